"""All states at one setting, on the branches and from random starts."""

from __future__ import annotations

import equinox as eqx
import numpy as np

from ..averages.default import default_nodes
from ..averages.rule import Rule, check_rule
from ..averages.sizes import SIZES
from ..base.errors import InputError, is_concrete, require_count
from ..base.results import Settings, Status
from ..model.model import Model
from ..model.overlaps import BRANCHES, Overlaps, admissible, branch_of, magnitudes
from .pool import Path, run_one, together
from .solve import Problem, branch_start, check_alpha, check_model
from .states import FixedPoint, State

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

    damped = eqx.tree_at(lambda s: s.warm_steps, settings, Settings().warm_steps)  # the starts of branches are rough
    starts = [x for x in (draw() for _ in range(4 * count)) if bool(admissible(model, x))][:count]
    searches: list[_Searches] = [(Problem(model, a, nodes, branch_of(None).free(model), settings), None, starts)]
    try:
        check_model(model, "uninformed")
    except InputError:  # the loss is not even: no symmetry defines a branch
        pass
    else:
        for name in BRANCHES:
            problem = Problem(model, a, nodes, branch_of(name).free(model), damped)
            searches += [(problem, name, [branch_start(model, name)])] if name is not None else []
    return run_one(_distinct(searches[1:] + searches[:1], settings))


# A problem on the coarse averages, the branch whose symmetry it imposes, and its starts.
_Searches = tuple[Problem, str | None, list[Overlaps]]


def _distinct(searches: list[_Searches], settings: Settings) -> Path:
    """Path of the states that are reached on coarse averages, each solved once on all of them, the lowest loss first.

    Args:
        settings: tolerances of the solves on all averages.
    """
    tries = yield [together([problem.coarsely(x) for x in starts]) for problem, _, starts in searches]
    points: list[FixedPoint] = []
    for (problem, branch, _), states in zip(searches, tries, strict=True):
        reached: list[State] = [s for s in states if s.status <= Status.max_steps]
        for state in sorted(reached, key=lambda s: float(s.train_loss)):
            if any(_alike(problem.model, state.overlaps, p.overlaps, _SAME_COARSE) for p in points):
                continue
            replicates = yield from problem._replace(settings=settings).finely(state.overlaps)
            point = FixedPoint(problem.model, problem.alpha, replicates, branch)
            if point.exists and not any(_alike(problem.model, point.overlaps, p.overlaps, _SAME) for p in points):
                points.append(point)
    return sorted(points, key=lambda p: float(p.train_loss))


def _alike(model: Model, x: Overlaps, y: Overlaps, tol: float) -> bool:
    """Whether two states are the same up to the symmetries."""
    sizes = [np.array([float(np.trace(s.q.mean(0))), *map(float, magnitudes(model, s))]) for s in (x, y)]
    return bool(np.all(np.abs(sizes[0] - sizes[1]) < tol * np.array([sizes[1][0], 1.0, 1.0])))
