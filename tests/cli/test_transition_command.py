"""The command `tiedattn transition`."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SIZES, default_recipe
from tiedattn_jax.cli import theory as command
from tiedattn_jax.cli.main import main
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.states import DIAGNOSTICS

PAIR = {"positional", "semantic"}
NUMBERS = {"omega", "sigma", "lam"}


def test_json_and_files(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CURVE_POINTS", 6)
    monkeypatch.setattr(command, "CURVE_RANGE", (0.6, 1.6))
    out_dir = tmp_path / "out"
    code = main(["transition", "--json", "--out", str(out_dir), "--nodes", "4096", "--optimal"])
    out, err = capsys.readouterr()
    assert code == 0 and err == ""
    report = json.loads(out)
    assert abs(report["alpha_c"] - 1.25154) <= 3 * report["alpha_c_stderr"]
    assert abs(report["alpha_l"] - 1.492272) <= 3 * report["alpha_l_stderr"]
    assert -6e-4 < report["alpha_c_rs_shift"] < -3e-4 and report["alpha_c_rs_shift_stderr"] < 1e-4
    assert (report["weak_recovery"], report["perfect_recovery"]) == (pytest.approx(1 / 6), 0.5)
    assert set(report["spinodals"]) == set(report["ends"]) == set(report["at_alpha_c"]) == PAIR
    end = report["spinodals"]["semantic"]
    assert set(end) == {"alpha", "stderr", "kind", "direction", "side"}
    assert end["direction"] == "m" and end in report["ends"]["semantic"]
    for kind in ("sensitivities", "sensitivities_stderr"):
        assert set(report[kind]["alpha_c"]) == set(report[kind]["alpha_l"]) == NUMBERS
    for branch in PAIR:
        assert {"q", "status", "stderr", *DIAGNOSTICS} < set(report["at_alpha_c"][branch])
    assert report["status"] in ("converged", "stalled at the accuracy of the averages")
    assert sorted(p.name for p in out_dir.iterdir()) == ["curves.csv", "transition.json", "transition.png"]
    rows = list(csv.DictReader((out_dir / "curves.csv").read_text().splitlines()))
    alphas = {b: [float(r["alpha"]) for r in rows if r["branch"] == b] for b in PAIR}
    np.testing.assert_allclose(alphas["positional"], np.linspace(0.6, 1.6, 6))
    np.testing.assert_allclose(alphas["semantic"], np.linspace(0.6, 1.6, 6))  # the branch ends near .72
    assert np.isfinite(float(rows[-1]["train_loss_stderr"]))
    assert {name for k in DIAGNOSTICS for name in (k, f"{k}_stderr")} < set(rows[0])
    assert json.loads((out_dir / "transition.json").read_text()) == report
    assert (out_dir / "transition.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("unchecked")
def test_the_end_that_is_met_first():
    def end(alpha, side):
        return SimpleNamespace(alpha=alpha, side=side)

    lower, higher, upper, beyond = end(0.7, "lower"), end(0.8, "lower"), end(2.0, "upper"), end(3.0, "upper")
    assert command.main_end([lower, higher, upper]) is higher
    assert command.main_end([upper, beyond]) is upper
    assert command.main_end([]) is None


@pytest.fixture
def without_solving(monkeypatch):
    """`tiedattn transition` with results made by hand, and the record of what it asked for."""
    calls, point = {"rough": [], "starts": []}, made.fixed_point()

    def sweep(model, branch, *, alpha, nodes, progress):
        calls["rough"].append(nodes.size)
        assert len(alpha) == command.CURVE_POINTS
        return Table.of_states(
            branch, [dataclasses.replace(point, alpha=jnp.asarray(a)) for a in (alpha[0], alpha[-1])]
        )

    def critical_alpha(model, nodes, start):
        calls["full"] = nodes.size
        calls["starts"].append([curve.question for curve in start])
        return calls["alpha_c"]

    def linear_crossing(model, critical, nodes, start):
        calls["starts"].append([curve.question for curve in start])
        return made.transition(1.5, event="alpha_l")

    end = made.end(made.transition(0.7), "pitchfork", "m", "lower")
    monkeypatch.setattr(command, "sweep", sweep)
    monkeypatch.setattr(command, "branch_ends", lambda curve, nodes: [end] if curve.question == "semantic" else [])
    monkeypatch.setattr(command, "critical_alpha", critical_alpha)
    monkeypatch.setattr(command, "linear_crossing", linear_crossing)
    return calls


def test_what_is_told(capsys, without_solving):
    without_solving["alpha_c"] = made.transition(1.25)
    assert main(["transition"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("alpha_c = 1.250(10): converged\n") and "the global minimum is positional below" in out
    assert "alpha_l = 1.500(10): converged\n" in out and "d/dsigma      2.000(20)" in out
    assert "semantic branch, lower end: ends at alpha = 0.700(10): m falls continuously to zero" in out
    assert "positional branch: neither end nor loss of stability in 0.05 <= alpha <= 2.25" in out
    (rough,) = set(without_solving["rough"])
    assert rough == default_recipe(ta.DotProduct(), SIZES["curve"]).rule(ta.DotProduct()).size < without_solving["full"]
    assert without_solving["starts"] == [["positional", "semantic"]] * 2


def test_nothing_is_known_of_alpha_l_without_alpha_c(capsys, without_solving):
    without_solving["alpha_c"] = made.transition(float("nan"), status=6)
    assert main(["transition", "--json", "--nodes", "4096"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["alpha_c"] is None and report["alpha_l"] is None and report["alpha_l_stderr"] is None
    assert report["alpha_c_rs_shift"] is None and report["alpha_c_rs_shift_stderr"] is None
    assert report["sensitivities"] == {"alpha_c": None, "alpha_l": None} and report["status"] == "absent"
    assert report["reason"] == "there is none near the start"
    assert report["spinodals"]["semantic"]["alpha"] == 0.7 and report["spinodals"]["positional"] is None
    assert main(["transition", "--nodes", "4096"]) == 1
    assert "semantic above): not found, as there is none near the start\n" in capsys.readouterr().out


def test_curves_are_drawn_to_their_ends():
    curve = Table.of_states("semantic", (made.fixed_point(CASES[4]), made.fixed_point(CASES[0])))
    found = made.transition(1.25, branches=(made.fixed_point(CASES[2]),))
    unsolved = made.transition(0.5, status=2, branches=(made.fixed_point(CASES[3]),))
    ends = [made.end(a, kind, "m", "lower") for a, kind in ((found, "instability"), (unsolved, "fold"))]
    complete = command._to_its_ends(curve, ends)
    assert complete.question == "semantic" and complete.alpha.tolist() == [1.0, 1.25, 2.0]
