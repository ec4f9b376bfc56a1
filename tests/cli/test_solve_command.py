"""The command `tiedattn solve`."""

import json

import pytest
from cases import CASES

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.cli import theory
from tiedattn_jax.cli.main import main
from tiedattn_jax.theory.states import DIAGNOSTICS

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


def test_a_branch_without_a_name(capsys, monkeypatch):
    """`--branch any` becomes None in Python, and other names stay as they are."""
    branches = []

    def spy(model, alpha, branch, nodes, *, rtol):
        branches.append(branch)
        raise InputError("branch", "must be another one")

    monkeypatch.setattr(theory, "solve", spy)
    for name in ("any", "uninformed"):
        with pytest.raises(SystemExit):
            run(capsys, "--branch", name)
    assert branches == [None, "uninformed"]


def test_summary_is_readable(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for word in ("semantic branch at alpha = 2", "training loss", "jump mass", "replicon", "linear attention"):
        assert word in out
    code, out, _ = run(capsys, "--alpha", "0.03", "--branch", "positional", "--json")
    assert code == 1 and json.loads(out)["status"] == "absent"
