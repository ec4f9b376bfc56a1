"""Settings along one number: what every search along it is given, after its arguments were checked."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, PyTree

from ..averages.recipes import SIZES, AnyNodes, default_recipe, make_rule
from ..averages.rules import REPLICATES, Rule
from ..base.arrays import GivenArray
from ..base.errors import InputError, array_of, is_concrete, is_tracing, require_kind
from ..base.results import Settings
from ..model.checks import check
from ..model.model import Model, require_model
from ..model.parameters import Parameter
from ..theory.setting import Setting


class Family(NamedTuple):
    """Settings along one number, and how their states are solved: what a search is given after the checks.

    Attributes:
        model: the model; concrete numbers.
        nodes, settings: averaging rule and tolerances.
        number: the number along which an event is searched.
        alpha: samples per dimension if the number is another one.
    """

    model: Model
    nodes: Rule
    settings: Settings
    number: Parameter = Parameter("alpha")
    alpha: Float[GivenArray, ""] | None = None

    def of(self, model: Model) -> Family:
        """Return the settings of another model, whose numbers are held."""
        return self._replace(model=lax.stop_gradient(model))

    @property
    def value(self) -> float:
        """The number at the model's own setting."""
        return self.number.read(self.model, self.alpha, "parameter")

    def at(self, value: float, branch: str | None) -> Setting:
        """Return a branch at one value of the number."""
        model, alpha = self.number.set(self.model, self.alpha, value)
        assert alpha is not None
        return Setting.of(model, np.asarray(alpha), self.nodes, branch, self.settings)

    def derivatives(
        self, value: float, by_model: Model, by_alpha: Float[GivenArray, " R"]
    ) -> tuple[PyTree[Float[GivenArray, "R ..."]], Float[GivenArray, " R"]]:
        """Return derivatives in the other numbers of the setting, and in the number itself at one value of it.

        The other numbers are those of the model or, along one of these, those of the model and alpha.

        Args:
            by_model, by_alpha: derivatives in the model at the value, and in alpha, with a leading axis of replicates.
        """
        if self.number.name == "alpha":
            return by_model, by_alpha
        at_value, pull = jax.vjp(
            lambda model, v: self.number.set(model, None, v)[0], self.model, jnp.asarray(value, self.model.lam.dtype)
        )
        gradients = jax.tree.map(lambda g, a: jnp.asarray(g, a.dtype), by_model, jax.vmap(lambda _: at_value)(by_alpha))
        rates, slopes = jax.vmap(pull)(gradients)
        return jax.tree.map(np.asarray, ((rates, by_alpha), slopes))


def prepared(
    model: Model,
    nodes: AnyNodes,
    settings: Settings | None,
    default: Settings | None = None,
    *,
    size: int = SIZES["solve"],
    replicates: int = REPLICATES,
    even: bool = True,
) -> Family:
    """Check a model; return its settings along alpha, with the averages and tolerances of the caller or the defaults.

    Its numbers are held: results become differentiable in the caller's model when they are made.

    Args:
        even: whether the model's loss must be even, as the named branches require.

    Raises:
        InputError: one of the three is of the wrong kind, or the model is traced by jax or fails its `check`.
    """
    require_model(model)
    require_kind(settings, "settings", (Settings, type(None)), "Settings, for instance Settings(tol=1e-4)")
    check_top_level(model)
    check(model, even=even)
    model = lax.stop_gradient(model)
    rule = make_rule(nodes, model, default_recipe(model, size, replicates=replicates))
    return Family(model, rule, settings or default or Settings())


def ends_of(bracket: tuple[float, float]) -> tuple[float, float]:
    """Check a bracket; return its ends."""
    low, high = array_of(bracket, "bracket", "two numbers 0 < low < high", lambda a: a.size == 2 and 0 < a[0] < a[1])
    return float(low), float(high)


def check_top_level(*values: PyTree) -> None:
    """Raise an `InputError` if numbers are traced: searches over settings are Python loops and need their values.

    `jax.grad` and `jax.jvp` of a search work, because its sensitivities are known when it returns.
    """
    if is_tracing() or not is_concrete(lax.stop_gradient(values)):
        text = "must have concrete numbers here, got one under a jax transformation such as jit or vmap"
        raise InputError("model", f"{text}: call this function outside of it, or sweep for many models at once")
