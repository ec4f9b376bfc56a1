"""Count the operations of a function by running its jaxpr step by step, with the actual loops and branches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Classes of operations that take similar times. A fused multiply-add counts as two simple ones.
_DIVISIONS = {"div", "sqrt", "rsqrt", "rem"}
_TRANSCENDENTAL = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "tan", "pow", "erf"}
_TRANSCENDENTAL |= {"erf_inv", "erfc", "atan2", "lgamma", "cbrt", "asin", "acos", "atan", "sinh", "cosh"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmin", "argmax"}
_REDUCTIONS |= {"cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"}
_MOVES = {"broadcast_in_dim", "reshape", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "gather"}
_MOVES |= {"scatter", "concatenate", "pad", "iota", "copy", "squeeze", "rev", "stop_gradient", "copy_p", "name"}
_MOVES |= {"convert_element_type", "split", "expand_dims", "bitcast_convert_type", "device_put"}

Operations = Counter[tuple[str, int]]  # counts by class and by bits of a number


def operations(fn: Callable[..., Any], *args: Any) -> Operations:
    """Count the floating-point operations of ``fn(*args)`` by class ("simple", "division", "transcendental") and bits.

    Moving numbers does not count. A matrix factorisation counts one operation per number of its result.
    """
    counted: Operations = Counter()
    _run(jax.make_jaxpr(fn)(*args), jax.tree.leaves(args), counted)
    return counted


def _run(closed: core.ClosedJaxpr, args: Sequence[Any], counted: Operations) -> list[Any]:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        results = _step(eqn, [value(v) for v in eqn.invars], counted)
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _step(eqn: Any, args: list[Any], counted: Operations) -> Sequence[Any]:
    """Evaluate an equation of a jaxpr, count its operations, and return its results."""
    p, name = eqn.params, eqn.primitive.name
    if name == "while":
        cond, body = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        state = args[body:]
        while _run(p["cond_jaxpr"], [*args[:cond], *state], counted)[0]:
            state = _run(p["body_jaxpr"], [*args[cond:body], *state], counted)
        return state
    if name == "scan":
        return _scan(p, args, counted)
    if name == "cond":
        branch = int(np.clip(args[0], 0, len(p["branches"]) - 1))
        return _run(p["branches"][branch], args[1:], counted)
    inner = p.get("jaxpr", p.get("call_jaxpr"))
    if isinstance(inner, core.Jaxpr):
        inner = core.ClosedJaxpr(inner, ())
    if isinstance(inner, core.ClosedJaxpr):
        return _run(inner, args, counted)
    counted.update(_count(eqn))
    results = eqn.primitive.bind(*args, **p)
    return results if eqn.primitive.multiple_results else [results]


def _scan(p: dict[str, Any], args: list[Any], counted: Operations) -> list[Any]:
    fixed, carried = p["num_consts"], p["num_consts"] + p["num_carry"]
    consts, state, rows = args[:fixed], args[fixed:carried], args[carried:]
    order = range(p["length"])
    outputs = []
    for k in reversed(order) if p["reverse"] else order:
        out = _run(p["jaxpr"], [*consts, *state, *(row[k] for row in rows)], counted)
        state = out[: p["num_carry"]]
        outputs.append(out[p["num_carry"] :])
    if p["reverse"]:
        outputs.reverse()
    columns = zip(*outputs, strict=True) if outputs[0] else ()
    return [*state, *(jax.numpy.stack(column) for column in columns)]


def _count(eqn: Any) -> Operations:
    """Return the operations of one primitive."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    operands = [v.aval for v in eqn.invars]
    dtype = next((a.dtype for a in [out, *operands] if np.issubdtype(a.dtype, np.floating)), None)
    if dtype is None or name in _MOVES:
        return Counter()
    bits, size = 8 * dtype.itemsize, math.prod(out.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return Counter({("simple", bits): 2 * size * math.prod(operands[0].shape[k] for k in contracted)})
    if name in _REDUCTIONS:
        return Counter({("simple", bits): math.prod(operands[0].shape)})
    if name == "integer_pow":
        power = abs(eqn.params["y"])  # computed by repeated squaring
        return Counter({("simple", bits): size * max(1, power.bit_length() + power.bit_count() - 2)})
    division, transcendental = name in _DIVISIONS, name in _TRANSCENDENTAL
    return Counter({("division" if division else "transcendental" if transcendental else "simple", bits): size})
