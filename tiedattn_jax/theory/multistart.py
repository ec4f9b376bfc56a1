"""All states at one setting, on the branches and from random starts."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..averages.default import default_nodes
from ..averages.rule import Rule, check_rule
from ..averages.sizes import SIZES
from ..errors import InputError, is_concrete, require_count
from ..model import Model
from ..overlaps import BRANCHES, Overlaps, admissible, branch_of, magnitudes
from ..results import Settings, Status
from .fixed_points import FixedPoint, State, branch_start, check_alpha, check_model, solve_coarsely, solve_from

# Damped steps lead to minima, and past saddles.
NEWTON = Settings(max_steps=60, warm_steps=0)
_SAME_COARSE, _SAME = 0.05, 0.02  # relative differences below which two states are one: on coarse averages, on all


def find_states(
    model: Model,
    alpha: float,
    nodes: Rule | None = None,
    *,
    count: int = 64,
    seed: int = 0,
    settings: Settings = NEWTON,
) -> list[FixedPoint]:
    """All states that are reached from many random starts without any symmetry imposed, the lowest training loss first.

    The branches that a symmetry of the loss defines are looked for besides, each from its own start: Newton's method
    may reach them from few starts or none.

    Args:
        alpha: samples per dimension.
        nodes: averaging rule; by default `default_nodes` of `SIZES["path"]`. The starts are tried on its coarse
            replicate, what they find is solved on all of it.
        count: random starts.
        seed: of the starts.
        settings: tolerances; by default without the damped steps, which lead to minima and past saddles.

    Returns:
        One `FixedPoint` for every state; states that differ by the signs of m and theta count once.

    Raises:
        InputError: `alpha` or `count` not positive, or a model without values, under a jax transformation.
    """
    check_model(model, None)
    a = check_alpha(model, alpha)
    if not is_concrete((model, a)):
        raise InputError("model", "must have concrete numbers here, got one under a jax transformation such as jit")
    require_count(count, "count")
    require_count(seed, "seed", 0)
    nodes = default_nodes(model, SIZES["path"]) if nodes is None else nodes
    check_rule(nodes, model)
    rng = np.random.default_rng(seed)
    base = branch_start(model, None)

    def draw() -> Overlaps:
        q, V, theta, m = rng.lognormal(-1.5, 1.0), rng.lognormal(0, 0.5), rng.uniform(-1.2, 1.2), rng.uniform(-1.2, 1.2)
        return Overlaps(q * base.q, V * base.V, q**0.5 * theta * base.theta, q**0.5 * m * base.m)

    def near(branch: str | None, starts: list[Overlaps], settings: Settings) -> list[tuple[str | None, State]]:
        """States on the coarse averages, each with the branch whose symmetry was imposed, the lowest loss first."""
        free = branch_of(branch).free(model)
        states = (solve_coarsely(model, a, nodes, x, free, settings) for x in starts)
        reached = sorted((s for s in states if s.status <= Status.max_steps), key=lambda s: float(s.train_loss))
        return [(branch, state) for state in reached]

    try:
        check_model(model, "uninformed")
        branches = [name for name in BRANCHES if name is not None]
    except InputError:  # the loss is not even: no symmetry defines a branch
        branches = []
    damped = eqx.tree_at(lambda s: s.warm_steps, settings, Settings().warm_steps)  # the starts of branches are rough
    starts = [x for x in (draw() for _ in range(4 * count)) if bool(admissible(model, x))][:count]
    reached = [pair for branch in branches for pair in near(branch, [branch_start(model, branch)], damped)]
    found: list[FixedPoint] = []
    for branch, state in [*reached, *near(None, starts, settings)]:
        if any(_alike(model, state.overlaps, f.overlaps, _SAME_COARSE) for f in found):
            continue
        point = solve_from(model, a, branch, nodes, state.overlaps, settings)
        if point.exists and not any(_alike(model, point.overlaps, f.overlaps, _SAME) for f in found):
            found.append(point)
    return sorted(found, key=lambda p: float(p.train_loss))


def _alike(model: Model, x: Overlaps, y: Overlaps, tol: float) -> bool:
    """Whether two states are the same up to the symmetries."""
    sizes = [np.array([float(jnp.trace(s.q.mean(0))), *map(float, magnitudes(model, s))]) for s in (x, y)]
    return bool(np.all(np.abs(sizes[0] - sizes[1]) < tol * np.array([sizes[1][0], 1.0, 1.0])))
