"""How tables read, print and compare the answers to their questions, with answers made by hand."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.finite.instances import Compared
from tiedattn_jax.phases.cells import entries_by_name, has_number
from tiedattn_jax.phases.table import Missing, Table
from tiedattn_jax.theory.quantities import Quantity


@jax.tree_util.register_static
class Cell(SimpleNamespace):
    """A result with any attributes."""

    __hash__ = object.__hash__


NAN = np.nan
RUNS = {
    "simulation": Compared(
        train_loss=np.array([1.0, 1.2, 3.0, 1.4, 9.0]),
        gen_error=np.array([0.5, 0.7, 0.9, NAN, 9.0]),
        q=np.array([0.1, 0.1, 0.4, 0.2, 9.0]),
        V=np.full(5, NAN),
        theta=np.array([0.3, 0.3, 0.6, 0.3, 9.0]),
        m=np.array([0.01, 0.02, 0.5, 0.06, 9.0]),
    ),
    "theory": Compared(*(np.full(5, a) for a in (1.0, 0.5, 0.125, 12.0, 0.3, 0.0))),
    "theory_stderr": Compared(*(np.full(5, a) for a in (0.3, 0.1, 0.01, 0.5, 0.02, 0.0))),
    "branch": np.array(["semantic", "semantic", "positional", "semantic", "unsettled"]),
    "distance": np.array([[NAN, 0.5], [NAN, 0.7], [0.8, NAN], [NAN, 0.9], [NAN, NAN]]),
    "rho": np.array([1.0, 1.1, 0.9, 1.0, 1.0]),
    "status": np.array([0, 2, 0, 0, 4]),
    "finished": np.array([True, False, False, True, False]),
    "gradient_norm": np.array([1e-9, 2e-5, 3e-9, 1e-8, 1e-7]),
    "iterations": np.array([10, 20, 30, 40, 50]),
    "theory_status": np.array([0, 1, 0, 6, 6]),
}
BESIDE_THEORY = """\
positional: 1 of 5 instances, 1 at a critical point (0 finished by L-BFGS)
              simulation  theory  difference  error bar  in bars
  train_loss  3           1       +2          unknown
  gen_error   0.9         0.5     +0.4        unknown
  q           0.4         0.125   +0.28       unknown
  theta       0.6         0.3     +0.3        unknown
  m           0.5         0       +0.5        unknown
semantic: 3 of 5 instances, 2 at a critical point (2 finished by L-BFGS)
              simulation  theory  difference  error bar  in bars
  train_loss  1.1         1       +0.1        {loss:.2g}       {of_loss:+.1f}
  gen_error   0.6         0.5     +0.1        {error:.2g}        {of_error:+.1f}
  q           0.1         0.125   -0.025      unknown
  theta       0.3         0.3     +0          unknown
  m           0.015       0       +0.015      {m:.2g}
unsettled: 1 of 5 instances, 0 at a critical point (0 finished by L-BFGS)"""
ALONE = """\
                      simulation  lowest  highest
  train_loss          1.2         1       1.4
  gen_error           0.6         0.5     0.7
  q                   0.133333    0.1     0.2
  theta               0.3         0.3     0.3
  m                   0.03        0.01    0.06
  distance, semantic  0.7         0.5     0.9
unsettled"""


def test_the_page_of_instances():
    """Instances count beside their theory if it has a state. A scatter of zero is not known, nor is that of one run."""
    instances = made.instances((made.fixed_point(),) * 5, **RUNS)
    loss, error, m = (np.hypot(float(error_bar(np.array([0.0, width]))), bar)
                      for width, bar in ((0.2, 0.3), (0.2, 0.1), (0.01, 0.0)))  # fmt: skip
    bars = {"loss": loss, "error": error, "m": m, "of_loss": 0.1 / loss, "of_error": 0.1 / error}
    head, page = instances.summary().split("\n", 1)
    assert head == "5 instances: nonfinite, largest gradient 2.0e-05"
    assert page.split() == BESIDE_THEORY.format(**bars).split()
    difference = instances.difference("semantic")
    assert list(difference) == ["train_loss", "gen_error", "q", "V", "theta", "m"]
    np.testing.assert_allclose(difference["train_loss"], [1.1, 1.0, 0.1, loss], rtol=1e-12)
    np.testing.assert_array_equal(difference["V"], [NAN] * 4)
    both = instances.difference()["m"]  # over both branches
    np.testing.assert_allclose(both, [0.53 / 3, 0, 0.53 / 3, error_bar(np.array([0.01, 0.02, 0.5]))], rtol=1e-12)
    assert instances.groups == {"positional": 1, "semantic": 3, "unsettled": 1}
    assert instances.ok.tolist() == [True, False, True, True, False]
    assert instances.found.tolist() == [True] * 4 + [False]
    assert instances.failures == ("instance = 4: the run did not settle: nonfinite",)
    assert ALONE in made.instances(**RUNS).summary()


PLACES = np.array([1.0, 2.0, 4.0, 5.0])


def best_cells(branches="positional positional semantic semantic", errors=(1.0, 0.9, 0.75, 0.5)):
    """The smallest test errors at four places."""
    words = {"name": "lam", "event": "best lam", "labels": (("branch", None), ("place", "inside"))}
    return tuple(
        Quantity(
            error / 4, error / 50, 0, branches=(dataclasses.replace(made.fixed_point(), branch=branch),), **words,
            further={"gen_error": Quantity(error, error / 10, 0)},
        )
        for error, branch in zip(errors, branches.split(), strict=True)
    )  # fmt: skip


@pytest.mark.usefixtures("unchecked")
def test_where_the_best_state_jumps():
    """It jumps between neighbouring results on different branches."""

    def table(cells):
        return Table("best lam", ("alpha",), (PLACES,), tuple(cells))

    cells, missing = best_cells(), Missing("there is none", 6)
    assert table(cells).jumps == [(2.0, 4.0)] and table(best_cells("semantic " * 4)).jumps == []
    for k, expected in ((0, (2.0, 4.0)), (1, (1.0, 4.0)), (2, (2.0, 5.0))):
        assert table([missing if n == k else cell for n, cell in enumerate(cells)]).jumps == [expected]
    page = table(cells).summary().splitlines()
    jump = "that jumps at alpha between 2 and 4"
    assert page[0] == f"best lam of the global minimum {jump} at 4 alphas from 1 to 5: found at 4"
    assert page[1].split() == ["alpha", "lam", "gen_error", "branch", "place", "status"]
    assert page[2].split() == ["1", "0.250(20)", "1.00(10)", "positional", "inside", "converged"]
    plane = Table("best lam", ("alpha", "sigma"), (PLACES[:2], PLACES[2:]), cells)
    head = "best lam of the global minimum at 2 x 2 settings of alpha and sigma: found at 4"
    assert plane.summary().splitlines()[0] == head


def land(label, ok=True):
    numbers = {"label": (label, None), "semantic": (0.5, 0.05), "positional": (0.25, 0.025)}
    form = {"in_table": ta.results.Landscape.in_table.fget(None), "has_result": ok}
    return Cell(label=np.asarray(label), status=0 if ok else 2, numbers=lambda: numbers, **form)


@pytest.mark.usefixtures("unchecked")
def test_the_page_of_landscapes():
    """Over two axes labels are counted, with their meaning, where there is a result."""
    cells = land(0), land(0), land(7), land(5, ok=False), Missing("no nodes", 6), land(2)
    table = Table("landscape", ("omega", "sigma"), (np.array([0.1, 0.2]), np.array([1.0, 2.0, 3.0])), cells)
    head = "landscape at 2 x 3 settings of omega and sigma: found at 4; failed at 1, the first: omega = 0.2, sigma = 2"
    lines = table.summary().splitlines()
    assert lines[0] == f"{head}: no nodes"
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["0", "2", "semantic minimum, semantic descent, one minimum"],
        ["2", "1", "semantic minimum, positional descent, one minimum"],
        ["7", "1", "positional minimum, positional descent, two minima"],
    ]
    first = table.table()[0]
    assert (first["label"], first["semantic"], first["semantic_stderr"]) == (0, 0.5, 0.05)
    assert table.values().tolist()[0] == [0, 0, 7]


def events_over_two(columns, lacking=(2, 1)):
    """alpha_c = 1 + i + 10 j over `columns` values of omega and two of sigma; it is missing in one cell."""
    cells = [
        Missing("there is none", 6)
        if (i, j) == lacking
        else Quantity(jnp.asarray(1 + i + 10.0 * j), jnp.asarray(0.25), jnp.asarray(0), name="alpha", event="alpha_c")
        for i in range(columns)
        for j in range(2)
    ]
    return Table("alpha_c", ("omega", "sigma"), (np.arange(float(columns)) / 10, np.array([1.0, 2.0])), tuple(cells))


def test_the_page_of_a_map():
    table = events_over_two(9)
    lines = table.summary().splitlines()
    outcome = "found at 17; failed at 1, the first: omega = 0.2, sigma = 2: there is none"
    assert lines[0] == f"alpha_c at 9 x 2 settings of omega and sigma: {outcome}"
    assert [line.split() for line in lines[1:3]] == [
        "smallest 1.00(25) at omega = 0, sigma = 1".split(),
        "largest 19.00(25) at omega = 0.8, sigma = 2".split(),
    ]
    assert lines[3].split() == [*r"sigma \ omega 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 ...".split()]
    assert lines[5].split() == ["2", "11.00(25)", "12.00(25)", "nan", *(f"{a}.00(25)" for a in range(14, 19)), "..."]
    assert "..." not in events_over_two(8).summary()
    nowhere = Table("alpha_c", ("a", "b"), (np.arange(9.0), np.arange(2.0)), (Missing("there is none", 6),) * 18)
    assert "smallest" not in str(nowhere) and "found at 0" in str(nowhere) and np.isnan(nowhere.alpha).all()
    row = {"omega": 0.0, "sigma": 2.0, "alpha_c": 11.0, "alpha_c_stderr": 0.25, "status": "converged", "reason": ""}
    assert table.table()[1] == row
    assert table.values("sigma").tolist()[3] == [1.0, 2.0]


def test_files_of_a_map(tmp_path):
    table = events_over_two(3)
    table.save(tmp_path / "map.npz")
    loaded = ta.load(tmp_path / "map.npz")
    assert type(loaded) is Table and loaded == ta.results.Table.load(tmp_path / "map.npz") == table
    assert str(loaded) == str(table) and events_over_two(3, lacking=None) != table
    text = table.to_csv(tmp_path / "map.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert (tmp_path / "map.csv").read_text() == text
    assert rows == [{name: str(value) for name, value in row.items()} for row in table.table()]
    report = json.loads(json.dumps(table.to_dict()).replace("NaN", "null"))
    assert report["alpha_c"][2] == [3.0, None] and report["status"][2] == ["converged", "absent"]
    assert report["axes"]["sigma"] == [1.0, 2.0] and report["stderr"]["alpha_c"][1][0] == 0.25


def test_xarray_of_a_map():
    xarray = pytest.importorskip("xarray")
    data = events_over_two(3).to_xarray()
    cell = data.sel(omega=0.1, sigma=2.0)
    assert (float(cell.alpha_c), float(cell.alpha_c_stderr), int(cell.status)) == (12.0, 0.25, 0)
    assert data.alpha_c.dims == ("omega", "sigma") and json.loads(data.attrs["question"]) == "alpha_c"
    assert int((data["reason"] != "").sum()) == 1
    halves = [data.isel(omega=part) for part in (slice(0, 1), slice(1, None))]
    assert xarray.combine_by_coords(halves).identical(data)  # one of them without failures


def test_lines_on_which_a_number_has_a_level():
    table = events_over_two(9, lacking=None)
    (line,) = table.contours(level=8.0)  # 1 + 10 x + 10 (y - 1) = 8
    np.testing.assert_allclose(10 * line[:, 0] + 10 * (line[:, 1] - 1), 7, rtol=1e-12)
    (line,) = table.contours(lambda cell: cell.alpha - 8.0)
    np.testing.assert_allclose(10 * line[:, 0] + 10 * (line[:, 1] - 1), 7, rtol=1e-12)
    one = Table("alpha_c", (), (), table.cells[:1])
    assert repr(one) == "Table(alpha_c at 1 settings of the model; found at 1)"


def asked(name, method="values"):
    return lambda curve, event: getattr(curve, method)(name)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        *((asked("replicom", method), "of which the nearest are replicon") for method in ("values", "stderr", "plot")),
        *((asked(name), "number must be one of") for name in ("overlaps.qq", "sensitivities.sigma", "")),
        *((asked(name, "plot"), "must be the name of one number per setting") for name in ("branch", "overlaps.q")),
        (lambda curve, event: curve.interpolant, "table must be that of an event along one axis, got question='sem"),
        (lambda curve, event: event.interpolant, "table must have two neighbouring points or more, alpha_c has 2"),
        (lambda curve, event: event.jumps, "table must be one of best values along one axis, got question='alpha_c'"),
        (lambda curve, event: event.contours(), "axes must be two for contour lines"),
        (lambda curve, event: Table("alpha_c", (), (), event.cells[:1]).plot(), "axes must be one or two for a pict"),
        (lambda curve, event: event.intersections(made.events("alpha_c", "omega", *[PLACES] * 3)), "names must be"),
    ],
)
def test_what_a_table_is_not_asked(ask, sentence):
    curve = Table.of_states("semantic", [made.fixed_point()])
    event = made.events("alpha_c", "sigma", PLACES, [1.0, NAN, 1.0, NAN], PLACES)
    with pytest.raises(ta.InputError, match=sentence):
        ask(curve, event)


def test_slopes_that_are_missing():
    """They are those of the spline, if the axis is a number."""
    listed = made.events("alpha_c", "model", [0.0, 1.0, 2.0], np.array([1.0, 3.0, 7.0]), np.zeros(3))
    assert np.isnan(listed.slope).all()
    partly = made.events("alpha_c", "sigma", PLACES, PLACES**2, 0 * PLACES, [2.0, NAN, 8.0, 10.0], np.ones(4, bool))
    np.testing.assert_allclose(partly.slope, 2 * PLACES, rtol=1e-9)
    assert not partly.exact.any()


def test_numbers_of_a_batch_without_a_state():
    """Where there is no state only the residual and the baseline have a number."""
    point = made.fixed_point(status=[6] * 4, residual=[0.5] * 4, gen_error_linear=[0.25] * 4)
    numbers = {name: pair for name, pair in point.numbers().items() if pair[1] is not None}
    known = {name for name, (mean, _) in numbers.items() if np.isfinite(mean).all()}
    assert known == {"residual", "gen_error_linear"} and "status" not in numbers
    assert (float(numbers["residual"][0]), float(numbers["gen_error_linear"][0])) == (0.5, 0.25)
    assert all(np.isnan(mean).all() for name, (mean, _) in numbers.items() if name not in known)
    table = Table.of_states("semantic", [point])
    for name, expected in (("residual", 0.5), ("gen_error_linear", 0.25), ("train_loss", NAN)):
        np.testing.assert_allclose([table.values(name)[0], table.table()[0][name]], expected)
    found = made.fixed_point().numbers()
    np.testing.assert_array_equal(found["q"][0], made.fixed_point().overlaps.q)
    assert has_number(point, "overlaps.q") and not has_number(point, "overlaps.other")
    assert entries_by_name("q", [[1.0, 2.0]]) == {"q_0": 1.0, "q_1": 2.0}
    assert entries_by_name("q", [[3.0]]) == {"q": 3.0}


def test_the_error_bars_of_a_table():
    """Replicates give the bars of scalars of a state, texts and other labels are exact, and events have their own."""
    scatter = (-0.1, 0.1, -0.2, 0.2)
    curve = Table.of_states("semantic", [made.fixed_point(scatter=scatter)])
    theta = float(curve.cells[0].theta)
    factor = 1 + np.array(scatter)
    np.testing.assert_allclose(curve.stderr("theta"), [error_bar(theta / factor.mean() * factor)], rtol=1e-6)
    np.testing.assert_allclose(curve.stderr("train_loss"), [curve.cells[0].stderr.train_loss], rtol=1e-12)
    np.testing.assert_allclose(curve.stderr(), curve.stderr("train_loss"), rtol=1e-12)
    np.testing.assert_allclose(curve.stderr("overlaps.theta"), [curve.cells[0].stderr.overlaps.theta], rtol=1e-12)
    assert curve.stderr("exists").tolist() == curve.stderr("label").tolist() == curve.stderr("alpha").tolist() == [0.0]
    moved = Table("alpha_c", (), (), (made.transition(),))
    assert (float(moved.values("sensitivities.sigma")), float(moved.stderr("sensitivities.sigma"))) == (2.0, 0.02)
    assert (float(moved.values()), float(moved.stderr())) == (1.25, 0.01)
    assert float(moved.stderr(lambda cell: cell)) == 0.01


@pytest.mark.usefixtures("unchecked")
def test_labels_of_settings():
    """A state has the name of its branch or, where nothing was imposed, its label."""
    named, free = Table.of_states("semantic", [made.fixed_point()]), Table.of_states(None, [made.fixed_point()])
    assert named.values("branch").tolist() == free.values("branch").tolist() == ["semantic"]
    assert free.groups == {"semantic": 1}
    failed = Table("semantic", ("alpha",), (PLACES[:2],), (made.fixed_point(), Missing("it broke", 4)))
    assert failed.alpha[0] == 2.0 and np.isnan(failed.alpha[1]) and failed.ok.tolist() == [True, False]
    assert failed.values("branch").tolist() == ["semantic", ""] and failed.values("exists").tolist() == [1, 0]
    stalled = Table.of_states("semantic", [made.fixed_point(status=[1] * 4), made.fixed_point(status=[2] * 4)])
    assert stalled.ok.tolist() == [True, False]
