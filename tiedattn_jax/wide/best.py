"""The ridge or the width of a wide layer at which its error is smallest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize_scalar

from ..base.arrays import Number
from ..base.errors import InputError, is_concrete, require_choice, require_positive
from ..base.progress import Progress, reporter
from ..base.results import Average, Status, error_bar
from ..phases.family import ends_of
from ..theory.quantities import Quantity
from .channel import wide_nodes
from .fixed_points import solve
from .layer import Layer, require_smooth
from .states import WidePoint

BRACKETS = {"tau": (1e-4, 10.0), "kappa": (1e-3, 1.0)}  # default ranges
ERRORS = "gen_error", "distance"
_PER_DECADE = 6  # values at which the error is first looked at
_TOL = 1e-4  # of the logarithm of the best value
_FLAT = 1e-7  # relative difference of errors below which none is smaller
_OFFSET = 0.05  # of the parabola that gives every replicate its own minimum
# Where the smallest error is, in the words of the result.
INSIDE, BESIDE, FLAT = "inside", "beside values without a usable state", "any value from there on"


def best_ridge(
    model: Layer,
    alpha: Number,
    nodes: Any = None,
    *,
    number: str = "tau",
    bracket: tuple[float, float] | None = None,
    error: str = "gen_error",
    progress: Progress = None,
) -> Quantity:
    """Find the ridge, or the width of the student, at which the error of a wide layer is smallest.

    The range is first walked downwards, with six values in a factor of ten; minima that are narrower can be missed.
    Where eigenvalues of the trained matrix are separate, as those of a teacher with a power law, the error is a curve
    with kinks in the width, and its smallest value may lie at one.

    Args:
        model: the layer. Its own value of the number does not matter.
        alpha: sentences per squared dimension.
        nodes: as in `solve`.
        number: "tau", the strength of the trace norm, or "kappa", the width over the dimension at fixed tau.
        bracket: range of values; by default `BRACKETS`.
        error: "gen_error", the loss on fresh sentences, or "distance", ||S - S*||^2 / d.
        progress: as in `solve`.

    Returns:
        A `Quantity` with the best value, without derivatives in the numbers of the layer. Its `state` is the one there;
        `gen_error` or `distance` is its error. `where` is "inside", "lower end" or "upper end" of the bracket; "any
        value from there on" if larger ones have the same error; or "beside values without a usable state", with the
        status `unresolved`.

    Raises:
        InputError: jax traces a number of the model or alpha, alpha is not positive, the number or the error has
            another name, the bracket is not 0 < low < high, or as in `solve`.
    """
    if not is_concrete(model, alpha):
        text = "must have concrete numbers for the best ridge, which has no derivatives, got one that jax traces"
        raise InputError("model", f"{text}: call it outside of jit, vmap and grad, or sweep for many models")
    require_smooth(model)
    require_positive(alpha, "alpha")
    require_choice(number, "number", BRACKETS)
    require_choice(error, "error", ERRORS)
    low, high = ends_of(BRACKETS[number] if bracket is None else bracket)
    rule, seen = wide_nodes(model, nodes), dict[float, WidePoint]()
    count = max(3, 1 + round(_PER_DECADE * np.log10(high / low)))
    report = reporter(progress, f"values of {number}")

    def state_at(x: float) -> WidePoint:
        """Return the state where the number is exp(x), looked for from the nearest one that is known."""
        if x not in seen:
            usable = [other for other in seen if seen[other].ok]
            start = seen[min(usable, key=lambda other: abs(other - x))] if usable else None
            value = jnp.asarray(np.exp(x), model.tau.dtype)
            changed = eqx.tree_at(lambda layer: getattr(layer, number), model, value)
            seen[x] = solve(changed, alpha, rule, start=start)
            report(min(len(seen), count), count)
        return seen[x]

    def errors(x: float) -> Float[Array, " R"]:
        state = state_at(x)
        return getattr(state.replicates, error) if state.ok else jnp.full(len(state.replicates.q), jnp.inf)

    grid = np.linspace(np.log(high), np.log(low), count)
    means = np.array([float(jnp.mean(errors(x))) for x in grid.tolist()])
    words: dict[str, Any] = {"name": number, "event": f"best {number}"}
    if not np.any(np.isfinite(means)):
        note = "no value in the bracket has a state that can be used"
        return Quantity.of(jnp.full(2, jnp.nan), status=Status.absent, known=False, note=note, **words)
    k, where = _smallest(means)
    x, values = grid[k], jnp.full(2, np.exp(grid[k]))
    if where == INSIDE:
        x, values = _refined(errors, grid[k + 1], grid[k - 1])
    state = state_at(float(x))
    best = Quantity.of(
        values,
        status=Status.unresolved if where == BESIDE else int(state.status),
        branches=(state,),
        further={error: Average(getattr(state, error), error_bar(getattr(state.replicates, error)))},
        labels=(("where", where),),
        meaning=f"the {error} is smallest there",
        **words,
    )
    # The place is known no better than the search ends.
    return eqx.tree_at(lambda best: best.stderr, best, jnp.hypot(best.stderr, _TOL * best.value * (where == INSIDE)))


def _smallest(means: Float[np.ndarray, " G"]) -> tuple[int, str]:
    """Return the place of the smallest of the errors at decreasing values, and where it is, see `best_ridge`."""
    # Where a number does not matter, as a width that does not bind, the errors are equal but for the search.
    smallest = np.flatnonzero(means <= np.min(means) * (1 + _FLAT))
    k = int(smallest[-1])
    if len(smallest) > 1:
        return k, FLAT
    if not np.all(np.isfinite(means[max(k - 1, 0) : k + 2])):
        return k, BESIDE
    return k, {0: "upper end", len(means) - 1: "lower end"}.get(k, INSIDE)


def _refined(
    errors: Callable[[float], Float[Array, " R"]], low: float, high: float
) -> tuple[float, Float[Array, " R"]]:
    """Return the place of the smallest mean error between two logarithms, and the best value in every replicate."""
    ends = {"bounds": (low, high), "method": "bounded", "options": {"xatol": _TOL}}
    x = float(minimize_scalar(lambda x: float(jnp.mean(errors(float(x)))), **ends).x)
    below, at, above = (errors(y) for y in (x - _OFFSET, x, x + _OFFSET))
    shifts = 0.5 * (below - above) / jnp.mean(above - 2 * at + below) * _OFFSET
    # At a kink there is no parabola, and all replicates have the minimum there.
    smooth = bool(jnp.all(jnp.isfinite(shifts)) & (jnp.max(jnp.abs(shifts)) < _OFFSET))
    return x, jnp.exp(x + (shifts - jnp.mean(shifts) if smooth else 0 * at))
