"""The proximal operator of the loss: the global minimiser, at very many nodes at once.

For a node with student field ``h`` and teacher field ``Y`` the Moreau envelope of the loss is

    min_Z  1/2 sum_l (z_l - h_l)^T V_l^{-1} (z_l - h_l) + loss(Z, Y)

and its minimiser is the proximal operator, the resolvent of eq. (9) of the paper. The loss is not convex. The sum is a
double well where the target attends to itself so strongly that the quadratic term does not make it convex. Such a node
is solved from several starts, and the lowest minimum wins. The minimiser therefore *jumps* where two minima have
equal energy; the envelope stays continuous.

Arrays carry the node axis last, `(L, r, N)`; see `nodewise`.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .loops import counted
from .minima import REFINE_STEPS, Origin, descend, lowest_minima, minima_from_all_starts, newton_tolerance, pick
from .moreau import ProxProblem, with_implicit_derivative


class Prox(eqx.Module):
    """Global minimisers at N nodes."""

    z: Float[Array, "L r N"]  # the proximal operator
    converged: Bool[Array, " N"]  # whether Newton's method met its tolerance
    other: Float[Array, "L r N"]  # second lowest minimum; the proximal operator itself where none was found
    gap: Float[Array, " N"]  # energy of `other` above the global minimum; infinite where none was found


def prox(
    problem: ProxProblem, h: Float[Array, "L r N"], extra_starts: Float[Array, "starts L r N"] | None = None
) -> Prox:
    """Return the proximal operator of the loss at `N` nodes, with its derivative by the implicit function theorem.

    The derivative follows the minimum on its own sheet. Where the minimiser jumps between two sheets, the derivative of
    an average has one more term, which no derivative taken node by node contains.

    Args:
        problem: the loss, the response, positive definite for every token, and the teacher's fields.
        h: student fields.
        extra_starts: optional extra starts, for instance the minimisers of a neighbouring problem.

    Returns:
        A `Prox`; differentiable in the model's numbers, the response and the fields in both modes.
    """
    minima = search(*lax.stop_gradient((problem, h)), extra_starts)
    return eqx.tree_at(lambda p: p.z, minima, with_implicit_derivative(minima.z, problem, h))


def search(
    problem: ProxProblem, h: Float[Array, "L r N"], extra_starts: Float[Array, "starts L r N"] | None = None
) -> Prox:
    """Return `prox` without derivatives."""
    # The search for the lowest minimum runs in single precision, at half the cost; the minimum is then refined.
    lowest, second, gap = lowest_minima(problem, h, extra_starts)
    z, _, converged = descend(problem, lowest, h, newton_tolerance(h.dtype), count=REFINE_STEPS)
    return Prox(z, converged, jnp.where(jnp.isfinite(gap), second, z), gap)


def proximal(
    problem: ProxProblem, h: Float[Array, "L r N"], origin: Origin | None = None
) -> tuple[Float[Array, "L r N"], Bool[Array, " N"]]:
    """Return only the proximal operator, without derivatives, and whether the search converged."""
    if counted():  # search from every start in single precision, then refine the lowest minimum
        start = lowest_minima(problem, h, origin=origin)[0]
        z, _, converged = descend(problem, start, h, newton_tolerance(h.dtype), count=REFINE_STEPS)
        return z, converged
    z, energy, converged = minima_from_all_starts(problem, h, None, newton_tolerance(h.dtype), origin)
    lowest = jnp.argmin(energy, 0)
    return pick(z, lowest), pick(converged, lowest)
