"""Thresholds in alpha that need no search for a state: of the optimal learner, and of small starts."""

from __future__ import annotations

from collections.abc import Callable

from ..averages.recipes import AnyNodes
from ..base.errors import require_choice
from ..bayes import thresholds as bayes
from ..dynamics import small_start
from ..model.model import Model
from ..theory.quantities import Threshold

THRESHOLDS: dict[str, Callable[[Model, AnyNodes], Threshold]] = bayes.THRESHOLDS | small_start.THRESHOLDS


def threshold(model: Model, name: str, *, nodes: AnyNodes = None) -> Threshold:
    """Return a threshold in alpha with its error bar and its derivatives in the numbers of the model.

    "weak_recovery": below it the labels say nothing of the teacher's direction, even to an optimal learner.
    "perfect_recovery": above it the teacher is recovered exactly, from exact labels that give its fields up to a sign.
    "encodings separate", "teacher separates": above it this overlap of a small student grows faster than noise under
    full-batch gradient descent, see `small_start`. Both are searched between 0.001 and 10,000.

    The thresholds are also events of `sweep`.

    Args:
        model: as in `bayes` or `small_start`. Perfect recovery also needs labels without noise, and tokens that are
            alike with one eigenvalue of their covariance.
        name: one of the four names.
        nodes: averages as in `bayes` or `small_start`; perfect recovery needs none.

    Returns:
        A `Threshold`; its status is `absent` if there is none.

    Raises:
        InputError: no threshold has this name; or as in `bayes` or `small_start`.
    """
    return THRESHOLDS[require_choice(name, "name", THRESHOLDS)](model, nodes)
