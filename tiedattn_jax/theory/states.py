"""States as results: a fixed point in every replicate of the averages, with a status, error bars and diagnostics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import InputError
from ..base.printing import WORDS, Description, by_token, rows_of, with_error
from ..base.results import OfMean, Result, Status, error_bar, has_state, mean_of_found, quorum
from ..model import overlaps as ov
from ..model.model import Model
from ..model.overlaps import Conjugates, Overlaps, shapes_of
from ..model.parameters import numbers_of
from .observables import Diagnostics

_NOTHING = 1e-12  # estimates below this are rounding of the loss
_SHOWN = 5e-4  # share of unresolved nodes from which on a state prints it


class State(eqx.Module):
    """A fixed point in every replicate of the averages: all arrays lead with the replicate axis."""

    overlaps: Overlaps
    conjugates: Conjugates
    train_loss: jax.Array
    gen_error: jax.Array
    gen_error_linear: jax.Array
    residual: jax.Array
    status: jax.Array
    diagnostics: Diagnostics
    train_loss_partials: tuple[Model, jax.Array]

    @property
    def has_state(self) -> jax.Array:
        """Whether each replicate has a state, (R,)."""
        return has_state(self.status, self.residual)

    def numbers(self) -> dict[str, jax.Array]:
        """Everything that is kept of a state, by name: what grids, paths, tables and reports list."""
        own = ("train_loss", "gen_error", "gen_error_linear", "residual", "status")
        return {
            **vars(self.overlaps),
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.diagnostics, name) for name in DIAGNOSTICS},
            "train_loss_by_alpha": self.train_loss_partials[1],
        }


def number_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of `State.numbers` in one replicate, by name."""
    names = "train_loss", "gen_error", "gen_error_linear", "residual", "status", *DIAGNOSTICS, "train_loss_by_alpha"
    return {**shapes_of(model), **dict.fromkeys(names, ())}


@jax.jit
def _jumps(mass: jax.Array, bar: jax.Array) -> jax.Array:
    return jnp.abs(mass) > jnp.maximum(1e-3, jnp.where(jnp.isfinite(bar), 3 * bar, 0.0))


# What a jump makes infinite, or wrong where it is differentiated node by node.
AFFECTED = ("replicon", "d overlaps", "d gen_error", "d alpha_l", "spinodals")
DIAGNOSTICS = tuple(field.name for field in dataclasses.fields(Diagnostics))


class _Scalar(OfMean[jax.Array]):
    """An order parameter of two tokens and rank one as one number: mean over the tokens, but m of the first one."""

    def __get__(self, point: Any, owner: type) -> jax.Array:
        batch, x = jnp.shape(point.alpha), point.overlaps
        if (shape := x.theta.shape[len(batch) :]) != (2, 1, 1):
            want = f"of shape (2, 1, 1) for the scalar {self.name}, got {shape}: use overlaps.{self.name}"
            raise InputError("model", f"must be {want}")
        values = jnp.reshape(getattr(x, self.name), (*batch, 2))
        return values[..., 0] if self.name == "m" else jnp.mean(values, -1)


class FixedPoint(Result):
    """A fixed point of state evolution.

    The averages are done in R independent replicates, each solved to its own fixed point; numbers are means over those
    that have a state, over all if none has, and error bars those of these means, see `results.error_bar`.

    Attributes:
        model, alpha, branch: what was asked for.
        replicates: the fixed point of every replicate.
        overlaps: order parameters q, V (L, r, r), theta (L, r, t), m (L, r).
        conjugates: conjugate order parameters, shapes as the overlaps.
        train_loss: training loss / d, minus the free energy.
        gen_error: test error eps_g.
        gen_error_linear: test error of the linear baseline; NaN for a model without `target`.
        diagnostics: stability, jumps and the health of the proximal solves.
        q, V, theta, m: of two tokens and rank one, scalars: means over the tokens, m of the first one. In general see
            `overlaps`.
    """

    of_one = "alpha", 0
    model: Model
    alpha: jax.Array
    replicates: State
    branch: str | None = eqx.field(static=True)
    overlaps = OfMean[Overlaps]()
    conjugates = OfMean[Conjugates]()
    train_loss = OfMean[jax.Array]()
    gen_error = OfMean[jax.Array]()
    gen_error_linear = OfMean[jax.Array]()
    diagnostics = OfMean[Diagnostics]()
    q, V, theta, m = _Scalar(), _Scalar(), _Scalar(), _Scalar()

    @property
    def mean(self) -> State:
        """Means over the replicates, in the fields of `State`."""
        return self._each(_means)

    @property
    def stderr(self) -> State:
        """Error bars of these means, in the fields of `State`; see `results.error_bar`."""
        return self._each(_error_bars)

    def _each(self, summary: Callable[[State], State]) -> State:
        """What a function makes of the replicates, of every lane of a batch by itself."""
        for _ in range(jnp.ndim(self.alpha)):
            summary = jax.vmap(summary)
        return summary(self.replicates)

    @property
    def status(self) -> jax.Array:
        """The worst `Status` over the replicates, as an integer."""
        return jnp.max(self.replicates.status, -1)

    @property
    def residual(self) -> jax.Array:
        """The largest undamped relative residual over the replicates."""
        return jnp.max(self.replicates.residual, -1)

    @property
    def exists(self) -> jax.Array:
        """Whether there is a state, resolved by the nodes or not: in half of the replicates or more."""
        return quorum(self.replicates.has_state)

    @property
    def jumps(self) -> jax.Array:
        """Whether the proximal operator jumps at a share of the nodes that is more than the averages' error.

        Then the replicon is formally infinite, and derivatives taken node by node miss a term. Those of `solve` contain
        it, whatever the rule.
        """
        mass, bar = (s.diagnostics.jump_mass for s in (self.mean, self.stderr))
        return _jumps(mass, bar)

    @property
    def label(self) -> str:
        """Name of the branch found, for a concrete state; see `overlaps.label`."""
        return ov.label(self.model, self.overlaps)

    def to_dict(self) -> dict[str, Any]:
        """Setting, all that is kept of a state, and `stderr` with the error bars: JSON, where numbers are finite.

        Order parameters are numbers where all tokens have the same up to sign, that of the first one, else nested
        lists.
        """
        numbers, bars = self.mean.numbers(), self.stderr.numbers()
        pairs = {name: by_token(a, bars[name]) for name, a in numbers.items()}
        worst = {"status": self.status_name, "residual": float(self.residual)}
        return {
            "alpha": float(self.alpha),
            **numbers_of(self.model),
            "branch": self.label,
            **{name: value.tolist() for name, (value, _) in pairs.items()},
            **worst,
            "affected_by_jumps": list(AFFECTED) if self.jumps else [],
            "stderr": {name: bar.tolist() for name, (_, bar) in pairs.items() if name not in worst},
        }

    def describe(self) -> Description:
        mean, bars = self.mean.numbers(), self.stderr.numbers()
        shown = (*vars(self.overlaps), "train_loss", "gen_error")
        numbers = rows_of(*({name: a[name] for name in shown} for a in (mean, bars)))
        formal = "; formally infinite with the jumps" if self.jumps else ""
        details = []
        if self.model.provides("target"):
            details += [("gen_error_linear", f"{mean['gen_error_linear']:.7f}", WORDS["gen_error_linear"])]
        share, bar = 100 * abs(mean["jump_mass"]), 100 * bars["jump_mass"]
        mass = with_error(share, bar) if bar > 0 else f"{share:.1f}"
        details += [
            ("replicon", f"{mean['replicon']:.2f}", f"below 1: stable{formal}"),
            ("jump mass", f"{mass}%", "of Vhat, the share of the jumps of the proximal operator"),
        ]
        if not np.isnan(mean["rs_error"]):
            estimate = with_error(mean["rs_error"], bars["rs_error"]) if mean["rs_error"] > _NOTHING else "0"
            details += [("rs_error", estimate, "what replica symmetry breaking adds to train_loss, estimated")]
        details += [("second minimum", f"{mean['second_minimum']:.2%}", "of the nodes have one")]
        if self.jumps:
            details += [("jumps matter", "", "derivatives and spinodals contain them, the replicon does not")]
        if mean["unresolved"] >= _SHOWN:
            missed = f"{mean['unresolved']:.1%}"
            details += [("unresolved", missed, "of the nodes (Sobol points resolve more than lines)")]
        if self.model.lam.dtype == jnp.float32:
            details += [("float32", "", "about six digits; jax_enable_x64 gives the others")]
        what = f"{self.branch or self.label} branch at alpha = {self.alpha:g}"
        status = f"{self.status_name}, residual {self.residual:.1e}"
        if self.status == Status.absent:
            status = "absent; the numbers are of the state in which it has vanished"
        return Description(what, status, numbers, details)


def states_table(
    points: Sequence[FixedPoint], by: str, places: Sequence[float] | np.ndarray = ()
) -> list[tuple[str, ...]]:
    """A head and a row for each fixed point: its place or its branch, its numbers with error bars, its status.

    Args:
        by: the name of what the places are values of, or "branch".
        places: of the points, where there are some.
    """
    rows: list[tuple[str, ...]] = []
    for k, point in enumerate(points):
        said = point.describe()
        columns = [*said.numbers, *(row for row in said.details if row[0] in ("replicon", "jump mass"))]
        rows = rows or [(by, *(name for name, *_ in columns), "status")]
        first = f"{places[k]:g}" if len(places) else point.branch or point.label
        rows.append((first, *(number for _, number, *_ in columns), point.status_name))
    return rows


# Two programs: at a number that is zero in all replicates the error bar has no derivative, and a reverse pass through
# both would hand its NaN to the mean.
@eqx.filter_jit
def _means(states: State) -> State:
    return jax.tree.map(lambda a: mean_of_found(a, states.has_state), states)


@eqx.filter_jit
def _error_bars(states: State) -> State:
    found = jnp.where(jnp.any(states.has_state), states.has_state, True)

    def bar(a: jax.Array) -> jax.Array:
        return error_bar(jnp.where(found.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.nan))

    return jax.tree.map(bar, states)
