"""The results `State` and `FixedPoint`: fixed points in all replicates, with status, error bars and diagnostics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real, Shaped

from ..averages.rules import Rule
from ..base.arrays import StateArray, indexed, precise, spread_to
from ..base.errors import InputError, as_array, is_concrete, require_kind, with_values
from ..base.report import WORDS, Description, Printed, Row, by_token, rows_of, with_error
from ..base.results import (
    MAP_FIGURE,
    Average,
    Column,
    InTable,
    Replicated,
    Status,
    error_bar,
    has_state,
    joined,
    mean_of_existing,
    quorum,
)
from ..model import overlaps as ov
from ..model.model import Model
from ..model.overlaps import Conjugates, OrderNumber, Overlaps, admissible, check_shapes, shapes_of
from ..model.parameters import scalar_parameters
from .observables import Diagnostics, second_minimum_share

_NOTHING = 1e-12  # `rs_error` below this is rounding of the loss
# Numbers that mean something where there is no state.
_ALWAYS = "residual", "gen_error_linear"
_SHOWN = 5e-4  # the printed report of a state mentions a share of unresolved nodes from this on


class State(Printed):
    """Fixed points in all replicates of the averages; the leading axis of every array is that of the R replicates.

    The result of one `Lane` is a state of a single replicate, without this axis.
    """

    batch_probe = "residual", 0
    overlaps: Overlaps
    conjugates: Conjugates
    train_loss: Float[StateArray, "*R"]
    gen_error: Float[StateArray, "*R"]
    gen_error_linear: Float[StateArray, "*R"]
    residual: Float[StateArray, "*R"]
    status: Shaped[StateArray, "*R"]  # integers; means are real numbers, and tangents float0
    diagnostics: Diagnostics
    train_loss_partials: tuple[Model, Float[StateArray, "*R"]]

    @property
    def has_state(self) -> Bool[Array, "*R"]:
        """Whether each replicate has a state."""
        return has_state(self.status, self.residual)

    def describe(self) -> Description:
        return Description("", numbers=rows_of(self.numbers()))

    def numbers(self) -> dict[str, Real[StateArray, "..."]]:
        """Return the numbers of a state by name; grids, paths, tables and reports list these."""
        own = {name: a for name, a in vars(self).items() if not isinstance(a, (eqx.Module, tuple))}
        by_alpha = {"train_loss_by_alpha": self.train_loss_partials[1]}
        return vars(self.overlaps) | own | vars(self.diagnostics) | by_alpha


def blank_state(model: Model, *shape: int) -> State:
    """Return a state of zeros on the host with the structure of all states of a model; every array is (*shape, ...)."""

    def zeros(*axes: int) -> Any:
        return np.zeros((*shape, *axes), model.lam.dtype)

    overlaps = {name: zeros(*axes) for name, axes in shapes_of(model).items()}
    return State(
        overlaps=Overlaps(**overlaps),
        conjugates=Conjugates(*overlaps.values()),
        train_loss=zeros(),
        gen_error=zeros(),
        gen_error_linear=zeros(),
        residual=zeros(),
        status=zeros().astype(int),
        diagnostics=Diagnostics(*(zeros() for _ in DIAGNOSTICS)),
        train_loss_partials=(jax.tree.map(lambda a: zeros(*a.shape), model), zeros()),
    )


@jax.jit
def _has_jumps(mass: Float[Array, "*batch"], bar: Float[Array, "*batch"]) -> Bool[Array, "*batch"]:
    return jnp.abs(mass) > jnp.maximum(1e-3, jnp.where(jnp.isfinite(bar), 3 * bar, 0.0))


# Quantities that a jump makes infinite, or that miss a term if they are differentiated node by node.
AFFECTED = ("replicon", "d overlaps", "d gen_error", "d alpha_l", "spinodals")
DIAGNOSTICS = tuple(field.name for field in dataclasses.fields(Diagnostics))


class FixedPoint(Replicated):
    """A fixed point of state evolution.

    The averages are computed in R independent replicates, and each replicate is solved to its own fixed point. The
    fields below are means over the replicates that have a state. `stderr` contains the error bars of these means, see
    `error_bar`. If no replicate has a state, `train_loss` and `gen_error` are NaN, the other numbers are those at which
    the searches ended, and all derivatives are zero; see `Result`.

    Attributes:
        model, alpha, branch: arguments of the solve.
        replicates: fixed points of all replicates.
        overlaps: order parameters.
        conjugates: conjugate order parameters.
        train_loss: training loss / d; it is minus the free energy.
        gen_error: test error eps_g.
        gen_error_linear: test error of the linear baseline; NaN for a model without `target`.
        diagnostics: stability, jumps, and the accuracy of the proximal solves.
        q, V, theta, m: the order parameters as scalars, for two tokens and rank one only. These are means over the
            tokens, except that m is that of the first token. For other shapes see `overlaps`.
    """

    batch_probe = "alpha", 0
    model: Model
    alpha: Float[StateArray, "*batch"]
    replicates: State
    branch: str | None = eqx.field(static=True)
    q, V, theta, m = OrderNumber(), OrderNumber(), OrderNumber(), OrderNumber()

    @property
    def mean(self) -> State:
        """Means over the replicates, in the fields of `State`."""
        return self._summarised(_mean_state)

    @property
    def stderr(self) -> State:
        """Error bars of these means, in the fields of `State`; see `error_bar`."""
        return self._summarised(_error_bars)

    def _summarised(self, summary: Callable[[State], State]) -> State:
        """Apply `summary` to the replicates, separately for every entry of a batch."""
        for _ in range(jnp.ndim(self.alpha)):
            summary = jax.vmap(summary)
        return summary(self.replicates)

    @property
    def residual(self) -> Float[Array, "*batch"]:
        """The largest undamped relative residual over the replicates."""
        return jnp.max(self.replicates.residual, -1)

    @property
    def exists(self) -> Bool[Array, "*batch"]:
        """Whether at least half of the replicates have a state; states that the nodes do not resolve count."""
        return quorum(self.replicates.has_state)

    @property
    def stable(self) -> Bool[Array, "*batch"]:
        """Whether the state exists, and neither theta nor m grows from zero where its branch has it at zero.

        Without a branch this holds for an overlap that is zero. The rates are `growth_theta` and `growth_m` of the
        `diagnostics`. Stability against replica symmetry breaking is another one; its number is the replicon.
        """
        branch, rates = ov.branch_of(self.branch), self.diagnostics
        if branch.name is None:
            has_theta, has_m = jnp.any(self.overlaps.theta, (-3, -2, -1)), jnp.any(self.overlaps.encoded, (-2, -1))
        else:
            has_theta, has_m = jnp.asarray(branch.theta == 1), jnp.asarray(branch.m == 1)
        return self.exists & (has_theta | (rates.growth_theta < 1)) & (has_m | (rates.growth_m < 1))

    @property
    def settled_status(self) -> Int[Array, "*batch"]:
        """The status of a number that the state defines: the worst over the replicates that have the state.

        A replicate without it counts as `stalled`, as its nodes decide; if most lack it, this is `status`.
        """
        has_state, status = self.replicates.has_state, self.replicates.status
        return jnp.where(self.exists, jnp.max(jnp.where(has_state, status, int(Status.stalled)), -1), self.status)

    @property
    def jumps(self) -> Bool[Array, "*batch"]:
        """Whether the proximal operator jumps: `jump_mass` exceeds .001 and three of its error bars.

        At such a state the replicon is formally infinite, and derivatives that are taken node by node miss a term. The
        derivatives of `solve` contain this term for every averaging rule.
        """
        mass, bar = (s.diagnostics.jump_mass for s in (self.mean, self.stderr))
        return _has_jumps(mass, bar)

    def seen_by(self, model: Model) -> Overlaps:
        """Return the overlaps of the same weights with tokens and a teacher of the size that another model gives them.

        Overlaps of other shapes than those of the model are returned as they are.
        """
        x, model = self.overlaps, lax.stop_gradient(model)
        return _resized(x, self.model, model) if jax.tree.map(jnp.shape, vars(x)) == shapes_of(model) else x

    def second_minimum_share(self, nodes: Rule, gap: float) -> Average:
        """Return the share of the nodes whose proximal problem has another minimum, less than `gap` above the lowest.

        Args:
            nodes: averaging rule.
            gap: energy difference; the loss is of order sigma^2.

        Raises:
            InputError: if `gap` is not positive.
        """
        return second_minimum_share(self.model, self.overlaps, nodes, gap)

    @property
    def label(self) -> str:
        """Name of the branch of the state, from its overlaps; concrete numbers only. See `overlaps.label`."""
        return ov.label(self.model, self.overlaps)

    @property
    def has_result(self) -> bool:
        return bool(self.exists)

    @property
    def question(self) -> str | None:
        """The branch: a table of such states has this name."""
        return self.branch

    @property
    def in_table(self) -> InTable:
        shown = "branch", "q", "V", "theta", "m", "train_loss", "gen_error", "replicon", "jump_mass"
        figures = "theory.branch_figure", MAP_FIGURE
        return InTable("train_loss", figures=figures, shown=shown, headline=_branches, always=_ALWAYS)

    def numbers(self) -> dict[str, Column]:
        """Return all numbers with their error bars by name, those of a batch as arrays (*batch, ...).

        They are NaN where there is no state, but for those in `_ALWAYS`. A single state also has its `alpha`, its
        branch, and whether it exists.
        """
        missing, means, bars = ~np.asarray(self.exists), self.mean.numbers(), self.stderr.numbers()

        def column(name: str, values: Any) -> Float[np.ndarray, "..."]:
            values = np.asarray(values, float)
            return values if name in _ALWAYS else np.where(spread_to(missing, values), np.nan, values)

        labels: dict[str, Column] = {}
        if not missing.ndim:
            labels = {"alpha": (float(self.alpha), None), "branch": (self.branch or self.label, None)}
            labels["exists"] = not missing, None
        names = [name for name in means if name != "status"]
        return labels | {name: (column(name, means[name]), column(name, bars[name])) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the setting, the numbers of the state and, in `stderr`, their error bars; JSON if they are finite.

        An order parameter that all tokens share up to its sign is one number, that of the first token. Other order
        parameters are nested lists. A batch has lists over its entries.
        """
        if jnp.ndim(self.alpha):
            return joined([indexed(self, k).to_dict() for k in range(len(self.alpha))])
        numbers, bars = self.mean.numbers(), self.stderr.numbers()
        pairs = {name: by_token(a, bars[name]) for name, a in numbers.items()}
        worst = {"status": self.status_name, "residual": float(self.residual)}
        return {
            "alpha": float(self.alpha),
            **scalar_parameters(self.model),
            "branch": self.label,
            **{name: value.tolist() for name, (value, _) in pairs.items()},
            **worst,
            "affected_by_jumps": list(AFFECTED) if self.jumps else [],
            "stderr": {name: bar.tolist() for name, (_, bar) in pairs.items() if name not in worst},
        }

    def describe(self) -> Description:
        mean, bars = self.mean.numbers(), self.stderr.numbers()
        names = (*vars(self.overlaps), "train_loss", "gen_error")
        numbers = rows_of(*({name: a[name] for name in names} for a in (mean, bars)))
        caveat = "; formally infinite with the jumps" if self.jumps else ""
        details = list[Row]()
        if self.model.provides("target"):
            linear = with_error(mean["gen_error_linear"], bars["gen_error_linear"])
            details += [("gen_error_linear", linear, WORDS["gen_error_linear"])]
        share, bar = 100 * abs(mean["jump_mass"]), 100 * bars["jump_mass"]
        mass = with_error(share, bar) if bar > 0 else f"{share:.1f}"
        meaning = "the share of the jumps" if share <= 100 else "whose rest is negative, from the jumps"
        details += [
            ("replicon", with_error(mean["replicon"], bars["replicon"]), f"below 1: stable{caveat}"),
            ("jump mass", f"{mass}%", f"of Vhat, {meaning} of the proximal operator"),
        ]
        if not np.isnan(mean["rs_error"]):
            estimate = with_error(mean["rs_error"], bars["rs_error"]) if mean["rs_error"] > _NOTHING else "0"
            details += [("rs_error", estimate, "estimated rise by replica symmetry breaking: add it to train_loss")]
        details += [("second minimum", f"{mean['second_minimum']:.2%}", "of the nodes have one")]
        if self.jumps:
            details += [("jumps matter", "", "derivatives and spinodals contain them, the replicon does not")]
        if mean["unresolved"] >= _SHOWN:
            percentage = f"{mean['unresolved']:.1%}"
            details += [("unresolved", percentage, "of the nodes (Sobol points resolve more than lines)")]
        if self.model.lam.dtype == jnp.float32:
            details += [("float32", "", "about six digits; jax_enable_x64 gives the others")]
        title = f"{self.branch} branch" if self.branch else f"{self.label} state"
        title += f" at alpha = {self.alpha:g}"
        if (t := self.model.shape[2]) > 1:
            title += f", along {ov.learned_directions(self.model, self.overlaps)} of {t} directions of the teacher"
        status = f"{self.status_name}, residual {self.residual:.1e}"
        if self.status == Status.absent:
            status = "absent; the overlaps are those of the state in which it has vanished"
        return Description(title, status, numbers, details)


def _branches(table: Any) -> str:
    labels = dict.fromkeys(point.label for point in table.points if point.exists)
    return f"{table.question or ', '.join(labels) or 'any'} branch"


def states_table(
    points: Sequence[FixedPoint], by: str, places: Sequence[float] | Float[np.ndarray, " A"] = ()
) -> list[tuple[str, ...]]:
    """Return a header, and one row per fixed point with its place or branch, its numbers with error bars, its status.

    Args:
        by: header of the first column: the name of the number that `places` are values of, or "branch".
        places: values of that number at the points. If there are none, the first column names the branches.
    """
    rows: list[tuple[str, ...]] = []
    for k, point in enumerate(points):
        description = point.describe()
        columns = [*description.numbers, *(row for row in description.details if row[0] in ("replicon", "jump mass"))]
        rows = rows or [(by, *(name for name, *_ in columns), "status")]
        label = f"{places[k]:g}" if len(places) else point.branch or point.label
        rows.append((label, *(number for _, number, *_ in columns), point.status_name))
    return rows


@eqx.filter_jit
@precise
def _resized(x: Overlaps, model: Model, other: Model) -> Overlaps:
    """Return overlaps x with the tokens and the teacher of a model for those of another one, of other sizes."""
    sizes = [(m.trace, jnp.trace(m.rho, axis1=1, axis2=2)) for m in (model, other)]
    tokens, teacher = (jnp.sqrt(new / old)[:, None, None] for old, new in zip(*sizes, strict=True))
    return dataclasses.replace(x, q=tokens**2 * x.q, V=tokens**2 * x.V, theta=tokens * teacher * x.theta)


def _of_a_state(states: State, summary: State) -> State:
    """Replace the losses by NaN if no replicate has a state to which they belong."""
    exists = jnp.any(states.has_state)
    train_loss, gen_error = (jnp.where(exists, a, jnp.nan) for a in (summary.train_loss, summary.gen_error))
    return dataclasses.replace(summary, train_loss=train_loss, gen_error=gen_error)


# Means and error bars are separate programs. The error bar of a number that is zero in all replicates has no
# derivative. In one program, reverse mode would pass that NaN on to the mean.
@eqx.filter_jit
def _mean_state(states: State) -> State:
    return _of_a_state(states, jax.tree.map(lambda a: mean_of_existing(a, states.has_state), states))


@eqx.filter_jit
def _error_bars(states: State) -> State:
    counted = jnp.where(jnp.any(states.has_state), states.has_state, True)
    return _of_a_state(states, jax.tree.map(lambda a: error_bar(jnp.where(spread_to(counted, a), a, jnp.nan)), states))


def check_start(model: Model, start: FixedPoint | Overlaps) -> Overlaps:
    """Return overlaps, for instance those of a state, in the model's dtype.

    Raises:
        InputError: if they are of another kind or shape, or not admissible.
    """
    start = start.overlaps if isinstance(start, FixedPoint) else start
    require_kind(start, "start", Overlaps, "Overlaps or a FixedPoint")
    with with_values() if is_concrete(start) else nullcontext():
        start = Overlaps(**{name: as_array(a, "start", model.lam.dtype) for name, a in vars(start).items()})
    check_shapes(model, start)
    if is_concrete(model, start):
        finite = all(np.all(np.isfinite(a)) for a in jax.tree.leaves(start))
        with jax.ensure_compile_time_eval():  # alpha may be traced
            is_admissible = finite and bool(admissible(model, start))
        if not is_admissible:
            raise InputError("start", "must be finite, with q, V and q - theta rho^-1 theta^T positive definite")
    return start
