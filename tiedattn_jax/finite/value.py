"""Training with a value matrix. There is no theory of it: it exists in finite dimension only.

# notation: x~ = x + p the inputs, Q (d, r) the weights of attention, W (d, d) the value matrix, kappa its ridge.

    f(x) = S(Z) (x + p) W,    Z = (x + p) Q / sqrt(d)
    risk(Q, W) = sum_mu ||y - f||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + kappa / 2 ||W - 1||_F^2

A value matrix maps what attention mixes, so that the risk is the exact one of the layer without it on other inner
products, `evaluation.valued`. As W is of the size of the inputs, arrays (n, L, d) are built here.

The ridge holds W at the identity, where the layer is the one without a value matrix, and not at zero, which would
shrink the tokens that the target copies. Each entry of W sees ``alpha L sigma^2`` of curvature from the data, of the
order of that of an entry of Q: kappa has the meaning of lambda, which it is by default. For large kappa W is held at
the identity.

Of given weights the best W is a ridge regression of y on S x~. L-BFGS therefore runs over Q alone, on the risk with the
best W, whose gradient is that at fixed W (variable projection): in the standard model at d = 300, alpha = 1 it takes 58
steps from either start to a gradient of 1e-8, where over both it takes 187 and 241.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ..averages.nodewise import nodewise
from ..errors import InputError, require_memory, require_not_negative, shaped_array
from ..linalg import precise
from ..model import Model, check_provides
from .data import Data, check_fit, start, student_fields
from .evaluation import valued
from .sampling import raw_labels
from .training import Descent, Training, descend, smooth_risk

_ARRAYS = 8  # of the size of the sentences, and of W, in memory together, as compiled


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


@precise
def value_risk(model: Model, data: Data, labels: jax.Array, Q: jax.Array, W: jax.Array, ridge: Any) -> jax.Array:
    """``sum_mu ||y - S (x + p) W||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + ridge / 2 ||W - 1||_F^2``.

    Args:
        labels: y, (n, L, d).
        Q, W: weights (d, r) and value matrix (d, d).
    """
    held = jnp.sum((W - jnp.eye(len(W), dtype=W.dtype)) ** 2)
    return smooth_risk(model, valued(data, labels, W), Q, exact=True) + 0.5 * ridge * held


@nodewise
def _attention(model: Model, Z: jax.Array) -> jax.Array:
    return model.student(Z)


@precise
def best_value(model: Model, data: Data, labels: jax.Array, Q: jax.Array, ridge: Any) -> jax.Array:
    """The value matrix of least `value_risk` at weights Q, (d, d), by the smaller of two linear systems.

    W = 1 + (F^T F + ridge)^-1 F^T (y / sqrt(d) - F) = 1 + F^T (F F^T + ridge)^-1 (y / sqrt(d) - F),
    F = S (x + p) / sqrt(d),    with a row for every token of every sentence
    """
    F = jnp.einsum("kln,lni->nki", _attention(model, student_fields(data.x, Q)), data.x).reshape(-1, len(Q))
    left = labels.reshape(F.shape) / len(Q) ** 0.5 - F
    few = len(F) < len(Q)
    gram = F @ F.T if few else F.T @ F
    least = jnp.finfo(gram.dtype).eps * jnp.trace(gram)  # so that no ridge has a solution, too
    factor = jax.scipy.linalg.cho_factor(gram + jnp.maximum(ridge, least) * jnp.eye(len(gram), dtype=gram.dtype))
    solved = F.T @ jax.scipy.linalg.cho_solve(factor, left) if few else jax.scipy.linalg.cho_solve(factor, F.T @ left)
    return jnp.eye(len(Q), dtype=gram.dtype) + solved


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
    """Minimise the empirical risk on exact labels over the weights and a value matrix.

    L-BFGS has the value matrix at its minimum for the weights at every step, `best_value`; gradient descent and Adam
    train it along with the weights, from the identity.

    There is no theory of a value matrix: neither message passing nor any other function but `heldout_error` and
    `run_instances` with ``theory=False`` knows of it.

    Works under `jit` and under `vmap` over instances. A step takes two products of the sentences with W or more.

    Args:
        model: attention and ridge of the weights; it has a method `student`, and no penalty.
        data: the instance.
        init: start of the weights, as in `train`.
        ridge: of the value matrix around the identity, zero or more; the model's `lam` by default.
        labels: the exact labels, (n, L, d); those of the model, `raw_labels`, by default.
        optimizer, steps, rate, tol, key, scale: as in `train`; `tol` is asked of W, too, which L-BFGS has at its
            minimum.

    Raises:
        InputError: naming the argument that is unknown, out of range or of the wrong shape; what does not fit into
            memory.
    """
    check_fit(model, data)
    check_provides(model, "student", "for a value matrix")
    if model.penalty is not None:
        raise InputError("model", "must have no penalty besides the ridge beside a value matrix: use penalty=None")
    L, n, d, _ = data.shape
    size = _ARRAYS * (L * n * d + d**2) * data.x.dtype.itemsize
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
@precise
def _run(model: Model, data: Data, labels: jax.Array, Q: jax.Array, ridge: jax.Array, how: Descent) -> ValueTraining:
    if how.optimizer == "lbfgs":

        def best(Q: jax.Array) -> jax.Array:
            return lax.stop_gradient(best_value(model, data, labels, Q, ridge))

        Q, ended = descend(model, lambda Q: value_risk(model, data, labels, Q, best(Q), ridge), Q, how)
        return ValueTraining(Q=Q, overlaps=data.overlaps(Q), W=best(Q), **ended)
    weights = Q, jnp.eye(len(Q), dtype=Q.dtype)
    (Q, W), ended = descend(model, lambda at: value_risk(model, data, labels, at[0], at[1], ridge), weights, how)
    return ValueTraining(Q=Q, overlaps=data.overlaps(Q), W=W, **ended)
