"""Training with a value matrix. There is no theory of it: it exists in finite dimension only.

# notation: x~ = x + p the inputs, Q (d, r) the weights of attention, W (d, d) the value matrix, kappa its ridge.

    f(x) = S(Z) (x + p) W,    Z = (x + p) Q / sqrt(d)
    risk(Q, W) = sum_mu ||y - f||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + kappa / 2 ||W - 1||_F^2

A value matrix maps what attention mixes, so that the risk is the exact one of the layer without it on other inner
products, `evaluation.valued`. As W is of the size of the inputs, arrays (n, L, d) are built here.

The ridge holds W at the identity, where the layer is the one without a value matrix, and not at zero, which would shrink
the tokens that the target copies. Each entry of W sees ``alpha L sigma^2`` of curvature from the data, of the order of
that of an entry of Q: kappa has the meaning of lambda, which it is by default. For large kappa W is held at the identity.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..errors import InputError, require_memory, require_not_negative, shaped_array
from ..model import Model, check_provides
from .data import Data, check_fit, start
from .evaluation import valued
from .sampling import raw_labels
from .training import Descent, Training, descend, smooth_risk

# Arrays in memory together, of the size of the sentences and of W, as compiled for L-BFGS, which keeps twenty of the latter.
_OF_SENTENCES, _OF_W = 8, 32


class ValueTraining(Training):
    """Where training with a value matrix ended: a `Training`, whose risk is the exact one, and

    Attributes:
        W: value matrix, (d, d).
    """

    W: jax.Array

    @property
    def shift(self) -> jax.Array:
        """How far W is from the identity, ``||W - 1||_F / sqrt(d)``."""
        return jnp.linalg.norm(self.W - jnp.eye(len(self.W), dtype=self.W.dtype)) / len(self.W) ** 0.5

    def _numbers(self) -> dict[str, jax.Array]:
        return {**super()._numbers(), "shift": self.shift}


def value_risk(model: Model, data: Data, labels: jax.Array, Q: jax.Array, W: jax.Array, ridge: Any) -> jax.Array:
    """``sum_mu ||y - S (x + p) W||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + ridge / 2 ||W - 1||_F^2``.

    Args:
        labels: y, (n, L, d).
        Q, W: weights (d, r) and value matrix (d, d).
    """
    held = jnp.sum((W - jnp.eye(len(W), dtype=W.dtype)) ** 2)
    return smooth_risk(model, valued(data, labels, W), Q, exact=True) + 0.5 * ridge * held


def train_value(
    model: Model,
    data: Data,
    init: Any = "semantic",
    *,
    ridge: Any = None,
    labels: Any = None,
    optimizer: str = "lbfgs",
    steps: int = 5000,
    rate: Any = None,
    tol: float = 1e-10,
    key: jax.Array | None = None,
    scale: float | None = None,
) -> ValueTraining:
    """Minimise the empirical risk on exact labels over the weights and a value matrix, which starts at the identity.

    There is no theory of a value matrix: neither message passing nor any other function but `heldout_error` and
    `run_instances` with ``theory=False`` knows of it.

    Works under `jit` and under `vmap` over instances. A step takes two products of the sentences with W or more.

    Args:
        model: attention and ridge of the weights; it has a method `student`, and no penalty.
        data: the instance.
        init: start of the weights, as in `train`.
        ridge: of the value matrix around the identity, zero or more; the model's `lam` by default.
        labels: the exact labels, (n, L, d); those of the model, `raw_labels`, by default.
        optimizer, steps, rate, tol, key, scale: as in `train`; `tol` is asked of W, too.

    Raises:
        InputError: naming the argument that is unknown, out of range or of the wrong shape; what does not fit into memory.
    """
    check_fit(model, data)
    check_provides(model, "student", "for a value matrix")
    if model.penalty is not None:
        raise InputError("model", "must have no penalty besides the ridge beside a value matrix: use penalty=None")
    L, n, d, _ = data.shape
    size = (_OF_SENTENCES * L * n * d + _OF_W * d**2) * data.x.dtype.itemsize
    require_memory(size, "data", data.shape, "training a value matrix on them")
    Q = start(model, data, init, key, scale)
    how = Descent.checked(optimizer, steps, rate, tol, Q.dtype)
    ridge = model.lam if ridge is None else ridge
    require_not_negative(ridge, "ridge")
    if labels is None:
        labels = raw_labels(model, data)
    labels = shaped_array("labels", labels, "n L d", {"n": n, "L": L, "d": d}, Q.dtype)
    return _run(model, data, labels, Q, jnp.asarray(ridge, Q.dtype), how)


@eqx.filter_jit
def _run(model: Model, data: Data, labels: jax.Array, Q: jax.Array, ridge: jax.Array, how: Descent) -> ValueTraining:
    weights = Q, jnp.eye(len(Q), dtype=Q.dtype)
    (Q, W), ended = descend(model, lambda at: value_risk(model, data, labels, at[0], at[1], ridge), weights, how)
    return ValueTraining(Q=Q, overlaps=data.overlaps(Q), W=W, **ended)
