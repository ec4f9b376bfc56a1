"""A number of the theory with its error bar, its derivatives and a status: transitions, thresholds, best ridges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..base.arrays import StateArray, spread_to
from ..base.report import Description, Row, entries, with_error
from ..base.results import Average, Result, Status, error_bar, quorum
from ..model.model import Model
from ..model.parameters import arrays_of, scalar_parameters
from .equations import first_order

Self = TypeVar("Self", bound="Quantity")
# A model alone, or a model and an alpha.
Setting = Model | tuple[Model, Float[Array, ""]]


class Quantity(Result):
    """A number that was computed in every replicate of the averages, with its derivatives.

    The number is differentiable in the numbers of the setting from which it was made; its first derivatives are
    `sensitivities` and `by_alpha`.

    Attributes:
        value: mean over the replicates. If the number does not exist, this and all its derivatives and error bars are
            NaN.
        stderr: error bar of `value`; zero if the number is known exactly.
        status: `Status` as an integer; `absent` if the number does not exist.
        sensitivities: d value / d (every number of the model), a pytree like the model; None if not computed.
        sensitivities_stderr: error bars of the sensitivities.
        by_alpha: d value / d alpha with its error bar, for a number that depends on alpha; else None.
    """

    batch_probe = "value", 0
    value: Float[StateArray, "*batch"]
    stderr: Float[StateArray, "*batch"]
    status: Int[StateArray, "*batch"]
    sensitivities: Model | None = None
    sensitivities_stderr: Model | None = None
    by_alpha: Average | None = None

    @classmethod
    def of(
        cls: type[Self],
        values: Float[Array, " R"],
        rates: PyTree[Float[Array, "R ..."]] | None = None,
        setting: Setting | None = None,
        *,
        status: int | Int[Array, ""] = Status.converged,
        known: bool | Bool[Array, ""] = True,
        **fields: Any,
    ) -> Self:
        """Return the mean over R replicates, with error bars and derivatives.

        Args:
            values: the number in every replicate; NaN in those that lack it.
            rates: its derivatives in the numbers of the setting, leaves (R, ...): a model, or a model and an array for
                alpha. None if they are not known.
            setting: the caller's model, or model and alpha, in which the result is differentiable. None if `values`
                have their own derivatives.
            status: see `Quantity.status`.
            known: whether the number exists; otherwise all numbers are NaN.
            fields: further fields of a subclass.
        """
        # No number of what was not found may read like a result. A factor makes the derivatives NaN as well.
        factor = jnp.where(known, 1.0, jnp.nan).astype(values.dtype)
        bar = factor * error_bar(lax.stop_gradient(values))
        slopes: tuple[Any, Any, Any] = None, None, None
        if rates is not None:
            values = values if setting is None else with_sensitivities(values, rates, setting)
            pair = rates if isinstance(rates, tuple) else (rates, None)
            (by_model, by_alpha), (bars, alpha_bar) = jax.tree.map(lambda a: factor * a, _mean_and_bar(pair))
            slopes = by_model, bars, None if by_alpha is None else Average(by_alpha, alpha_bar)
        value = factor * jnp.nanmean(values)
        return cls(value, bar, jnp.asarray(status), *slopes, **fields)

    @classmethod
    def of_existing(
        cls: type[Self], values: Float[Array, " R"], rates: PyTree[Float[Array, "R ..."]] | None = None, **fields: Any
    ) -> Self:
        """Return the mean over the replicates that have the number, where `values` are finite; see `of`.

        The number exists if at least half of the replicates have it. The values have their own derivatives.
        """
        exists = jnp.isfinite(values)
        known = quorum(exists)
        values, rates = jax.tree.map(lambda a: jnp.where(spread_to(exists, a), a, jnp.nan), (values, rates))
        status = jnp.where(known, Status.converged, Status.absent)
        return cls.of(values, rates, status=status, known=known, **fields)

    @property
    def title(self) -> str:
        """The number in words."""
        return "value"

    def to_dict(self) -> dict[str, Any]:
        """Return the number, its error bar, its derivatives and the status; valid JSON if all numbers are finite."""
        return {
            "value": float(self.value),
            "stderr": float(self.stderr),
            **self.derivatives(),
            "status": self.status_name,
        }

    def describe(self) -> Description:
        headline = f"{self.title} = {with_error(self.value, self.stderr)}"
        rows = self.sensitivity_rows(scalar_parameters), self.sensitivity_rows(arrays_of)
        return Description(headline, self.status_name, *rows)

    def derivatives(self) -> dict[str, Any]:
        """Return the sensitivities and their error bars by the names of the numbers, ready for JSON."""
        trees = {name: getattr(self, name) for name in ("sensitivities", "sensitivities_stderr")}
        return {name: None if tree is None else numbers_by_name(tree) for name, tree in trees.items()}

    def sensitivity_rows(self, select: Callable[[Model], dict[str, Any]]) -> list[Row]:
        """Return printed rows of the sensitivities to the numbers that `select` returns; none if not computed."""
        if self.sensitivities is None or self.sensitivities_stderr is None:
            return []
        values, bars = map(select, (self.sensitivities, self.sensitivities_stderr))
        return [(f"d/d{name}", entries(value, bars[name])) for name, value in values.items()]


class Threshold(Quantity):
    """An alpha at which something begins, and which follows from averages without a search for a state.

    Attributes:
        alpha: samples per dimension at the threshold; NaN if there is none.
        event: name of the threshold.
        meaning: what begins there, in words.
    """

    event: str = eqx.field(static=True, kw_only=True)
    meaning: str = eqx.field(static=True, kw_only=True)

    @classmethod
    def of_model(cls: type[Self], values: Callable[[Model], Float[Array, " R"]], model: Model, **fields: Any) -> Self:
        """Return a threshold and its sensitivities from its values in every replicate, a function of the model."""

        def twice(model: Model) -> tuple[Array, Array]:
            alphas = values(model)
            return alphas, alphas

        rates, alphas = jax.jacrev(twice, has_aux=True)(model)
        return cls.of_existing(alphas, rates, **fields)

    @property
    def alpha(self) -> Float[StateArray, "*batch"]:
        """The threshold, which is `value`."""
        return self.value

    @property
    def reason(self) -> str:
        """Why there is no threshold, in one sentence; empty if there is one."""
        return "" if self.ok else "the threshold is not finite"

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.event} | super().to_dict()

    def describe(self) -> Description:
        return Description(self.meaning, self.status_name, [("alpha", with_error(self.value, self.stderr), "n / d")])


def numbers_by_name(model: Model) -> dict[str, Any]:
    """Return all numbers of a model by name, arrays as lists."""
    return scalar_parameters(model) | {name: a.tolist() for name, a in arrays_of(model).items()}


@eqx.filter_jit
def _mean_and_bar(rates: PyTree[Float[Array, "R ..."]]) -> tuple[Any, Any]:
    """Return means and error bars over the replicates."""
    return jax.tree.map(lambda a: jnp.nanmean(a, 0), rates), jax.tree.map(error_bar, rates)


@jax.custom_jvp
def with_sensitivities(
    values: Float[Array, " R"], rates: PyTree[Float[Array, "R ..."]], setting: PyTree[Float[Array, "..."]]
) -> Float[Array, " R"]:
    """Return the values with `rates` (leading axis R) as their first derivatives in the numbers of a setting."""
    return values


@with_sensitivities.defjvp
def _(primals: Any, tangents: Any) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    values, rates, setting = primals
    terms = jax.tree.map(
        lambda s, d: jnp.sum((s * d).reshape(values.shape[0], -1), 1), first_order(rates, setting), tangents[2]
    )
    return values, sum(jax.tree.leaves(terms), jnp.zeros_like(values))
