"""Tracing boundaries: an event followed through the values of a second parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Real
from scipy.interpolate import KroghInterpolator

from ..averages.recipes import AnyNodes
from ..averages.rules import Rule
from ..base.errors import InputError, array_of, as_flag, require, require_choice, require_kind
from ..base.report import Settings
from ..model.model import Model
from ..model.parameters import Parameter
from ..theory.engine import run_one
from ..theory.paths import Path
from ..theory.states import FixedPoint
from .boundaries import ALPHA_L, Boundary, baseline_branch
from .events import EVENTS, Event, event_of
from .follow import Progress, WarmStart, predict, silent, update, walk
from .independent import THRESHOLDS, collected, thresholds_of
from .inputs import prepared
from .locate import Guess, Start, Zero, find_zero, guess_of, number_of, sign_changes, transition_of

SEARCH = np.geomspace(3.0, 0.05, 19)  # alphas that are searched for the first point
_WIDER_SEARCH = np.geomspace(1.8, 0.4, 9)  # alphas, relative to the last one, that are searched if a prediction fails
_SETTINGS = Settings(tol=1e-4, warm_steps=20)  # loose, because losses are stationary and starts are predicted
_POINTS = 3  # points that the extrapolation of alpha uses


def trace_boundary(
    model: Model,
    event: str,
    parameter: str,
    values: Sequence[float] | Real[np.ndarray, " A"],
    nodes: AnyNodes = None,
    *,
    start: Start | None = None,
    settings: Settings | None = None,
    sensitivities: bool = False,
    progress: Progress = silent,
) -> Boundary:
    """Follow an event through the values of a parameter, in the order in which they are given.

    The points before it predict alpha and the states of every replicate at the next point. A good prediction takes a
    single evaluation.

    Args:
        event: a name in `EVENTS` other than a fold (`trace_branch` finds folds), "alpha_l", or a threshold of the
            optimal learner, "weak_recovery" or "perfect_recovery", or of small starts of gradient descent, "encodings
            separate" or "teacher separates". "alpha_l" costs as much as "alpha_c" and both
            baselines together, because it coincides with one of the three. It takes no `start`, nor do the thresholds.
        parameter: name of a scalar field of the model, or an entry such as "mixing[0,1]".
        values: values of the parameter, monotonic.
        nodes: recipe of the averages, or number of nodes; see `make_rule`. For weak recovery that of `weak_recovery`.
        start: where the event is expected at the first value, as in `find_event`; by default the alphas `SEARCH` are
            searched.
        settings: tolerances; the default is looser than `Settings()`, because losses are stationary and starts are
            predicted.
        sensitivities: whether to compute the exact slope at every point. For events other than alpha_c this compiles
            one more program.
        progress: called with the number of finished values and the number of all values.

    Raises:
        InputError: the event or parameter is unknown; the event is a fold; the values are not monotonic, finite and in
            the model's range; there is no event at the first value (the message says what was found instead); nodes,
            start or settings are of the wrong kind.
    """
    sensitivities = as_flag(sensitivities, "sensitivities")
    is_threshold = isinstance(event, str) and event in THRESHOLDS
    averages, settings = prepared(model, None if is_threshold else nodes, settings, _SETTINGS)
    event = require_choice(event, "event", [*EVENTS, ALPHA_L, *THRESHOLDS])
    if event == ALPHA_L or is_threshold:
        require_kind(start, "start", type(None), f'None for "{event}"')
    require_kind(parameter, "parameter", str, "the name of a number, for instance sigma")
    require(parameter != "alpha", "parameter", parameter, "another one than alpha")
    number = Parameter(parameter)
    number.read(model, None, "parameter")
    grid = array_of(
        values, "values", "a list of finite, monotonic numbers", lambda a: abs(np.sign(np.diff(a)).sum()) == a.size - 1
    )
    number.check(model, grid, "values")
    if is_threshold:
        models = [number.set(model, None, value)[0] for value in grid]
        names = [f"{parameter} = {value:g}" for value in grid]
        return collected(event, parameter, grid, models, thresholds_of(event, models, names, nodes, progress))

    events = ("alpha_c", "semantic baseline", "positional baseline") if event == ALPHA_L else (event,)
    finished = dict.fromkeys(events, 0)

    def boundary_path(event: str) -> Path:
        """Return the path that traces the boundary of one event."""

        def report(done: int, total: int) -> None:
            finished[event] = done
            progress(sum(finished.values()), total * len(events))

        definition = event_of(event, model)
        if definition.value is None:
            text = f"must be one that can be followed, got event={event!r}: use trace_branch for folds"
            raise InputError("event", text)
        guess = None if start is None else guess_of(definition, start)
        tracer = _Tracer(definition, model, number, averages, settings, sensitivities or definition.observable is None)
        return tracer.boundary(grid, guess, report)

    paths = [boundary_path(name) for name in events]
    return run_one(_first_to_beat_the_baseline(*paths) if event == ALPHA_L else paths[0])


def _first_to_beat_the_baseline(*boundaries: Path) -> Path:
    """Path that traces alpha_l, which lies on one of three boundaries: alpha_c and the baselines of both branches."""

    def positional_baseline() -> Path:
        """Path that traces the positional baseline; returns None if the positional state never beats the baseline."""
        try:
            return (yield boundaries[2])
        except InputError:
            return None

    critical, semantic, positional = yield [*boundaries[:2], positional_baseline()]
    if positional is None:
        positional = eqx.tree_at(lambda b: b.alpha, critical, np.full_like(critical.alpha, np.nan))
    owner = np.asarray(baseline_branch(positional.alpha <= critical.alpha, semantic.alpha <= critical.alpha))
    candidates = (positional, critical, semantic)
    names = "alpha", "stderr", "slope", "status", "reason", "exact"
    columns = (np.choose(owner, [getattr(b, k) for b in candidates]) for k in names)
    return Boundary.of(ALPHA_L, critical.parameter, critical.values, *columns)


class _BoundaryPoint(NamedTuple):
    """A point of a boundary; alpha, its error bar and slope are NaN if it was not found."""

    value: float  # the parameter
    alpha: float
    stderr: float
    slope: float  # d alpha / d parameter
    status: int
    reason: str  # why the point was not found, or ""


class _Tracer:
    """A boundary that is being traced: its points so far, and the warm start of every state."""

    def __init__(self, event: Event, model: Model, parameter: Parameter, nodes: Rule, settings: Settings, exact: bool):
        self.event, self.model, self.parameter = event, model, parameter
        self.nodes, self.settings, self.exact = nodes, settings, exact
        self.points: list[_BoundaryPoint] = []

    @property
    def known_points(self) -> list[_BoundaryPoint]:
        return [p for p in self.points if np.isfinite(p.alpha)]

    def boundary(self, values: Float[np.ndarray, " A"], guess: Guess | None, progress: Progress) -> Path:
        """Path that traces the boundary through the values, starting near a guess for the first one."""
        progress(0, len(values))
        yield from self.begin(values[0], guess)
        progress(1, len(values))
        for k, value in enumerate(values[1:], 2):
            yield from self.add(value)
            progress(k, len(values))
        columns = map(np.array, zip(*self.points, strict=True))
        return Boundary.of(self.event.name, self.parameter.name, *columns)

    def begin(self, value: float, guess: Guess | None) -> Path:
        """Path that finds the first point, near a guess if there is one.

        Raises:
            InputError: the event does not happen there.
        """
        if guess is None:
            guess = yield from self.wide_search(value, SEARCH)
        zero = yield from self.search_near(value, guess)
        if not zero.converged:
            reason = self.failure_reason(value, zero)
            problem = f"got none at the first near alpha = {guess.alpha:.4g}"
            raise InputError("values", f"must begin where the event happens, {problem}: {reason}")
        self.warm_starts = [WarmStart.begin(x, value, self.nodes.replicates) for x in guess.overlaps]
        self.record(value, zero)

    def model_at(self, value: float) -> Model:
        return self.parameter.set(self.model, None, value)[0]

    def prediction(self, value: float) -> Guess:
        """Predict alpha by extrapolating the last points (one point: along its slope), and the states by the secant."""
        last = self.known_points[-_POINTS:]
        if len(last) == 1 and np.isfinite(last[0].slope):
            alpha = last[0].alpha + last[0].slope * (value - last[0].value)
        else:
            alpha = float(KroghInterpolator([p.value for p in last], [p.alpha for p in last])(value))
        model = self.model_at(value)
        return Guess(alpha, tuple(predict(model, warm_start, value) for warm_start in self.warm_starts), self.steepness)

    def add(self, value: float) -> Path:
        """Path that finds the next point, near its prediction or by a wider search if that fails."""
        zero = yield from self.search_near(value, self.prediction(value))
        if not zero.converged:
            with contextlib.suppress(InputError):
                guess = yield from self.wide_search(value, self.known_points[-1].alpha * _WIDER_SEARCH)
                zero = yield from self.search_near(value, guess)
        if not zero.converged:
            worst = max(int(s.status.max()) for s in zero.states)
            self.points.append(_BoundaryPoint(value, np.nan, np.nan, np.nan, worst, self.failure_reason(value, zero)))
        else:
            self.record(value, zero)

    def record(self, value: float, zero: Zero) -> None:
        """Record a point that was found, so that it serves to predict the next ones."""
        transition, slope = transition_of(self.event, self.model_at(value), zero), np.nan
        if transition.sensitivities is not None:
            slope = self.parameter.slope(transition.sensitivities, self.model, value)
        self.steepness = zero.slope  # d (event's number) / d alpha
        self.warm_starts = [update(w, value, s) for w, s in zip(self.warm_starts, zero.states, strict=True)]
        self.points.append(
            _BoundaryPoint(value, float(transition.alpha), float(transition.stderr), slope, int(transition.status), "")
        )

    def failure_reason(self, value: float, zero: Zero) -> str:
        """Say why the event was not found."""
        return transition_of(self.event, self.model_at(value), zero).reason

    def search_near(self, value: float, guess: Guess) -> Path:
        return find_zero(self.event, self.model_at(value), guess, self.nodes, self.settings, exact=self.exact)

    def wide_search(self, value: float, alphas: Float[np.ndarray, " A"]) -> Path:
        return first_sign_change(self.event, self.model_at(value), alphas, self.nodes, self.settings)


def first_sign_change(
    event: Event, model: Model, alphas: Float[np.ndarray, " A"], nodes: Rule, settings: Settings
) -> Path:
    """Path that visits alphas in turn until the number of an event changes its sign; returns a `Guess`.

    If the sign never changes, the event is expected between an alpha with states and a neighbour without, provided that
    the sign of the number at the states is compatible with a zero on that side.

    Raises:
        InputError: the event happens nowhere between the alphas.
    """
    visited: list[tuple[Sequence[FixedPoint], float]] = []
    for steps in zip(*(walk(model, list(alphas), b, nodes, settings) for b in event.branches), strict=True):
        points = yield list(steps)
        visited.append((points, number_of(event, points)))
        if guesses := sign_changes(visited[-2:]):
            return guesses[0]
    for before, after in pairwise(visited):
        for (points, g), (neighbours, h) in ((before, after), (after, before)):
            a, b = float(points[0].alpha), float(neighbours[0].alpha)
            if np.isnan(h) and g * (b - a) < 0:  # numbers of events rise with alpha
                overlaps = tuple(p.replicates.overlaps for p in points)
                return Guess(0.5 * (a + b), overlaps, low=min(a, b), high=max(a, b), there=a)
    ends = [float(points[0].alpha) for points, _ in (visited[-1], visited[0])]
    text = f"must begin where the event happens, got none at the first for alpha from {ends[0]:g} to {ends[1]:g}"
    raise InputError("values", text)
