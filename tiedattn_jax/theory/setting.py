"""A branch at one setting, and the root searches on it: one `Lane` for each replicate of the averages."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..averages.rules import COARSE, Rule
from ..base.arrays import GivenArray, cholesky, precise, solve as solve_entries, stacked, unstacked
from ..base.results import Settings, Status
from ..model.model import Model
from ..model.overlaps import Overlaps, branch_of, explained_covariance
from .equations import Equations
from .newton import ATTEMPTS, is_hopeless, stall_of

Path = Generator[Any, Any, Any]  # see `paths`


class Setting(NamedTuple):
    """A branch at one setting: what all its root searches share.

    Attributes:
        model, alpha: numbers, not tracers of jax.
        nodes: averaging rule.
        free: 1.0 for theta and for m if the branch leaves them free, else 0.0: the branch fixes them at zero.
        settings: tolerances.
    """

    model: Model
    alpha: Float[GivenArray, ""]
    nodes: Rule
    free: Float[GivenArray, " 2"]
    settings: Settings = Settings()

    @classmethod
    def of(
        cls, model: Model, alpha: Float[GivenArray, ""], nodes: Rule, branch: str | None, settings: Settings
    ) -> Setting:
        """Return the setting of a branch."""
        return cls(model, alpha, nodes, np.asarray(branch_of(branch).free(model)), settings)

    def equations(self, replicate: int) -> Equations:
        """Return the equations in a replicate of the averages."""
        return Equations(self.model, self.alpha, self.nodes.replicate(replicate), self.free)

    def coarse_lane(self, start: Overlaps) -> Lane:
        """Return the search on the coarse replicate, from a start that may be far from the solution."""
        return Lane(self, start, COARSE, len(ATTEMPTS))

    def solve_replicates(self, start: Overlaps) -> Path:
        """Path to the states of all replicates, from a start near them; it may have a leading axis of replicates."""
        count = self.nodes.replicates
        starts = unstacked(start, count) if start.m.ndim == 3 else [start] * count
        return stacked((yield [Lane(self, x, k) for k, x in enumerate(starts)]))

    def solve_from_far(self, start: Overlaps) -> Path:
        """Path to the states of all replicates, from a start that may be far; the coarse replicate is solved first.

        A search from a far start can miss a branch whose response differs much from that of the start. If the branch
        vanishes, a second search starts from where the first one ended; see `revived`.
        """
        coarse_state = yield self.coarse_lane(start)
        if coarse_state.status == Status.absent:
            second_state = yield Lane(self, revived(self.model, start, coarse_state.overlaps))
            if second_state.status <= Status.stalled:
                coarse_state = second_state
        # The other replicates would be unresolved, too.
        if is_hopeless(coarse_state.status, coarse_state.residual, coarse_state.diagnostics.unresolved):
            return stacked([coarse_state] * self.nodes.replicates)
        return (yield from self.solve_replicates(coarse_state.overlaps))


class Lane(NamedTuple):
    """Request for one root search: a state of the saddle-point equations in one replicate of the averages.

    Attributes:
        setting: the branch and its setting.
        start: overlaps to start from.
        replicate: index of the replicate in the rule, or `COARSE`.
        attempts: number of starts that are tried in turn: `start` scaled by the first rows of `newton.ATTEMPTS`.
    """

    setting: Setting
    start: Overlaps
    replicate: int = COARSE
    attempts: int = 1

    @property
    def equations(self) -> Equations:
        """Equations that the lane solves."""
        return self.setting.equations(self.replicate)

    @property
    def search_arguments(self) -> tuple[Overlaps, Settings, Int[np.ndarray, ""], Float[np.ndarray, ""]]:
        """Start, tolerances, attempts, and the largest residual of a stalled state, as `searched_state` takes them."""
        stall = np.asarray(stall_of(self.setting.nodes.size), self.setting.model.lam.dtype)
        # NumPy arrays, because arrays of jax may have a weak type, which would trigger another compilation.
        start = jax.tree.map(np.asarray, self.start)
        return start, self.setting.settings, np.asarray(self.attempts), stall


_REVIVED = 0.8  # share of q that the teacher explains in a revived start
_RESPONSE = 0.5  # its response; a student that follows teacher or encodings has a smaller one than without overlaps


@eqx.filter_jit
@precise
def revived(model: Model, start: Overlaps, vanished_state: Overlaps) -> Overlaps:
    """Return the state in which a branch vanished, with large order parameters in the directions of a start.

    The size of the student is that of the state, and its response half of it.
    """
    q, scale = vanished_state.q, _trace_by_token(vanished_state.q) / _trace_by_token(start.q)
    # The eigenvalues of q^{-1} theta rho^{-1} theta^T are the shares of q that the teacher explains.
    root = cholesky(q)
    half = solve_entries(root, explained_covariance(model, start.theta))
    shares = solve_entries(root, jnp.swapaxes(half, 1, 2))
    share = jnp.max(shares if shares.shape[-1] == 1 else jnp.linalg.eigvalsh(shares))
    theta = start.theta * jnp.where(share > 0, jnp.sqrt(_REVIVED / jnp.where(share > 0, share, 1.0)), 0.0)
    return Overlaps(q, _RESPONSE * vanished_state.V, theta, start.m * jnp.sqrt(jnp.mean(scale)))


def _trace_by_token(q: Float[Array, "L r r"]) -> Float[Array, " L"]:
    return jnp.trace(q, axis1=1, axis2=2)


@eqx.filter_jit
def branch_start(model: Model, branch: str | None) -> Overlaps:
    """Return the overlaps from which a branch is looked for by default."""
    return branch_of(branch).start(model)
