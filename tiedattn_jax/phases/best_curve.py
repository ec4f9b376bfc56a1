"""The best value of a number of the model along alpha, along another number, or for a list of models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float

from ..base.arrays import Number
from ..base.report import Description, Printed, Row, with_error
from ..model.parameters import Parameter
from .best import BestRidge
from .boundaries import MODELS


class BestCurve(Printed):
    """The value of a number of the model with the smallest test error, at increasing values of alpha or of another one.

    Attributes:
        number: name of the number.
        branch: the branch, or None for the global minimum of the training loss.
        points: the `BestRidge` at every place.
        parameter: the number that changes: "alpha", a number of the model, or "model" for a list of models.
        at: values of the parameter, increasing.
        failures: places at which an exception ended the search, each with its message.
    """

    number: str = eqx.field(static=True)
    branch: str | None = eqx.field(static=True)
    points: tuple[BestRidge, ...]
    parameter: str = eqx.field(static=True)
    at: Float[np.ndarray, " A"]
    failures: tuple[str, ...] = eqx.field(static=True, default=())

    def values(self, get: str | Callable[[BestRidge], Number] = "value") -> Float[np.ndarray, " A"]:
        """Return a number of every point, given by name, such as "gen_error.value", or by a function."""
        get = attrgetter(get) if isinstance(get, str) else get
        return np.array([float(get(point)) for point in self.points])

    @property
    def best(self) -> Float[np.ndarray, " A"]:
        """The best value of the number at every point; NaN where there is no state."""
        return self.values("value")

    @property
    def gen_error(self) -> Float[np.ndarray, " A"]:
        """The smallest test error at every point; NaN where there is no state."""
        return self.values("gen_error.value")

    @property
    def jumps(self) -> list[float]:
        """Places between neighbouring points at which the best value jumps, because the best state changes its branch.

        The smallest test error is continuous there. The tangents of the test error at both points meet at the place.
        """
        places = []
        for k, (a, b) in enumerate(pairwise(self.points)):
            if a.states and b.states and a.state.branch != b.state.branch:
                x, y = self.at[k], self.at[k + 1]
                (e, s), (f, t) = ((float(p.gen_error.value), self._slope(p, v)) for p, v in ((a, x), (b, y)))
                place = x + (f - e + t * (x - y)) / (s - t) if s != t else np.nan
                places.append(float(place) if x <= place <= y else float(0.5 * (x + y)))
        return places

    def _slope(self, point: BestRidge, value: float) -> float:
        """Return the derivative of the smallest test error in the parameter; NaN between models of a list."""
        if self.parameter == "alpha":
            assert point.gen_error.by_alpha is not None
            return float(point.gen_error.by_alpha.value)
        if self.parameter == MODELS:
            return np.nan
        assert point.gen_error.sensitivities is not None
        return Parameter(self.parameter).slope(point.gen_error.sensitivities, point.state.model, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the names, the values of the parameter, the jumps, and every `BestRidge.to_dict`."""
        names = {name: getattr(self, name) for name in ("number", "branch", "parameter", "jumps")}
        return {**names, "values": self.at.tolist(), "points": [point.to_dict() for point in self.points]}

    def describe(self) -> Description:
        whose = f"{self.branch} branch" if self.branch else "global minimum"
        values = "alphas" if self.parameter == "alpha" else f"values of {self.parameter}"
        headline = f"best {self.number} of the {whose} at {self.at.size} {values}"
        solved = f"states at {sum(bool(point.states) for point in self.points)}"
        if self.jumps:
            solved += f"; {self.number} jumps at {self.parameter} = {', '.join(f'{place:.4g}' for place in self.jumps)}"
        if self.failures:
            solved += f"; failed at {len(self.failures)}, the first: {self.failures[0]}"
        rows: list[Row] = [(self.parameter, self.number, "gen_error", "branch", "place", "status")]
        for value, point in zip(self.at, self.points, strict=True):
            numbers = (with_error(a.value, a.stderr) for a in (point, point.gen_error))
            branch = str(point.state.branch) if point.states else ""
            rows.append((f"{value:g}", *numbers, branch, point.place, point.status_name))
        return Description(headline, solved, tables=[("", rows)])

    def plot(self, ax: Any = None) -> Any:
        """Plot the best value and the smallest test error against the parameter; see `plotting.best`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "best" and "gen_error",
                or a dict of some of them.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.theory import best_figure

        return best_figure(self, ax=ax)
