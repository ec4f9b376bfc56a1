"""Results made by hand, without a solve: the semantic state at alpha = 2, with given numbers in place of its own."""

import dataclasses
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES, state
from jax import lax

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import unstacked
from tiedattn_jax.finite.instances import Instance
from tiedattn_jax.model.overlaps import Conjugates
from tiedattn_jax.phases.cells import Batch
from tiedattn_jax.phases.events import as_event
from tiedattn_jax.phases.pair import Pair
from tiedattn_jax.phases.table import Missing, Table
from tiedattn_jax.theory.equations import with_tangents
from tiedattn_jax.theory.observables import Diagnostics
from tiedattn_jax.theory.quantities import Quantity
from tiedattn_jax.theory.solve import traced_states
from tiedattn_jax.theory.states import DIAGNOSTICS, State, blank_state


def states(model, case=CASES[0], scatter=(0.0,) * 4, **numbers) -> State:
    """A `State` of several replicates, whose unknown numbers are zero.

    Args:
        scatter: relative increase of theta, m and both losses in every replicate.
        numbers: diagnostics and other arrays of the state, (R,).
    """
    zero = jnp.zeros(len(scatter))
    factor = 1 + jnp.asarray(scatter)
    x = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(scatter), *a.shape)), state(case))
    x = ta.Overlaps(x.q, x.V, x.theta * factor[:, None, None, None], x.m * factor[:, None, None])
    diagnostics = {name: jnp.asarray(numbers.pop(name, zero), float) for name in DIAGNOSTICS}
    results = {
        "train_loss": case.train_loss * factor,
        "gen_error": case.gen_error * factor,
        "gen_error_linear": zero,
        "residual": zero,
        "status": jnp.zeros(len(scatter), int),
    }
    return State(
        overlaps=x,
        conjugates=Conjugates(x.q, x.V, x.theta, x.m),
        **{**results, **{name: jnp.asarray(a) for name, a in numbers.items()}},
        diagnostics=Diagnostics(**diagnostics),
        train_loss_partials=(jax.tree.map(lambda a: jnp.zeros((len(scatter), *a.shape)), model), zero),
    )


def numbers_of(states: State):
    """q, V, theta, m, training loss and test error of every replicate, for the first token: (R, 6)."""
    x = states.overlaps
    parts = x.q[:, 0, 0, 0], x.V[:, 0, 0, 0], x.theta[:, 0, 0, 0], x.m[:, 0, 0], states.train_loss, states.gen_error
    return jnp.stack(parts, 1)


def overlaps_of(q, V, theta=0.0, m=0.0, tokens=2) -> ta.Overlaps:
    """Overlaps of one column, equal for all tokens, but for the sign of m."""
    signs = jnp.linspace(1.0, -1.0, tokens)[:, None]
    return ta.Overlaps(*(jnp.full((tokens, 1, 1), v, float) for v in (q, V, theta)), m * signs)


def states_near(model, alpha, nodes, start, free, settings) -> State:
    """The states that `solve` finds near a start under `jax.jit`, where the branch is data."""
    starts = jax.tree.map(lambda a: jnp.broadcast_to(a, (nodes.replicates, *jnp.shape(a))), start)
    states = traced_states(*lax.stop_gradient((model, alpha)), nodes, free, settings, starts, False)
    return with_tangents(states, model, alpha, nodes, free)


def fixed_point(case=CASES[0], **numbers) -> ta.results.FixedPoint:
    """A `FixedPoint` of the standard model; the numbers are those of `states`."""
    model = ta.DotProduct()
    return ta.results.FixedPoint(model, jnp.asarray(case.alpha), states(model, case, **numbers), case.branch)


SPREAD = np.array([0.99, 1.01])  # of the two replicates


def point(value, growth, branch="semantic", model=None):
    """A state whose theta, m and training loss are `value`, with a test error twice and a baseline half as large."""
    model, numbers = model or ta.DotProduct(), value * SPREAD
    blank = blank_state(model, 2)
    overlaps = dataclasses.replace(
        blank.overlaps,
        q=np.ones((2, 2, 1, 1)),
        theta=np.tile(numbers[:, None, None, None], (1, 2, 1, 1)),
        m=numbers[:, None, None] * np.array([1.0, -1.0])[:, None],
    )
    growths = dataclasses.replace(blank.diagnostics, growth_m=np.full(2, growth), growth_theta=np.full(2, growth))
    losses = {"train_loss": numbers, "gen_error": 2 * numbers, "gen_error_linear": np.full(2, value / 2)}
    state = dataclasses.replace(blank, overlaps=overlaps, diagnostics=growths, **losses)
    return ta.results.FixedPoint(model, np.asarray(value), state, branch)


def instances(points=(), **columns) -> Table:
    """A table of instances made of columns, the fields of its cells with an axis of instances."""
    rows = []
    for row in unstacked(columns, len(columns["status"])):
        numbers = {name: a.item() if isinstance(a, np.generic) else a for name, a in row.items()}
        rows.append(Instance(**numbers, point=None))
    if points:
        rows = [dataclasses.replace(row, point=point) for row, point in zip(rows, points, strict=True)]
    return Table("instances", ("instance",), (np.arange(float(len(rows))),), tuple(rows))


def transition(alpha=1.25, status=0, event="alpha_c", branches=()) -> Quantity:
    """An event with sensitivities 1, 2 and 3 in omega, sigma and lambda, and error bars of a hundredth."""
    model = ta.DotProduct(omega=1.0, sigma=2.0, lam=3.0)
    bars = jax.tree.map(lambda a: a / 100, model)
    numbers = jnp.asarray(alpha), jnp.asarray(0.01), jnp.asarray(status), model, bars
    return as_event(Quantity(*numbers), event, branches)


def end(transition, *labels) -> Quantity:
    """An event as the end of a branch."""
    return dataclasses.replace(transition, labels=tuple(zip(("kind", "direction", "side"), labels, strict=True)))


def events(event, name, values, alpha, stderr, slope=None, exact=None, reason="there is none") -> Table:
    """A table of an event along one axis; it is missing where alpha is NaN."""
    cells = [
        Missing(reason, int(ta.Status.absent)) if np.isnan(a)
        else Quantity(jnp.asarray(a), jnp.asarray(bar), jnp.asarray(0), name="alpha", event=event)
        for a, bar in zip(alpha, stderr, strict=True)
    ]  # fmt: skip
    slope = np.full(len(cells), np.nan) if slope is None else np.array(slope, float)
    return Table.of_event(event, name, np.asarray(values, float), cells, slope, exact)


def diagram(x, y, cells, attrs=None) -> ta.results.PhaseDiagram:
    """A diagram with given numbers of the states, arrays (branch, y, x, replicate, ...) by name; others are zero."""
    model, shape = ta.DotProduct(), next(iter(cells.values())).shape[1:4]
    pair = []
    for branch in range(2):
        own = {name: np.array(a[branch]) for name, a in cells.items()}
        state = blank_state(model, *shape)
        parts = ((state.overlaps, "q V theta m".split()), (state.diagnostics, DIAGNOSTICS))
        overlaps, diagnostics = (
            dataclasses.replace(part, **{k: own.pop(k) for k in names if k in own}) for part, names in parts
        )
        partials = state.train_loss_partials[0], own.pop("train_loss_by_alpha", state.train_loss_partials[1])
        own["status"] = own["status"].astype(int)
        state = dataclasses.replace(
            state, overlaps=overlaps, diagnostics=diagnostics, train_loss_partials=partials, **own
        )
        models = jax.tree.map(lambda a: np.broadcast_to(a, (*shape[:2], *a.shape)), model)
        pair.append(ta.results.FixedPoint(models, np.ones(shape[:2]), state, ("positional", "semantic")[branch]))
    cells, attrs = Batch(Pair(*pair), shape[:2]), {} if attrs is None else attrs
    return ta.results.PhaseDiagram("phase_diagram", (y[0], x[0]), (y[1], x[1]), cells, attrs=attrs)


def cells_of(diagram) -> dict:
    """The numbers of the states of a diagram in all replicates by name, arrays (branch, y, x, replicate, ...)."""
    parts = [branch.replicates.numbers() for branch in (diagram.positional, diagram.semantic)]
    return {name: np.stack([np.asarray(part[name]) for part in parts]) for name in parts[0]}


def changed(known, name, index, value):
    """A diagram whose cells have another number at an index of (branch, y, x, replicate)."""
    cells = cells_of(known)
    cells[name][index] = value
    return diagram(known.x, known.y, cells, known.attrs)


def means_of(diagram, name):
    """Means and error bars of a number of both branches, each (branch, y, x, ...)."""
    parts = [branch.numbers()[name] for branch in (diagram.positional, diagram.semantic)]
    return tuple(map(np.stack, zip(*parts, strict=True)))


def finished_path(result):
    """A path that returns `result` without waiting for anything."""
    return result
    yield


def answer_path(path, answer):
    """Run a path, answer its lanes and calls in the order in which it asks, and return its result.

    Args:
        answer: gives the answer to a lane or a call. Paths that the path yields are driven in the same way.
    """

    def reply(request):
        return answer_path(request, answer) if isinstance(request, Generator) else answer(request)

    try:
        requests = next(path)
        while True:
            requests = path.send([reply(r) for r in requests] if isinstance(requests, list) else reply(requests))
    except StopIteration as stop:
        return stop.value
