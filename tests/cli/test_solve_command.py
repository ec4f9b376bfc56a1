"""`tiedattn solve`."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from cases import CASES

from tiedattn_jax.cli.main import main
from tiedattn_jax.cli.solve import AFFECTED, state_report, state_text
from tiedattn_jax.theory.fixed_points import DIAGNOSTICS

KEYS = (
    "alpha omega sigma lam branch q V theta m train_loss gen_error gen_error_linear status residual affected_by_jumps"
).split()


def run(capsys, *arguments):
    code = main(["solve", *arguments, "--nodes", "4096"])
    out, err = capsys.readouterr()
    return code, out, err


def test_json(capsys):
    code, out, err = run(capsys, "--alpha", "2", "--branch", "positional", "--json")
    assert code == 0 and err == ""
    report = json.loads(out)
    assert {*KEYS, *DIAGNOSTICS} < set(report)
    # Every number of the state has an error bar.
    assert {"q", "V", "theta", "m", "train_loss", "gen_error", *DIAGNOSTICS} < set(report["stderr"]) < set(report)
    for k in ("q", "m", "V", "train_loss", "gen_error"):
        assert abs(report[k] - getattr(CASES[1], k)) <= 4 * report["stderr"][k]
    assert report["branch"] == "positional" and report["theta"] == 0
    assert report["status"] in ("converged", "stalled at the accuracy of the averages") and report["residual"] < 1e-3
    assert "replicon" in report["affected_by_jumps"] and 0 < report["second_minimum"] < 0.01
    assert report["train_loss_direct"] == pytest.approx(report["train_loss"], rel=1e-3)


def test_a_failure_prints_its_status(capsys):
    code, out, _ = run(capsys, "--alpha", "0.03", "--branch", "positional", "--json")
    assert code == 1
    assert json.loads(out)["status"] == "absent"


def test_summary_is_readable(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for word in ("semantic branch at alpha = 2", "training loss", "jump mass", "replicon", "linear baseline"):
        assert word in out


def point(**given):
    """A fixed point of two tokens, its numbers made by hand."""
    names = ("q", "V", "theta", "train_loss", "gen_error", "gen_error_linear", "replicon", "jump_mass")
    numbers = {name: np.array([k, k + 2.0]) for k, name in enumerate((*names, "second_minimum", "unconverged"))}
    numbers |= {"m": np.array([0.5, -0.5]), "status": np.array([0.0]), "residual": np.array([1e-5])}
    bars = {name: np.array([0.25, 0.75]) for name in numbers}
    own = {"status": 1, "residual": 2e-3, "alpha": 2.0, "label": "semantic", "jumps": False}
    return SimpleNamespace(
        **{**own, **given},
        model=SimpleNamespace(omega=0.3, sigma=0.5, lam=0.01),
        mean=SimpleNamespace(numbers=lambda: numbers),
        stderr=SimpleNamespace(numbers=lambda: bars),
    )


def test_one_number_for_every_observable():
    report = state_report(point())
    assert (report["q"], report["V"], report["m"]) == (1.0, 2.0, 0.5)  # means over the tokens, but m of the first
    assert (report["stderr"]["q"], report["stderr"]["m"]) == (0.5, 0.25)
    # The worst of the replicates, not the mean over them.
    assert report["residual"] == 2e-3 and report["status"] == "stalled at the accuracy of the averages"
    assert "residual" not in report["stderr"] and report["affected_by_jumps"] == []
    assert state_report(point(jumps=True))["affected_by_jumps"] == list(AFFECTED)


def test_what_jumps_affect_is_told():
    plain, affected = state_text("title", point()), state_text("title", point(jumps=True))
    assert plain.splitlines()[0] == "title: stalled at the accuracy of the averages, residual 2.0e-03"
    assert "affected" not in plain and "formally infinite" not in plain
    assert "affected" in affected and "formally infinite" in affected and "unresolved" in plain
