"""Equality of results, what is ready for JSON, pages, and the forms of public functions for other models."""

import dataclasses
import html
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import tiedattn_jax as ta
from tiedattn_jax.base import arrays, derivatives, kinds
from tiedattn_jax.base.report import (
    WORDS,
    Description,
    Printed,
    by_token,
    entries,
    figure_of,
    picture,
    plain,
    rows_of,
    with_error,
)
from tiedattn_jax.base.results import Average, classify, error_bar, has_state, mean_of_existing


class Part(Printed):
    numbers: jax.Array
    others: object = None
    what: str = "<thing>"

    def describe(self):
        table = ("two < three", [("a", "1", "one"), ("longer", "2")])
        rows = [("numbers", entries(self.numbers), "of it")]
        return Description(self.what, "done", rows, [("detail", "x")], [table])


class Plain(Printed):
    batch_probe = "x", 1
    x: jax.Array


def test_pages_and_lines():
    part = Part(jnp.array([1.0, 2.0]))
    page = ["<thing>: done", "  numbers  [1, 2]  of it", "  detail   x", "two < three"]
    page += ["  a       1  one", "  longer  2"]
    assert str(part).splitlines() == page == part.summary().splitlines()
    assert repr(part) == "Part(<thing>; numbers=[1, 2]; done)"
    cell = "<td style='text-align:left'>"
    assert part._repr_html_().splitlines() == [
        "<b>Part</b> &lt;thing&gt;: done",
        f"<table><tr>{cell}numbers</td>{cell}[1, 2]</td>{cell}of it</td></tr>"
        f"<tr>{cell}detail</td>{cell}x</td></tr></table>",
        f"two &lt; three<table><tr>{cell}a</td>{cell}1</td>{cell}one</td></tr>"
        f"<tr>{cell}longer</td>{cell}2</td></tr></table>",
    ]
    assert str(Plain(jnp.arange(2.0))).splitlines()[0] == "Plain" and repr(Plain(jnp.arange(2.0))) == "Plain(x=[0, 1])"
    batch = Plain(jnp.ones((2, 2)))
    assert not batch.readable and batch._repr_html_() == f"<pre>{html.escape(eqx.tree_pformat(batch))}</pre>"
    assert Description("").title == "" and Description("", "done").title == "done" and Description("a").title == "a"


def test_results_are_equal_if_all_their_numbers_are():
    """NaN equals NaN; arrays of another dtype, shape or number, and parts of another kind, are different."""
    base = Part(np.array([1.0, np.nan]), {"a": [1, 2.5], "b": (None, math.nan)})
    assert base == Part(jnp.array([1.0, np.nan]), {"a": [1, 2.5], "b": (None, math.nan)})
    for numbers, others in (
        (np.array([1.0, 2.0]), base.others), (np.array([1.0, np.nan], np.float32), base.others),
        (np.array([1.0, np.nan, 1.0]), base.others), (base.numbers, {"a": [1, 2.5]}),
        (base.numbers, {"a": [1, 2.5], "c": (None, math.nan)}), (base.numbers, {"a": [1, 2.0], "b": (None, math.nan)}),
        (base.numbers, {"a": [1], "b": (None, math.nan)}), (base.numbers, {"a": (1, 2.5), "b": (None, math.nan)}),
        (base.numbers, {"a": [1, 2.5], "b": (None, 0.0)}), (base.numbers, None),
    ):  # fmt: skip
        other = Part(numbers, others)
        assert base != other and not base == other
    assert base != dataclasses.replace(base, what="other") and base != "text" and Part(np.ones(1)) != Plain(np.ones(1))
    assert Part(np.array(["a"])) == Part(np.array(["a"])) != Part(np.array(["b"]))


def test_numbers_ready_for_json():
    part = Part(jnp.array([1.0, 2.0]), {"a": np.float32(0.5), "b": [1, "x"]})
    assert plain(part) == {"numbers": [1.0, 2.0], "others": {"a": 0.5, "b": [1, "x"]}, "what": "<thing>"}
    assert plain(np.arange(2)) == [0, 1] and plain(jnp.asarray(3)) == 3 and plain("text") == "text"


def test_where_numbers_change_their_form():
    """Exponents begin below 1e-4 and from error bars of 1e4; rounding is below 100 units of the last digit."""
    assert with_error(1e-4, 1e-6) == "0.0001000(10)" and with_error(9.9e-5, 1e-6) == "9.90(10)e-5"
    assert with_error(12345.0, 9999.0) == "12345(9999)" and with_error(12345.0, 10001.0) == "1.2(10)e4"
    eps = np.finfo(float).eps
    assert with_error(1.0, 99 * eps) == "1" and with_error(1.0, 101 * eps) != "1"
    assert with_error(1 / 3) == "0.333333" and with_error(-1 / 3, 0.1) == "-0.33(10)"
    assert entries(np.arange(4)) == "[0, 1, 2, 3]" and entries(np.arange(5.0), np.ones(5)) == (
        "[0.0(10), 1.0(10), 2.0(10), 3.0(10), ...]"
    )
    assert rows_of({"q": 1.0, "x": 2.0}, meanings={"q": "mine", "x": ""}) == [("q", "1", "mine"), ("x", "2", "")]
    assert rows_of({"V": [1.0, 1.0]}) == [("V", "1", WORDS["V"])]


def test_tokens_of_several_columns():
    same = np.array([[[1.0, 2.0]], [[-1.0, 2.0]]])
    assert by_token(same)[0].tolist() == [[1.0, 2.0]] and by_token(np.array(3.0))[0] == 3.0
    other = np.array([[[1.0, 2.0]], [[1.0, 2.1]]])
    assert by_token(other)[0].shape == (2, 1, 2)
    assert by_token(np.array([[np.nan], [np.nan]]))[0].shape == ()
    assert by_token(np.array([0.5, 0.5 + 1e-9]))[0].shape == ()


def test_a_figure_by_its_name():
    from tiedattn_jax.plotting import theory

    assert figure_of("theory.branch_figure") is theory.branch_figure
    plot = picture("theory.branch_figure", "a curve")
    assert "Plot a curve; see `plotting.theory.branch_figure`." in plot.__doc__ and "panels" not in plot.__doc__
    assert "one for each of the panels a, b, or a dict" in picture("x.y", "z", "a", "b").__doc__


def test_an_average_is_a_number():
    average = Average(jnp.asarray(1.251537), jnp.asarray(0.000123))
    assert float(average) == 1.251537 and f"{average:.2f}" == "1.25" and f"{average}" == str(average) == "1.25154(12)"


def test_error_bars_of_two_and_of_many_replicates():
    """For two values a and b it is |a - b| / 2 times half of Student's factor 13.97; for many the standard error."""
    np.testing.assert_allclose(error_bar(np.array([1.0, 3.0])), 13.968 / 2, rtol=1e-3)
    values = np.random.default_rng(0).normal(size=2000)
    np.testing.assert_allclose(error_bar(values), values.std(ddof=1) / 2000**0.5, rtol=2e-3)
    assert np.isnan(error_bar(np.array([np.nan]))) and np.isinf(error_bar(np.array([1.0, np.nan])))
    np.testing.assert_allclose(mean_of_existing(jnp.array([1.0, 3.0]), jnp.zeros(2, bool)), 2.0)
    assert classify(0, jnp.asarray(0.05)) == 0 and classify(0, jnp.asarray(0.0501)) == ta.Status.unresolved
    assert not has_state(ta.Status.max_steps, 0.1) and has_state(ta.Status.max_steps, 0.0999)


def test_other_forms_of_a_public_function():
    """The first argument decides, given by position or as `model`, also inside of lists of models."""

    @kinds.with_other_forms
    def measure_of_a_test(model, factor=1):
        """The measure."""
        return ("own", factor)

    @kinds.form_of("measure_of_a_test", complex)
    def other(model, factor=1):
        return ("other", factor)

    assert measure_of_a_test.__doc__ == "The measure." and other(1j) == ("other", 1)
    for argument in (1j, [1j, 2j], [(1j, 0.5)], ((1j,),)):
        assert measure_of_a_test(argument, 2) == ("other", 2) == measure_of_a_test(model=argument, factor=2)
    for argument in (1.0, [1.0, 1j], [], [(1.0, 1j)]):
        assert measure_of_a_test(argument) == ("own", 1)


def test_a_bisected_root_and_its_derivative():
    def root(a):
        return derivatives.bisected_root(lambda x: x**3 - a, jnp.asarray(0.0), jnp.asarray(4.0))

    value, slope = jax.jit(jax.value_and_grad(root))(2.0)
    np.testing.assert_allclose([value, slope], [2 ** (1 / 3), 2 ** (-2 / 3) / 3], rtol=1e-14)


def test_inner_products_and_trailing_axes():
    a, b = np.random.default_rng(0).normal(size=(2, 2, 3, 5))
    expected = a @ b.swapaxes(1, 2)
    np.testing.assert_allclose(
        arrays.inner_products(jnp.asarray(a), jnp.asarray(b[:, :2])), expected[..., :2], rtol=1e-12
    )
    values = np.arange(6.0).reshape(2, 3)
    assert arrays.spread_to(values, np.ones((2, 3, 4, 5))).shape == (2, 3, 1, 1)
    assert arrays.spread_to(values, values).shape == (2, 3)
    matrices, v = np.random.default_rng(1).normal(size=(2, 3, 7)), np.random.default_rng(2).normal(size=(3, 7))
    np.testing.assert_allclose(
        arrays.matvec(jnp.asarray(matrices), jnp.asarray(v)), np.einsum("abn,bn->an", matrices, v)
    )
    np.testing.assert_array_equal(arrays.total(jnp.array([1.0, 2.0, 4.0])), 7.0)
