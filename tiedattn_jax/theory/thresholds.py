"""Thresholds in alpha that need no fixed point."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..base.report import Description, Result, Status, with_error
from ..model.model import Model


class Threshold(Result):
    """A threshold in alpha, with its derivatives.

    Attributes:
        event: what begins at the threshold.
        alpha: samples per dimension at the threshold; NaN or infinite if there is none.
        stderr: its error bar; zero if it is known in closed form.
        sensitivities: derivatives of alpha in the numbers of the model, as a model.
    """

    event: str = eqx.field(static=True)
    alpha: Float[Array, ""]
    stderr: Float[Array, ""]
    sensitivities: Model
    batch_probe = "alpha", 0

    @property
    def status(self) -> Int[Array, "*batch"]:
        """`converged` if the threshold is finite."""
        return jnp.where(jnp.isfinite(self.alpha), Status.converged, Status.absent)

    @property
    def reason(self) -> str:
        """Why there is no threshold, in one sentence; empty if there is one."""
        return "" if self.ok else "the threshold is not finite"

    def describe(self) -> Description:
        return Description(self.event, self.status_name, [("alpha", with_error(self.alpha, self.stderr), "n / d")])
