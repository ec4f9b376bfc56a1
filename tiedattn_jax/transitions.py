"""Transitions in alpha: where the global minimum changes its mechanism, and where attention beats the linear baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .lines import default_nodes
from .model import Model, is_concrete, require
from .nodes import Rule
from .observables import gen_error_linear, test_error
from .overlaps import FREE, Overlaps
from .overlaps import start as branch_start
from .solve import FixedPoint, check_model, error_bar, near_branch, solve_from
from .state_evolution import Settings, Status, fixed_point, implicit_gradient, vanished

PAIR = ("positional", "semantic")
RANGE = (0.1, 4.0)


class Transition(eqx.Module):
    """A transition in alpha.

    Attributes:
        alpha: mean over the replicates of the averages.
        stderr: its error bar.
        sensitivities: d alpha / d (every number of the model), a pytree like the model.
        sensitivities_stderr: their error bars.
        status: `Status` as an integer: `absent` when nothing crosses in the range asked for.
        branches: the states at `alpha`: the positional and the semantic one, or the one branch that crosses.
    """

    alpha: jax.Array
    stderr: jax.Array
    sensitivities: Model
    sensitivities_stderr: Model
    status: jax.Array
    branches: tuple[FixedPoint, ...]


class _Root(NamedTuple):
    alpha: jax.Array
    value: jax.Array
    alpha_before: jax.Array
    value_before: jax.Array
    lo: jax.Array
    hi: jax.Array
    state: Any
    k: jax.Array


def _find_root(
    fn: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    alpha: jax.Array,
    slope: jax.Array,
    bracket: tuple[jax.Array, jax.Array],
    state: Any,
    tol: float,
    steps: int = 40,
) -> tuple[jax.Array, jax.Array, Any, jax.Array]:
    """Root of an increasing function by the secant method inside a bracket that shrinks; jit-safe.

    Args:
        fn: (alpha, state) -> (value, state), the state being a warm start.
        alpha, slope: first guess, and the slope of the first step; a zero slope bisects.
        bracket: ends, which are not evaluated.

    Returns:
        The root, the last slope, the state, and whether the root was met rather than an end of the bracket.
    """
    value, state = fn(alpha, state)

    def advance(s: _Root, slope: jax.Array) -> _Root:
        lo = jnp.where(s.value < 0, s.alpha, s.lo)
        hi = jnp.where(s.value >= 0, s.alpha, s.hi)
        step = s.alpha - s.value / slope
        trial = jnp.where((step > lo) & (step < hi) & (slope > 0), step, jnp.sqrt(lo * hi))
        value, state = fn(trial, s.state)
        return _Root(trial, value, s.alpha, s.value, lo, hi, state, s.k + 1)

    def secant(s: _Root) -> jax.Array:
        return (s.value - s.value_before) / (s.alpha - s.alpha_before)

    def unfinished(s: _Root) -> jax.Array:
        open_ = (s.value != 0) & (jnp.abs(s.alpha - s.alpha_before) > tol * s.alpha)
        return (s.k == 0) | ((s.k < steps) & open_)

    s = _Root(alpha, value, alpha, value, *bracket, state, jnp.array(0))
    s = lax.while_loop(unfinished, lambda s: advance(s, jnp.where(s.k == 0, slope, secant(s))), s)
    last = jnp.where(s.alpha == s.alpha_before, slope, secant(s))
    # One more secant step is free.
    root = jnp.clip(jnp.where(last > 0, s.alpha - s.value / last, s.alpha), *bracket)
    inside = (root > bracket[0] * (1 + 1e-3)) & (root < bracket[1] * (1 - 1e-3)) & jnp.isfinite(s.value)
    return root, last, s.state, inside & (s.k < steps)


def _frees(model: Model) -> jax.Array:
    return jnp.asarray([FREE[b] for b in PAIR], model.lam.dtype)


@eqx.filter_jit
def _coarse_alpha_c(
    model: Model, coarse: Rule, bracket: tuple[jax.Array, jax.Array], settings: Settings
) -> tuple[jax.Array, Overlaps, jax.Array]:
    """alpha_c on cheap averages, both branches there (leading axis), and whether it is one."""
    frees = _frees(model)
    starts = jax.tree.map(lambda *a: jnp.stack(a), *(branch_start(model, b) for b in PAIR))

    def difference(alpha: jax.Array, xs: Overlaps) -> tuple[jax.Array, Overlaps]:
        """Positional minus semantic loss; where only one of them exists, that one wins."""

        def one(args: Any) -> Any:
            x0, start, free = args
            x, _, seen, status = fixed_point(model, alpha, coarse, x0, free, settings)
            usable = (status <= Status.stalled) & ~vanished(model, x, free)
            # A branch that is not here is looked for from its start the next time.
            return seen.train_loss, usable, jax.tree.map(lambda a, b: jnp.where(usable, a, b), x, start)

        loss, usable, xs = lax.map(one, (xs, starts, frees))
        alone = jnp.where(usable[1] & ~usable[0], 1.0, -1.0) * jnp.mean(jnp.abs(loss))
        return jnp.where(jnp.all(usable), loss[0] - loss[1], alone), xs

    zero = jnp.zeros((), model.lam.dtype)
    alpha, _, xs, met = _find_root(difference, jnp.sqrt(bracket[0] * bracket[1]), zero, bracket, starts, 1e-3)
    return alpha, xs, met


@jax.custom_jvp
def _with_sensitivities(alphas: jax.Array, sensitivities: Model, model: Model) -> jax.Array:
    """Roots (R,), whose first derivatives in the model are the `sensitivities` (leading axis R) found with them."""
    return alphas


@_with_sensitivities.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    alphas, sensitivities, model = primals
    terms = jax.tree.map(
        lambda s, d: jnp.sum((s * d).reshape(alphas.shape[0], -1), 1), _first_order(sensitivities, model), tangents[2]
    )
    return alphas, sum(jax.tree.leaves(terms), jnp.zeros_like(alphas))


@jax.custom_jvp
def _first_order(tree: Any, model: Model) -> Any:
    """A function of the model, as a tree that refuses to be differentiated rather than to pass for a constant."""
    return tree


@_first_order.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise TypeError("transitions have first derivatives only: take differences of `sensitivities` for the second")


def critical_alpha(
    model: Model,
    nodes: Rule | None = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: tuple[Any, Sequence[Overlaps]] | None = None,
    settings: Settings | None = None,
) -> Transition:
    """Sample complexity alpha_c at which the positional and the semantic branch have the same training loss.

    Below it the global minimum is positional, above it semantic. Works under `jit`, `vmap` and `grad` (first
    derivatives); the derivative in any number p of the model is the envelope formula
    ``-(d_p Delta Phi) / (d_alpha Delta Phi)`` at fixed overlaps, which the jumps of the proximal operator leave exact.

    Args:
        model: attention layer and data.
        nodes: averaging rule; by default `default_nodes`.
        bracket: range of alpha in which the crossing is looked for.
        start: an alpha near the crossing and the overlaps of the positional and the semantic branch there, from a
            neighbouring model for instance; by default they are looked for in the bracket, on coarse averages.
        settings: tolerances.

    Returns:
        A `Transition` with both branches at alpha_c. Status `absent` when no crossing lies in the bracket; `alpha` is
        then the end that it would lie beyond.

    Raises:
        ValueError: a bracket that is not 0 < low < high.
    """
    nodes, settings = _prepare(model, nodes, bracket, settings)
    held = lax.stop_gradient(model)
    if start is None:
        alpha, xs, met = _coarse_alpha_c(held, nodes.coarse(), _ends(held, bracket), settings)
        overlaps: Sequence[Overlaps] = [jax.tree.map(lambda a, i=i: a[i], xs) for i in range(2)]
    else:
        (alpha, overlaps), met = start, jnp.array(True)
    for _ in range(2):  # the slope is exact and the start is near: the second step moves by 1e-6
        states = [solve_from(held, alpha, b, nodes, x, settings) for x, b in zip(overlaps, PAIR, strict=True)]
        gap, by_model, by_alpha = jax.tree.map(
            jnp.subtract, *((s.replicates.train_loss, *s.replicates.train_loss_partials) for s in states)
        )
        roots = alpha - gap / by_alpha
        met &= jnp.abs(jnp.mean(roots) - alpha) < 0.1 * alpha
        alpha, overlaps = jnp.mean(roots), [s.replicates.overlaps for s in states]
    return _transition(model, roots, by_model, by_alpha, met, tuple(states))


def _prepare(model: Model, nodes: Rule | None, bracket: tuple, settings: Settings | None) -> tuple[Rule, Settings]:
    if is_concrete(bracket):
        ok = len(bracket) == 2 and np.all(np.isfinite(bracket)) and 0 < bracket[0] < bracket[1]
        require(ok, "bracket", bracket, "two numbers 0 < low < high")
    if is_concrete(model):
        check_model(model, "semantic")
    return (default_nodes(model) if nodes is None else nodes), settings or Settings()


def _ends(model: Model, bracket: tuple[float, float]) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(bracket[0], model.lam.dtype), jnp.asarray(bracket[1], model.lam.dtype)


def _transition(
    model: Model,
    roots: jax.Array,
    by_model: Model,
    by_alpha: jax.Array,
    met: jax.Array,
    branches: tuple[FixedPoint, ...],
) -> Transition:
    """Roots of a function of alpha with derivatives `by_model` and `by_alpha`, all (R, ...), as a result."""
    sensitivities = jax.tree.map(lambda g: -g / by_alpha.reshape(-1, *[1] * (g.ndim - 1)), by_model)
    roots = _with_sensitivities(roots, sensitivities, model)
    worst = jnp.max(jnp.stack([b.status for b in branches]))
    return Transition(
        alpha=jnp.mean(roots),
        stderr=error_bar(lax.stop_gradient(roots)),
        sensitivities=jax.tree.map(lambda a: jnp.mean(a, 0), sensitivities),
        sensitivities_stderr=jax.tree.map(error_bar, sensitivities),
        status=jnp.where(met, worst, Status.absent),
        branches=branches,
    )


def _excess(model: Model, x: Overlaps, rule: Rule) -> jax.Array:
    """By how much a state beats the linear baseline."""
    return gen_error_linear(model, rule) - test_error(model, x, rule)


@eqx.filter_jit
def _coarse_alpha_l(
    model: Model, coarse: Rule, x0: Overlaps, free: jax.Array, bracket: tuple[jax.Array, jax.Array], settings: Settings
) -> tuple[jax.Array, Overlaps, jax.Array]:
    def excess(alpha: jax.Array, x: Overlaps) -> tuple[jax.Array, Overlaps]:
        x = near_branch(model, alpha, coarse, x, free, settings)
        return _excess(model, x, coarse), x

    zero = jnp.zeros((), model.lam.dtype)
    alpha, _, x, met = _find_root(excess, jnp.sqrt(bracket[0] * bracket[1]), zero, bracket, x0, 1e-3)
    return alpha, x, met


@eqx.filter_jit
def _excess_gradient(
    model: Model, alpha: jax.Array, nodes: Rule, xs: Overlaps, free: jax.Array
) -> tuple[jax.Array, Model, jax.Array]:
    """In every replicate, at its own fixed point: the excess over the baseline and its total derivatives."""

    def one(args: tuple[Rule, Overlaps]) -> Any:
        rule, x = args
        return implicit_gradient(model, alpha, rule, x, free, lambda m, x: _excess(m, x, rule))

    return lax.map(one, (nodes, xs))


def linear_crossing(
    model: Model,
    transition: Transition,
    nodes: Rule | None = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: tuple[Any, Overlaps] | None = None,
    settings: Settings | None = None,
) -> Transition:
    """Sample complexity alpha_l at which the global minimum starts to beat the linear baseline (Result 5.1).

    It lies on the semantic branch when the test error there still exceeds the baseline at alpha_c, on the positional
    one when the baseline is beaten before alpha_c, and equals alpha_c when the exchange of the minima itself crosses
    it. Works under `jit` and `grad` (first derivatives); the derivatives are those of the implicit function
    theorem and contain the jumps of the proximal operator.

    Args:
        transition: the result of `critical_alpha` for the same model.
        start: an alpha near the crossing, and the overlaps there of the branch it lies on; by default looked for.
        model, nodes, bracket, settings: as there.

    Returns:
        A `Transition` with the one branch that crosses.
    """
    nodes, settings = _prepare(model, nodes, bracket, settings)
    held, transition_held = lax.stop_gradient((model, transition))
    positional, semantic = transition_held.branches
    early, late = (b.gen_error < b.gen_error_linear for b in (positional, semantic))

    def choose(a: Any, b: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(early, a, b), a, b)

    lo, hi = _ends(held, bracket)
    free = choose(*_frees(held))
    ends = choose((lo, transition_held.alpha), (transition_held.alpha, jnp.maximum(hi, 1.01 * transition_held.alpha)))
    x0 = choose(positional.overlaps, semantic.overlaps)
    if start is None:
        alpha, x, met = _coarse_alpha_l(held, nodes.coarse(), x0, free, ends, settings)
    else:
        (alpha, x), met = start, jnp.array(True)

    for _ in range(2):
        point = solve_from(held, alpha, None, nodes, x, settings, free=free)
        x = point.replicates.overlaps
        excess, by_model, by_alpha = _excess_gradient(held, point.alpha, nodes, x, free)
        roots = point.alpha - excess / by_alpha
        alpha = jnp.mean(roots)
        met &= jnp.abs(alpha - point.alpha) < 0.1 * alpha
    found = _transition(model, roots, by_model, by_alpha, met, (point,))
    exchanged = late & ~early  # the exchange of the minima at alpha_c is what beats the baseline

    def pick(name: str) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(exchanged, a, b), getattr(transition, name), getattr(found, name))

    return Transition(
        alpha=pick("alpha"),
        stderr=pick("stderr"),
        sensitivities=pick("sensitivities"),
        sensitivities_stderr=pick("sensitivities_stderr"),
        status=pick("status"),
        branches=found.branches,
    )
