"""Many settings, each for itself: their paths in one pool, and the boundary of the events that they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..averages.recipes import AnyNodes
from ..averages.rules import Rule
from ..base.errors import InputError
from ..base.report import Status
from ..bayes.thresholds import RECOVERIES, recovery
from ..dynamics.small_start import SEPARATIONS, separated
from ..model.model import Model
from ..model.parameters import Parameter
from ..theory.engine import run
from ..theory.paths import Call, Failure, Path
from ..theory.thresholds import Threshold
from .boundaries import MODELS, Boundary
from .events import Transition
from .follow import Progress

# Events that need no search: thresholds of the optimal learner, and of small starts of gradient descent.
THRESHOLDS: dict[str, Callable[[str, Model, Rule | None], Threshold]] = {
    **dict.fromkeys(RECOVERIES, recovery),
    **dict.fromkeys(SEPARATIONS, separated),
}


def run_settings(paths: list[Path], names: Sequence[str], progress: Progress) -> list[Any]:
    """Run the path of every setting; a failure at one setting is its result, and does not affect the others."""
    done = 0

    def report(number: int, result: Any) -> None:
        nonlocal done
        done += 1
        progress(done, len(paths))

    progress(0, len(paths))
    return run(paths, names=names, done=report, keep=True)


def collected(
    event: str,
    parameter: str,
    grid: Float[np.ndarray, " A"],
    models: Sequence[Model],
    results: Sequence[Transition | Threshold | Failure],
) -> Boundary:
    """Collect the events of all settings; slopes are finite if a number of the model is the parameter."""
    rows: list[tuple] = []
    for value, model, result in zip(grid, models, results, strict=True):
        if isinstance(result, Failure):
            status = Status.absent if isinstance(result.error, InputError) else Status.nonfinite
            rows.append((value, np.nan, np.nan, np.nan, int(status), result.reason))
            continue
        alpha, bar, slope = float(result.alpha), float(result.stderr), np.nan
        if result.reason:
            alpha, bar = np.nan, np.nan
        elif result.sensitivities is not None and parameter != MODELS:
            slope = Parameter(parameter).slope(result.sensitivities, model, value)
        rows.append((value, alpha, bar, slope, int(result.status), result.reason))
    values, alphas, bars, slopes, statuses, reasons = (np.array(column) for column in zip(*rows, strict=True))
    return Boundary.of(event, parameter, values, alphas, bars, slopes, statuses, reasons, np.isfinite(slopes))


def thresholds_of(
    event: str, models: Sequence[Model], names: Sequence[str], nodes: AnyNodes, progress: Progress
) -> list[Threshold | Failure]:
    """Return one of the `THRESHOLDS` of several models; no search is needed, and slopes are exact."""

    def path(model: Model) -> Path:
        return (yield Call(THRESHOLDS[event], (event, model, nodes)))

    return run_settings([path(m) for m in models], names, progress)
