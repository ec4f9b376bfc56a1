"""Sweeps and diagrams of wide layers: every cell is the answer for its setting, and its region what it has learned."""

from dataclasses import replace
from types import SimpleNamespace as Namespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.phases.questions import QUESTIONS
from tiedattn_jax.phases.table import Missing, Table
from tiedattn_jax.wide import tables
from tiedattn_jax.wide.channel import wide_nodes
from tiedattn_jax.wide.finite import scores
from tiedattn_jax.wide.tables import learned_positions

MIXING = [[0.8, 0.2], [0.3, 0.7]]
ALPHAS, TAUS = [0.01, 1.0], [0.1, 0.2]  # the onset is at .0233 and .0709

KEYS = jax.random.split(jax.random.key(0), 2)

pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(**options):
    return ta.WideDotProduct(**{"teacher": ta.Wishart(0.5), "tau": 0.1, **options})


@pytest.fixture(scope="module")
def diagram():
    return ta.phase_diagram(layer(), alpha=ALPHAS, tau=TAUS)


def test_every_cell_is_the_state_of_its_setting(diagram, tmp_path):
    assert isinstance(diagram, Table) and diagram.shape == (2, 2) and diagram.found.all()
    np.testing.assert_allclose(diagram.values("q")[1, 1], ta.solve(layer(tau=0.2), 1.0).q, rtol=1e-9)
    assert [[float(c.model.tau), float(c.alpha)] for c in diagram.cells] == [[t, a] for a in ALPHAS for t in TAUS]
    (*_, row) = diagram.table()
    assert row["region"] == "content" and row["q"] == diagram.values("q")[1, 1]
    assert 0 < row["q_stderr"] < 1e-4
    diagram.save(tmp_path / "diagram.npz")
    assert ta.load(tmp_path / "diagram.npz") == diagram
    dataset = diagram.to_xarray()
    assert dataset.q.dims == ("alpha", "tau") and dataset.region.values[0, 0] == "no attention to content"


def test_regions_without_encodings_are_told_by_the_onset(diagram):
    onset = ta.sweep(layer(), "alpha_c", tau=TAUS)
    above = np.array(ALPHAS)[:, None] > onset.alpha
    np.testing.assert_array_equal(diagram.values("region") == "content", above)
    assert "2  content" in str(diagram) and "2  no attention to content" in str(diagram)
    # The slope along tau is exact: the chord between neighbours lies between the slopes at both ends.
    chord = np.diff(onset.alpha) / np.diff(onset.at)
    assert onset.exact.all() and onset.slope.min() < chord < onset.slope.max()
    axis = diagram.plot(boundaries=[onset]).axes[0]
    drawn = {c.get_gid(): len(c.get_paths()) for c in axis.collections}
    assert drawn["content"] == drawn["no attention to content"] == 2 and drawn["content and position"] == 0
    assert "alpha_c" in [line.get_gid() for line in axis.lines]


def test_the_position_of_a_state():
    """The mean score of a token with itself minus the mean of the others; a common shift does not count."""
    model = layer(encodings="long", mixing=MIXING)
    offsets = [
        model.coordinates(jnp.array(shift) + 0.7) for shift in ([[0.5, 0.1], [0.1, 0.2]], [[0.5, 0.1], [0.1, 0.4]])
    ]
    state = Namespace(model=model, offset=sum(offsets) / 2, replicates=Namespace(offset=jnp.stack(offsets)))
    value, bar = tables.position_of(state)
    np.testing.assert_allclose([value, bar], [0.3, error_bar(jnp.array([0.25, 0.35]))])


@pytest.mark.parametrize(
    "shift, directions",
    [
        ([[0.3, 0.0], [0.0, 0.1]], 1),
        ([[0.0, 0.0], [0.0, 0.0]], 0),
        ([[0.4, 0.3], [0.3, 0.2]], 0),  # no token prefers itself on average
        ([[0.5, 0.2], [0.2, -0.1 + 1e-12]], 0),
    ],
)
def test_directions_of_position(shift, directions):
    model = layer(encodings="long", mixing=MIXING)
    assert learned_positions(Namespace(offset=model.coordinates(jnp.array(shift)), model=model)) == directions


@pytest.mark.parametrize("shift, is_learned", [(2.7e-6, True), (2.2e-6, False)])
def test_a_small_shift_counts_from_a_millionth_of_the_scores_on(shift, is_learned):
    """Half of the shift of one token lies along the direction; the scores are sqrt(1.5) large."""
    model = layer(encodings="long", mixing=MIXING)
    offset = model.coordinates(jnp.array([[shift, 0.0], [0.0, 0.0]]))
    assert learned_positions(Namespace(offset=offset, model=model)) == is_learned


def cell(q=0.3, position=0.4, ok=True, encodings="long"):
    """A made-up state, with what its row in a table needs."""
    model = layer(encodings=encodings, mixing=MIXING)
    shift = jnp.array([[position, 0.0], [0.0, 0.0]])
    offset = model.coordinates(shift) if encodings else jnp.zeros(0)
    numbers = {"q": q}, {"q": 0.01}
    return Namespace(
        model=model, offset=offset, replicates=Namespace(offset=jnp.stack([offset, offset])), q=jnp.asarray(q), ok=ok,
        numbers=lambda: numbers, alpha=jnp.asarray(0.7),
    )  # fmt: skip


@pytest.mark.parametrize(
    "q, position, region",
    [
        (0.0, 0.0, "no attention to content"),
        (0.3, 0.0, "content"),
        (0.0, 0.4, "position, no attention to content"),
        (0.3, 0.4, "content and position"),
    ],
)
def test_what_a_state_has_learned(q, position, region):
    assert tables.region_of(cell(q, position)) == region
    assert tables.region_of(cell(q, encodings=None)) == ("content" if q else "no attention to content")


def test_the_row_of_a_state():
    row = tables._state(cell(), "state")
    assert {name: row[name] for name in ("alpha", "region", "q")} == {
        "alpha": (pytest.approx(0.7), None), "region": ("content and position", None), "q": (0.3, 0.01),
    }  # fmt: skip
    np.testing.assert_allclose(row["position"], [0.2, 0.0], atol=1e-12)
    failed = tables._state(cell(ok=False), "state")
    assert failed["region"] == ("", None) and np.isnan([failed["q"], failed["position"]]).all()
    assert "position" not in tables._state(cell(encodings=None), "state")


@pytest.mark.long
def test_regions_with_encodings():
    """Position is learned below the onset of content, too, unless the target asks tokens to prefer each other."""
    model = layer(omega=0.4, encodings="long", mixing=MIXING, loss="cross_entropy")
    below, above = ta.sweep(model, "regions", alpha=[1e-3, 1.0]).values()
    assert (below, above) == ("position, no attention to content", "content and position")
    other = layer(omega=0.4, encodings="long", mixing=[[0.25, 0.75], [0.75, 0.25]], loss="cross_entropy")
    assert ta.sweep(other, "regions", alpha=1.0).values() == "content"


@pytest.fixture(scope="module")
def instances():
    calls = []
    keys = jax.random.split(jax.random.key(0), 3)

    def run(data, key):
        return ta.train(layer(tau=0.05), data)

    table = ta.run_instances(layer(tau=0.05), 40, 1.0, run, keys, progress=lambda *c: calls.append(c), sentences=2000)
    assert calls == [(k, 3) for k in range(4)]
    return table


@pytest.mark.long
def test_instances_beside_the_theory_of_their_eigenvalues(instances):
    """q deviates by .0124(10) at d = 40, beyond the theory of the 40 eigenvalues; the energy by less than 1 %."""
    theory = ta.solve(layer(tau=0.05, teacher=ta.Wishart(0.5).eigenvalues(40)), 1.0)
    np.testing.assert_allclose(instances.values("theory.largest"), theory.largest, rtol=1e-9)
    differences = instances.difference("content")
    assert differences == instances.difference() and not instances.difference("nowhere")["q"][0] == differences["q"][0]
    for name, limit in {
        "q": 0.025,
        "m": 0.015,
        "trace": 0.015,
        "energy": 0.01,
        "largest": 0.02,
        "gen_error": 0.1,
    }.items():
        simulation, expected, gap, bar = differences[name]
        assert abs(gap) < limit * expected + 3 * bar, name
        assert gap == pytest.approx(simulation - expected)
    assert "converged" in str(instances) and "theory" in str(instances)
    assert instances.ok.all() and (instances.values("iterations") > 10).all()
    assert np.ptp(instances.values("q")) > 0  # every key draws its own sentences
    alike = replace(instances, axes=(np.arange(2.0),), cells=instances.cells[:1] * 2).difference()
    assert np.isnan(alike["q"][-1]) and alike["q"][0] == instances.values("q")[0]  # two equal runs have no error bar


def test_instances_without_theory():
    data = []

    def run(drawn, key):
        data.append(drawn)
        return ta.train(layer(tau=0.3), drawn, steps=2)

    keys = jax.random.split(jax.random.key(1), 2)
    table = ta.run_instances(layer(tau=0.3), 10, 1.0, run, keys, theory=False, sentences=256)
    assert np.isnan(table.values("theory.q")).all() and set(table.values("branch")) == {""}
    assert "max steps" in str(table) and "gen_error" in str(table)
    for drawn, error, key in zip(data, table.values("gen_error"), keys, strict=True):
        S = ta.train(layer(tau=0.3), drawn, steps=2).S
        held = ta.heldout_error(layer(tau=0.3), drawn, S, jax.random.split(key, 3)[2], sentences=256)
        np.testing.assert_allclose(error, held.value)


def test_instances_are_put_beside_the_theory_of_their_eigenvalues(monkeypatch):
    """The theory is solved once, by default, for the eigenvalues that the sentences have."""
    names, asked, calls = list(tables.WideNumbers.__dataclass_fields__), [], []

    def solved(model, alpha, *, nodes):
        asked.append((model.teacher.values, alpha, nodes))
        mean, stderr = (Namespace(**dict.fromkeys(names, jnp.asarray(number))) for number in (0.5, 0.1))
        return Namespace(mean=mean, stderr=stderr, status=2, offset=jnp.zeros(0), q=jnp.asarray(0.5))

    monkeypatch.setattr(tables, "solve_wide", solved)
    model, one = layer(tau=0.3), jax.random.split(jax.random.key(1), 1)
    table = ta.run_instances(
        model, 10, 1.0, lambda data, key: ta.train(model, data, steps=2), one, nodes=7, sentences=256,
        progress=lambda *step: calls.append(step),
    )  # fmt: skip
    ((values, alpha, nodes),) = asked
    assert (alpha, nodes, calls) == (1.0, 7, [(0, 1), (1, 1)])
    np.testing.assert_array_equal(values, np.sort(model.teacher.eigenvalues(10)))
    (row,) = table.table()
    assert row["branch"] == "content" and row["iterations"] == 2 and table.cells[0].theory_status == 2
    assert [row[f"theory.{name}"] for name in names] == [0.5] * 8 and row["theory.q_stderr"] == pytest.approx(0.1)
    assert "simulation" in str(table) and str(table).startswith("1 instances: max steps")


@pytest.mark.parametrize("status, reason", [(0, ""), (2, ""), (3, "the run failed: left domain")])
def test_a_run_out_of_steps_counts(status, reason):
    none = tables.WideNumbers(*[jnp.zeros(())] * 8)
    assert tables.WideInstance(none, none, none, "", status, 6, 1).reason == reason


def test_one_instance_has_a_page():
    model, one = layer(tau=0.3), jax.random.split(jax.random.key(1), 1)
    run = ta.run_instances(
        model, 10, 1.0, lambda data, key: ta.train(model, data, steps=2), one, theory=False, sentences=256
    )
    title, *rows = str(run).splitlines()
    assert title == "1 instances: max steps"
    assert [row.split()[0] for row in rows] == list(tables.WideNumbers.__dataclass_fields__)


def test_error_on_sentences_that_training_has_not_seen():
    """The mean and its error bar are those of all fresh sentences, and of the sentences of the data without a key."""
    model = layer(encodings="long", mixing=MIXING, omega=0.4)
    data = ta.sample_data(model, 10, 3.0, jax.random.key(0))
    S = 0.5 * data.teacher + jnp.eye(10) / 3
    losses = jax.vmap(model.loss)(scores(data.x, S), data.scores)
    given = ta.heldout_error(model, data, S)
    np.testing.assert_allclose([given.value, given.stderr], [losses.mean(), losses.std(ddof=1) / np.sqrt(300)])
    few, many = (ta.heldout_error(model, data, S, jax.random.key(1), sentences=n) for n in (256, 256 * 64))
    assert few.stderr / many.stderr == pytest.approx(8, rel=0.2)
    assert abs(given.value - many.value) < 3 * given.stderr and abs(few.value - many.value) < 3 * few.stderr
    other = ta.heldout_error(model, data, S, jax.random.key(2), sentences=256)
    assert other.value != few.value


def test_the_optimal_learner_and_thresholds():
    table = ta.sweep(layer(), "bayes", alpha=[0.05, 0.1], noise=[0.0, 0.1])
    np.testing.assert_array_equal(table.values()[1, 1], ta.bayes(layer(noise=0.1), 0.1).distance)
    assert table.values("q")[0, 0] + table.values()[0, 0] == pytest.approx(1.5) and not table.stderr().any()
    models = [(layer(), None), layer(teacher=ta.Wishart(0.1), beta=2.0)]
    recovery = ta.sweep(models, "ridge_recovery")
    np.testing.assert_allclose(recovery.alpha, [0.2110875, 0.078786], rtol=1e-5)
    through = ta.sweep(layer(), "perfect_recovery", **{"teacher.kappa": [0.1, 0.5]})
    np.testing.assert_allclose(through.alpha, [0.0475, 0.1875])
    np.testing.assert_allclose(through.slope, [0.45, 0.25])


def test_a_cell_that_fails_says_why():
    table = ta.sweep(layer(), "ridge_recovery", noise=[0.0, 0.1])
    assert table.found.tolist() == [True, False] and isinstance(table.cells[1], Missing)
    assert table.reason[1].startswith("noise must be zero for recovery")


def test_all_cells_share_the_nodes_of_the_finest(monkeypatch):
    seen = []
    kind = QUESTIONS["state"]._replace(call=lambda layer, alpha, nodes: seen.append(nodes) or (layer, alpha))
    monkeypatch.setitem(QUESTIONS, "state", kind)
    ta.sweep(layer(), "state", alpha=1.0, beta=[0.5, 1.0, 1.5])
    finest = wide_nodes(layer(beta=1.5), None)
    assert all(nodes is seen[0] for nodes in seen) and seen[0].weight.shape == finest.weight.shape


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda m: ta.sweep(m, "semantic", alpha=1.0), "question must be one of state, regions, bayes, alpha_c"),
        (lambda m: ta.sweep(m, "state", tau=[0.1]), "alpha must be given"),
        (lambda m: ta.sweep(m, "bayes", noise=[0.1]), "alpha must be given"),
        (lambda m: ta.sweep(m, "alpha_c", alpha=[0.1]), "alpha must be left out"),
        (lambda m: ta.sweep(m, "state", alpha=1.0, lam=[0.1]), "lam must name one of alpha, beta, omega, kappa, tau"),
        (lambda m: ta.sweep(m, "state", alpha=1.0, tau=[-0.1, 0.1]), "tau must be positive"),
        (lambda m: ta.sweep(m, "state", alpha=1.0, omega=[0.0, 2.0]), "omega must be in"),
        (lambda m: ta.sweep(m, "state", alpha=1.0, **{"teacher.kappa": [-1.0, 1.0]}), "kappa must be positive"),
        (lambda m: ta.sweep(m, "state", alpha=1.0, follow=True), "follow must name one of"),
        (lambda m: ta.sweep(m, "bayes", alpha=1.0, nodes=64), "nodes must be left out for 'bayes'"),
        (lambda m: ta.sweep([m, ta.DotProduct()], "state", alpha=1.0), "model must be"),
        (lambda m: ta.phase_diagram(m, alpha=[1.0]), "axes must be two"),
        (lambda m: ta.run_instances(m, 10, 1.0, lambda data, key: None, KEYS, theory=False), "run must be a function"),
        (lambda m: ta.run_instances(m, 10, 1.0, lambda data: None, KEYS), "run must take"),
        (lambda m: ta.run_instances(m, 10, 1.0, lambda data, key: None, KEYS[0]), "keys must be"),
        (lambda m: ta.heldout_error(m, None, jnp.eye(10)), "data must be sentences from sample_data with a wide"),
        (lambda m: ta.heldout_error(m, ta.sample_data(m, 10, 1.0, KEYS[0]), jnp.eye(9)), "S must have shape"),
        (lambda m: ta.heldout_error(m, ta.sample_data(m, 10, 1.0, KEYS[0]), jnp.eye(10), 3), "key must be"),
        (lambda m: ta.phase_diagram(m, tau=[0.1], omega=[0.1]), "alpha must be given"),
    ],
)
def test_bad_sweeps(unchecked, call, sentence):
    with pytest.raises(ta.InputError, match=sentence):
        call(layer())
