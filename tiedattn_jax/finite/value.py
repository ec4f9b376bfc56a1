"""Training with a value matrix. There is no theory for it, only simulation in finite dimension.

# notation: x~ = x + p the inputs, Q (d, r) the weights of attention, W (d, d) the value matrix, kappa its ridge.

    f(x) = S(Z) (x + p) W,    Z = (x + p) Q / sqrt(d)
    risk(Q, W) = sum_mu ||y - f||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + kappa / 2 ||W - 1||_F^2

A value matrix maps the tokens that attention mixes. The risk is therefore the exact risk of the layer without it, with
other inner products: see `evaluation.with_value`. Arrays (n, L, d) are built here, because W mixes all d coordinates.

The ridge pulls W to the identity, where the layer is the one without a value matrix. A ridge that pulls W to zero would
shrink the tokens that the target copies. The data give each entry of W a curvature ``alpha L sigma^2``, of the order of
that of an entry of Q. So kappa means for W what lambda means for Q, and lambda is its default. For large kappa W stays
at the identity.

For given Q the best W is a ridge regression of y on S x~. L-BFGS therefore runs over Q alone, on the risk at the best
W; its gradient is the one at fixed W (variable projection). In the standard model at d = 300, alpha = 1, this takes 58
steps from either start to a gradient of 1e-8; L-BFGS over Q and W takes 187 and 241.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, Real

from ..base.arrays import AnyArray, Number, precise
from ..base.errors import InputError, require_memory, require_not_negative, shaped_array
from ..base.nodewise import nodewise
from ..model.checks import check_provides
from ..model.model import Model
from .data import Data
from .estimate import check_fit
from .evaluation import with_value
from .products import student_fields
from .sampling import raw_labels, start
from .training import Descent, Training, descend, differentiated, smooth_risk

_ARRAYS = 8  # peak number of arrays of the size of the sentences, and of W, in the memory of the compiled program


class ValueTraining(Training):
    """A `Training` with a value matrix; its losses and gradients are those of the risk on exact labels.

    Attributes:
        W: value matrix.
    """

    W: Float[Array, "d d"]

    @property
    def shift(self) -> Float[Array, ""]:
        """Distance of W from the identity, ``||W - 1||_F / sqrt(d)``."""
        return jnp.linalg.norm(self.W - jnp.eye(len(self.W), dtype=self.W.dtype)) / len(self.W) ** 0.5

    def _numbers(self) -> dict[str, Float[AnyArray, "..."]]:
        return {**super()._numbers(), "shift": self.shift}


@precise
def value_risk(
    model: Model,
    data: Data,
    labels: Float[Array, "n L d"],
    Q: Float[Array, "d r"],
    W: Float[Array, "d d"],
    ridge: Number,
) -> Float[Array, ""]:
    """Return ``sum_mu ||y - S (x + p) W||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + ridge / 2 ||W - 1||_F^2``.

    Args:
        labels: exact labels y.
        Q, W: weights and value matrix.
        ridge: kappa.
    """
    distance = jnp.sum((W - jnp.eye(len(W), dtype=W.dtype)) ** 2)
    return smooth_risk(model, with_value(data, labels, W), Q, exact=True) + 0.5 * ridge * distance


@nodewise
def _student_attention(model: Model, Z: Float[Array, "L r"]) -> Float[Array, "L L"]:
    return model.student(Z)


@precise
def best_value(
    model: Model, data: Data, labels: Float[Array, "n L d"], Q: Float[Array, "d r"], ridge: Number
) -> Float[Array, "d d"]:
    """Return the value matrix that minimises `value_risk` at weights Q, by the smaller of two linear systems.

    W = 1 + (F^T F + ridge)^-1 F^T (y / sqrt(d) - F) = 1 + F^T (F F^T + ridge)^-1 (y / sqrt(d) - F),
    F = S (x + p) / sqrt(d),    with a row for every token of every sentence
    """
    F = jnp.einsum("kln,lni->nki", _student_attention(model, student_fields(data.x, Q)), data.x).reshape(-1, len(Q))
    residual = labels.reshape(F.shape) / len(Q) ** 0.5 - F
    is_wide = len(F) < len(Q)
    gram = F @ F.T if is_wide else F.T @ F
    floor = jnp.finfo(gram.dtype).eps * jnp.trace(gram)  # keeps the system solvable without a ridge
    factor = jax.scipy.linalg.cho_factor(gram + jnp.maximum(ridge, floor) * jnp.eye(len(gram), dtype=gram.dtype))
    correction = (
        F.T @ jax.scipy.linalg.cho_solve(factor, residual)
        if is_wide
        else jax.scipy.linalg.cho_solve(factor, F.T @ residual)
    )
    return jnp.eye(len(Q), dtype=gram.dtype) + correction


def train_value(
    model: Model,
    data: Data,
    init: str | Real[AnyArray, "d r"] = "semantic",
    *,
    ridge: Number | None = None,
    labels: Real[AnyArray, "n L d"] | None = None,
    optimizer: str = "lbfgs",
    steps: int = 5000,
    rate: Number | None = None,
    tol: Number = 1e-10,
    key: PRNGKeyArray | None = None,
    scale: Number | None = None,
) -> ValueTraining:
    """Minimise the empirical risk on exact labels over the weights and a value matrix.

    L-BFGS sets the value matrix to its minimum at the weights of every step, see `best_value`. Gradient descent and
    Adam train it together with the weights, starting from the identity.

    There is no theory of a value matrix. Among the other functions only `heldout_error` and `run_instances` with
    ``theory=False`` support it; message passing does not.

    Works under `jit` and under `vmap` over instances. A step takes at least two products of the sentences with W.

    Args:
        model: attention, and ridge of the weights; it must have a method `student` and no penalty.
        data: the instance.
        init: start of the weights, as in `train`.
        ridge: strength of the ridge that pulls the value matrix to the identity, zero or more; by default the model's
            `lam`.
        labels: exact labels; by default those of the model, `raw_labels`.
        optimizer, steps, rate, tol, key, scale: as in `train`. With gradient descent and Adam `tol` also applies to the
            gradient in W; with L-BFGS W is at its minimum.

    Raises:
        InputError: if an argument is unknown, out of range or of the wrong shape (the error names it), or the arrays do
            not fit into memory.
    """
    check_fit(model, data)
    data = data.stored("for a value matrix")
    check_provides(model, "student", "for a value matrix")
    if model.penalty is not None:
        raise InputError("model", "must have no penalty besides the ridge beside a value matrix: use penalty=None")
    L, n, d, _ = data.shape
    size = _ARRAYS * (L * n * d + d**2) * data.x.dtype.itemsize
    require_memory(size, "data", data.shape, "training a value matrix on them")
    Q = start(model, data, init, key, scale)
    options = Descent.checked(optimizer, steps, rate, tol, Q.dtype)
    ridge = model.lam if ridge is None else ridge
    require_not_negative(ridge, "ridge")
    if labels is None:
        labels = raw_labels(model, data)
    exact_labels = shaped_array("labels", labels, "n L d", {"n": n, "L": L, "d": d}, Q.dtype)
    return _run(model, data, exact_labels, Q, jnp.asarray(ridge, Q.dtype), options)


@eqx.filter_jit
@precise
def _run(
    model: Model,
    data: Data,
    labels: Float[Array, "n L d"],
    Q: Float[Array, "d r"],
    ridge: Float[Array, ""],
    options: Descent,
) -> ValueTraining:
    if options.optimizer == "lbfgs":

        def best_W(Q: Float[Array, "d r"]) -> Float[Array, "d d"]:
            return lax.stop_gradient(best_value(model, data, labels, Q, ridge))

        objective = differentiated(lambda Q: value_risk(model, data, labels, Q, best_W(Q), ridge))
        Q, fields = descend(model, objective, Q, options)
        return ValueTraining(Q=Q, overlaps=data.overlaps(Q), W=best_W(Q), **fields)
    weights = Q, jnp.eye(len(Q), dtype=Q.dtype)
    objective = differentiated(lambda w: value_risk(model, data, labels, w[0], w[1], ridge))
    (Q, W), fields = descend(model, objective, weights, options)
    return ValueTraining(Q=Q, overlaps=data.overlaps(Q), W=W, **fields)
