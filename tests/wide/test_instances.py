"""Sweeps and diagrams of wide layers: every cell is the answer for its setting, and its region what it has learned."""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.phases.table import Missing, Table
from tiedattn_jax.wide.states import WideNumbers, WideState

MIXING = [[0.8, 0.2], [0.3, 0.7]]
ALPHAS, TAUS = [0.01, 1.0], [0.1, 0.2]  # the onset is at .0233 and .0709
KEYS = jax.random.split(jax.random.key(0), 3)
layer = partial(ta.wide.DotProduct, tau=0.1)


@pytest.mark.full
def test_every_cell_is_the_state_of_its_setting(tmp_path):
    diagram = ta.sweep(ta.wide.solve, layer(), alpha=ALPHAS, tau=TAUS)
    assert isinstance(diagram, Table) and diagram.shape == (2, 2) and diagram.found.all()
    np.testing.assert_allclose(diagram.values("q")[1, 1], ta.wide.solve(layer(tau=0.2), 1.0).q, rtol=1e-9)
    (*_, row) = diagram.table()
    assert row["region"] == "content" and row["q"] == diagram.values("q")[1, 1] and 0 < row["q_stderr"] < 1e-4
    assert "2  content" in str(diagram) and "2  no attention to content" in str(diagram)
    dataset = diagram.to_xarray()
    assert dataset.q.dims == ("alpha", "tau") and dataset.region.values[0, 0] == "no attention to content"
    diagram.save(tmp_path / "diagram.npz")
    assert ta.load(tmp_path / "diagram.npz") == diagram


@pytest.mark.full
def test_regions_without_encodings_are_told_by_the_onset():
    diagram, onset = (
        ta.sweep(ta.wide.solve, layer(), alpha=ALPHAS, tau=TAUS),
        ta.sweep(ta.wide.onset, layer(), tau=TAUS),
    )
    above = np.array(ALPHAS)[:, None] > onset.alpha
    np.testing.assert_array_equal(diagram.values("region") == "content", above)
    # The slope along tau is exact: the chord between neighbours lies between the slopes at both ends.
    chord = np.diff(onset.alpha) / np.diff(onset.at)
    assert onset.exact.all() and onset.slope.min() < chord < onset.slope.max()
    axis = diagram.plot(boundaries=[onset]).axes[0]
    drawn = {c.get_gid(): len(c.get_paths()) for c in axis.collections}
    assert drawn["content"] == drawn["no attention to content"] == 2 and drawn["content and position"] == 0
    assert "alpha_c" in [line.get_gid() for line in axis.lines]


def cell(q=0.3, shift=((0.4, 0.0), (0.0, 0.0)), ok=True, encodings="long"):
    """A made-up state of two replicates, whose shift of the first score differs by a tenth around a mean."""
    model = layer(encodings=encodings, mixing=MIXING)
    H = np.array(shift)[..., None] + np.array([0.0, 0.05, -0.05]) * np.diag([1.0, 0.0])[..., None]
    _, *both = model.coordinates(jnp.asarray(H))[0].T if encodings else np.zeros((3, 0))
    blank = {field.name: np.full(2, np.nan) for field in fields(WideState)}
    status = np.full(2, 0 if ok else 4)
    numbers = blank | {"q": np.array([0.99, 1.01]) * q, "offset": np.stack(both), "status": status}
    return ta.results.WidePoint(model, jnp.asarray(0.7), WideState(**jax.tree.map(jnp.asarray, numbers)))


@pytest.mark.parametrize(
    "q, shift, region",
    [
        (0.0, [[0.0, 0.0], [0.0, 0.0]], "no attention to content"),
        (0.3, [[0.0, 0.0], [0.0, 0.0]], "content"),
        (0.0, [[0.3, 0.0], [0.0, 0.1]], "position, no attention to content"),
        (0.3, [[0.3, 0.0], [0.0, 0.1]], "content and position"),
        (0.3, [[0.4, 0.3], [0.3, 0.2]], "content"),  # no token prefers itself on average
        (0.3, [[0.5, 0.2], [0.2, -0.1 + 1e-12]], "content"),
        # It counts from a millionth of the scores on, which are sqrt(1.5) large; half of it is along the direction.
        (0.3, [[2.7e-6, 0.0], [0.0, 0.0]], "content and position"),
        (0.3, [[2.2e-6, 0.0], [0.0, 0.0]], "content"),
    ],
)
def test_what_a_state_has_learned(q, shift, region):
    assert cell(q, shift).region == region
    assert cell(q, encodings=None).region == ("content" if q else "no attention to content")


def test_the_row_of_a_state():
    """The position is the mean score of a token with itself minus that of the others; a common shift does not count."""
    row = cell(shift=((1.1, 0.8), (0.8, 0.9))).numbers()
    assert (row["alpha"], row["region"]) == ((0.7, None), ("content and position", None))
    np.testing.assert_allclose(row["q"], [0.3, error_bar(0.3 * jnp.array([0.99, 1.01]))])
    np.testing.assert_allclose(row["position"], [0.2, error_bar(jnp.array([0.225, 0.175]))])
    failed = cell(ok=False).numbers()
    assert failed["region"] == ("", None) and np.isnan([failed["q"], failed["position"]]).all()
    assert "position" not in cell(encodings=None).numbers()


@pytest.mark.full
def test_regions_with_encodings():
    """Position is learned below the onset of content, too, unless the target asks tokens to prefer each other."""
    model = layer(omega=0.4, encodings="long", mixing=MIXING, loss="cross_entropy")
    below, above = ta.sweep(ta.wide.solve, model, alpha=[1e-3, 1.0]).values("region")
    assert (below, above) == ("position, no attention to content", "content and position")
    other = layer(omega=0.4, encodings="long", mixing=[[0.25, 0.75], [0.75, 0.25]], loss="cross_entropy")
    assert ta.sweep(ta.wide.solve, other, alpha=1.0).values("region") == "content"


@pytest.mark.full
def test_instances_beside_the_theory_of_their_eigenvalues():
    """q deviates by .0124(10) at d = 40, beyond the theory of the 40 eigenvalues; the energy by less than 1 %."""
    model = layer(tau=0.05)
    instances = ta.wide.run_instances(
        model, 40, 1.0, lambda data, key: ta.wide.train(model, data), KEYS, sentences=2000
    )
    assert set(instances.values("branch")) == {"content"}
    theory = ta.wide.solve(layer(tau=0.05, teacher=ta.wide.Wishart(0.5).eigenvalues(40)), 1.0)
    np.testing.assert_allclose(instances.values("theory.largest"), theory.largest, rtol=1e-9)
    differences = instances.difference("content")
    assert differences == instances.difference() and not instances.difference("nowhere")["q"][0] == differences["q"][0]
    limits = {"q": 0.025, "m": 0.015, "trace": 0.015, "energy": 0.01, "largest": 0.02, "gen_error": 0.1}
    for name, limit in limits.items():
        simulation, expected, gap, bar = differences[name]
        assert abs(gap) < limit * expected + 3 * bar, name
        assert gap == pytest.approx(simulation - expected)
    assert "converged" in str(instances) and "theory" in str(instances)
    assert instances.ok.all() and (instances.values("iterations") > 10).all()
    assert np.ptp(instances.values("q")) > 0  # every key draws its own sentences
    alike = replace(instances, axes=(np.arange(2.0),), cells=instances.cells[:1] * 2).difference()
    assert np.isnan(alike["q"][-1]) and alike["q"][0] == instances.values("q")[0]  # two equal runs have no error bar


@pytest.mark.full
def test_instances_without_theory():
    """Every instance has sentences of its own, and fresh ones for its error."""
    data, keys = [], KEYS[:2]

    def run(drawn, key):
        found = ta.wide.train(layer(tau=0.3), drawn, steps=2)
        data.append((drawn, found.S))
        return found

    table = ta.wide.run_instances(layer(tau=0.3), 10, 1.0, run, keys, theory=False, sentences=256)
    assert np.isnan(table.values("theory.q")).all() and set(table.values("branch")) == {""}
    for (drawn, S), error, key in zip(data, table.values("gen_error"), keys, strict=True):
        held = ta.wide.heldout_error(layer(tau=0.3), drawn, S, jax.random.split(key, 3)[2], sentences=256)
        np.testing.assert_allclose(error, held.value)
    title, *rows = str(table).splitlines()
    assert title == "2 instances: max steps"
    assert [row.split()[0] for row in rows] == list(WideNumbers.__dataclass_fields__)
    reasons = [replace(table.cells[0], status=status).reason for status in (0, 2, 3)]
    assert reasons == ["", "", "the run failed: left domain"]  # a run that is out of steps counts


def test_the_optimal_learner_and_thresholds():
    table = ta.sweep(ta.wide.bayes, layer(), alpha=[0.05, 0.1], noise=[0.0, 0.1])
    np.testing.assert_array_equal(table.values()[1, 1], ta.wide.bayes(layer(noise=0.1), 0.1).distance)
    assert table.values("q")[0, 0] + table.values()[0, 0] == pytest.approx(1.5) and not table.stderr().any()
    through = ta.sweep(ta.wide.perfect_recovery, layer(), **{"teacher.kappa": [0.1, 0.5]})
    np.testing.assert_allclose(through.alpha, [0.0475, 0.1875])
    np.testing.assert_allclose(through.slope, [0.45, 0.25])


def test_a_cell_that_fails_says_why():
    table = ta.sweep(ta.wide.ridge_recovery, layer(), noise=[0.0, 0.1])
    assert table.found.tolist() == [True, False] and isinstance(table.cells[1], Missing)
    assert table.reason[1].startswith("noise must be zero for recovery")
