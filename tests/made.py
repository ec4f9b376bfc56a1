"""Results made by hand, without a solve: the semantic state at alpha = 2, with given numbers in place of its own."""

from collections.abc import Generator

import jax
import jax.numpy as jnp
from cases import CASES, state
from jax import lax

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import Conjugates
from tiedattn_jax.theory.observables import Diagnostics
from tiedattn_jax.theory.solve import traced_states, with_tangents
from tiedattn_jax.theory.states import DIAGNOSTICS, State


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


def states_near(model, alpha, nodes, start, free, settings) -> State:
    """The states that `solve` finds near a start under `jax.jit`, where the branch is data."""
    starts = jax.tree.map(lambda a: jnp.broadcast_to(a, (nodes.replicates, *jnp.shape(a))), start)
    states = traced_states(*lax.stop_gradient((model, alpha)), nodes, free, settings, starts, False)
    return with_tangents(model, alpha, nodes, free, states)


def fixed_point(case=CASES[0], **numbers) -> ta.FixedPoint:
    """A `FixedPoint` of the standard model; the numbers are those of `states`."""
    model = ta.dot_product()
    return ta.FixedPoint(model, jnp.asarray(case.alpha), states(model, case, **numbers), case.branch)


def transition(alpha=1.25, status=0, event="alpha_c", branches=()) -> ta.Transition:
    """A `Transition` with sensitivities 1, 2 and 3 in omega, sigma and lambda, and error bars of a hundredth."""
    model = ta.dot_product(omega=1.0, sigma=2.0, lam=3.0)
    bars = jax.tree.map(lambda a: a / 100, model)
    numbers = jnp.asarray(alpha), jnp.asarray(0.01), jnp.asarray(status), model, bars
    return ta.Transition(*numbers, branches=branches, event=event)


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
