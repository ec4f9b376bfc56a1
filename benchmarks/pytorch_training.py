"""The published way of training the dot-product model, full batches and the exact labels in PyTorch,
as a comparator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tiedattn_jax as ta
from tiedattn_jax.finite.sampling import raw_labels
from tiedattn_jax.finite.training import RATES


class Plain:
    """Gradient descent as PyTorch's own layers do it: the output of every sentence, (n, L, d), and its squared error.

    Args:
        model: of `dot_product`.
        data: with the teacher's fields and the encodings, from which the labels are made.
        Q: weights that every run starts from, (d, 1).
    """

    def __init__(self, model: ta.DotProduct, data: ta.Data, Q: Any):
        import torch  # not at the top: it is in no extra that the suite needs

        self.torch = torch
        sentences, labels = np.array(data.x).swapaxes(0, 1), raw_labels(model, data) / data.x.shape[2] ** 0.5
        self.inputs, self.labels, self.start = (torch.from_numpy(np.array(a)) for a in (sentences, labels, Q))
        self.rate = {"lr": RATES["gd"], "weight_decay": float(model.lam)}

    def run(self, steps: int) -> np.ndarray:
        """Weights after so many steps."""
        torch, Q = self.torch, self.start.clone().requires_grad_()
        optimizer = torch.optim.SGD([Q], **self.rate)
        for _ in range(steps):
            optimizer.zero_grad()
            fields = self.inputs @ Q
            outputs = torch.softmax(fields @ fields.transpose(1, 2), -1) @ self.inputs
            (0.5 * torch.sum((self.labels - outputs) ** 2)).backward()
            optimizer.step()
        return Q.detach().numpy()
