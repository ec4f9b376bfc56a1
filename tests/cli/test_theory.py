"""The commands `tiedattn solve`, `transition` and `diagram`."""

import csv
import dataclasses
import json

import made
import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_L, CASES

import tiedattn_jax as ta
from tiedattn_jax.cli import theory
from tiedattn_jax.cli.main import main
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.states import DIAGNOSTICS

SETTLED = ("converged", "stalled at the accuracy of the averages")
PAIR = {"positional", "semantic"}


def printed(capsys, words, code=0):
    """Run a command and return what it prints."""
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out) if "--json" in words else out


def test_solve(capsys):
    report = printed(capsys, "solve --branch positional --nodes 1024 --json")
    assert {*"alpha omega sigma lam gen_error_linear".split(), *DIAGNOSTICS} < set(report)
    # Every number of the state has an error bar.
    assert {"q", "V", "theta", "m", "train_loss", "gen_error", *DIAGNOSTICS} < set(report["stderr"]) < set(report)
    for k in ("q", "m", "V", "train_loss", "gen_error"):
        assert abs(report[k] - getattr(CASES[1], k)) <= 4 * report["stderr"][k]
    assert report["branch"] == "positional" and report["theta"] == 0
    assert report["status"] in SETTLED and report["residual"] < 1e-3
    assert "replicon" in report["affected_by_jumps"] and 0 < report["second_minimum"] < 0.01
    assert report["train_loss_direct"] == pytest.approx(report["train_loss"], rel=1e-3)
    text = printed(capsys, "solve --nodes 1024")
    for word in ("semantic branch at alpha = 2", "training loss", "jump mass", "replicon", "linear attention"):
        assert word in text
    anything = printed(capsys, "solve --branch any --nodes 1024 --json")  # without a symmetry: the lowest state
    assert anything["branch"] == "semantic" and anything["q"] == pytest.approx(CASES[0].q, rel=1e-3)


@pytest.mark.full
def test_diagram(capsys, tmp_path):
    words = f"diagram --x alpha .6 1.8 4 --y omega .3 .4 2 --nodes 1024 --optimal --out {tmp_path}/out --json"
    report = printed(capsys, words)
    assert report["omega"] == [0.3, 0.4] and len(report["alpha"]) == 4 and sum(report["regions"].values()) == 8
    assert abs(report["alpha_c"][0] - ALPHA_C) < 3 * report["alpha_c_stderr"][0] + 0.02
    assert report["weak_recovery"] == pytest.approx([1 / 6] * 2) and report["perfect_recovery"] == [0.5] * 2
    assert report["nodes"]["size"] == 6300 and report["settings"]["tol"] == 5e-4
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert set(files) == {"diagram.csv", "diagram.json", "diagram.npz", "diagram.png", "tracks"}
    assert len(list(csv.DictReader(files["diagram.csv"].read_text().splitlines()))) == 8
    diagram = ta.results.PhaseDiagram.load(files["diagram.npz"])
    np.testing.assert_allclose(diagram.alpha_c().alpha, report["alpha_c"])
    # A second run must be told to go on; then everything is already there.
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert "--out" in capsys.readouterr().err
    text = printed(capsys, words.replace("--json", "--resume"))
    assert "bistable, semantic global" in text and "alpha_c" in text


def test_parts_that_were_computed_are_joined(capsys, tmp_path):
    """The whole has the cells of its parts, and its files."""
    alphas, omegas = np.array([1.0, 2.0]), np.array([0.1, 0.2])
    rng = np.random.default_rng(0)
    cells = {"status": np.zeros((2, 2, 2, 3)), "train_loss": rng.uniform(1, 2, (2, 2, 2, 3))}
    for k in range(2):
        own = {name: a[:, k : k + 1] for name, a in cells.items()}
        made.diagram(("alpha", alphas), ("omega", omegas[k : k + 1]), own).save(tmp_path / f"{k}.npz")
    words = f"join {tmp_path}/0.npz {tmp_path}/1.npz --out {tmp_path}/out --json"
    report = printed(capsys, words)
    assert report["omega"] == omegas.tolist() and sum(report["regions"].values()) == 4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"diagram.{k}" for k in ("png", "csv", "npz", "json")
    }
    whole = ta.load(tmp_path / "out" / "diagram.npz")
    np.testing.assert_array_equal(whole.semantic.replicates.train_loss, cells["train_loss"][1])
    with pytest.raises(SystemExit, match="2"):
        main(["join", f"{tmp_path}/0.npz", f"{tmp_path}/2.npz"])
    assert "argument --parts: must be a whole file" in capsys.readouterr().err


@pytest.mark.full
def test_parts_of_a_diagram(capsys, tmp_path):
    """Two jobs in one folder compute what one job does."""
    words = f"diagram --x alpha 1 1.5 2 --y omega .3 .4 3 --nodes 1024 --out {tmp_path} --json"
    parts = [printed(capsys, f"{words} --part {k}/2") for k in (1, 2)]
    assert [part["omega"] for part in parts] == [[0.3, 0.35], [0.4]]
    files = [f"{tmp_path}/diagram-{k}-of-2.npz" for k in (1, 2)]
    joined, whole = printed(capsys, f"join {' '.join(files)} --json"), printed(capsys, words)
    assert joined["regions"] == whole["regions"]
    alpha_c = [np.array(report["alpha_c"], float) for report in (joined, whole)]  # none in range at large omega
    np.testing.assert_allclose(*alpha_c, rtol=1e-4)
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), "--part", "1/4"])
    assert "argument --part: must be of as many parts as there are values of omega" in capsys.readouterr().err


@pytest.mark.full
def test_other_axes(capsys, tmp_path):
    words = f"diagram --x sigma .5 .6 2 --y mixing[0,1] .3 .4 2 --alpha 1.25 --nodes 1024 --devices 1 --out {tmp_path}"
    printed(capsys, words)
    diagram = ta.results.PhaseDiagram.load(tmp_path / "diagram.npz")
    assert (diagram.x[0], diagram.y[0]) == ("sigma", "mixing[0,1]")
    np.testing.assert_allclose([diagram.x[1], diagram.y[1]], [[0.5, 0.6], [0.3, 0.4]])
    assert diagram.semantic.q[1, 0] == pytest.approx(CASES[2].q, rel=2e-3)  # the standard setting


@pytest.mark.full
def test_transition(capsys, tmp_path):
    report = printed(capsys, f"transition --json --out {tmp_path} --nodes 4096 --optimal")
    assert abs(report["alpha_c"] - ALPHA_C) <= 3 * report["alpha_c_stderr"]
    assert abs(report["alpha_l"] - ALPHA_L) <= 3 * report["alpha_l_stderr"]
    assert -6e-4 < report["alpha_c_rs_shift"] < -3e-4 and report["alpha_c_rs_shift_stderr"] < 1e-4
    assert (report["weak_recovery"], report["perfect_recovery"]) == (pytest.approx(1 / 6), 0.5)
    assert set(report["spinodals"]) == set(report["ends"]) == set(report["at_alpha_c"]) == PAIR
    end = report["spinodals"]["semantic"]
    assert end["direction"] == "m" and end in report["ends"]["semantic"]
    assert report["status"] in SETTLED and json.loads((tmp_path / "transition.json").read_text()) == report


POINT = made.fixed_point()
CURVES = [
    Table.of_states(name, [dataclasses.replace(POINT, alpha=np.asarray(a)) for a in (0.05, 2.25)])
    for name in ("positional", "semantic")
]
LOWER = made.end(made.transition(0.7), "pitchfork", "m", "lower")
FOLD = made.end(made.transition(0.7, status=int(ta.Status.max_steps)), "fold", "m", "lower")


def test_what_a_transition_tells(capsys, tmp_path, monkeypatch):
    """The command reports results made by hand as text, JSON, table and figure."""
    critical = made.transition(1.25, branches=(POINT, POINT))
    monkeypatch.setattr(theory, "sweep", lambda question, model, branch, **_: CURVES[branch == "semantic"])
    monkeypatch.setattr(theory, "branch_ends", lambda curve, nodes: [LOWER] * (curve.question == "semantic"))
    monkeypatch.setattr(theory, "critical_alpha", lambda *_, **__: critical)
    monkeypatch.setattr(theory, "linear_crossing", lambda *_, **__: made.transition(1.5, event="alpha_l"))
    text = printed(capsys, f"transition --out {tmp_path}")
    assert text.startswith("alpha_c = 1.250(10): converged\n") and "the global minimum is positional below" in text
    for line in (
        "alpha_l = 1.500(10): converged\n",
        "d/dsigma      2.000(20)",
        "semantic branch, lower end: ends at alpha = 0.700(10): m falls continuously to zero",
        "positional branch: neither end nor loss of stability in 0.05 <= alpha <= 2.25",
    ):
        assert line in text
    report = json.loads((tmp_path / "transition.json").read_text())
    assert (report["alpha_c"], report["alpha_l"], report["alpha_l_stderr"]) == (1.25, 1.5, 0.01)
    assert report["sensitivities"]["alpha_l"] == {"omega": 1.0, "sigma": 2.0, "lam": 3.0}
    expected = {"alpha": 0.7, "stderr": 0.01, "status": "converged", "kind": "pitchfork", "direction": "m"}
    assert report["spinodals"] == {"positional": None, "semantic": expected | {"side": "lower"}}
    assert report["ends"] == {"positional": [], "semantic": [report["spinodals"]["semantic"]]}
    assert {"q", "status", "stderr", *DIAGNOSTICS} < set(report["at_alpha_c"]["semantic"])
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    expected = [(name, alpha) for name in ("positional", "semantic") for alpha in (0.05, 2.25)]
    assert [(row["branch"], float(row["alpha"])) for row in rows] == expected
    assert {name for k in DIAGNOSTICS for name in (k, f"{k}_stderr")} < set(rows[0])
    assert (tmp_path / "transition.png").read_bytes()[:4] == b"\x89PNG"


def test_places_that_were_not_located():
    missing, found = made.transition(float("nan"), status=6), made.transition(1.5, event="alpha_l")
    ends = {"positional": [], "semantic": [FOLD]}
    report = theory.transition_report(missing, found, ends)
    assert report["alpha_c"] is None is report["alpha_c_rs_shift"] is report["sensitivities"]["alpha_c"]
    assert report["alpha_l"] == 1.5 and report["sensitivities"]["alpha_l"]["sigma"] == 2.0
    assert (report["status"], report["reason"]) == ("absent", "there is none near the start")
    assert "semantic above): not found, as there is none near the start\n" in missing.summary() + "\n"
    told = "lower end: ends at a place between alpha = 0.69 and 0.71, where it was not located, with m finite"
    assert told in theory._end_lines(ends, CURVES)[1]


def test_ends_of_curves():
    """A picture of a curve has the states at its ends; the end that is told first is that next to the stable range."""
    curve = Table.of_states("semantic", (made.fixed_point(CASES[4]), made.fixed_point(CASES[0])))
    found = made.transition(1.25, branches=(made.fixed_point(CASES[2]),))
    unsolved = made.transition(0.5, status=2, branches=(made.fixed_point(CASES[3]),))
    ends = [made.end(a, kind, "m", "lower") for a, kind in ((found, "instability"), (unsolved, "fold"))]
    complete = theory._to_its_ends(curve, ends)
    assert complete.question == "semantic" and complete.alpha.tolist() == [1.0, 1.25, 2.0]
    sides = ((0.7, "lower"), (0.8, "lower"), (2.0, "upper"), (3.0, "upper"))
    low, high, upper, beyond = (made.end(made.transition(alpha), "fold", "m", side) for alpha, side in sides)
    assert theory.main_end([low, high, upper]) is high and theory.main_end([upper, beyond]) is upper
    assert theory.main_end([]) is None
