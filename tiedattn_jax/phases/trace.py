"""Tracing: an event followed through the values of a number of the model."""

from __future__ import annotations

import contextlib

import numpy as np
from jaxtyping import Float
from scipy.interpolate import KroghInterpolator

from ..base.errors import InputError, require, require_kind
from ..base.progress import Report
from ..base.results import Settings, Status
from ..model.model import Model
from ..model.parameters import Axis, Parameter
from ..theory.paths import Path
from ..theory.quantities import Quantity
from .events import ALPHA_L, Event, baseline_branch, event_of
from .family import Family
from .follow import WarmStart, predict, update
from .locate import SEARCH, Guess, Reading, Start, event_path, guess_among, guess_of, transition_of
from .table import Table

_WIDER_SEARCH = np.geomspace(1.8, 0.4, 9)  # alphas, relative to the last one, that are searched if a prediction fails
TRACE_SETTINGS = Settings(tol=1e-4, warm_steps=20)  # loose, because losses are stationary and starts are predicted
_POINTS = 3  # points that the extrapolation of alpha uses


def trace_path(
    event: str,
    family: Family,
    axis: Axis,
    start: Start | None,
    sensitivities: bool,
    progress: Report,
) -> Path:
    """Return the path that follows an event through the values along an axis, in their order.

    The path returns a `Table`. The points before it predict alpha and the states of every replicate at the next
    point. The arguments are those of `sweep`.

    Raises:
        InputError: the event is unknown, or a fold; there is no event at the first value (the message says what was
            found instead); start is of the wrong kind.
    """
    require(axis.name != "alpha", "alpha", axis.values, "left out where an event is looked for in it")
    if event == ALPHA_L:
        require_kind(start, "start", type(None), f'None for "{event}"')
    events = ("alpha_c", "semantic baseline", "positional baseline") if event == ALPHA_L else (event,)
    finished = dict.fromkeys(events, 0)

    def path(event: str) -> Path:
        """Return the path that traces one event."""

        def report(done: int, total: int) -> None:
            finished[event] = done
            progress(sum(finished.values()), total * len(events))

        definition = event_of(event, family.model)
        if definition.value is None:
            text = f"must be one that can be followed, got question={event!r}: use trace_branch for folds"
            raise InputError("question", text)
        guess = guess_of(definition, start)
        exact = sensitivities or definition.observable is None
        return _Tracer(definition, family, axis.parameter, exact).boundary(axis.values, guess, report)

    paths = [path(name) for name in events]
    return _first_to_beat_the_baseline(*paths) if event == ALPHA_L else paths[0]


def _first_to_beat_the_baseline(*boundaries: Path) -> Path:
    """Path that traces alpha_l, which lies on one of three boundaries: alpha_c and the baselines of both branches."""

    def positional_baseline() -> Path:
        """Path that traces the positional baseline; returns None if the positional state never beats the baseline."""
        try:
            return (yield boundaries[2])
        except InputError:
            return None

    critical, semantic, positional = yield [*boundaries[:2], positional_baseline()]
    early = np.nan if positional is None else positional.alpha
    owner = np.asarray(baseline_branch(early <= critical.alpha, semantic.alpha <= critical.alpha))
    owner = np.where(critical.found, owner, [_global_branch(cell) for cell in critical.cells])
    candidates = (critical if positional is None else positional, critical, semantic)
    slope, exact = (np.choose(owner, [getattr(table, name) for table in candidates]) for name in ("slope", "exact"))
    cells = [candidates[k].cells[place] for place, k in enumerate(owner)]
    return Table.of_event(ALPHA_L, critical.parameter, critical.at, cells, slope, exact)


def _global_branch(critical: Quantity) -> int:
    """Return where alpha_l lies if there is no alpha_c: 0 or 2 on the branch that is global where the search ended.

    It is 1 if the search failed. Then nothing is known of alpha_l either.
    """
    losses = [float(state.train_loss) if state.exists else np.inf for state in critical.branches]
    if critical.status != Status.absent or not np.isfinite(losses).any():
        return 1
    return 0 if losses[0] < losses[1] else 2


class _Tracer:
    """A boundary that is being traced: its points so far, and the warm start of every state."""

    def __init__(self, event: Event, family: Family, parameter: Parameter, exact: bool):
        self.event, self.family, self.parameter, self.exact = event, family, parameter, exact
        self.cells: list[Quantity] = []
        self.slopes: list[float] = []  # d alpha / d value; NaN where it is not known exactly
        self.known: list[tuple[float, float, float]] = []  # value, alpha and slope of the points that were found

    def boundary(self, values: Float[np.ndarray, " A"], guess: Guess | None, progress: Report) -> Path:
        """Path that traces the boundary through the values, starting near a guess for the first one."""
        progress(0, len(values))
        yield from self.begin(values[0], guess)
        progress(1, len(values))
        for k, value in enumerate(values[1:], 2):
            yield from self.add(value)
            progress(k, len(values))
        return Table.of_event(self.event.name, self.parameter.name, values, self.cells, np.array(self.slopes))

    def begin(self, value: float, guess: Guess | None) -> Path:
        """Path that finds the first point, near a guess if there is one.

        Raises:
            InputError: the event does not happen there.
        """
        if guess is None:
            guess = yield from self.wide_search(value, SEARCH)
        zero = yield from self.search_near(value, guess)
        if not zero.converged:
            reason = transition_of(self.event, self.model_at(value), zero).reason
            problem = f"got none at the first near alpha = {guess.at:.4g}"
            raise InputError("values", f"must begin where the event happens, {problem}: {reason}")
        self.warm_starts = [WarmStart.begin(x, value, self.family.nodes.replicates) for x in guess.overlaps]
        self.record(value, zero)

    def model_at(self, value: float) -> Model:
        return self.parameter.set(self.family.model, None, value)[0]

    def prediction(self, value: float) -> Guess:
        """Predict alpha by extrapolating the last points (one point: along its slope), and the states by the secant."""
        values, alphas, slopes = zip(*self.known[-_POINTS:], strict=True)
        if len(values) == 1 and np.isfinite(slopes[0]):
            alpha = alphas[0] + slopes[0] * (value - values[0])
        else:
            alpha = float(KroghInterpolator(values, alphas)(value))
        model = self.model_at(value)
        return Guess(alpha, tuple(predict(model, warm_start, value) for warm_start in self.warm_starts), self.steepness)

    def add(self, value: float) -> Path:
        """Path that finds the next point, near its prediction or by a wider search if that fails."""
        zero = yield from self.search_near(value, self.prediction(value))
        if not zero.converged:
            with contextlib.suppress(InputError):
                guess = yield from self.wide_search(value, self.known[-1][1] * _WIDER_SEARCH)
                zero = yield from self.search_near(value, guess)
        if zero.converged:
            self.record(value, zero)
        else:
            self.cells.append(transition_of(self.event, self.model_at(value), zero))
            self.slopes.append(np.nan)

    def record(self, value: float, zero: Reading) -> None:
        """Record a point that was found, so that it serves to predict the next ones."""
        transition, slope = transition_of(self.event, self.model_at(value), zero), np.nan
        if transition.sensitivities is not None and self.parameter.put is None:
            slope = self.parameter.slope(transition.sensitivities, self.family.model, value)
        self.steepness = zero.slope  # d (event's number) / d alpha
        self.warm_starts = [update(w, value, s) for w, s in zip(self.warm_starts, zero.states, strict=True)]
        self.cells.append(transition)
        self.slopes.append(slope)
        self.known.append((value, float(transition.alpha), slope))

    def search_near(self, value: float, guess: Guess) -> Path:
        return event_path(self.event, self.family_at(value), guess, exact=self.exact)

    def wide_search(self, value: float, alphas: Float[np.ndarray, " A"]) -> Path:
        guess = yield from guess_among(self.event, self.family_at(value), alphas)
        if guess is None:
            text = f"must begin where the event happens, got none at the first for alpha from {alphas[-1]:g} to"
            raise InputError("values", f"{text} {alphas[0]:g}")
        return guess

    def family_at(self, value: float) -> Family:
        return self.family.of(self.model_at(value))
