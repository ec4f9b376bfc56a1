"""Instances are compared with the theory at the teacher that each one has drawn."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.finite.instances import Compared, _instance, _mean_record, distance, means_of
from tiedattn_jax.model.overlaps import Overlaps

KEYS = jax.random.split(jax.random.key(0), 8)
CASE = CASES[0]  # semantic, at alpha = 2
NAMES = ("train_loss", "gen_error", "q", "V", "theta", "m")


@pytest.mark.parametrize(("d", "count"), [(60, 2), pytest.param(250, 8, marks=pytest.mark.full)])
def test_theory_is_that_of_the_realised_teacher(model, lines, d, count):
    """Simulation and theory agree within error bars, and the realised teacher explains most of the scatter."""
    progress = []

    def run(data, key):
        return ta.gamp(model, data, "semantic", tol=1e-10)

    options = {"nodes": lines, "sentences": 50_000 if d == 250 else 256}
    instances = ta.run_instances(model, d, 2.0, run, KEYS[:count], progress=lambda *k: progress.append(k), **options)
    assert progress == [(k, count) for k in range(count + 1)]
    assert np.all(instances.ok) and instances.groups == {"semantic": count}
    assert np.max(instances.values("gradient_norm")) <= 1e-10
    point = ta.solve(ta.DotProduct(teacher=4 * instances.values("rho")[1]), 2.0, "semantic", lines)
    losses, theory, q = (instances.values(name) for name in ("train_loss", "theory.train_loss", "theory.q"))
    np.testing.assert_allclose(theory[1], point.train_loss, rtol=1e-6)
    np.testing.assert_allclose(instances.values("theory.theta")[1], np.mean(point.overlaps.theta), rtol=1e-5)
    assert instances.stderr("theory.q")[1] > 0 and np.std(q) > 0.02 * np.mean(q)
    gaps = instances.difference("semantic")
    assert tuple(gaps) == NAMES
    if d == 250:
        assert np.std(losses - theory) < np.std(losses)
        for name, (simulation, theory, gap, bar) in gaps.items():
            if name != "m":
                assert gap == pytest.approx(simulation - theory)
                limit = 1.22 * 0.04 * theory  # 4 % for a standard error, times Student's factor for eight instances
                assert bar < limit and abs(gap) < 3.5 * bar + 0.02 * theory, name


def trained(data, key):
    return ta.train(ta.DotProduct(), data, "semantic", optimizer="lbfgs", steps=200)


@pytest.mark.full
def test_instances_on_an_executor(model, tmp_path):
    """Processes find what this one does; their runs are kept, and the same call goes on from them."""
    options = {"theory": False, "sentences": 256}
    here = ta.run_instances(model, 30, 2.0, trained, KEYS[:3], **options)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        there = ta.run_instances(model, 30, 2.0, trained, KEYS[:3], executor=pool, out=tmp_path, **options)
        with pytest.raises(ta.InputError, match="executor must be given what can be sent to it"):
            ta.run_instances(model, 30, 2.0, lambda data, key: trained(data, key), KEYS[:2], executor=pool, **options)
    kept = ta.run_instances(model, 30, 2.0, trained, KEYS[:3], out=tmp_path, resume=True, **options)
    for table in (there, kept):
        assert table.groups == here.groups
        np.testing.assert_allclose(table.values("train_loss"), here.values("train_loss"), rtol=1e-9)
    with pytest.raises(ta.InputError, match="out must hold pieces of the same question, settings, options"):
        ta.run_instances(model, 30, 2.1, trained, KEYS[:3], out=tmp_path, resume=True, **options)


@pytest.mark.full
def test_states_of_a_teacher_that_overlaps_with_encodings(model):
    """Theta and m are then both free in the theory, and m is that of the simulation."""
    tau, cross = jnp.array([[[1.0, 0.0], [0.0, 1.0]]]), jnp.array([[[0.0], [0.3]]])  # with the second encoding alone
    law = ta.SpectralLaw(jnp.ones(1), jnp.full((1, 2), 0.25), tau, jnp.ones((1, 1, 1)), cross)
    other = ta.DotProduct(spectrum=law)

    def run(data, key):
        return ta.gamp(other, data, "semantic")

    instances = ta.run_instances(other, 250, 2.0, run, KEYS[:4], nodes=ta.Lines(5), sentences=256)
    assert instances.groups == {"semantic": 4} and np.all(instances.values("theory.m") > 0.02)
    _, theory, gap, bar = instances.difference("semantic")["m"]
    assert abs(gap) < 4 * bar + 0.02 * theory


def test_states_are_compared_by_their_invariants():
    matrices = -np.array([np.diag(entries) for entries in ([1.0, 2.0], [3.0, 4.0])])
    x = Overlaps(q=matrices, V=2 * matrices, theta=-np.array([[[3.0], [4.0]]] * 2), m=-np.array([[6.0, 8.0]] * 2))
    compared = Compared.of(jnp.array(0.1), jnp.array(0.2), x)
    assert [float(getattr(compared, name)) for name in NAMES] == [0.1, 0.2, -5.0, -10.0, 5.0, 10.0]


MAX_STEPS, NONFINITE = int(ta.Status.max_steps), int(ta.Status.nonfinite)


@pytest.mark.parametrize(
    ("moved", "status", "ended", "group"),
    [
        (0.01, MAX_STEPS, ta.Status.converged, "semantic"),  # L-BFGS finishes
        (0.0, 0, ta.Status.converged, "semantic"),
        (1e150, MAX_STEPS, ta.Status.max_steps, "unsettled"),
        (1e150, NONFINITE, ta.Status.nonfinite, "unsettled"),
    ],
)
def test_message_passing_is_finished_by_l_bfgs(model, moved, status, ended, group):
    """What does not settle has no response V and is no state. From a critical point L-BFGS takes no step."""

    def run(data, key):
        result = ta.gamp(model, data, "semantic", tol=1e-10)
        Q = result.Q if moved else ta.train(model, data, result.Q, optimizer="lbfgs", steps=1000, tol=1e-10).Q
        return eqx.tree_at(lambda f: (f.Q, f.status), result, (Q + moved, jnp.array(status)))

    instances = ta.run_instances(model, 60, 2.0, run, KEYS[:1], theory=False, sentences=256)
    (cell,) = instances.cells
    assert str(instances).startswith("1 instance: ")
    assert cell.status == ended and cell.finished == (moved == 0.01) and instances.groups == {group: 1}
    assert np.isnan(instances.values("V")[0]) == (status != 0) and instances.found[0] == (group == "semantic")
    assert group == "unsettled" or cell.gradient_norm <= 1e-10


@pytest.mark.parametrize("init", ["semantic", "positional"])
def test_training_that_runs_out_of_steps_counts(model, init):
    """Its theory, test error and teacher are what was asked for."""

    def run(data, key):
        return ta.train(model, data, init, optimizer="adam", steps=2)

    instances, other = (
        ta.run_instances(model, 60, 2.0, run, KEYS[:1], theory=False, normalise=True, sentences=n) for n in (256, 257)
    )
    assert instances.status[0] == ta.Status.max_steps and instances.found[0] and instances.groups == {init: 1}
    np.testing.assert_allclose(instances.values("rho"), 0.25, rtol=1e-12)
    assert instances.values("gen_error") != other.values("gen_error") and instances.values("q") == other.values("q")
    assert np.isnan(instances.values("theory.q")[0]) and np.isnan(instances.values("V")[0])


def compared(share=1.0, **numbers):
    """The quantities of a mixture of the semantic and the positional state, some of them replaced."""
    mixed = {name: share * getattr(CASE, name) + (1 - share) * getattr(CASES[1], name) for name in NAMES}
    return Compared(**{name: np.asarray(a) for name, a in (mixed | numbers).items()})


# Size and scatter of every quantity.
UNITS = {
    **{name: (getattr(CASE, name), 2) for name in ("train_loss", "q", "V")},
    **{"theta": ((CASE.q / 4) ** 0.5, 2), "m": (CASE.q**0.5, 3), "gen_error": (None, 1)},
}


@pytest.mark.parametrize("name", UNITS)
def test_distance_to_a_branch(name):
    """A quantity off by five units sets the distance to a branch; smaller gaps and the test error do not count."""
    size, scatter = UNITS[name]
    others = {"train_loss": CASE.train_loss * 1.1, "V": np.nan}
    far = compared(**others | {name: getattr(CASE, name) + 5 * scatter * (size or 1.0) / 100**0.5})
    assert distance(compared(**others), 100, made.fixed_point()) == pytest.approx(0.5)
    assert distance(far, 100, made.fixed_point()) == pytest.approx(5.0 if size else 0.5)
    assert distance(far, 400, made.fixed_point()) == pytest.approx(10.0 if size else 1.0)


def test_distance_with_error_bars():
    doubled, scattered = compared(train_loss=2 * CASE.train_loss), made.fixed_point(scatter=(-0.3, -0.1, 0.1, 0.3))
    bar = float(scattered.stderr.train_loss) / CASE.train_loss
    assert distance(doubled, 10**8, scattered) == pytest.approx(1 / bar, rel=1e-4) and bar > 0.05
    assert distance(doubled, 400, made.fixed_point(scatter=(0.0,))) == pytest.approx(10.0)  # the error bar is unknown


FOUND = "converged converged"


@pytest.mark.parametrize(
    ("simulation", "states", "branch", "distances", "status"),
    [
        (compared(), FOUND, "semantic", (np.nan, 0), "converged"),  # the other branch is not solved
        (compared(0.0), FOUND, "positional", (0, np.nan), "converged"),
        (compared(0.52), FOUND, "neither", (None, None), "converged"),
        (compared(q=1.299 * CASE.q), FOUND, "semantic", (np.nan, 2.99), "converged"),
        (compared(q=1.301 * CASE.q), FOUND, "neither", (None, 3.01), "converged"),
        (compared(), "max_steps converged", "semantic", (np.nan, np.nan), "max_steps"),  # the larger overlap is known
        (compared(), "absent absent", "neither", (np.inf, np.inf), "absent"),
        (compared(), "absent max_steps", "neither", (np.nan, np.inf), "absent"),
    ],
)
def test_ends_are_named_for_what_they_are(simulation, states, branch, distances, status):
    """Ends are named after the branch that is at most three units away; units are a tenth at d = 400."""
    statuses = [int(ta.Status[name]) for name in states.split()]
    points = {c.branch: made.fixed_point(c, status=[s] * 4) for c, s in zip(CASES[:2], statuses, strict=True)}
    numbers = {"rho": np.array(0.25), "status": np.array(0), "finished": np.array(False), "iterations": np.array(3)}
    measured = {"simulation": simulation, "gradient_norm": np.array(1e-9), **numbers}
    outcome = {"measured": measured, "settled": True, "positional": branch == "positional"}
    cell = _instance(outcome, 400, points.get)
    assert cell.branch == branch and cell.point is points.get(branch) and cell.theory_status == ta.Status[status]
    assert (cell.rho, cell.status, cell.finished, cell.iterations) == (0.25, 0, False, 3)
    for found, expected in zip(cell.distance, distances, strict=True):
        assert found > 3 if expected is None else found == pytest.approx(expected, abs=1e-6, nan_ok=True)
    np.testing.assert_allclose(cell.theory.q, cell.point.overlaps.q[0, 0, 0] if cell.point else np.nan)
    assert _instance(outcome, 400, None).branch == ("positional" if branch == "positional" else "semantic")
    unsettled = _instance(outcome | {"settled": False}, 400, points.get)
    assert (unsettled.branch, unsettled.point, unsettled.theory_status) == ("unsettled", None, ta.Status.absent)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_instances_in_batches(model, kind):
    """Every instance of a batch has its row, whatever its key; by default they run one by one, with random norms."""
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)

    def run(data, key):
        return ta.train(model, data, data.teacher, optimizer="gd", steps=1)

    def table(batch):
        counted = []
        options = {"theory": False, "sentences": 2, "progress": lambda *numbers: counted.append(numbers)}
        return ta.run_instances(model, 6, 1.0, run, keys, batch=batch, **options), counted

    (single, ones), (batched, twos) = table(1), table(2)
    assert ones == [(0, 3), (1, 3), (2, 3), (3, 3)] and twos == [(0, 3), (2, 3), (3, 3)]
    assert len(batched.cells) == 3 and np.std(single.values("rho")) > 0
    for name in ("train_loss", "gen_error", "q", "rho"):
        np.testing.assert_allclose(batched.values(name), single.values(name), rtol=1e-9)
    assert np.all(np.isnan(single.values("theory.q"))) and np.all(np.isnan(single.values("V")))


def instances_by_hand(**fields):
    """Four instances made by hand: the second diverged, the third has no theory, the fourth is on neither branch."""
    values = np.array([1.0, np.inf, 2.0, 5.0])
    defaults = {
        "simulation": Compared(*[values] * 6),
        "theory": Compared(*[np.array([1.5, 2.5, np.nan, np.nan])] * 6),
        "theory_stderr": Compared(*[np.full(4, 0.1)] * 6),
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


def test_rows_files_and_columns():
    """The rows say what the cells say; an unsettled instance keeps its row, with the reason, and has no values."""
    instances = instances_by_hand()
    first, second, _, last = instances.table()
    expected = {"instance": 0.0, "branch": "semantic", "q": 1.0, "theory.q": 1.5, "theory.q_stderr": 0.1, "reason": ""}
    expected |= {"distance.semantic": 0.5, "finished": False, "status": "converged"}
    assert first.items() >= expected.items() and "q_stderr" not in first
    assert second["branch"] == "unsettled" and second["q"] == np.inf and last["distance.positional"] == 7.0
    assert instances.to_csv().splitlines()[1].startswith("0.0,semantic,1.0,")
    assert instances.values("branch").tolist() == ["semantic", "", "semantic", "neither"]
    np.testing.assert_array_equal(instances.values("theory.V"), [1.5, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(instances.stderr("theory.V"), [0.1, np.nan, 0.1, 0.1])
    assert instances.stderr("V").tolist() == [0.0] * 4 and repr(instances).startswith("Table(4 instances; nonfinite")
    event = made.events("alpha_c", "sigma", [0.4, 0.5], [1.0, 2.0], [0.1, 0.1])
    for asked in (lambda: event.groups, lambda: event.difference("semantic")):
        with pytest.raises(ta.InputError, match=r"table must be one of .*, got question='alpha_c'"):
            asked()


def test_what_is_told_of_instances():
    numbers = json.loads(json.dumps(means_of(instances_by_hand())))
    assert numbers["branch"] == "several" and numbers["q"] is None and numbers["stderr"]["q"] is None
    assert (numbers["status"], numbers["iterations"], numbers["gradient_norm"]) == ("nonfinite", 5, 1.0)
    assert numbers["rho"] == pytest.approx(0.3) and "theory" not in numbers
    groups, bar = numbers["groups"], pytest.approx(float(ta.results.error_bar(np.array([1.0, 2.0]))))
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
    assert "theory" not in means_of(instances_by_hand(points=()))
    assert means_of(instances_by_hand(branch=np.full(4, "unsettled")))["branch"] == "unsettled"
    # Numbers by token stay so; a group may lack a theory.
    assert _mean_record([{"q": [1.0, 3.0]}, {"q": [3.0, 6.0]}]) == {"q": [2.0, 4.5]}
    assert _mean_record([{"q": [1.0, 2.0]}, {"q": np.nan}]) == {"q": [1.0, 2.0]}
