"""Checks of arguments: each of them takes what it should, and names what it does not take."""

import os
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base import errors
from tiedattn_jax.base.errors import InputError

MODEL = ta.DotProduct()
MASKED = np.ma.array([[0.6, 0.4]], mask=[[True, False]])
_KEY = jax.random.key(0)


def sizes_after(shape, axes, sizes):
    errors.shaped_array("a", np.zeros(shape), axes, sizes)
    return sizes


# A check that takes its argument returns this.
TAKEN = [
    (lambda: errors.require_positive(1e-300, "x"), 1e-300),
    (lambda: errors.require_not_negative(0, "x"), 0.0),
    (lambda: errors.require_number(-1, "x", "below one", lambda v: v < 1), -1.0),
    (lambda: jax.jit(lambda v: errors.require_positive(v, "x"))(-1.0), -1.0),  # a traced number has no value yet
    (lambda: errors.as_number(Fraction(1, 2), "x", float), 0.5),
    (lambda: errors.as_array([1, 2], "x", float), [1.0, 2.0]),
    (lambda: errors.require_count(3, "n", 3, 3), None),
    (lambda: errors.require_count(np.int32(1), "n"), None),
    (lambda: errors.require_choice(np.str_("b"), "x", ("a", "b")), "b"),
    (lambda: errors.require_choice(None, "x", ("a", None)), None),
    (lambda: errors.as_flag(np.True_, "x"), True),
    (lambda: errors.as_flag(False, "x"), False),
    (lambda: errors.array_of([1, 2.5], "x", "rising", lambda a: np.diff(a) > 0), [1.0, 2.5]),
    (lambda: errors.array_of([[1]], "x", "a matrix", lambda a: a > 0, ndim=2), [[1.0]]),
    (lambda: errors.shaped_array("x", [[1, 2]], "n d", {"n": 1}, on_host=True), [[1.0, 2.0]]),
    (lambda: errors.shaped_array("x", jnp.ones(2, jnp.float32), "n", {}), [1.0, 1.0]),
    (lambda: sizes_after((3, 2, 3), "n d n", {"d": 2}), {"d": 2, "n": 3}),
    (lambda: errors.float_dtype(None), np.dtype(float)),
    (lambda: errors.float_dtype("float32"), np.dtype("float32")),
    (lambda: errors.require_key(_KEY), None),
    (lambda: errors.require_key(jax.random.PRNGKey(0)), None),
    (lambda: errors.require_keys(jax.random.split(_KEY, 1)), None),
    (lambda: errors.require_takes(lambda a, b=1: a, "f", ("a",)), None),
    (lambda: errors.require_memory(2**20, "d", 3, "arrays"), None),
    (lambda: [errors.are_real(a) for a in ([1, 2.0], Fraction(1, 2), np.int8(1), jnp.ones(2))], [True] * 4),
    (
        lambda: [
            errors.are_real(a) for a in (True, 1j, "1", MASKED, np.timedelta64(1), None, [1, [False]], [object()])
        ],
        [False] * 5 + [True] + [False] * 2,  # nothing consists of no other numbers
    ),
    (lambda: jax.jit(lambda: (errors.is_tracing(), errors.is_concrete(1.0)))(), [True, True]),
    (lambda: (errors.is_tracing(), errors.is_concrete([1.0, jnp.ones(2)])), [False, True]),
    (lambda: jax.jit(lambda v: (errors.is_concrete(1.0, v), errors.is_concrete({"a": v})))(1.0), [False, False]),
]


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
        assert errors.require_positive(1, "x", dtype).dtype == errors.as_array([1], "x", dtype).dtype == dtype
        assert errors.shaped_array("x", np.ones(2, dtype), "n", {}).dtype == dtype
        assert errors.shaped_array("x", [1, 2], "n", {}, dtype).dtype == dtype
    assert errors.shaped_array("x", [1, 2], "n", {}).dtype == jnp.float64
    assert type(errors.shaped_array("x", [1, 2], "n", {}, on_host=True)) is np.ndarray
    assert isinstance(errors.shaped_array("x", [1, 2], "n", {}), jax.Array)
    assert type(errors.require_choice(np.str_("b"), "x", ("b",))) is str


NAMES = [f"name {k}" for k in range(13)]
REFUSED = [
    (lambda: errors.require([True, False], "x", np.ones(2), "two"), r"^x must be two, got x=\[1.0, 1.0\]$"),
    (lambda: errors.require(False, "x", "a\nb", "two"), r"^x must be two, got x='a\\nb'$"),
    (lambda: errors.require_positive(0.0, "x"), "^x must be positive and finite, got x=0.0$"),
    (lambda: errors.require_positive(np.inf, "x"), "^x must be positive and finite, got x=inf$"),
    (lambda: errors.require_not_negative(-1e-9, "x"), "^x must be zero or positive, and finite, got x=-1e-09$"),
    (lambda: errors.require_not_negative(np.nan, "x"), "^x must be zero or positive, and finite"),
    (
        lambda: errors.as_number([1.0], "x", float),
        r"^x must be one number, got shape \(1,\): use jax.vmap for several$",
    ),
    (lambda: errors.as_number([1.0], "alpha", float), "use sweep for a branch at several alphas, or jax.vmap$"),
    (lambda: errors.as_array("1", "x", float), "^x must be a real number or an array of them, got x='1'$"),
    (lambda: errors.as_array([[1.0], 2.0], "x", float), "^x must be a real number or an array of them"),
    (lambda: errors.as_array("a" * 79, "x", float), "got x='a{76}[.]{3}$"),
    (lambda: errors.as_array("a" * 78, "x", float), "got x='a{78}'$"),
    (lambda: errors.require_count(2, "n", 3), "^n must be an integer of at least 3, got n=2$"),
    (lambda: errors.require_count(0, "n"), "^n must be an integer of at least 1, got n=0$"),
    (lambda: errors.require_count(4, "n", 3, 3), "^n must be an integer of at most 3, got n=4$"),
    (lambda: errors.require_count(True, "n"), "^n must be an integer"),
    (lambda: errors.require_count(1.0, "n"), "^n must be an integer"),
    (lambda: errors.require_choice("c", "x", ("a", None)), "^x must be one of a, None, got x='c'$"),
    (lambda: errors.require_choice(1, "x", NAMES[:12]), "^x must be one of name 0, .*name 11, got x=1$"),
    (
        lambda: errors.require_choice("nam 7", "x", NAMES),
        "^x must be one of 13 names, of which the nearest are name 7, ",
    ),
    (lambda: errors.as_flag(1, "x"), "^x must be True or False, got x=1 of <class 'int'>$"),
    (lambda: errors.require_kind(1.0, "x", (int, str), "a word"), "^x must be a word, got x=1.0 of <class 'float'>$"),
    (lambda: errors.array_of([], "x", "a vector", lambda a: a > 0), r"^x must be a vector, got x=\[\]$"),
    (lambda: errors.array_of([1, -1], "x", "positive", lambda a: a > 0), r"^x must be positive, got x=\[1, -1\]$"),
    (lambda: errors.array_of([np.nan], "x", "a vector", lambda a: True), "^x must be a vector"),
    (lambda: errors.array_of([[1.0]], "x", "a vector", lambda a: a > 0), "^x must be a vector"),
    (lambda: errors.array_of(["a"], "x", "a vector", lambda a: a > 0), "^x must be a vector"),
    (
        lambda: errors.shaped_array("x", np.ones(3), "n", {"n": 2}),
        r"^x must have shape \(n\) with n = 2, got shape \(3,\)$",
    ),
    (lambda: errors.shaped_array("x", np.ones(3), "n d", {}), r"^x must have shape \(n, d\), got shape \(3,\)$"),
    (lambda: errors.shaped_array("x", np.ones((2, 3)), "n n", {}), r"^x must have shape \(n, n\)"),
    (lambda: errors.shaped_array("x", [], "n", {}, on_host=True), r"^x must not be empty, got shape \(0,\)$"),
    (
        lambda: errors.shaped_array("x", [1.0, np.nan, np.inf], "n", {}),
        "^x must be finite, got 2 entries that are not$",
    ),
    (lambda: errors.shaped_array("x", [np.nan], "n", {}, on_host=True), "^x must be finite, got 1 entries"),
    (lambda: errors.shaped_array("x", "a", "n", {}), "^x must be an array of real numbers, got .* of type str$"),
    (lambda: errors.float_dtype("int32"), "^dtype must be float32 or float64, got dtype=dtype.'int32'.$"),
    (lambda: errors.float_dtype("half a dozen"), "^dtype must be float32 or float64, got dtype='half a dozen'$"),
    (lambda: errors.require_key(jax.random.split(_KEY)), "^key must be one key, as jax.random.key.0. is, got key="),
    (lambda: errors.require_key(np.zeros(3, np.uint32)), "^key must be one key"),
    (lambda: errors.require_key(np.zeros(2, np.int32)), "^key must be one key"),
    (lambda: errors.require_key(0), "^key must be one key"),
    (lambda: errors.require_keys(_KEY), "^keys must be typed PRNG keys .*, got one key$"),
    (lambda: errors.require_keys(jax.random.split(_KEY, (2, 2))), r"got shape \(2, 2\)$"),
    (lambda: errors.require_keys(jax.random.split(_KEY, 2)[:0]), r"got shape \(0,\)$"),
    (lambda: errors.require_keys(3), "got 3$"),
    (lambda: errors.require_takes(lambda a: a, "f", ("a", "b"), " of c"), r"^f must take \(a, b\) of c, got \(a\)$"),
    (lambda: errors.require_takes(3, "f", ("a",)), r"^f must take \(a\), got one that cannot be called so$"),
    (
        lambda: errors.require_memory(2**60, "d", 3, "arrays"),
        "^d must be smaller, got d=3: arrays would take 1.07e.09 GiB",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


SETTINGS = [
    ({"tol": "x"}, "tol must be a real number, got tol='x'"), ({"tol": 0.0}, "tol must be positive"),
    ({"tol": MASKED[0, 0]}, "tol must be a real number"), ({"tol": True}, "tol must be a real number"),
    ({"max_steps": -1}, "max_steps must be at least 0"), ({"warm_steps": -1}, "warm_steps must be at least 0"),
    ({"max_steps": 10**12}, "max_steps must be at least 0, and 1000000000 at most"),
    ({"damping": 1.5}, r"damping must be in \(0, 1\]"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("arguments", "message"), SETTINGS, ids=[message for _, message in SETTINGS])
def test_settings(arguments, message):
    with pytest.raises(InputError, match=message):
        ta.Settings(**arguments)


def test_settings_at_the_ends_of_their_ranges():
    settings = ta.Settings(tol=1e-300, max_steps=0, warm_steps=10**9, damping=1)
    assert [settings.max_steps, settings.warm_steps, settings.damping] == [0, 10**9, 1]


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
    data = ta.sample_data(MODEL, 20, 1.0, _KEY)
    with jax.enable_x64(False):
        for name, call in (
            ("lam", partial(ta.solve, MODEL, 1.0)),
            ("lam", partial(ta.gamp, MODEL, data)),
            ("lam", partial(ta.sweep, MODEL, "semantic", alpha=[1.0])),
            ("dtype", partial(ta.DotProduct, dtype="float64")),
        ):
            with pytest.raises(ta.InputError, match=f"^{name} must be float32 while jax has no double precision"):
                call()


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_other_types():
    half = Fraction(1, 2)
    layers = [ta.DotProduct(mixing=[[a, a]] * 2, sigma=a) for a in (half, 0.5, jnp.array(0.5), np.float32(0.5))]
    for layer in layers:
        np.testing.assert_array_equal(layer.mixing, 0.5)
        assert layer.sigma == 0.5 and layer.mixing.dtype == jnp.float64
    unmasked = np.ma.array(np.full((2, 2), 0.5), mask=False)
    np.testing.assert_array_equal(ta.DotProduct(mixing=unmasked).mixing, 0.5)


class Device:
    """A device that reports its memory, or None."""

    def __init__(self, limit):
        self.stats = None if limit is None else {"bytes_limit": limit}

    def memory_stats(self):
        return self.stats


def test_what_fits_into_the_memory(monkeypatch):
    """The memory is that of all devices if each says its own, else that of the machine; it may be used up exactly."""
    unknown_memory = errors._memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limits, expected in (((2**30, 2**31), 3 * 2**30), ((2**30, None), machine), ((None,), machine)):
        monkeypatch.setattr(jax, "local_devices", lambda limits=limits: [Device(limit) for limit in limits])
        assert errors._memory() == expected
    monkeypatch.setattr(errors, "_memory", lambda: 3.0 * 2**30)
    errors.require_memory(3.0 * 2**30, "n", 5, "the nodes")
    message = "^n must be smaller, got n=5: the nodes would take 4.5 GiB of memory, of which there are 3$"
    with pytest.raises(InputError, match=message):
        errors.require_memory(4.5 * 2**30, "n", 5, "the nodes")
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf_names", {})  # a system that does not know it
        assert unknown_memory() == np.inf


def test_bounds_of_counts_and_names():
    for value, low, high in ((1, 1, None), (3, 3, 3), (0, 0, 0)):
        errors.require_count(value, "n", low, high)
    assert errors.INT32 == 2147483647
    names = [f"name {k}" for k in range(12)]
    assert errors.require_choice("name 11", "x", names) == "name 11"
    with pytest.raises(InputError, match="of 13 names, of which the nearest are "):
        errors.require_choice("other", "x", [*names, "last"])
    assert errors._shown("a" * 78) == repr("a" * 78) and len(errors._shown("a" * 79)) == 80
    assert errors._shown(np.ones((2, 2))) == "array([[1., 1.], [1., 1.]])"
