"""Instances are compared with the theory at the teacher that each one has drawn."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.finite.instances import Compared, _instance, _solution, distance, means_of
from tiedattn_jax.model.overlaps import Overlaps

pytestmark = pytest.mark.usefixtures("fast_compilation")
KEYS = jax.random.split(jax.random.key(0), 4)
CASE = CASES[0]  # semantic, at alpha = 2
NAMES = ("train_loss", "gen_error", "q", "V", "theta", "m")


@pytest.fixture(scope="module")
def instances(model, lines):
    progress = []
    keys = jax.random.split(jax.random.key(0), 8)

    def run(data, key):
        return ta.gamp(model, data, "semantic", tol=1e-10)

    instances = ta.run_instances(model, 250, 2.0, run, keys, nodes=lines, progress=lambda *k: progress.append(k))
    assert progress == [(k, 8) for k in range(9)]
    return instances


@pytest.mark.long
def test_message_passing_agrees_with_theory(instances):
    assert np.all(instances.ok) and instances.groups == {"semantic": 8}
    assert np.max(instances.values("gradient_norm")) <= 1e-10
    gaps = instances.difference("semantic")
    assert set(gaps) == set(NAMES)
    for name, (simulation, theory, gap, bar) in gaps.items():
        if name != "m":
            assert gap == pytest.approx(simulation - theory)
            limit = 1.22 * 0.04 * theory  # 4 % for a standard error, times Student's factor for eight instances
            assert bar < limit and abs(gap) < 3.5 * bar + 0.02 * theory, name


def test_theory_is_that_of_the_realised_teacher(model, lines, instances):
    realised = ta.DotProduct(teacher=4 * instances.values("rho")[3])
    point = ta.solve(realised, 2.0, "semantic", lines)
    losses, theory, q = (instances.values(name) for name in ("train_loss", "theory.train_loss", "theory.q"))
    np.testing.assert_allclose(theory[3], point.train_loss, rtol=1e-6)
    np.testing.assert_allclose(instances.values("theory.theta")[3], jnp.mean(point.overlaps.theta), rtol=1e-5)
    assert instances.stderr("theory.q")[3] > 0 and np.std(q) > 0.02 * np.mean(q)
    # The realised teacher explains most of the scatter.
    assert np.std(losses - theory) < np.std(losses)


def test_table(instances):
    text = instances.summary()
    assert "semantic: 8 of 8 instances, 8 at a critical point" in text
    losses = (f"{np.mean(instances.values(name)):.6g}" for name in ("train_loss", "theory.train_loss"))
    assert all(part in text for part in (*NAMES, *losses))


def test_rows_files_and_columns():
    """The rows say what the cells say; an unsettled instance keeps its row, with the reason, and has no values."""
    numbers = np.array([0.5, 0.25, 1.0])
    columns = {name: Compared(*[numbers + k] * 6) for k, name in enumerate(("simulation", "theory", "theory_stderr"))}
    columns |= {"branch": np.array(["semantic", "neither", "unsettled"]), "distance": np.ones((3, 2)) * [2.0, 1.0]}
    columns |= {"rho": numbers, "gradient_norm": numbers, "finished": numbers < 1, "iterations": np.arange(3)}
    instances = made.instances(**columns, status=np.array([0, 2, 4]), theory_status=np.zeros(3, int))
    first, _, last = instances.table()
    expected = {"instance": 0.0, "branch": "semantic", "q": 0.5, "theory.q": 1.5, "theory.q_stderr": 2.5, "reason": ""}
    expected |= {"distance.positional": 2.0, "distance.semantic": 1.0, "finished": True, "status": "converged"}
    assert first.items() >= expected.items() and "q_stderr" not in first
    assert last["branch"] == "unsettled" and last["q"] == 1.0
    assert instances.failures == ("instance = 2: the run did not settle: nonfinite",)
    assert instances.to_csv().splitlines()[1].startswith("0.0,semantic,0.5,")
    assert instances.values("branch").tolist() == ["semantic", "neither", ""]
    np.testing.assert_array_equal(instances.values("theory.V"), [1.5, 1.25, np.nan])
    np.testing.assert_array_equal(instances.stderr("theory.V"), [2.5, 2.25, np.nan])
    assert instances.stderr("V").tolist() == [0.0] * 3
    event = made.events("alpha_c", "sigma", [0.4, 0.5], [1.0, 2.0], [0.1, 0.1])
    for asked in (lambda: event.groups, lambda: event.difference("semantic")):
        with pytest.raises(ta.InputError, match=r"table must be one of .*, got question='alpha_c'"):
            asked()


def test_differences_are_those_of_the_usable_instances():
    """Differences use only usable instances, three of eight: means, scatter and the theory's error bar."""
    q, theory = np.array([1.0, 2.0, 4.0, 50.0, 60.0, 70.0, 80.0, 90.0]), np.array([1.5, 2.5, 3.0, *[np.nan] * 5])
    status = np.array([0, 1, 2, 3, 4, 0, 0, 0])
    simulation, theory, bars = (Compared(*[a] * 6) for a in (q, theory, np.full(8, 0.3)))
    zeros = np.zeros(8)
    columns = {
        "simulation": eqx.tree_at(lambda c: c.V, simulation, np.full(8, np.nan)),
        **{"theory": theory, "theory_stderr": bars, "status": status},
        "branch": np.array(["semantic"] * 3 + ["unsettled"] * 2 + ["semantic"] + ["positional"] * 2),
        **{"distance": np.zeros((8, 2)), "rho": zeros, "gradient_norm": zeros},
        **{"finished": zeros.astype(bool), "iterations": zeros.astype(int)},
        "theory_status": np.array([0, 1, 0, 0, 0, ta.Status.absent, 0, 0]),
    }
    instances = made.instances(**columns)
    gaps = instances.difference("semantic")
    scatter = float(error_bar(np.array([-0.5, -0.5, 1.0])))
    np.testing.assert_allclose(gaps["q"], [7 / 3, 7 / 3, 0, np.hypot(scatter, 0.3)], atol=1e-12)
    assert np.all(np.isnan(gaps["V"][:3]))
    assert instances.ok.tolist() == [s == 0 for s in status] and instances.found.tolist() == [s < 3 for s in status]
    assert instances.groups == {"positional": 2, "semantic": 4, "unsettled": 2}
    # In a report the mean of the theory is over the instances for which it has a state; its status is the worst.
    losses = [1.0, 2.0, 6.0, None, None, 100.0, 3.0, 5.0]
    points = [None if a is None else made.fixed_point(train_loss=jnp.full(4, a)) for a in losses]
    groups = means_of(made.instances(points, **columns))["groups"]
    assert groups["semantic"]["theory"]["train_loss"] == 3 and groups["semantic"]["theory"]["status"] == "absent"
    assert groups["positional"]["theory"]["train_loss"] == 4 and groups["positional"]["theory"]["status"] == "converged"


def test_states_are_compared_by_their_invariants():
    matrices = -jnp.stack([jnp.diag(jnp.array(entries)) for entries in ([1.0, 2.0], [3.0, 4.0])])
    x = Overlaps(q=matrices, V=2 * matrices, theta=-jnp.array([[[3.0], [4.0]]] * 2), m=-jnp.array([[6.0, 8.0]] * 2))
    compared = Compared.of(jnp.array(0.1), jnp.array(0.2), x)
    assert [float(a) for a in (compared.q, compared.V, compared.theta, compared.m)] == [-5.0, -10.0, 5.0, 10.0]
    assert (compared.train_loss, compared.gen_error) == (0.1, 0.2)


@pytest.mark.long
def test_together_equal_one_by_one(model):
    keys = jax.random.split(jax.random.key(1), 3)

    def run(data, key):
        return ta.train(model, data, "random", optimizer="adam", steps=50, key=key)

    progress = []
    options = {"theory": False, "progress": lambda done, total: progress.append((done, total))}
    separate, batched = (ta.run_instances(model, 60, 2.0, run, keys, batch=b, **options) for b in (1, 2))
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3), (0, 3), (2, 3), (3, 3)]
    for name in NAMES:
        np.testing.assert_allclose(separate.values(name), batched.values(name), rtol=1e-9)
    assert np.std(separate.values("train_loss")) > 0 and not np.any(separate.ok)
    assert np.all(np.isnan(separate.values("theory.q"))) and np.all(np.isnan(separate.values("V")))
    assert np.std(separate.values("rho")) > 0
    options = {"normalise": True, "theory": False}
    first, second = (ta.run_instances(model, 60, 2.0, run, keys[:1], sentences=n, **options) for n in (256, 512))
    np.testing.assert_allclose(first.values("rho"), 0.25, rtol=1e-12)
    assert first.values("gen_error") != second.values("gen_error") and first.values("q") == second.values("q")


def test_message_passing_that_does_not_settle_is_finished(model):
    def unsettled(data, key):
        result = ta.gamp(model, data, "semantic", tol=1e-10)
        return eqx.tree_at(lambda f: (f.Q, f.status), result, (result.Q + 0.01, jnp.array(int(ta.Status.max_steps))))

    def numbers_of(run, count=1):
        return ta.run_instances(model, 60, 2.0, run, KEYS[:count], theory=False, sentences=256)

    result = numbers_of(unsettled, 2)
    assert np.all(result.values("finished")) and np.all(result.ok) and np.max(result.values("gradient_norm")) <= 1e-10
    assert "2 finished by L-BFGS" in result.summary() or "1 finished by L-BFGS" in result.summary()

    def settled(data, key):
        result = ta.gamp(model, data, "semantic", tol=1e-10)
        end = ta.train(model, data, result.Q, optimizer="lbfgs", steps=1000, tol=1e-10)
        return eqx.tree_at(lambda f: f.Q, result, end.Q)

    assert not numbers_of(settled).cells[0].finished

    def blown_up(data, key):
        result = ta.gamp(model, data, "semantic", tol=1e-10)
        return eqx.tree_at(lambda f: (f.Q, f.status), result, (1e150 + result.Q, jnp.array(int(ta.Status.nonfinite))))

    result = numbers_of(blown_up)
    assert result.status.tolist() == [ta.Status.nonfinite] and not result.cells[0].finished and not result.found[0]
    assert np.isnan(result.values("V")[0]) and result.groups == {"unsettled": 1}


def test_what_message_passing_stopped_at_is_no_state(model, monkeypatch):
    """Message passing that runs out of steps, and is not finished by L-BFGS either, is not compared with the theory."""
    monkeypatch.setattr("tiedattn_jax.finite.instances._FINISH_STEPS", 1)

    def stopped(data, key):
        return ta.gamp(model, data, "semantic", steps=2)

    def short(data, key):
        return ta.train(model, data, "semantic", optimizer="adam", steps=2)

    options = {"theory": False, "sentences": 256}
    message_passing, training = (ta.run_instances(model, 60, 2.0, f, KEYS[:1], **options) for f in (stopped, short))
    assert message_passing.status[0] == training.status[0] == ta.Status.max_steps
    assert message_passing.groups == {"unsettled": 1} and training.groups == {"semantic": 1}
    assert np.isnan(message_passing.values("V")[0]) and not message_passing.found[0] and training.found[0]
    assert means_of(message_passing)["q"] is None


def test_a_run_that_minimises_no_risk_is_refused(model):
    def run(data, key):
        return ta.posterior_mean(model, data, steps=1)

    with pytest.raises(ta.InputError, match="run must return a result of `gamp` or `train`, got one of `posterior"):
        ta.run_instances(model, 40, 1.0, run, KEYS[:1], theory=False)


# Size and scatter of every quantity.
UNITS = {
    **{name: (getattr(CASE, name), 2) for name in ("train_loss", "q", "V")},
    **{"theta": ((CASE.q / 4) ** 0.5, 2), "m": (CASE.q**0.5, 3), "gen_error": (None, 1)},
}


def compared(**numbers):
    """The quantities of the state, some of them replaced."""
    return Compared(**{name: jnp.asarray(getattr(CASE, name)) for name in NAMES} | numbers)


@pytest.mark.parametrize("name", UNITS)
def test_distance_to_a_branch(name):
    """A quantity off by five units sets the distance to a branch; smaller gaps and the test error do not count."""
    size, scatter = UNITS[name]
    close = compared(train_loss=jnp.asarray(CASE.train_loss * 1.1), V=jnp.array(jnp.nan))
    gap = 5 * scatter * (size or 1.0) / 100**0.5
    far = eqx.tree_at(lambda c: getattr(c, name), close, jnp.asarray(getattr(CASE, name) + gap))
    assert distance(close, 100, made.fixed_point()) == pytest.approx(0.5)
    assert distance(far, 100, made.fixed_point()) == pytest.approx(5.0 if size else 0.5)
    assert distance(far, 400, made.fixed_point()) == pytest.approx(10.0 if size else 1.0)


def test_distance_with_error_bars_and_without_a_state():
    doubled = compared(train_loss=jnp.asarray(2 * CASE.train_loss))
    scattered = made.fixed_point(scatter=(-0.3, -0.1, 0.1, 0.3))
    bar = float(scattered.stderr.train_loss) / CASE.train_loss
    assert distance(doubled, 10**8, scattered) == pytest.approx(1 / bar, rel=1e-4) and bar > 0.05
    assert distance(doubled, 400, made.fixed_point(scatter=(0.0,))) == pytest.approx(10.0)  # the error bar is unknown
    assert distance(doubled, 100, made.fixed_point(status=[int(ta.Status.absent)] * 4)) == np.inf
    assert np.isnan(distance(doubled, 100, made.fixed_point(status=[int(ta.Status.max_steps)] * 4)))


def test_ends_are_named_for_what_they_are(model, monkeypatch):
    """Ends are named after the branch whose numbers they match: semantic, positional, or neither if halfway between."""
    states = {case.branch: made.fixed_point(case) for case in CASES[:2]}
    monkeypatch.setattr("tiedattn_jax.finite.instances.solve", lambda model, alpha, branch, nodes: states[branch])
    semantic, positional = ((s.overlaps, s.train_loss) for s in states.values())
    halfway = jax.tree.map(lambda a, b: 0.52 * a + 0.48 * b, semantic, positional)  # theta is the larger overlap
    endings = iter([semantic, halfway, positional, semantic])

    def run(data, key):
        end = ta.train(model, data, "semantic", optimizer="adam", steps=2)
        if len(returned) == 3:  # as if it had diverged
            end = eqx.tree_at(lambda e: e.status, end, jnp.array(int(ta.Status.nonfinite)))
        returned.append(next(endings))
        return eqx.tree_at(lambda e: (e.overlaps, e.train_loss), end, returned[-1])

    returned = []
    instances = ta.run_instances(model, 400, 2.0, run, KEYS, normalise=True, sentences=256)
    assert [cell.branch for cell in instances.cells] == ["semantic", "neither", "positional", "unsettled"]
    # The other branch is solved only where the first one is too far.
    distances = np.array([cell.distance for cell in instances.cells])
    assert np.isnan(distances).tolist() == [[True, False], [False, False], [False, True], [True, True]]
    assert distances[0, 1] < 0.01 and distances[2, 0] < 0.01 and np.all(distances[1] > 3)
    assert [cell.point and cell.point.branch for cell in instances.cells] == ["semantic", None, "positional", None]
    assert np.isnan(instances.values("theory.q")).tolist() == [False, True, False, True]
    np.testing.assert_allclose(instances.difference("positional")["train_loss"][:2], [positional[1]] * 2, rtol=1e-6)
    simulation, *theory = instances.difference("neither")["train_loss"]
    assert simulation == pytest.approx(float(halfway[1])) and np.all(np.isnan(theory))
    assert [cell.theory_status for cell in instances.cells] == [0, 0, 0, ta.Status.absent]


@pytest.mark.parametrize(("gap", "name"), [(2.99, "semantic"), (3.01, "neither"), (np.nan, "semantic")])
def test_three_units_are_far(monkeypatch, gap, name):
    """Within three units a run is on a branch, and on the first one if that cannot be told."""
    monkeypatch.setattr("tiedattn_jax.finite.instances.distance", lambda *_: gap)
    point = made.fixed_point()
    numbers = {"rho": np.array(0.25), "status": np.array(0), "finished": np.array(False), "iterations": np.array(3)}
    measured = {"simulation": compared(), "gradient_norm": np.array(1e-9), **numbers}
    outcome = {"measured": measured, "settled": True, "positional": False}
    cell = _instance(outcome, 100, lambda branch: point)
    assert cell.branch == name and (cell.point is point) == (name == "semantic")
    assert (cell.rho, cell.status, cell.finished, cell.iterations, cell.theory_status) == (0.25, 0, False, 3, 0)
    assert _instance(outcome | {"positional": True}, 100, None).branch == "positional"
    assert _instance(outcome | {"settled": False}, 100, lambda branch: point).branch == "unsettled"


@pytest.mark.parametrize(
    ("kind", "status", "solves"),
    [
        ("standard", "converged", [("semantic", None)]),
        ("overlaps", "converged", [("semantic", None), (None, "semantic")]),
        ("overlaps", "absent", [("semantic", None)]),
        ("means", "converged", [("semantic", None)]),
    ],
)
def test_states_where_the_teacher_overlaps_are_left_free(model, lines, monkeypatch, kind, status, solves):
    """They are solved again from the state of the branch; means of classes that overlap do not count."""
    point, asked = made.fixed_point(status=[int(ta.Status[status])] * 4), []

    def solve(model, alpha, branch, nodes, start=None):
        asked.append((branch, start and start.branch))
        return point

    monkeypatch.setattr("tiedattn_jax.finite.instances.solve", solve)
    if kind == "overlaps":  # with the second encoding alone
        tau, cross = jnp.array([[[1.0, 0.0], [0.0, 1.0]]]), jnp.array([[[0.0], [0.3]]])
        law = ta.SpectralLaw(jnp.ones(1), jnp.full((1, 2), 0.25), tau, jnp.ones((1, 1, 1)), cross)
        model = ta.DotProduct(spectrum=law)
    elif kind == "means":
        shares, means = {(0, 1): 0.5, (1, 0): 0.5}, {"means": [[0.0, 1.0], [0.0, -1.0]], "teacher_means": [0.3, -0.3]}
        law = ta.SpectralLaw.of_classes([0.25, 0.36], shares, encodings=[[1.0, 0.0], [-1.0, 0.0]], **means)
        model = ta.DotProduct(spectrum=law)
    assert _solution(model, 2.0, lines, "semantic").branch == "semantic" and asked == solves


@pytest.mark.parametrize(
    ("semantic", "positional", "name", "worst"),
    [
        ("max_steps", "converged", "semantic", "max_steps"),  # only the larger overlap is known
        ("absent", "absent", "neither", "absent"),
        ("absent", "max_steps", "neither", "absent"),
    ],
)
def test_theory_without_a_state_and_theory_that_fails(model, monkeypatch, semantic, positional, name, worst):
    status = {"semantic": ta.Status[semantic], "positional": ta.Status[positional]}

    def solve(model, alpha, branch, nodes):
        return made.fixed_point(status=[int(status[branch])] * 4)

    def run(data, key):
        return ta.train(model, data, "semantic", optimizer="adam", steps=2)

    monkeypatch.setattr("tiedattn_jax.finite.instances.solve", solve)
    instances = ta.run_instances(model, 60, 2.0, run, KEYS[:1], sentences=256)
    assert instances.groups == {name: 1} and instances.cells[0].theory_status == ta.Status[worst]


def instances_by_hand(**fields):
    """Four instances made by hand: the second diverged, the third has no theory, the fourth is on neither branch."""
    values = jnp.array([1.0, np.inf, 2.0, 5.0])
    defaults = {
        "simulation": Compared(**dict.fromkeys(NAMES, values)),
        "theory": Compared(**dict.fromkeys(NAMES, jnp.array([1.5, np.nan, np.nan, np.nan]))),
        "theory_stderr": Compared(**dict.fromkeys(NAMES, jnp.full(4, 0.1))),
        "branch": np.array(["semantic", "unsettled", "semantic", "neither"]),
        "distance": np.array([[np.nan, 0.5], [np.nan, np.nan], [np.nan, np.nan], [7.0, 9.0]]),
        "rho": np.array([0.2, 0.3, 0.4, 0.3]),
        "status": np.array([0, 4, 0, 0]),
        "finished": np.array([False, False, True, False]),
        "gradient_norm": np.array([1e-9, 1.0, 1e-8, 1e-9]),
        "iterations": np.array([3, 5, 4, 2]),
        "theory_status": np.array([0, 6, 2, 0]),
        "points": [made.fixed_point(CASES[0]), None, made.fixed_point(CASES[4]), None],
    }
    return made.instances(**{**defaults, **fields})


def test_instances_in_batches(model):
    """Every instance of a batch has its row; by default they run one by one, with teachers of random norm."""

    def run(data, key):
        return ta.train(model, data, data.teacher, optimizer="gd", steps=1)

    def table(**options):
        counted = []
        options |= {"theory": False, "sentences": 2, "progress": lambda *numbers: counted.append(numbers)}
        return ta.run_instances(model, 6, 1.0, run, KEYS[:3], **options), counted

    (single, ones), (batched, twos) = table(), table(batch=2)
    assert ones == [(0, 3), (1, 3), (2, 3), (3, 3)] and twos == [(0, 3), (2, 3), (3, 3)]
    assert len(batched.cells) == 3 and np.std(single.values("rho")) > 0
    for name in ("train_loss", "gen_error", "q", "rho"):
        np.testing.assert_allclose(batched.values(name), single.values(name), rtol=1e-9)


def test_what_is_told_of_instances():
    numbers = json.loads(json.dumps(means_of(instances_by_hand())))
    assert numbers["branch"] == "several" and numbers["q"] is None and numbers["stderr"]["q"] is None
    assert (numbers["status"], numbers["iterations"], numbers["gradient_norm"]) == ("nonfinite", 5, 1.0)
    assert numbers["rho"] == pytest.approx(0.3) and "theory" not in numbers
    groups, bar = numbers["groups"], pytest.approx(float(ta.error_bar(np.array([1.0, 2.0]))))
    assert {name: group["instances"] for name, group in groups.items()} == {"semantic": 2, "unsettled": 1, "neither": 1}
    assert groups["semantic"]["q"] == 1.5 and groups["semantic"]["stderr"]["q"] == bar
    # The numbers are of the instances for which the theory has a state, but the status is the worst of all.
    assert groups["semantic"]["theory"]["q"] == pytest.approx(CASES[0].q)
    assert groups["semantic"]["theory"]["status"] == "max steps"
    assert groups["neither"]["q"] == 5.0 and "theory" not in groups["neither"]
    assert groups["unsettled"]["q"] is None
    assert [report["finished_by_lbfgs"] for report in numbers["instances"]] == [False, False, True, False]
    assert [report.get("theory", {}).get("alpha") for report in numbers["instances"]] == [2.0, None, 1.0, None]
    assert numbers["instances"][3]["distance"] == {"positional": 7.0, "semantic": 9.0}
    # Unsettled instances enter no mean.
    report = means_of(instances_by_hand(branch=np.array(["semantic", "unsettled", "semantic", "unsettled"])))
    assert (report["branch"], report["q"]) == ("semantic", 1.5) and report["theory"]["q"] == pytest.approx(CASES[0].q)
    stalled = means_of(instances_by_hand(theory_status=np.array([1, 6, 2, 0])))["groups"]["semantic"]["theory"]
    assert stalled["q"] == pytest.approx(CASES[0].q)  # a state that stalled is one
    unsolved = means_of(instances_by_hand(theory_status=np.full(4, 2)))["groups"]["semantic"]
    assert unsolved["theory"]["q"] == pytest.approx((CASES[0].q + CASES[4].q) / 2)
    assert "theory" not in means_of(instances_by_hand(points=[]))
    assert means_of(instances_by_hand(branch=np.full(4, "unsettled")))["branch"] == "unsettled"
    page = instances_by_hand().summary()
    head, *others = page.splitlines()
    assert head == "4 instances: nonfinite, largest gradient 1.0e+00"
    assert others[0].startswith("neither: 1 of 4 instances, 1 at a critical")
    assert "semantic: 2 of 4 instances, 2 at a critical point (1 finished by L-BFGS)" in page
    assert page.endswith("unsettled: 1 of 4 instances, 0 at a critical point (0 finished by L-BFGS)")
    (neither, semantic) = page.split("semantic: 2 of")
    assert "theory" in semantic and "theory" not in neither
    rows = [line.split() for line in neither.splitlines()]
    assert ["q", "5", "5", "5"] in rows and ["distance,", "positional", "7", "7", "7"] in rows
    assert repr(instances_by_hand()).startswith("Table(4 instances; nonfinite")


def test_what_has_a_picture_draws_it():
    transition = made.transition(branches=(made.fixed_point(CASES[3]), made.fixed_point(CASES[2])))
    x = jax.tree.map(lambda a: a[0], made.fixed_point().replicates.overlaps)
    Q, unit, history = jnp.ones((60, 1)), jnp.ones(()), jax.tree.map(lambda a: jnp.stack([a, a]), x)
    training = ta.results.Training(Q, x, jnp.array(2), jnp.array(0), unit, unit, jnp.ones(3), jnp.ones(3))
    messages = jnp.ones((1, 1, 1)), jnp.ones((2, 1, 4)), unit, history, jnp.ones(1), unit, unit, unit
    run = ta.results.GAMP(Q, x, jnp.array(1), jnp.array(0), *messages)
    for result, panels in ((transition, 2), (instances_by_hand(), 5), (training, 2), (run, 4)):
        assert len(result.plot().axes) == panels
