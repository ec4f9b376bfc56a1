"""Checks of arguments: each of them takes what it should, and names what it does not take."""

import os
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base import errors as e, machine
from tiedattn_jax.base.errors import InputError

MODEL = ta.DotProduct()
MASKED = np.ma.array([[0.6, 0.4]], mask=[[True, False]])
_KEY = jax.random.key(0)
NAMES = [f"name {k}" for k in range(13)]


def sizes_after(shape, axes, sizes):
    e.shaped_array("a", np.zeros(shape), axes, sizes)
    return sizes


# A check that takes its argument returns this.
TAKEN = [
    (lambda: e.require_positive(1e-300, "x"), 1e-300),
    (lambda: e.require_not_negative(0, "x"), 0.0),
    (lambda: e.require_number(-1, "x", "below one", lambda v: v < 1), -1.0),
    # A traced number that is out of range becomes NaN.
    (lambda: jax.jit(lambda v: [e.require_positive(a, "x") for a in (v, -v)])(2.0), [2.0, np.nan]),
    (lambda: e.as_number(Fraction(1, 2), "x", float), 0.5),
    (lambda: [e.as_array([a], "x", float) for a in (Fraction(1, 2), jnp.array(0.5), np.float32(0.5))], [[0.5]] * 3),
    (lambda: e.as_array(np.ma.array([0.5], mask=False), "x", float), [0.5]),
    (lambda: [e.require_count(*given) for given in ((3, "n", 3, 3), (np.int32(1), "n"), (0, "n", 0, 0))], [None] * 3),
    (lambda: [e.require_choice(name, "x", ("a", None)) for name in ("a", None)], ["a", None]),
    (lambda: type(e.require_choice(np.str_("b"), "x", ("b",))), str),
    (lambda: [e.as_flag(flag, "x") for flag in (np.True_, False)], [True, False]),
    (lambda: e.array_of([[1, 2.5]], "x", "rising rows", lambda a: np.diff(a) > 0, ndim=2), [[1.0, 2.5]]),
    (lambda: e.shaped_array("x", [[1, 2]], "n d", {"n": 1}, on_host=True), [[1.0, 2.0]]),
    (lambda: sizes_after((3, 2, 3), "n d n", {"d": 2}), {"d": 2, "n": 3}),
    (lambda: [e.float_dtype(name) for name in (None, "float32")], [np.dtype(float), np.dtype("float32")]),
    (lambda: [jax.random.key_data(e.require_key(k)) for k in (_KEY, jax.random.PRNGKey(0))], [[0, 0]] * 2),
    (lambda: e.require_keys(jax.random.split(_KEY, 1)).shape, (1,)),
    (lambda: [e.are_real(a) for a in ([1, 2.0], Fraction(1, 2), np.int8(1), np.ones(2), None)], [True] * 5),
    (lambda: [e.are_real(a) for a in (True, 1j, "1", MASKED, np.timedelta64(1))], [False] * 5),
    (lambda: [e.are_real(a) for a in ([1, [False]], [object()])], [False] * 2),
    (lambda: jax.jit(lambda v: (e.is_tracing(), e.is_concrete(1.0), e.is_concrete({"a": v})))(1.0), [1, 1, 0]),
    (lambda: (e.is_tracing(), e.is_concrete([1.0, np.ones(2)])), [False, True]),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "result"), TAKEN)
def test_what_is_taken(call, result):
    actual = call()
    if isinstance(result, (list, float)):
        np.testing.assert_array_equal(actual, result)
    else:
        assert actual == result


def test_what_is_taken_keeps_its_kind():
    for dtype in (jnp.float32, jnp.float64):
        assert e.require_positive(1, "x", dtype).dtype == e.as_array([1], "x", dtype).dtype == dtype
        assert e.shaped_array("x", np.ones(2, dtype), "n", {}).dtype == dtype
        assert e.shaped_array("x", [1, 2], "n", {}, dtype).dtype == dtype
    assert type(e.shaped_array("x", [1, 2], "n", {}, on_host=True)) is np.ndarray
    assert isinstance(e.shaped_array("x", [1, 2], "n", {}), jax.Array)


REFUSED = [
    (lambda: e.require([True, False], "x", np.ones(2), "two"), r"^x must be two, got x=\[1.0, 1.0\]$"),
    (lambda: e.require(False, "x", "a\nb", "two"), r"^x must be two, got x='a\\nb'$"),
    (lambda: e.require_positive(0.0, "x"), "^x must be positive and finite, got x=0.0$"),
    (lambda: e.require_positive(np.inf, "x"), "^x must be positive and finite, got x=inf$"),
    (lambda: e.require_not_negative(-1e-9, "x"), "^x must be zero or positive, and finite, got x=-1e-09$"),
    (lambda: e.as_number([1.0], "x", float), r"^x must be one number, got shape \(1,\): use jax.vmap for several$"),
    (lambda: e.as_number([1.0], "alpha", float), "use sweep for a branch at several alphas, or jax.vmap$"),
    (lambda: e.as_array([[1.0], 2.0], "x", float), "^x must be a real number or an array of them, got x="),
    (lambda: e.as_array("a" * 79, "x", float), "got x='a{76}[.]{3}$"),
    (lambda: e.as_array("a" * 78, "x", float), "got x='a{78}'$"),
    (lambda: e.require_count(2, "n", 3), "^n must be an integer of at least 3, got n=2$"),
    (lambda: e.require_count(4, "n", 3, 3), "^n must be an integer of at most 3, got n=4$"),
    (lambda: e.require_count(True, "n"), "^n must be an integer of at least 1, got n=True$"),
    (lambda: e.require_count(1.0, "n"), "^n must be an integer"),
    (lambda: e.require_choice("c", "x", ("a", None)), "^x must be one of a, None, got x='c'$"),
    (lambda: e.require_choice(1, "x", NAMES[:12]), "^x must be one of name 0, .*name 11, got x=1$"),
    (lambda: e.require_choice("nam 7", "x", NAMES), "^x must be one of 13 names, of which the nearest are name 7, "),
    (lambda: e.as_flag(1, "x"), "^x must be True or False, got x=1 of <class 'int'>$"),
    (lambda: e.array_of([], "x", "a vector", lambda a: a > 0), r"^x must be a vector, got x=\[\]$"),
    (lambda: e.array_of([1, -1], "x", "positive", lambda a: a > 0), r"^x must be positive, got x=\[1, -1\]$"),
    (lambda: e.array_of([np.nan], "x", "a vector", lambda a: True), "^x must be a vector"),
    (lambda: e.array_of([[1.0]], "x", "a vector", lambda a: a > 0), "^x must be a vector"),
    (lambda: e.shaped_array("x", np.ones(3), "n", {"n": 2}), r"^x must have shape \(n\) with n = 2, got shape \(3,\)$"),
    (lambda: e.shaped_array("x", np.ones((2, 3)), "n n", {}), r"^x must have shape \(n, n\), got shape \(2, 3\)$"),
    (lambda: e.shaped_array("x", [], "n", {}, on_host=True), r"^x must not be empty, got shape \(0,\)$"),
    (lambda: e.shaped_array("x", [1.0, np.nan, np.inf], "n", {}), "^x must be finite, got 2 entries that are not$"),
    (lambda: e.shaped_array("x", [np.nan], "n", {}, on_host=True), "^x must be finite, got 1 entries"),
    (lambda: e.shaped_array("x", "a", "n", {}), "^x must be an array of real numbers, got .* of type str$"),
    (lambda: e.float_dtype("int32"), "^dtype must be float32 or float64, got dtype=dtype.'int32'.$"),
    (lambda: e.require_key(jax.random.split(_KEY)), "^key must be one key, as jax.random.key.0. is, got key="),
    (lambda: e.require_key(np.zeros(2, np.int32)), "^key must be one key"),
    (lambda: e.require_keys(_KEY), "^keys must be typed PRNG keys .*, got one key$"),
    (lambda: e.require_keys(jax.random.split(_KEY, 1)[:0]), r"got shape \(0,\)$"),
    (lambda: e.require_takes(lambda a: a, "f", ("a", "b"), " of c"), r"^f must take \(a, b\) of c, got \(a\)$"),
    (lambda: e.require_takes(3, "f", ("a",)), r"^f must take \(a\), got one that cannot be called so$"),
    (lambda: ta.Settings(tol=0.0), "^tol must be positive"),
    (lambda: ta.Settings(max_steps=-1), "^max_steps must be at least 0"),
    (lambda: ta.Settings(warm_steps=-1), "^warm_steps must be at least 0"),
    (lambda: ta.Settings(max_steps=10**12), "^max_steps must be at least 0, and 1000000000 at most"),
    (lambda: ta.Settings(damping=1.5), r"^damping must be in \(0, 1\]"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_settings_at_the_ends_of_their_ranges():
    settings = ta.Settings(tol=1e-300, max_steps=0, warm_steps=10**9, damping=1)
    assert [settings.max_steps, settings.warm_steps, settings.damping] == [0, 10**9, 1] and e.INT32 == 2147483647


PROMOTIONS = [(jax.numpy_dtype_promotion, "strict", "standard"), (jax.numpy_rank_promotion, "raise", "allow")]


@pytest.mark.parametrize(("context", "value", "usual"), PROMOTIONS)
def test_promotion_is_left_to_jax(context, value, usual):
    message = f"^jax_{context.__name__} must be '{usual}' for this library, got '{value}': call it with jax"
    with context(value):
        for call in (ta.DotProduct, partial(ta.solve, MODEL, 1.0), partial(ta.sample_data, MODEL, 20, 1.0, _KEY)):
            with pytest.raises(ta.InputError, match=message):
                call()


def test_double_precision_that_was_turned_off():
    """A model in float64 would become float32, with no more than a warning."""
    known = {"teacher": np.ones((20, 1)), "encodings": np.ones((2, 20))}
    data = ta.Data.from_sentences(np.ones((40, 2, 20)), np.ones((40, 2, 20)), **known)
    with jax.enable_x64(False):
        for name, call in (
            ("lam", partial(ta.solve, MODEL, 1.0)),
            ("lam", partial(ta.gamp, MODEL, data)),
            ("lam", partial(ta.sweep, ta.solve, MODEL, alpha=[1.0])),
            ("dtype", partial(ta.DotProduct, dtype="float64")),
        ):
            with pytest.raises(ta.InputError, match=f"^{name} must be float32 while jax has no double precision"):
                call()


def test_what_fits_into_the_memory(monkeypatch):
    """The memory is that of all devices if each says its own, else that of the machine; it may be used up exactly."""

    def device(limit):
        return SimpleNamespace(memory_stats=lambda: limit and {"bytes_limit": limit})

    host = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), machine.memory_limit())
    for limits, expected in (((2**31, None), host), ((None,), host), ((2**30, 2**31), 3 * 2**30)):
        monkeypatch.setattr(jax, "local_devices", lambda limits=limits: [*map(device, limits)])
        e.require_memory(float(expected), "n", 5, "the nodes")
        with pytest.raises(InputError, match=r"^n must be smaller, got n=5"):
            e.require_memory(1.001 * expected, "n", 5, "the nodes")
    message = "^n must be smaller, got n=5: the nodes would take 4.5 GiB of memory, of which there are 3$"
    with pytest.raises(InputError, match=message):
        e.require_memory(4.5 * 2**30, "n", 5, "the nodes")
