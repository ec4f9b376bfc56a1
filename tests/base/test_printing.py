"""Results print themselves, with error bars and statuses."""

import dataclasses
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.base.report import by_token, entries, rows_of, table, with_error
from tiedattn_jax.finite.instances import NAMES, Compared, means_of
from tiedattn_jax.phases.table import Table

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


class WithoutTarget(ta.DotProduct):
    target = ta.Model.target


def test_a_state_of_a_model_without_a_target():
    point = dataclasses.replace(made.fixed_point(), model=WithoutTarget())
    assert "replicon" in str(point) and "linear attention" not in str(point)
    assert repr(point).startswith("FixedPoint(semantic branch at alpha = 2;")


def test_a_fixed_point(capsys):
    point = made.fixed_point(scatter=SCATTER, replicon=[0.25] * 4, residual=[1e-6, 2e-6, 1e-6, 1e-6])
    line = repr(point)
    assert line.startswith("FixedPoint(semantic branch at alpha = 2; q=0.114817, V=12.6685, theta=0.158158(15), m=0, ")
    assert line.endswith("converged, residual 2.0e-06)") and "\n" not in line
    print(point)
    page, html = capsys.readouterr().out, point._repr_html_()
    assert page == point.summary() + "\n" and page.startswith("semantic branch at alpha = 2: converged")
    for words in ("0.158158(15)  ", "test error of the best linear", "below 1: stable\n", "response of the student"):
        assert words in page
    for words in ("jumps matter", "formally infinite", "unresolved", "six digits"):
        assert words not in page
    assert "<td style='text-align:left'>0.158158(15)</td>" in html and "FixedPoint" in html
    jumps = made.fixed_point(jump_mass=[0.5] * 4, unresolved=[1e-3] * 4).summary()
    for words in ("formally infinite", "jumps matter", "50.0%", "0.1%        of the nodes (Sobol"):
        assert words in jumps
    assert "whose rest is negative" in made.fixed_point(jump_mass=[1.4] * 4).summary()
    assert "absent; the overlaps are those of the state in which" in made.fixed_point(status=[6] * 4).summary()
    single = eqx.tree_at(lambda p: p.model.lam, point, point.model.lam.astype(jnp.float32))
    assert "about six digits" in single.summary()


def test_a_state_of_no_branch_says_what_it_is():
    """Its order parameters were all free, and it may follow some of the teacher's directions alone."""
    point = made.fixed_point()
    free = ta.results.FixedPoint(point.model, point.alpha, point.replicates, None)
    assert repr(free).startswith("FixedPoint(semantic state at alpha = 2; q=")
    model = ta.DotProduct(rank=2, teacher=np.eye(2))
    for theta in (np.diag([0.1, 0.0]), np.diag([0.1, 0.05])):
        pairs = [jnp.broadcast_to(a, (4, 2, 2, 2)) for a in (0.2 * np.eye(2), np.eye(2), theta)]
        replicates = eqx.tree_at(lambda s: s.overlaps, point.replicates, ta.Overlaps(*pairs, jnp.zeros((4, 2, 2))))
        several = ta.results.FixedPoint(model, point.alpha, replicates, None)
        directions = np.count_nonzero(theta)
        title = f"semantic state at alpha = 2, along {directions} of 2 directions of the teacher: converged"
        assert several.summary().startswith(title)


def test_an_absent_branch_has_no_losses():
    """Losses are NaN if no replicate has the branch; their derivatives are zero, so that other lanes keep theirs."""
    absent, partly = made.fixed_point(status=[6] * 4), made.fixed_point(status=[6, 0, 0, 0], scatter=SCATTER)
    for losses in (absent, absent.stderr):
        assert np.isnan(losses.train_loss) and np.isnan(losses.gen_error)
    assert absent.q == made.fixed_point().q and np.isfinite([partly.train_loss, partly.stderr.gen_error]).all()

    def total(factor):
        points = (eqx.tree_at(lambda p: p.replicates.train_loss, p, factor * p.replicates.train_loss) for p in both)
        return sum(jnp.where(p.ok, p.train_loss, 0.0) for p in points)

    both = absent, made.fixed_point()
    np.testing.assert_allclose(jax.grad(total)(1.0), CASES[0].train_loss)


def test_numbers_of_a_fixed_point_for_json():
    point = made.fixed_point(CASES[1], scatter=SCATTER, residual=[0.0, 2e-3, 0.0, 0.0], status=[0, 1, 0, 0])
    numbers = json.loads(json.dumps(point.to_dict()))
    assert (numbers["alpha"], numbers["omega"], numbers["lam"], numbers["branch"]) == (2.0, 0.3, 0.01, "positional")
    assert numbers["q"] == CASES[1].q and numbers["m"] == pytest.approx(CASES[1].m)  # m of the first token
    assert numbers["stderr"]["m"] == pytest.approx(float(point.stderr.overlaps.m[0, 0])) != 0
    # The report has the worst of the replicates, not their mean.
    assert numbers["residual"] == 2e-3 and numbers["status"] == "stalled at the accuracy of the averages"
    assert "residual" not in numbers["stderr"] and "status" not in numbers["stderr"]
    assert numbers["affected_by_jumps"] == []
    assert "replicon" in made.fixed_point(jump_mass=[0.5] * 4).to_dict()["affected_by_jumps"]


def test_scalars_of_two_tokens():
    point = made.fixed_point(CASES[1])
    assert (float(point.q), float(point.V), float(point.m)) == (CASES[1].q, CASES[1].V, CASES[1].m)
    assert point.theta == 0 and point.status_name == "converged"
    batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), point)
    np.testing.assert_allclose([batch.m, batch.q], np.outer([CASES[1].m, CASES[1].q], [1, 2]))
    three_tokens = jax.tree.map(lambda a: jnp.concatenate([a, a[:, :1]], 1), point.replicates.overlaps)
    three_tokens = eqx.tree_at(lambda p: p.replicates.overlaps, point, three_tokens)
    with pytest.raises(ta.InputError, match=r"\(2, 1, 1\) for the scalar q, got \(3, 1, 1\): use overlaps.q"):
        _ = three_tokens.q


def test_a_batch_keeps_its_lanes_apart():
    first, second = made.fixed_point(scatter=SCATTER), made.fixed_point(CASES[1], status=[0, 0, 0, 1])
    renamed = ta.results.FixedPoint(second.model, second.alpha, second.replicates, first.branch)
    batch = jax.tree.map(lambda *a: jnp.stack(a), first, renamed)
    for lane, point in enumerate((first, second)):
        for name in ("mean", "stderr"):
            of_lane = jax.tree.map(lambda a, lane=lane: a[lane], getattr(batch, name))
            jax.tree.map(np.testing.assert_array_equal, of_lane, getattr(point, name))
        assert batch.status[lane] == point.status and batch.residual[lane] == point.residual
    assert batch.status_name == ["converged", "stalled at the accuracy of the averages"]
    assert batch.exists.tolist() == [True, True]


def test_without_numbers_there_are_shapes():
    point, texts = made.fixed_point(), []
    jax.jit(lambda p: texts.extend((repr(p), str(p), p._repr_html_())) or p.alpha)(point)
    batch = jax.tree.map(lambda a: jnp.stack([a, a]), point)
    for text in (*texts, repr(batch), str(batch), repr(batch.model), repr(batch.overlaps)):
        assert "[" in text and "f64" in text
    assert all("f64[]" not in repr(a) for a in (point, point.model, point.overlaps, ta.Settings()))
    structure = jax.eval_shape(lambda p: p, point)
    assert "float64" in repr(structure) and repr(jax.tree.map(lambda a: None, point))


def test_a_transition():
    transition = made.transition(branches=(made.fixed_point(CASES[3]), made.fixed_point(CASES[2])))
    slopes = "d/dlam=3.000(30), d/domega=1.000(10), d/dsigma=2.000(20)"
    assert repr(transition) == f"Quantity(alpha_c = 1.250(10); {slopes}; converged)"
    page = transition.summary().splitlines()
    assert page[0] == "alpha_c = 1.250(10): converged" and "the global minimum is positional below" in page[7]
    assert page[4].split() == "d/dmixing [[0.6000(60), 0.4000(40)], [0.4000(40), 0.6000(60)]]".split()
    assert page[8].split()[:3] == ["branch", "q", "V"]
    assert page[9].split()[:2] == ["positional", f"{CASES[3].q:.6g}"]
    numbers = json.loads(json.dumps(transition.to_dict()))
    arrays = {"mixing": [[0.6, 0.4], [0.4, 0.6]], "encodings": [[1.0], [-1.0]], "teacher": [[1.0]]}
    assert numbers["sensitivities"] == {"lam": 3.0, "omega": 1.0, "sigma": 2.0, **arrays}
    assert numbers["status"] == "converged"
    assert [b["branch"] for b in numbers["branches"]] == ["positional", "semantic"]
    missing, meaning = made.transition(status=6, event="alpha_l"), "the global minimum beats the linear baseline above"
    assert repr(missing) == f"Quantity(alpha_l ({meaning}); not found, as there is none near the start)"
    assert all(event.meaning for event in ta.EVENTS.values())


def test_why_a_transition_was_not_found():
    """A transition that was not found says why in a sentence: no branch, no crossing, or states that did not settle."""

    def reason(positional, semantic, alpha=2.0, status=6):
        pairs = (CASES[3], positional), (CASES[2], semantic)
        points = tuple(made.fixed_point(case, status=[s] * 4, residual=[1.0] * 4) for case, s in pairs)
        transition = made.transition(alpha, status=status, branches=points)
        assert transition.reason == transition.to_dict()["reason"]
        assert transition.reason in repr(transition) and transition.reason in transition.summary()
        return transition.reason

    assert reason(0, 0, 1.25, 0) == reason(0, 2, 1.25, 2) == ""
    assert reason(0, 6) == "there is no semantic branch at alpha = 1.25, where the search ended"
    assert reason(6, 6).startswith("there is no positional branch and no semantic branch at")
    lower = "the losses do not cross in the range: that of the positional branch is lower at alpha = 1.25"
    assert reason(0, 1).startswith(lower)
    unsettled = "the semantic branch was not settled at alpha = 1.25, where the search ended: max steps"
    assert reason(0, 2, np.nan, 2) == reason(6, 2, np.nan, 2) == unsettled
    point = (made.fixed_point(),)
    crossing = made.transition(status=6, event="alpha_l", branches=point)
    assert crossing.ended_at.shape == () and np.isnan(made.transition(branches=point).ended_at)
    assert made.transition(np.nan, 6, branches=point).to_dict()["ended_at"] == 2.0
    assert crossing.reason == "nothing changes in the range, up to the state at alpha = 2, where the search ended"


def test_curves_paths_and_boundaries():
    points = (made.fixed_point(CASES[4]), made.fixed_point(CASES[0]))
    curve = Table.of_states("semantic", points)
    assert repr(curve) == "Table(semantic branch at 2 alphas from 1 to 2; found at 2)"
    path = Table.of_states(None, (points[1], made.fixed_point(CASES[1])))
    assert repr(path).startswith("Table(semantic, positional branch at 2 alphas")
    assert [row.split()[0] for row in curve.summary().splitlines()[1:]] == ["alpha", "1", "2"]
    assert curve.to_dict()["axes"] == {"alpha": [1.0, 2.0]}
    partial = Table.of_states("semantic", (made.fixed_point(CASES[4], status=[6] * 4), points[1]))
    assert repr(partial).endswith("found at 1, from 2 to 2)")
    boundary = made.events("alpha_c", "sigma", [0.5, 0.4], np.array([1.25, np.nan]), np.array([0.01, np.nan]))
    outcome = "found at 1, from 0.5 to 0.5; failed at 1, the first: sigma = 0.4: there is none"
    assert repr(boundary) == f"Table(alpha_c at 2 values of sigma from 0.4 to 0.5; {outcome})"
    lower, upper = boundary.summary().splitlines()[2:4]
    assert lower.split()[:2] == ["0.4", "nan"] and lower.endswith("absent: there is none")
    assert upper.split()[:2] == ["0.5", "1.250(10)"]
    numbers = np.array([0.4, 0.5]), np.array([1.5, 1.25]), np.array([0.01, 0.01])
    rough = made.events("semantic baseline", "sigma", *numbers)
    exact = made.events("alpha_c", "sigma", *numbers, -numbers[0])
    assert [row.split()[2:-1] for row in rough.summary().splitlines()[2:]] == [["-2.5", "False"]] * 2
    assert [row.split()[2:-1] for row in exact.summary().splitlines()[2:]] == [["-0.4", "True"], ["-0.5", "True"]]
    report = boundary.to_dict()
    assert report["status"] == ["absent", "converged"] and report["axes"] == {"sigma": [0.4, 0.5]}
    end, labels = made.end(made.transition(0.7), "pitchfork", "theta", "lower"), ("alpha", "kind", "direction", "side")
    assert repr(end).startswith("Quantity(alpha_c = 0.700(10); ") and str(end).split("side")[1].split()[0] == "lower"
    assert [end.to_dict()[name] for name in labels] == [0.7, "pitchfork", "theta", "lower"]


def instances(**fields):
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


def test_what_is_told_of_instances():
    numbers = json.loads(json.dumps(means_of(instances())))
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
    report = means_of(instances(branch=np.array(["semantic", "unsettled", "semantic", "unsettled"])))
    assert (report["branch"], report["q"]) == ("semantic", 1.5) and report["theory"]["q"] == pytest.approx(CASES[0].q)
    unsolved = means_of(instances(theory_status=np.full(4, 2)))["groups"]["semantic"]
    assert unsolved["theory"]["q"] == pytest.approx((CASES[0].q + CASES[4].q) / 2)
    assert "theory" not in means_of(instances(points=[]))
    assert means_of(instances(branch=np.full(4, "unsettled")))["branch"] == "unsettled"
    page = instances().summary()
    head, *others = page.splitlines()
    assert head == "4 instances: nonfinite, largest gradient 1.0e+00"
    assert others[0].startswith("neither: 1 of 4 instances, 1 at a critical")
    assert "semantic: 2 of 4 instances, 2 at a critical point (1 finished by L-BFGS)" in page
    assert page.endswith("unsettled: 1 of 4 instances, 0 at a critical point (0 finished by L-BFGS)")
    (neither, semantic) = page.split("semantic: 2 of")
    assert "theory" in semantic and "theory" not in neither
    rows = [line.split() for line in neither.splitlines()]
    assert ["q", "5", "5", "5"] in rows and ["distance,", "positional", "7", "7", "7"] in rows
    assert repr(instances()).startswith("Table(4 instances; nonfinite")


def test_runs_on_data(model):
    data = ta.sample_data(model, 60, 2.0, jax.random.key(0))
    assert repr(data) == "Data(120 sentences of 2 tokens in 60 dimensions, alpha = 2, float64, with teacher and labels)"
    unit = jnp.ones(())
    x = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.5, jnp.nan, 0.25)), jnp.ones((2, 1)))
    counts, losses = (jnp.array(7), jnp.array(2)), (0.5 * unit, 1e-9 * unit, unit[None], unit[None])
    run = ta.results.Training(jnp.ones((60, 1)), x, *counts, *losses)
    words = "Training(Q of shape (60, 1) after 7 iterations; q=0.5, theta=0.25, m=1, train_loss=0.5,"
    assert repr(run).startswith(words) and not run.ok
    assert run.to_dict() == {  # training weights have no V
        "q": 0.5, "theta": 0.25, "m": 1.0, "train_loss": 0.5, "gradient_norm": 1e-9, "iterations": 7,
        "status": "max steps"
    }  # fmt: skip
    mean = ta.Average(jnp.array(0.5), jnp.array(0.01))
    assert repr(mean) == "Average(0.500(10))" and f"{mean:.2f} {mean}" == "0.50 0.500(10)"
    labels = data.raw_labels(model)
    baseline = ta.linear_baseline(ta.Data.from_sentences(data.inputs(), labels, encodings=data.encodings))
    assert repr(baseline) == f"Quantity(gen_error = {with_error(baseline.value, baseline.stderr)}; converged)"
    assert "W            [[" in str(baseline) and "train_error" in str(baseline)
    assert baseline.to_dict()["W"] == baseline.W.tolist()


def test_models_rules_and_settings(model, lines):
    numbers = "lam=0.01, omega=0.3, sigma=0.5, mixing=[[0.6, 0.4], [0.4, 0.6]], encodings=[[1], [-1]], teacher=[[1]]"
    assert repr(model) == f"DotProduct({numbers}, rank=1)"
    assert str(model).splitlines()[:2] == ["DotProduct", "  lam        0.01"]
    assert repr(model.law()).startswith("SpectralLaw(weights=[1], gamma=[[0.25, 0.25]]")
    assert repr(lines) == "Rule(4 replicates of 6300 nodes, LineNodes for (L, r, t) = (2, 1, 1))"
    assert repr(ta.Settings()) == "Settings(tol=1e-05, max_steps=30, warm_steps=300, damping=0.2)"
    hats = made.fixed_point().conjugates
    assert repr(hats).startswith("Conjugates(q=") and "student" not in str(hats)


def test_the_package_has_a_table_of_contents():
    names = [name for name in dir(ta) if name[0].islower()]
    assert "solve" in names and not {"theory", "cli"} & set(names)
    missing = [name for name in names if callable(getattr(ta, name)) and name not in ta.__doc__]
    assert not missing and ta.__version__ == "0.1.0"


def test_what_has_a_picture_draws_it():
    transition = made.transition(branches=(made.fixed_point(CASES[3]), made.fixed_point(CASES[2])))
    x = jax.tree.map(lambda a: a[0], made.fixed_point().replicates.overlaps)
    Q, unit, history = jnp.ones((60, 1)), jnp.ones(()), jax.tree.map(lambda a: jnp.stack([a, a]), x)
    training = ta.results.Training(Q, x, jnp.array(2), jnp.array(0), unit, unit, jnp.ones(3), jnp.ones(3))
    messages = jnp.ones((1, 1, 1)), jnp.ones((2, 1, 4)), unit, history, jnp.ones(1), unit, unit, unit
    run = ta.results.GAMP(Q, x, jnp.array(1), jnp.array(0), *messages)
    for result, panels in ((transition, 2), (instances(), 5), (training, 2), (run, 4)):
        assert len(result.plot().axes) == panels
