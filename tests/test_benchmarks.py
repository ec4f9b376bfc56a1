"""The benchmark suite: what it writes, prints and refuses, and its comparators. No time is asserted."""

import json
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace as Namespace

import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES
from jax import lax
from scipy.optimize import minimize

import tiedattn_jax as ta
from tiedattn_jax.theory.observables import jump_cost

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not part of the package

from benchmarks import (
    __main__ as command,
    float32,
    further_steps,
    minima,
    monte_carlo,
    published_method as published,
    roofline,
    suite,
)
from benchmarks.operations import operations
from benchmarks.registry import BENCHMARKS, Benchmark, invariants, order_parameters, worst

TINY = {"solve": 4096, "rules": 4096, "gradient": 2048, "critical_alpha": 2048, "grid": 3}
TINY |= {"wide": 1024, "gamp": 30, "gamp_run": 30, "train": 30, "on_demand": 30}


class Clock:
    """A clock that moves only in calls of `fn`: each takes the number of seconds given for it."""

    def __init__(self, *calls):
        self.now, self.calls = 0.0, list(calls)

    def __call__(self):
        return self.now

    def fn(self, *args):
        self.now += self.calls.pop(0)
        return sum(args)


def measured(benchmark="stub", case="one", size=2, **numbers):
    defaults = {"unit": "call", "compile": 3.0, "seconds": 2.0, "lower": 1.0, "upper": 4.0, "repeat": 5}
    return suite.Measurement(benchmark, case, size, **defaults | numbers)


def test_the_first_call_is_apart_and_the_others_have_median_and_quartiles(monkeypatch):
    def clock(*calls):
        clock = Clock(*calls)
        monkeypatch.setattr(suite.time, "perf_counter", clock)
        return clock

    fn, slower = clock(10.0, 1.0, 9.0, 2.0, 4.0, 3.0).fn, measured(case="slow", seconds=6.0)
    options = {"repeat": 5, "unit": "step", "units": 2, "error": lambda v: v / 6, "against": [slower]}
    m = suite.measure("stub", "one", 7, fn, 1, 2, **options)
    assert (m.benchmark, m.case, m.size, m.unit, m.repeat) == ("stub", "one", 7, "step", 5)
    assert (m.compile, m.seconds, m.lower, m.upper) == (10.0 - 3.0, 1.5, 1.0, 2.0)
    assert m.error == 0.5 and m.ratios == {"slow": 4.0} and m.load >= 0
    # What is not compiled is measured from its first call.
    m = suite.measure("stub", "one", 1, clock(8.0).fn, 4, repeat=1, compiled=False, units=lambda result: result)
    assert (m.compile, m.seconds, m.lower, m.upper) == (None, 2.0, 2.0, 2.0)


# The file, the table, the pictures


def test_file_of_a_machine_and_a_date(tmp_path):
    machine = suite.about()
    assert {"date", "cpu", "cores", "device", "devices"} <= set(machine)
    assert {"jax", "jaxlib", "numpy", "python", "tiedattn_jax"} <= set(machine["versions"])
    some = machine | {"date": "2026-01-31", "cpu": "Some CPU (R) 7", "device": "cpu", "cores": 3}
    path = suite.path_in(tmp_path, some)
    assert path == tmp_path / "2026-01-31-some-cpu-r-7-3-cores.json"
    assert "fast-gpu" in suite.path_in(tmp_path, machine | {"device": "Fast GPU"}).name
    first = [measured(error=0.1, ratios={"slow": 2.0}), measured("other", compile=None)]
    second, other_machine = [measured(seconds=9.0)], machine | {"devices": 64}
    both = [first[1], *second]  # a benchmark is replaced, others stay
    for about, rows, kept in ((machine, first, first), (machine, second, both), (other_machine, second, second)):
        assert suite.write(path, about, rows) == kept and suite.read(path) == (about, kept)


def test_the_table_and_the_pictures(tmp_path):
    text = str(measured(error=0.00123, ratios={"slow": 250.0}, unit="cell"))
    assert all(part in text for part in ("stub", "one", "2 cell", "1 to 4", "0.0012", "250 x slow"))
    assert str(measured(compile=None)).split()[3] == "-" and suite.HEADER.index("median") == text.index("2 cell")
    rows = [measured(name, size=size, error=1e-3 if name == "b" else None) for name in "ab" for size in (4, 2)]
    pictures = suite.draw(tmp_path / "file.json", rows, {"a": "nodes", "b": "nodes"})
    assert [p.name for p in pictures] == ["file-precision.png", "file-size.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in pictures)
    size_pictures = suite.draw(tmp_path / "none.json", rows[:2], {"a": "nodes"})
    assert [p.name for p in size_pictures] == ["none-size.png"]


# The command


def test_command(tmp_path, capsys, monkeypatch):
    calls = []

    def run(sizes, repeat):
        calls.append((tuple(sizes), repeat))
        for size in sizes:
            yield suite.measure("stub", "sum", size, np.sum, np.ones(size), repeat=repeat, error=lambda s: s / 10)

    monkeypatch.setitem(BENCHMARKS, "stub", Benchmark(run, "a sum", "terms", (2, 3)))
    monkeypatch.setattr(command.jax, "clear_caches", lambda: calls.append("cleared"))
    assert command.main(["stub", "--out", str(tmp_path)]) == 0
    assert command.main(["stub", "--sizes", "4", "--repeat", "2", "--out", str(tmp_path)]) == 0
    assert calls == ["cleared", ((2, 3), 5), "cleared", ((4,), 2)]
    [path] = tmp_path.glob("*.json")
    assert [(m.size, m.error) for m in suite.read(path)[1]] == [(4, pytest.approx(0.4))]
    assert json.loads(path.read_text())["about"]["date"] == time.strftime("%Y-%m-%d")
    assert len(list(tmp_path.glob("*.png"))) == 2
    printed = capsys.readouterr().out.splitlines()
    assert printed.count(suite.HEADER) == 2 and sum(line.startswith("stub") for line in printed) == 3
    assert printed[-3:] == [str(path), *sorted(map(str, tmp_path.glob("*.png")))]
    for arguments, message in (
        ("stub unknown", f"benchmark must be one of {', '.join(BENCHMARKS)}"),
        ("stub --repeat 0", "repeat must be an integer of at least 1"),
        ("stub --sizes 0", "sizes must be an integer of at least 1"),
        ("stub train --sizes 30", "sizes must be for one benchmark"), ("--sizes 30", "sizes must be for one benchmark"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            command.main([*arguments.split(), "--out", str(tmp_path)])
        assert stop.value.code == 2 and message in capsys.readouterr().err and len(calls) == 4


# Benchmarks and comparators


@pytest.mark.full
@pytest.mark.parametrize("name", TINY)
def test_benchmark(name):
    measurements = list(BENCHMARKS[name].run((TINY[name],), 1))
    assert measurements and all(m.benchmark == name and m.seconds > 0 for m in measurements)
    assert all(m.error is None or 0 <= m.error < 0.5 for m in measurements)
    unchecked = {"gamp", "gamp_run", "on_demand"} | (set() if find_spec("torch") else {"train"})
    assert any(m.error is not None for m in measurements) == (name not in unchecked)
    assert any(m.ratios for m in measurements) == (name in ("solve", "gradient", "gamp", "train"))


def test_error_of_the_worst_order_parameter():
    assert set(TINY) == set(BENCHMARKS)  # every benchmark is measured somewhere
    q, V, theta, m = (k + np.array([[0.0], [0.5]]) * np.ones(2) for k in range(1, 5))  # axes: replicate, token
    x = ta.Overlaps(*(a[..., None, None] for a in (q, V, theta)), m[..., None])
    for branch, last in (("semantic", 2), ("positional", 3)):
        values = order_parameters(Namespace(replicates=Namespace(overlaps=x), branch=branch))
        assert values.tolist() == [[k + shift for k in (1, 2, last + 1)] for shift in (0.0, 0.5)]
    assert worst(np.array([[1.1, 2.0], [0.9, 2.4]]), np.array([1.0, 2.0])) == pytest.approx(0.02**0.5)


def test_invariants_do_not_see_a_rotation():
    rng, losses = np.random.default_rng(0), np.arange(3.0)
    q, V = (a @ np.swapaxes(a, -1, -2) for a in rng.standard_normal((2, 3, 2, 2, 2)))
    theta, m, O = (rng.standard_normal(shape) for shape in ((3, 2, 2, 1), (3, 2, 2), (2, 2)))
    O = np.linalg.qr(O)[0]

    def invariants_of(*matrices):
        return invariants(Namespace(replicates=Namespace(overlaps=ta.Overlaps(*matrices, m), train_loss=losses)))

    values = invariants_of(q, V, theta)
    np.testing.assert_allclose(invariants_of(O @ q @ O.T, O @ V @ O.T, O @ theta), values, rtol=1e-12)
    np.testing.assert_allclose(values[:, 0], 0.5 * np.trace(q, axis1=2, axis2=3).sum(1))
    np.testing.assert_allclose(values[:, 2:], np.stack([np.sum(theta**2, (1, 2, 3)), losses], 1))


def test_numpy_monte_carlo_finds_the_lowest_minimum():
    p, V = published.problem(2.0), 12.0
    h, y = np.random.default_rng(0).standard_normal((2, 2, 12)) * np.array([[[0.3]], [[0.5]]])
    z = monte_carlo.prox(h, y, V, p)
    starts = np.random.default_rng(1).standard_normal((8, 2))
    for k in range(12):
        energy = published.scalar_objective(h[:, k], y[:, k], V, p)
        best = min((minimize(energy, s, method="BFGS") for s in starts), key=lambda r: r.fun)
        assert energy(z[:, k]) <= best.fun + 1e-12
        assert np.allclose(z[:, k], best.x, atol=1e-4)


def test_numpy_monte_carlo_iterates_the_same_map():
    """A known fixed point is its own image, up to scatter."""
    case, p = CASES[0], published.problem(2.0)
    x = published.Overlaps(case.q, case.m, case.V, case.theta)
    images = []
    for seed in range(4):
        normals = np.random.default_rng(seed).standard_normal((2, 2, 2000))
        images.append(published.overlaps(monte_carlo.conjugates(x, p, normals), p))
    bias = np.mean(images, 0) - np.array(x)
    assert np.all(np.abs(bias) < 4 * np.std(images, 0, ddof=1) / 2)
    assert np.all(np.std(images, 0) < 0.1 * np.array([x.q, 0.3, x.V, x.theta]))


def test_published_iteration_takes_other_conjugates():
    """It ends where they send every state, and counts its damped steps."""
    p, calls = published.problem(2.0), []
    hats = published.Overlaps(0.1, 0.0, 0.05, 0.2)
    result = published.solve(2.0, tol=1e-6, hats=lambda x, p: calls.append(x) or hats)
    assert result.converged and result.iterations == len(calls)
    assert np.allclose(result.overlaps, published.overlaps(hats, p), rtol=1e-5)


def test_further_steps_of_breaking():
    """One step of breaking is `jump_cost`, two equal steps count as one, and the best second step adds 2.7 %."""
    cost = further_steps.cost(np.array([2.1]), np.ones(1))
    np.testing.assert_allclose(cost, jump_cost(2.1) / 2.1, rtol=1e-4)
    np.testing.assert_allclose(further_steps.cost(np.array([2.1, 2.1]), np.array([0.3, 0.7])), cost, rtol=1e-4)

    def elevation(s, widths):
        s, widths = np.array(s), np.array(widths)
        return 4 / 27 * further_steps.cost(s, widths) ** 3 / further_steps.curvature(s, widths, np.ones_like) ** 2

    assert further_steps.curvature(np.array([2.0]), np.ones(1), np.ones_like) == pytest.approx(0.5)
    best = elevation([4.837, 1.673], [0.1988, 0.8012])
    assert best / elevation([2.109], [1.0]) == pytest.approx(1.027, abs=2e-4)
    for s, width in (([5.5, 1.673], 0.1988), ([4.837, 1.5], 0.1988), ([4.837, 1.673], 0.25)):
        assert elevation(s, [width, 1 - width]) < best


@pytest.mark.full
def test_two_steps_where_every_sample_chooses_a_sign():
    """For few samples, steps of breaking give energies of the SK model; one step equals the result by hand.

    The energy with two steps is -.7636 (Parisi, J. Phys. A 13, L115, 1980).
    """
    alphas = np.array([[1e-4], [1e-5]])
    losses = np.array([further_steps.signs(alpha, 2) for alpha in alphas[:, 0]])
    at_larger, at_smaller = (4 * losses / alphas - 1) / alphas**0.5
    limit = at_smaller + (at_smaller - at_larger) / (10**0.5 - 1)  # corrections are of order alpha^{1/2}
    np.testing.assert_allclose(limit, [-((2 / np.pi) ** 0.5), -0.7652, -0.7636], atol=1e-4)
    rs, one_step, two_steps = further_steps.signs(0.01, 2)
    # The energy rises by as much as `tests/rsb` computes with conjugates.
    assert one_step - rs == pytest.approx(8.1990e-6, rel=1e-5)
    assert (two_steps - rs) / (one_step - rs) == pytest.approx(1.0482, abs=1e-4)


# Operations and their limit


def test_operations_are_counted_as_they_are_taken():
    x = jnp.linspace(0.1, 1.0, 10)
    simple, division, transcendental = (("simple", 64), ("division", 64), ("transcendental", 64))

    def last(x):  # a scan in reverse reads the first row last, and returns it
        return lax.scan(lambda carry, row: (row, row), 0 * x[0], x, reverse=True)[0]

    for fn, arguments, expected in (
        (lambda x: 2 * x + 1, [x], {simple: 20}),
        (lambda x: jnp.exp(x) / jnp.sqrt(x), [x], {transcendental: 10, division: 20}),
        (lambda x: x.astype(jnp.float32) ** 3, [x], {("simple", 32): 20}),
        (lambda a, b: a @ b, [jnp.ones((3, 4)), jnp.ones((4, 5))], {simple: 2 * 3 * 4 * 5}),
        (lambda x: jnp.sum(x[:4].reshape(2, 2), 0), [x], {simple: 4}),  # moving data is no operation
        # Loops count by their rounds, branches by the one that is taken.
        (lambda x: lax.fori_loop(0, 5, lambda k, x: x + 1, x), [x], {simple: 50}),
        (lambda x: lax.while_loop(lambda x: x < 4, lambda x: 2 * x, x), [1.0], {simple: 3 + 2}),
        (lambda x: lax.cond(x[0] > 1, jnp.exp, lambda x: -x, x), [x], {simple: 1 + 10}),
        (lambda x: lax.while_loop(lambda c: c < 1, lambda c: c + 1, last(x)), [x], {simple: 1 + 2 + 1}),
    ):
        assert operations(fn, *arguments) == expected
    counts, rates = Counter({simple: 30, division: 4}), {simple: 10.0, division: 2.0}
    assert roofline.limit(counts, 8, rates, 4.0) == 30 / 10 + 4 / 2  # the limit is that of operations
    assert roofline.limit(counts, 80, rates, 4.0) == 80 / 4  # or of bytes


def test_float32_is_held_against_float64():
    def part(model, nodes, d):
        sigma = np.asarray(model.sigma)
        assert nodes.stack.weight.dtype == sigma.dtype and d == 7
        yield "sigma", sigma + (1e-3 if sigma.dtype == np.float32 else 0), None
        yield "zero", 0 * sigma, sigma

    first, second = float32.differences(part, 3, 7)
    assert first.split() == ["sigma", "+0.5", "2.0e-03"]
    assert second.split() == ["zero", "+0", "0.0e+00", "0.0e+00"]


@pytest.mark.full
def test_minima_of_an_instance(model):
    """The lowest minimum on the branch counts; minima off the branch and copies of one minimum do not."""
    rs = made.fixed_point(CASES[1])

    def ends(*losses, on_branch=True):
        a = jnp.asarray(losses) * float(rs.train_loss)
        return minima.Minima(a, a, 0 * a + 1.1 * float(rs.q), 0 * a + abs(rs.m), a > 0 if on_branch else a < 0)

    rounds = [ends(1.02), ends(1.03, 1.01, 1.01), ends(0.9, on_branch=False), ends(1.01, 1.02)]
    row = minima.row(rs, ta.GaussHermite(2, replicates=1).rule(model).replicate(0), rounds)
    np.testing.assert_allclose([row["training"]["loss"], row["lowest"]["loss"], row["lowest"]["q"]], [2, 1, 10])
    assert row["lowest"]["eps_g"] > 1 and row["lowest after one round"] == row["lowest"]
    counts = ("runs on the branch", "runs at the lowest, last round", "distinct minima")
    assert [row[name] for name in counts] == [5, 1, 3]
    np.testing.assert_allclose(row["next above the lowest, relative"], 0.01 / 1.01)
    untrained = {**row, "training": None}
    assert "| 100 (2) | loss | 2 | 1 | -1 |" in minima.table({100: [row, row, untrained]})
    with pytest.raises(RuntimeError, match="no run ended on the positional branch"):
        minima.lowest([ends(0.9, on_branch=False)])
