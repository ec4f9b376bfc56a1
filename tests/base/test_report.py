"""Results print themselves with error bars and statuses; equality, JSON, and functions with forms for other models."""

import dataclasses
import html
import math

import equinox as eqx
import jax
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base import report as r
from tiedattn_jax.base.report import Description, Printed, by_token, entries, rows_of, table, with_error


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


EPS = np.finfo(float).eps
# Numbers are printed with their error bars, if they have one.
NUMBERS = {
    (1.251537, 0.000123): "1.25154(12)", (1.251537,): "1.25154", (1.251537, 0.0): "1.25154",
    (0.806986, math.inf): "0.81(?)", (-12.3, math.inf): "-12(?)", (1234.5, math.inf): "1234(?)",
    (3.14e-7, math.inf): "3.1(?)e-7", (0.0, math.inf): "0", (0.806986, math.nan): "0.806986",
    (math.nan, math.inf): "nan", (math.nan, math.nan): "nan", (-12.3, 4.56): "-12.3(46)", (-0.004, 0.12): "0.00(12)",
    (0.00024622, 4.9e-7): "0.00024622(49)", (-3.14e-7, 1.4e-8): "-3.14(14)e-7", (0.0, 2e-9): "0.0(20)e-9",
    (2.0, 0.0996): "2.00(10)", (2.0, 0.0994): "2.000(99)", (1234.5, 567.8): "1234(568)", (2.0, 9.97): "2(10)",
    (5580929999021.0, 4027727063.0): "5.5809(40)e12", (2e4, 9999.0): "20000(9999)", (0.0, 1e-17): "0.0(10)e-17",
    (0.25, 4.4e-14): "0.250000000000000(44)", (1 / 3,): "0.333333", (-1 / 3, 0.1): "-0.33(10)",
    # Exponents begin below 1e-4 and from error bars of 1e4; rounding is below 100 units of the last digit.
    (1e-4, 1e-6): "0.0001000(10)", (9.9e-5, 1e-6): "9.90(10)e-5", (12345.0, 9999.0): "12345(9999)",
    (12345.0, 10001.0): "1.2(10)e4", (0.249999999999991923, 4.4e-17): "0.25", (1.0, 99 * EPS): "1",
}  # fmt: skip


def test_numbers_with_error_bars():
    assert {number: with_error(*number) for number in NUMBERS} == NUMBERS and with_error(1.0, 101 * EPS) != "1"


ONE, TWO = np.array([[[1.0, 2.0]], [[-1.0, 2.0]]]), np.array([[[1.0, 2.0]], [[1.0, 2.1]]])
EYES = np.stack([np.eye(2), np.eye(2)])


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([[[0.5]], [[-0.5]]], 0.5), ([[1.0], [2.0]], [1.0, 2.0]), (EYES, np.eye(2)), (ONE, [[1.0, 2.0]]), (TWO, TWO),
        (3.0, 3.0), ([[np.nan], [np.nan]], np.nan), ([0.5, 0.5 + 1e-9], 0.5), ([0.5, 0.5 + 1e-6], [0.5, 0.5 + 1e-6]),
        (np.array([0.5, 0.5 + 1e-6], np.float32), 0.5),  # equal up to rounding of float32
    ],
)  # fmt: skip
def test_what_repeats_itself_is_told_once(values, shown):
    found = by_token(np.asarray(values))[0]
    assert np.shape(found) == np.shape(shown) and np.array_equal(found, shown, equal_nan=True)


def test_entries_and_tables():
    value, bar = by_token(np.array([[[0.5]], [[-0.5]]]), np.array([[[0.1]], [[0.2]]]))
    assert value == 0.5 and bar == 0.1  # of the first token
    assert entries(0.25, 0.01) == "0.250(10)" and entries([1.0, 2.0], [0.1, 0.2]) == "[1.00(10), 2.00(20)]"
    assert entries(np.arange(4)) == "[0, 1, 2, 3]" and entries(np.arange(6)) == "[0, 1, 2, 3, ...]"
    assert entries([[1.0], [2.0]]) == "[[1], [2]]"
    assert entries(np.arange(5.0), np.ones(5)) == "[0.0(10), 1.0(10), 2.0(10), 3.0(10), ...]"
    rows = rows_of({"q": np.full((2, 1, 1), 0.5), "x": 2.0}, {"q": np.full((2, 1, 1), 0.1), "x": 0.5})
    assert rows == [("q", "0.50(10)", "overlap of the student with itself"), ("x", "2.00(50)", "")]
    assert rows_of({"q": 1.0, "x": 2.0}, meanings={"q": "mine", "x": ""}) == [("q", "1", "mine"), ("x", "2", "")]
    assert rows_of({"V": [1.0, 1.0]}) == [("V", "1", r.WORDS["V"])]
    assert table([("q", "0.5"), ("training loss", 1), ("", "")]) == "  q              0.5\n  training loss  1\n"
    assert table([("a", "long", "b"), ("longer", 1)]) == "  a       long  b\n  longer  1"


def test_pages_and_lines():
    part = Part(np.array([1.0, 2.0]))
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
    assert str(Plain(np.arange(2.0))).splitlines()[0] == "Plain" and repr(Plain(np.arange(2.0))) == "Plain(x=[0, 1])"
    batch = Plain(np.ones((2, 2)))
    assert not batch.readable and batch._repr_html_() == f"<pre>{html.escape(eqx.tree_pformat(batch))}</pre>"
    assert [Description(*words).title for words in ([""], ["", "done"], ["a"])] == ["", "done", "a"]


def test_without_numbers_there_are_shapes():
    point, texts = made.fixed_point(), []
    jax.eval_shape(lambda p: texts.extend((repr(p), str(p), p._repr_html_())) or p.alpha, point)
    batch = jax.tree.map(lambda a: np.stack([a, a]), point)
    for text in (*texts, repr(batch), str(batch), repr(batch.model), repr(batch.overlaps)):
        assert "[" in text and "f64" in text
    assert all("f64[]" not in repr(a) for a in (point, point.model, point.overlaps, ta.Settings()))
    structure = jax.eval_shape(lambda p: p, point)
    assert "float64" in repr(structure) and repr(jax.tree.map(lambda a: None, point))


def test_models_rules_settings_and_parts_of_a_state(model, lines):
    numbers = "lam=0.01, omega=0.3, sigma=0.5, mixing=[[0.6, 0.4], [0.4, 0.6]], encodings=[[1], [-1]], teacher=[[1]]"
    law = ta.SpectralLaw(np.full(3, 1 / 3), *(np.ones((3, *shape)) for shape in ((2,), (2, 2), (1, 1), (2, 1))))
    point = made.fixed_point(replicon=[0.5] * 4)
    for part, text in (
        (model, f"DotProduct({numbers}, rank=1)"),
        (model.law(), "SpectralLaw(weights=[1], gamma=[[0.25, 0.25]]"),
        (lines, "Rule(4 replicates of 6300 nodes, lines, for (L, r, t) = (2, 1, 1))"),
        (ta.Settings(), "Settings(tol=1e-05, max_steps=30, warm_steps=300, damping=0.2)"),
        (point.conjugates, "Conjugates(q="),
        (law, "SpectralLaw(3 atoms; weights=[0.333333, "),
    ):
        assert repr(part).startswith(text)
    assert "spectrum=SpectralLaw(3 atoms))" in repr(ta.DotProduct(spectrum=law))
    assert str(model).splitlines()[:2] == ["DotProduct", "  lam        0.01"]
    page = str(point.diagnostics).splitlines()
    assert page[0] == "Diagnostics" and page[1].split() == ["replicon", "0.5", "below", "1:", "stable"]
    assert len(page) == 9 and "growth_m" in page[5] and "student" not in str(point.conjugates)
    assert f"train_loss={point.train_loss:.6g}" in repr(point.mean) and "f64" not in str(point.stderr)


def test_results_are_equal_if_all_their_numbers_are():
    """NaN equals NaN; arrays of another dtype, shape or number, and parts of another kind, are different."""
    base = Part(np.array([1.0, np.nan]), {"a": [1, 2.5], "b": (None, math.nan)})
    assert base == Part(jax.device_put(base.numbers), {"a": [1, 2.5], "b": (None, math.nan)})
    for numbers in ([1 + 1e-15, np.nan], [1.0, 2.0], [1.0, np.nan, 1.0], np.array(base.numbers, np.float32)):
        numbers = np.asarray(numbers)
        assert base != Part(numbers, base.others) and not base == Part(numbers, base.others)
    lists = [1, 2.5], [1, 2.0], [1], (1, 2.5)
    others = [{"a": a, "b": (None, b)} for a in lists for b in (math.nan, 0.0)][1:]
    for other in (*others, {"a": lists[0]}, {"a": lists[0], "c": (None, math.nan)}, None):
        assert base != Part(base.numbers, other)
    assert base != dataclasses.replace(base, what="other") and base != "text" and Part(np.ones(1)) != Plain(np.ones(1))
    assert Part(np.array(["a"])) == Part(np.array(["a"])) != Part(np.array(["b"]))
    traced = jax.jit(lambda x: ta.results.Average(x, x) == ta.results.Average(x, x))(
        1.0
    )  # inside jit it is an array, as in equinox
    assert bool(traced) and isinstance(traced, jax.Array)


def test_numbers_ready_for_json():
    part = Part(jax.device_put(np.array([1.0, 2.0])), {"a": np.float32(0.5), "b": [1, "x"]})
    assert r.plain(part) == {"numbers": [1.0, 2.0], "others": {"a": 0.5, "b": [1, "x"]}, "what": "<thing>"}
    assert r.plain(np.arange(2)) == [0, 1] and r.plain(jax.device_put(3)) == 3 and r.plain("text") == "text"


def test_a_figure_by_its_name():
    from tiedattn_jax.plotting import theory

    assert r.figure_of("theory.branch_figure") is theory.branch_figure
    plot = r.picture("theory.branch_figure", "a curve")
    assert "Plot a curve; see `plotting.theory.branch_figure`." in plot.__doc__ and "panels" not in plot.__doc__
    assert "one for each of the panels a, b, or a dict" in r.picture("x.y", "z", "a", "b").__doc__


def test_the_package_has_a_table_of_contents():
    names = [name for name in dir(ta) if name[0].islower()]
    assert "solve" in names and not {"theory", "cli"} & set(names)
    missing = [name for name in names if callable(getattr(ta, name)) and name not in ta.__doc__]
    assert not missing and ta.__version__ == "0.1.0"
