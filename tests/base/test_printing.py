"""Results print themselves, with error bars and statuses."""

import math

import jax
import jax.numpy as jnp
import made
import numpy as np

import tiedattn_jax as ta
from tiedattn_jax.base.report import by_token, entries, rows_of, table, with_error

SCATTER = (-1e-4, 1e-4, -1e-4, 1e-4)


def test_numbers_with_error_bars():
    assert with_error(1.251537, 0.000123) == "1.25154(12)"
    assert with_error(1.251537) == "1.25154" == with_error(1.251537, 0.0)
    assert [with_error(a, math.inf) for a in (0.806986, -12.3, 1234.5, 3.14e-7, 0.0)] == [
        "0.81(?)", "-12(?)", "1234(?)", "3.1(?)e-7", "0"
    ]  # fmt: skip
    assert with_error(0.806986, math.nan) == "0.81(?)" and with_error(math.nan, math.inf) == "nan"
    assert with_error(-12.3, 4.56) == "-12.3(46)" and with_error(-0.004, 0.12) == "0.00(12)"
    assert with_error(0.00024622, 4.9e-7) == "0.00024622(49)"
    assert with_error(-3.14e-7, 1.4e-8) == "-3.14(14)e-7" and with_error(0.0, 2e-9) == "0.0(20)e-9"
    assert with_error(2.0, 0.0996) == "2.00(10)" and with_error(2.0, 0.0994) == "2.000(99)"
    assert with_error(1234.5, 567.8) == "1234(568)" and with_error(2.0, 9.97) == "2(10)"
    assert with_error(5580929999021.0, 4027727063.0) == "5.5809(40)e12" and with_error(2e4, 9999.0) == "20000(9999)"
    assert with_error(math.nan, math.nan) == "nan"
    assert with_error(0.249999999999991923, 4.4e-17) == "0.25"  # replicates that differ by rounding only
    assert with_error(0.0, 1e-17) == "0.0(10)e-17" and with_error(0.25, 4.4e-14) == "0.250000000000000(44)"


def test_what_repeats_itself_is_told_once():
    repeated, bars = np.array([[[0.5]], [[-0.5]]]), np.array([[[0.1]], [[0.2]]])
    values, errors = by_token(repeated, bars)
    assert values.shape == () and values == 0.5 and errors == 0.1  # the first token's value and error bar
    assert by_token(np.array([[1.0], [2.0]]))[0].tolist() == [1.0, 2.0]
    matrices = np.stack([np.eye(2), np.eye(2)])
    assert np.array_equal(by_token(matrices)[0], np.eye(2))
    assert by_token(np.array([0.5, 0.5 + 1e-6], np.float32))[0].shape == ()  # equal up to rounding of float32
    assert by_token(np.array([0.5, 0.5 + 1e-6]))[0].shape == (2,)


def test_entries():
    assert entries(0.25, 0.01) == "0.250(10)" and entries([1.0, 2.0], [0.1, 0.2]) == "[1.00(10), 2.00(20)]"
    assert entries(np.arange(6)) == "[0, 1, 2, 3, ...]" and entries([[1.0], [2.0]]) == "[[1], [2]]"
    numbers = {"q": jnp.full((2, 1, 1), 0.5), "x": 2.0}
    rows = rows_of(numbers, {"q": jnp.full((2, 1, 1), 0.1), "x": 0.5})
    assert rows == [("q", "0.50(10)", "overlap of the student with itself"), ("x", "2.00(50)", "")]


def test_tables():
    assert table([("q", "0.5"), ("training loss", 1), ("", "")]) == "  q              0.5\n  training loss  1\n"
    assert table([("a", "long", "b"), ("longer", 1)]) == "  a       long  b\n  longer  1"


def test_without_numbers_there_are_shapes():
    point, texts = made.fixed_point(), []
    jax.jit(lambda p: texts.extend((repr(p), str(p), p._repr_html_())) or p.alpha)(point)
    batch = jax.tree.map(lambda a: jnp.stack([a, a]), point)
    for text in (*texts, repr(batch), str(batch), repr(batch.model), repr(batch.overlaps)):
        assert "[" in text and "f64" in text
    assert all("f64[]" not in repr(a) for a in (point, point.model, point.overlaps, ta.Settings()))
    structure = jax.eval_shape(lambda p: p, point)
    assert "float64" in repr(structure) and repr(jax.tree.map(lambda a: None, point))


def test_models_rules_and_settings(model, lines):
    numbers = "lam=0.01, omega=0.3, sigma=0.5, mixing=[[0.6, 0.4], [0.4, 0.6]], encodings=[[1], [-1]], teacher=[[1]]"
    assert repr(model) == f"DotProduct({numbers}, rank=1)"
    assert str(model).splitlines()[:2] == ["DotProduct", "  lam        0.01"]
    assert repr(model.law()).startswith("SpectralLaw(weights=[1], gamma=[[0.25, 0.25]]")
    assert repr(lines) == "Rule(4 replicates of 6300 nodes, LineNodes for (L, r, t) = (2, 1, 1))"
    assert repr(ta.Settings()) == "Settings(tol=1e-05, max_steps=30, warm_steps=300, damping=0.2)"
    hats = made.fixed_point().conjugates
    assert repr(hats).startswith("Conjugates(q=") and "student" not in str(hats)


def test_parts_of_a_state_and_a_model_with_a_law_print_their_numbers():
    point = made.fixed_point(replicon=[0.5] * 4)
    lines = str(point.diagnostics).splitlines()
    assert lines[0] == "Diagnostics" and lines[1].split() == ["replicon", "0.5", "below", "1:", "stable"]
    assert len(lines) == 9 and "growth_m" in lines[5]
    assert f"train_loss={point.train_loss:.6g}" in repr(point.mean) and "f64" not in str(point.stderr)
    law = ta.SpectralLaw(np.full(3, 1 / 3), *(np.ones((3, *shape)) for shape in ((2,), (2, 2), (1, 1), (2, 1))))
    assert repr(law).startswith("SpectralLaw(3 atoms; weights=[0.333333, ")
    assert "spectrum=SpectralLaw(3 atoms))" in repr(ta.DotProduct(spectrum=law))


def test_the_package_has_a_table_of_contents():
    names = [name for name in dir(ta) if name[0].islower()]
    assert "solve" in names and not {"theory", "cli"} & set(names)
    missing = [name for name in names if callable(getattr(ta, name)) and name not in ta.__doc__]
    assert not missing and ta.__version__ == "0.1.0"
