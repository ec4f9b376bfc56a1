"""Train the dot-product model in PyTorch as published, on full batches and exact labels, as a comparator."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

import tiedattn_jax as ta
from tiedattn_jax.finite.training import RATES


class Plain:
    """Gradient descent in plain PyTorch: the output of every sentence, (n, L, d), and its squared error.

    Args:
        model: a model from `dot_product`.
        data: instance whose teacher's fields and encodings give the labels.
        Q: weights from which every run starts, (d, 1).
    """

    def __init__(self, model: ta.DotProduct, data: ta.Data, Q: Float[Array, "d r"]):
        import torch  # imported here, because the suite also runs without it

        self.torch = torch
        sentences, labels = np.array(data.x).swapaxes(0, 1), data.raw_labels(model) / data.x.shape[2] ** 0.5
        self.inputs, self.labels, self.start = (torch.from_numpy(np.array(a)) for a in (sentences, labels, Q))
        self.rate = {"lr": RATES["gd"], "weight_decay": float(model.lam)}

    def run(self, steps: int) -> Float[np.ndarray, "d r"]:
        """Return the weights after `steps` steps."""
        torch, Q = self.torch, self.start.clone().requires_grad_()
        optimizer = torch.optim.SGD([Q], **self.rate)
        for _ in range(steps):
            optimizer.zero_grad()
            fields = self.inputs @ Q
            outputs = torch.softmax(fields @ fields.transpose(1, 2), -1) @ self.inputs
            (0.5 * torch.sum((self.labels - outputs) ** 2)).backward()
            optimizer.step()
        return Q.detach().numpy()
