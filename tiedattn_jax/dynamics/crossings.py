"""Times of events in an integrated flow: where a quantity of its states first becomes positive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..averages.program import at_top_level
from ..base.derivatives import bisected_root
from ..base.results import Status, quorum
from ..theory.quantities import Quantity
from .flow import Integrated


def first_crossing(
    quantity: Callable[[Any], Array], run: Integrated, times: Float[Array, "*batch T"], event: str
) -> Quantity:
    """Return the first time at which a quantity of a state becomes positive.

    Args:
        quantity: a function of the state at one time.
        run: the flow; if it is a batch, the result is one, too.
        times: times of which the last is that after the last step.
        event: name of the event.
    """

    def crossing(run: Integrated, until: Float[Array, ""]) -> Quantity:
        f, slopes = jax.vmap(jax.vmap(lambda s, rate: jax.jvp(quantity, (s,), (rate,))))(run.every, run.rate)
        t = until * jnp.linspace(0, 1, f.shape[1], dtype=f.dtype)
        first = jax.vmap(_first_root, (0, 0, None))(f, slopes, t)
        resolved, note = jnp.all(run.status <= Status.max_steps), ""
        if at_top_level(f):
            is_before = quorum(f[:, 0] > _zero_level(f)[:, -1]) and not quorum(jnp.isfinite(first))
            note = "it holds before the first time" if is_before else ""
            note = note if resolved else "the steps do not resolve it: pass more `steps`"
        found = Quantity.of_existing(first, name="t", event=event, meaning="time in steps / d", note=note)
        return eqx.tree_at(lambda q: q.status, found, jnp.where(resolved, found.status, Status.imprecise))

    for _ in range(times.ndim - 1):
        crossing = jax.vmap(crossing)
    return crossing(run, times[..., -1])


def _zero_level(f: Float[Array, "*R T"]) -> Float[Array, "*R T"]:
    """Return the size below which f counts as zero up to a time, so that a start at the event does not count as one."""
    return 100 * jnp.finfo(f.dtype).eps * lax.cummax(jnp.abs(lax.stop_gradient(f)), f.ndim - 1)


def _first_root(f: Float[Array, " T"], slope: Float[Array, " T"], t: Float[Array, " T"]) -> Float[Array, ""]:
    """Return the time at which f first becomes positive, from its values and slopes at the times; NaN if never.

    Between two times f is the cubic with these values and slopes, whose error is that of the steps. It may rise above
    zero and fall again there.
    """
    width = t[1] - t[0]
    pieces = f[:-1], f[1:], width * slope[:-1], width * slope[1:]
    top, rounding = _top(*lax.stop_gradient(pieces)), _zero_level(f)[1:]
    end = jnp.where(f[1:] > 0, 1.0, top)
    was_below = lax.cummax((f[:-1] < -rounding).astype(jnp.int32)) > 0
    rises = was_below & (f[:-1] <= 0) & ((f[1:] > 0) | (_cubic(top, *pieces) > rounding))
    k, happens = jnp.argmax(rises), jnp.any(rises)
    # Where nothing happens, harmless numbers are used: derivatives of the unused branch must be finite.
    piece = [jnp.where(happens, a[k], safe) for a, safe in zip(pieces, (-1.0, 1.0, 2.0, 2.0), strict=True)]
    root = bisected_root(lambda s: _cubic(s, *piece), jnp.zeros_like(width), jnp.where(happens, end[k], 1.0))
    return jnp.where(happens, t[k] + root * width, jnp.nan)


def _cubic(s: Array, a: Array, b: Array, da: Array, db: Array) -> Array:
    """Return the cubic with values a, b and slopes da, db at zero and at one."""
    return (1 - s) ** 2 * ((1 + 2 * s) * a + s * da) + s**2 * ((3 - 2 * s) * b + (s - 1) * db)


def _top(a: Array, b: Array, da: Array, db: Array) -> Array:
    """Return where such a cubic has its maximum between zero and one; one if it does not rise first and fall then."""
    has_top = (da > 0) & (db < 0)
    linear, square = 6 * (b - a) - 4 * da - 2 * db, 3 * (2 * (a - b) + da + db)  # coefficients of its slope after da
    root = jnp.sqrt(jnp.where(has_top, linear**2 - 4 * da * square, 1.0))
    return jnp.where(has_top, 2 * da / jnp.where(has_top, root - linear, 1.0), 1.0)
