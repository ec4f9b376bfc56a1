"""Order parameters, their conjugates, and what makes a set of them admissible, equivalent, or of a named branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from .model import Model

BRANCHES = ("positional", "semantic", "uninformed")
# Which of (theta, m) are free on each branch; the other vanishes by symmetry. `None` is any state, nothing imposed.
FREE = {"positional": (0.0, 1.0), "semantic": (1.0, 0.0), "uninformed": (0.0, 0.0), None: (1.0, 1.0)}


class Overlaps(eqx.Module):
    """Order parameters of a student Q (eq. (6) of the paper).

    Attributes:
        q: Q^T Sigma_l Q / d, (L, r, r).
        V: response of the student, (L, r, r).
        theta: Q^T Sigma_l Q* / d, (L, r, t).
        m: Q^T p_l / sqrt(d), (L, r).
    """

    q: jax.Array
    V: jax.Array
    theta: jax.Array
    m: jax.Array


class Conjugates(eqx.Module):
    """Conjugate order parameters, the paper's hats; shapes as in `Overlaps`."""

    q: jax.Array
    V: jax.Array
    theta: jax.Array
    m: jax.Array


def symmetric(a: jax.Array) -> jax.Array:
    """Symmetric part over the last two axes."""
    return 0.5 * (a + jnp.swapaxes(a, -1, -2))


def residual_covariance(model: Model, x: Overlaps) -> jax.Array:
    """Covariance of the student fields given the teacher's, ``q - theta rho^{-1} theta^T``, (L, r, r)."""
    return x.q - x.theta @ jnp.linalg.solve(model.rho, jnp.swapaxes(x.theta, -1, -2))


def admissible(model: Model, x: Overlaps) -> jax.Array:
    """Whether q, V and ``q - theta rho^{-1} theta^T`` are positive definite for every token: a boolean scalar."""
    stacked = jnp.concatenate([x.q, x.V, residual_covariance(model, x)])
    if stacked.shape[-1] == 1:
        return jnp.all(stacked > 0)  # also False for NaN
    return jnp.all(jnp.isfinite(jnp.linalg.cholesky(stacked)))


def start(model: Model, branch: str | None) -> Overlaps:
    """A point from which damped iteration reaches the branch, for models whose scores are of order one."""
    L, r, t = model.shape
    law = model.law()
    eye = jnp.broadcast_to(jnp.eye(r, dtype=law.gamma.dtype), (L, r, r))
    scale = jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)) / t
    # The encodings' principal direction over the tokens, of entries of order one.
    tau = jnp.einsum("k,kij->ij", law.weights, law.tau)
    direction = jnp.linalg.eigh(tau)[1][:, -1] * jnp.sqrt(L)
    direction = jnp.where(direction[0] < 0, -direction, direction)
    overlap = jnp.eye(r, t, dtype=law.gamma.dtype)
    q = {"positional": 0.1, "semantic": 0.6, "uninformed": 0.4, None: 0.6}[branch] * scale
    theta = 0.5 * scale * overlap if branch in ("semantic", None) else 0.0 * overlap
    m = 0.25 * direction[:, None] * jnp.eye(1, r, k=0 if branch == "positional" or r == 1 else r - 1)
    return Overlaps(
        q=q * eye,
        V=15.0 * eye,
        theta=jnp.broadcast_to(theta, (L, r, t)),
        m=m if branch in ("positional", None) else 0.0 * m,
    )


def magnitudes(model: Model, x: Overlaps) -> tuple[jax.Array, jax.Array]:
    """How positional and how semantic a state is: |m| / sqrt(tr q) and |theta| / sqrt(tr q tr rho), of order one."""
    q = jnp.sum(jnp.trace(x.q, axis1=-2, axis2=-1), -1)
    rho = jnp.sum(jnp.trace(model.rho, axis1=-2, axis2=-1), -1) / x.q.shape[-3]
    return (
        jnp.sqrt(jnp.sum(x.m**2, (-1, -2)) / q),
        jnp.sqrt(jnp.sum(x.theta**2, (-1, -2, -3)) / (q * rho)),
    )


def label(model: Model, x: Overlaps, tol: float = 0.02) -> str:
    """Name of the branch of a concrete state: one of `BRANCHES`, or "mixed" when both overlaps are present."""
    positional, semantic = (bool(np.asarray(s) > tol) for s in magnitudes(model, x))
    return {(1, 0): "positional", (0, 1): "semantic", (0, 0): "uninformed", (1, 1): "mixed"}[positional, semantic]


State = TypeVar("State", Overlaps, Conjugates)


def impose(x: State, free: jax.Array) -> State:
    """Set to zero what the symmetry of a branch sets to zero; `free` is the branch's pair of `FREE`.

    On conjugates it does to frozen nodes what symmetrising them would do.
    """
    return type(x)(x.q, x.V, free[0] * x.theta, free[1] * x.m)


def gauge_directions(x: Overlaps) -> list[Overlaps]:
    """Tangents of the orbit of a state under rotations of the student, Q -> Q O: one for each pair of its columns."""
    r = x.m.shape[-1]
    out = []
    for a in range(r):
        for b in range(a):
            A = jnp.zeros((r, r), x.q.dtype).at[a, b].set(1.0).at[b, a].set(-1.0)
            out.append(Overlaps(A @ x.q - x.q @ A, A @ x.V - x.V @ A, A @ x.theta, x.m @ A.T))
    return out
