"""Search for all states at one setting, on the branches and from random starts."""

from __future__ import annotations

import equinox as eqx
import numpy as np

from ..averages.recipes import SIZES, AnyNodes, default_recipe, make_rule
from ..base.errors import InputError, is_concrete, require_count
from ..base.progress import Progress
from ..base.results import Settings, Status
from ..model.checks import check, check_alpha
from ..model.model import Model
from ..model.overlaps import BRANCHES, Overlaps, admissible, magnitudes
from .engine import run_one
from .paths import Path, together
from .setting import Setting, branch_start
from .states import FixedPoint, State

# There are no damped steps, because these lead to minima and past saddles.
NEWTON = Settings(max_steps=60, warm_steps=0)
# Relative differences below which two states count as one: on coarse averages, and on all averages.
_SAME_COARSE, _SAME = 0.05, 0.02


def find_states(
    model: Model,
    alpha: float,
    nodes: AnyNodes = None,
    *,
    count: int = 64,
    seed: int = 0,
    settings: Settings = NEWTON,
    progress: Progress = None,
) -> list[FixedPoint]:
    """Search for all states from many random starts, without imposing any symmetry.

    The branches that a symmetry of the loss defines are also searched for, each from its own start, because Newton's
    method may reach them from few of the random starts or from none.

    Args:
        alpha: samples per dimension.
        nodes: recipe of the averages, or number of nodes; by default `SIZES["path"]`. The starts are tried on a coarse
            replicate, and the states that they lead to are solved on all replicates.
        count: number of random starts.
        seed: seed of the random starts.
        settings: tolerances. By default there are no damped steps, because these lead to minima and past saddles.
        progress: as in `solve`.

    Returns:
        One `FixedPoint` for every state, in the order of the training loss, lowest first. States that differ only in
        the signs of m and theta count once.

    Raises:
        InputError: if `alpha` or `count` is not positive, or under a jax transformation, where numbers have no values.
    """
    is_even = True
    try:
        check(model, even=True)
    except InputError:  # if only the loss is not even, no symmetry defines a branch
        is_even = False
    if not is_even:
        check(model, even=False)
    a = check_alpha(model, alpha)
    if not is_concrete((model, a)):
        raise InputError("model", "must have concrete numbers here, got one under a jax transformation such as jit")
    require_count(count, "count")
    require_count(seed, "seed", 0)
    rule = make_rule(nodes, model, default_recipe(model, SIZES["path"]))
    rng = np.random.default_rng(seed)
    reference = branch_start(model, None)

    def draw() -> Overlaps:
        q, V, theta, m = rng.lognormal(-1.5, 1.0), rng.lognormal(0, 0.5), rng.uniform(-1.2, 1.2), rng.uniform(-1.2, 1.2)
        return Overlaps(q * reference.q, V * reference.V, q**0.5 * theta * reference.theta, q**0.5 * m * reference.m)

    # The starts of branches are far from the states, so damped steps come first.
    damped_settings = eqx.tree_at(lambda s: s.warm_steps, settings, Settings().warm_steps)
    starts = [x for x in (draw() for _ in range(4 * count)) if bool(admissible(model, x))][:count]
    searches: list[_Searches] = [(Setting.of(model, a, rule, None, settings), None, starts)]
    for name in [name for name in BRANCHES if name is not None and is_even]:
        searches.append((Setting.of(model, a, rule, name, damped_settings), name, [branch_start(model, name)]))
    return run_one(_distinct(searches[1:] + searches[:1], settings), progress)


# A setting, the branch whose symmetry it imposes, and the starts on its coarse replicate.
_Searches = tuple[Setting, str | None, list[Overlaps]]


def _distinct(searches: list[_Searches], settings: Settings) -> Path:
    """Path to the distinct states, the lowest training loss first.

    The searches run on coarse averages. Every distinct state that they reach is then solved on all averages.

    Args:
        settings: tolerances of the solves on all averages.
    """
    trials = yield [together([setting.coarse_lane(x) for x in starts]) for setting, _, starts in searches]
    points: list[FixedPoint] = []
    for (setting, branch, _), states in zip(searches, trials, strict=True):
        candidates: list[State] = [s for s in states if s.status <= Status.max_steps]
        for state in sorted(candidates, key=lambda s: float(s.train_loss)):
            if any(_same_state(setting.model, state.overlaps, p.overlaps, _SAME_COARSE) for p in points):
                continue
            replicates = yield from setting._replace(settings=settings).solve_replicates(state.overlaps)
            point = FixedPoint(setting.model, setting.alpha, replicates, branch)
            if point.exists and not any(_same_state(setting.model, point.overlaps, p.overlaps, _SAME) for p in points):
                points.append(point)
    return sorted(points, key=lambda p: float(p.train_loss))


def _same_state(model: Model, x: Overlaps, y: Overlaps, tol: float) -> bool:
    """Return whether two states are the same up to the symmetries."""
    sizes = [np.array([float(np.trace(s.q.mean(0))), *map(float, magnitudes(model, s))]) for s in (x, y)]
    return bool(np.all(np.abs(sizes[0] - sizes[1]) < tol * np.array([sizes[1][0], 1.0, 1.0])))
