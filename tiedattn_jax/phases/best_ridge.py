"""The best ridge: the value of `lam`, or of another number of the model, at which the test error is smallest.

`best_ridge` finds it at one alpha, for a branch or for the global minimum of the training loss. The global minimum
changes its branch at a value of the number; the test error jumps there, so that the smallest error may be a limit.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ..averages.recipes import SIZES, AnyNodes
from ..base.arrays import Number, StateArray
from ..base.errors import InputError, array_of, require, require_choice, require_kind
from ..base.report import Average, Description, Result, Row, Settings, Status, entries, error_bar, with_error
from ..model.model import Model
from ..model.overlaps import PAIR
from ..model.parameters import Parameter
from ..theory.engine import run_one
from ..theory.paths import Failure
from ..theory.solve import check_alpha
from ..theory.states import FixedPoint, states_table
from .best_places import Optimum, best_path
from .best_search import Task
from .events import numbers_by_name
from .inputs import check_top_level, prepared
from .locate import with_sensitivities

RIDGES = (1e-5, 1.0)  # default range of the ridge

# Meanings of the places at which the error can be smallest.
PLACES = {
    "inside": "the test error is smallest there",
    "transition": "the global minimum changes its branch there, and the test error falls up to it and then jumps",
    "lower end": "no smallest error: it falls down to there, {end}",
    "upper end": "no smallest error: it falls up to there, {end}",
}


class BestRidge(Result):
    """The value of a number of the model, by default the ridge, at which the test error is smallest.

    Attributes:
        number: name of the number.
        branch: the branch, or None for the global minimum of the training loss.
        alpha: samples per dimension.
        value: the best value, a mean over the replicates of the averages; NaN if there is no state.
        stderr: error bar of `value`.
        gen_error: the smallest test error, with its error bar.
        place: "inside" if the error is stationary at `value`; "transition" if it falls towards the value at which the
            global minimum changes its branch, and jumps there, so that the smallest error is a limit; "lower end" or
            "upper end" if it falls to the end of the `bracket`, or to the last value with a state; "nowhere" if there
            is no state.
        status: `Status` as an integer.
        bracket: range of values that was searched.
        states: the state at `value`; at a transition the second one is the state of the other branch, with the same
            training loss and a larger error.
        sensitivities: d value / d (every number of the model), a pytree like the model. The entry of the number itself
            is zero. All sensitivities are None if there is no state.
        sensitivities_stderr: error bars of the sensitivities.
        by_alpha: d value / d alpha, with its error bar.
        gen_error_sensitivities: d gen_error / d (every number of the model). At a minimum this is the derivative of the
            test error at a fixed value of the number.
        gen_error_sensitivities_stderr: error bars of these.
        gen_error_by_alpha: d gen_error / d alpha, with its error bar.
    """

    batch_probe = "value", 0
    number: str = eqx.field(static=True)
    branch: str | None = eqx.field(static=True)
    alpha: Float[StateArray, ""]
    value: Float[StateArray, ""]
    stderr: Float[StateArray, ""]
    gen_error: Average
    place: str = eqx.field(static=True)
    status: Int[StateArray, ""]
    bracket: tuple[float, float] = eqx.field(static=True)
    states: tuple[FixedPoint, ...] = ()
    sensitivities: Model | None = None
    sensitivities_stderr: Model | None = None
    by_alpha: Average | None = None
    gen_error_sensitivities: Model | None = None
    gen_error_sensitivities_stderr: Model | None = None
    gen_error_by_alpha: Average | None = None

    @property
    def state(self) -> FixedPoint:
        """The state at the best value.

        Raises:
            InputError: there is none.
        """
        if not self.states:
            raise InputError("bracket", f"must contain a state, but {self.reason}")
        return self.states[0]

    @property
    def reason(self) -> str:
        """Why the error has no minimum at `value`, in one sentence; empty if it has one. Needs a concrete result."""
        low, high = self.bracket
        if self.place == "nowhere":
            return f"there is no {self.branch or 'positional, semantic or uninformed'} state from {low:g} to {high:g}"
        if not self.ok:
            return f"the search near {self.number} = {float(self.value):.4g} did not settle: {self.status_name}"
        at_end = bool(np.isclose(float(self.value), low if self.place == "lower end" else high))
        end = "the end of the bracket" if at_end else "beyond which no state was found"
        return PLACES[self.place].format(end=end) if self.place != "inside" else ""

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, and the `FixedPoint.to_dict` of every state; valid JSON if all numbers are finite."""
        names = "sensitivities", "sensitivities_stderr", "gen_error_sensitivities", "gen_error_sensitivities_stderr"
        averages = {name: getattr(self, name) for name in ("gen_error", "by_alpha", "gen_error_by_alpha")}
        return {
            "number": self.number,
            "branch": self.branch,
            "alpha": float(self.alpha),
            "value": float(self.value),
            "stderr": float(self.stderr),
            **{name: None if a is None else float(a.value) for name, a in averages.items()},
            **{f"{name}_stderr": None if a is None else float(a.stderr) for name, a in averages.items()},
            **{name: None if getattr(self, name) is None else numbers_by_name(getattr(self, name)) for name in names},
            "place": self.place,
            "status": self.status_name,
            "reason": self.reason,
            "states": [state.to_dict() for state in self.states],
        }

    def describe(self) -> Description:
        whose = f"{self.branch} branch" if self.branch else "global minimum"
        title = f"best {self.number} of the {whose} at alpha = {float(self.alpha):g}"
        if self.place == "nowhere":
            return Description(title, f"not found, as {self.reason}")
        end = self.reason or PLACES["inside"]
        numbers: list[Row] = [
            (self.number, with_error(self.value, self.stderr), end),
            ("gen_error", with_error(self.gen_error.value, self.gen_error.stderr), "smallest test error"),
        ]
        return Description(title, self.status_name, numbers, tables=[("", self._rates()), ("", self._states())])

    def _states(self) -> list[Row]:
        return states_table(self.states, "branch")

    def _rates(self) -> list[Row]:
        """Return a table of all derivatives."""
        if self.by_alpha is None or self.gen_error_by_alpha is None:
            return []
        rows: list[Row] = [
            ("", f"d {self.number}", "d gen_error"),
            ("d/dalpha", str(self.by_alpha), str(self.gen_error_by_alpha)),
        ]
        rates, bars, error_rates, error_bars = (
            numbers_by_name(getattr(self, f"{name}sensitivities{bar}"))
            for name in ("", "gen_error_")
            for bar in ("", "_stderr")
        )
        for name in rates:
            if name != self.number:
                rows.append(
                    (f"d/d{name}", entries(rates[name], bars[name]), entries(error_rates[name], error_bars[name]))
                )
        return rows


def best_ridge(
    model: Model,
    alpha: Number,
    branch: str | None = "semantic",
    nodes: AnyNodes = None,
    *,
    number: str = "lam",
    bracket: tuple[float, float] | None = None,
    settings: Settings | None = None,
) -> BestRidge:
    """Find the ridge, or the value of another number of the model, at which the test error is smallest.

    The error is that of a branch, or that of the global minimum of the training loss. This is the positional or the
    semantic state, or the uninformed state if neither of them exists in the bracket. The global minimum changes its
    branch at a value of the ridge, and its error jumps there. If the error falls towards that transition, the smallest
    error is a limit, and the best ridge is the place of the transition. `jax.grad` of this function works, in the model
    and in alpha (first derivatives). `jit` and `vmap` do not; `sweep(..., best="lam")` treats many settings at once.

    The range is first walked on the coarse replicate of the averages, in steps of a third of a factor of ten. Minima
    that are narrower than this can be missed.

    Args:
        model: attention layer and data. The value of the number is where the walk begins.
        alpha: samples per dimension.
        branch: "positional", "semantic", or None for the global minimum of the training loss.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        number: name of a positive number of the model, such as "lam", "penalty.strength" or "mixing[0,1]".
        bracket: range of values; by default `RIDGES` for the ridge.
        settings: tolerances; by default `Settings()`.

    Raises:
        InputError: alpha is not positive; the branch or number is unknown; the bracket is not 0 < low < high, is out of
            the model's range, or is missing for another number than the ridge; nodes or settings are of the wrong kind.
    """
    search = prepared_search(model, branch, nodes, number, bracket, settings)
    alpha = check_alpha(model, alpha)
    check_top_level(model, alpha)
    optimum = run_one(best_path(search._replace(model=lax.stop_gradient(model), alpha=lax.stop_gradient(alpha))))
    return best_of(search._replace(model=model, alpha=alpha), branch, optimum)


def prepared_search(
    model: Model,
    branch: str | None,
    nodes: AnyNodes,
    number: str,
    bracket: tuple[float, float] | None,
    settings: Settings | None,
    size: int = SIZES["solve"],
) -> Task:
    """Check the arguments of `best_ridge` and fill in defaults; the alpha of the result is one."""
    rule, tolerances = prepared(model, nodes, settings, size=size)
    branch = require_choice(branch, "branch", [*PAIR, None])
    require_kind(number, "number", str, 'the name of a number, for instance "lam"')
    require(number != "alpha", "number", number, "a number of the model")
    parameter, fixed_model = Parameter(number), lax.stop_gradient(model)
    parameter.read(fixed_model, None, "number")
    if bracket is None and number != "lam":
        raise InputError("bracket", f"must be given for another number than lam, got number={number!r}")
    requirement = "two numbers 0 < low < high"
    given = RIDGES if bracket is None else bracket
    ends = array_of(given, "bracket", requirement, lambda a: a.size == 2 and 0 < a[0] < a[1])
    parameter.check(fixed_model, ends, "bracket")
    branches = PAIR if branch is None else (branch,)
    one = jnp.ones((), model.lam.dtype)
    return Task(model, one, parameter, tuple(branches), (float(ends[0]), float(ends[1])), rule, tolerances)


def best_of(task: Task, branch: str | None, optimum: Optimum | Failure | None) -> BestRidge:
    """Convert what `best_path` returned to a result that is differentiable in the model and alpha of the task.

    Args:
        task: the search, with the caller's model and alpha.
        branch: the caller's branch.
    """
    number, fixed_alpha = task.number.name, lax.stop_gradient(task.alpha)
    if optimum is None or isinstance(optimum, Failure):
        nan, status = (
            jnp.full((), jnp.nan, task.model.lam.dtype),
            Status.absent if optimum is None else Status.nonfinite,
        )
        return BestRidge(
            number, branch, fixed_alpha, nan, nan, Average(nan, nan), "nowhere", jnp.asarray(int(status)), task.bracket
        )
    setting = task.model, task.alpha
    values = jnp.asarray(np.exp(optimum.x))
    rates = jax.tree.map(lambda a: jnp.asarray(a) * values.reshape(-1, *[1] * (a.ndim - 1)), optimum.x_rates)
    error_rates = jax.tree.map(jnp.asarray, optimum.error_rates)
    (by_model, by_alpha), (bars, alpha_bar) = _summary(rates)
    (error_by_model, error_by_alpha), (error_bars, error_alpha_bar) = _summary(error_rates)
    at = task._replace(model=lax.stop_gradient(task.model)).at(np.log(optimum.value))
    states = tuple(FixedPoint(at, fixed_alpha, jax.tree.map(jnp.asarray, s), b) for b, s in optimum.states.items())
    worst = max(int(s.status) for s in states)
    errors = jnp.asarray(optimum.error)
    return BestRidge(
        number,
        branch,
        fixed_alpha,
        value=jnp.nanmean(with_sensitivities(values, rates, setting)),
        stderr=error_bar(values),
        gen_error=Average(jnp.nanmean(with_sensitivities(errors, error_rates, setting)), error_bar(errors)),
        place=optimum.kind,
        status=jnp.asarray(worst if optimum.converged else max(worst, int(Status.max_steps))),
        bracket=task.bracket,
        states=states,
        sensitivities=by_model,
        sensitivities_stderr=bars,
        by_alpha=Average(by_alpha, alpha_bar),
        gen_error_sensitivities=error_by_model,
        gen_error_sensitivities_stderr=error_bars,
        gen_error_by_alpha=Average(error_by_alpha, error_alpha_bar),
    )


def _summary(rates: PyTree[Float[Array, "R ..."]]) -> tuple[Any, Any]:
    """Return means and error bars over the replicates."""
    return jax.tree.map(lambda a: jnp.nanmean(a, 0), rates), jax.tree.map(error_bar, rates)
