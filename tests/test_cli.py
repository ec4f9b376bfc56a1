import csv
import json

import numpy as np
import pytest
from cases import CASES

from tiedattn_jax import cli
from tiedattn_jax.commands import transition

SMALL = ["--nodes", "4096"]
SOLVE_KEYS = (
    "alpha omega sigma lam branch q V theta m train_loss gen_error gen_error_linear status residual replicon jump_mass"
).split()


def run(capsys, *arguments):
    code = cli.main([*arguments, *SMALL])
    out, err = capsys.readouterr()
    return code, out, err


def test_solve_json(capsys):
    code, out, err = run(capsys, "solve", "--alpha", "2", "--branch", "positional", "--json")
    assert code == 0 and err == ""
    report = json.loads(out)
    assert set(SOLVE_KEYS) < set(report)
    assert set(report["stderr"]) == {"q", "V", "theta", "m", "train_loss", "gen_error"}
    for k in ("q", "m", "V", "train_loss", "gen_error"):
        assert abs(report[k] - getattr(CASES[1], k)) <= 4 * report["stderr"][k]
    assert report["branch"] == "positional"
    assert "replicon" in report["affected_by_jumps"] and 0 < report["second_minimum"] < 0.01


def test_solve_that_fails_prints_its_status(capsys):
    code, out, _ = run(capsys, "solve", "--alpha", "0.03", "--branch", "positional", "--json")
    assert code == 1
    assert json.loads(out)["status"] == "absent"


def test_summary_is_readable(capsys):
    code, out, _ = run(capsys, "solve")
    assert code == 0
    for word in ("semantic branch at alpha = 2", "training loss", "jump mass", "replicon", "linear baseline"):
        assert word in out


def test_transition(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(transition, "CURVE_POINTS", 6)
    monkeypatch.setattr(transition, "CURVE_RANGE", (0.6, 1.6))
    out_dir = tmp_path / "out"
    code, out, err = run(capsys, "transition", "--json", "--out", str(out_dir))
    assert code == 0 and err == ""
    report = json.loads(out)
    assert abs(report["alpha_c"] - 1.25154) <= 3 * report["alpha_c_stderr"]
    assert abs(report["alpha_l"] - 1.492272) <= 3 * report["alpha_l_stderr"]
    assert set(report["spinodals"]) == {"semantic", "positional"}
    assert report["spinodals"]["semantic"]["direction"] == "m"
    assert (
        set(report["sensitivities"]["alpha_c"]) == {"omega", "sigma", "lam"} == set(report["sensitivities"]["alpha_l"])
    )
    for branch in ("positional", "semantic"):
        assert set(SOLVE_KEYS) < set(report["at_alpha_c"][branch])
    assert report["status"] in ("converged", "stalled at the accuracy of the averages")
    assert sorted(p.name for p in out_dir.iterdir()) == ["curves.csv", "transition.json", "transition.png"]
    rows = list(csv.DictReader((out_dir / "curves.csv").read_text().splitlines()))
    alphas = {b: [float(r["alpha"]) for r in rows if r["branch"] == b] for b in ("positional", "semantic")}
    np.testing.assert_allclose(alphas["positional"], np.linspace(0.6, 1.6, 6))
    np.testing.assert_allclose(alphas["semantic"], np.linspace(0.6, 1.6, 6))  # ends near .72
    assert np.isfinite(float(rows[-1]["train_loss_stderr"]))
    assert json.loads((out_dir / "transition.json").read_text()) == report
    assert (out_dir / "transition.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["solve", "--omega", "1.5"], "--omega"), (["solve", "--omega", "x"], "--omega"),
        (["solve", "--sigma", "0"], "--sigma"), (["solve", "--lam", "-1"], "--lam"),
        (["solve", "--alpha", "nan"], "--alpha"), (["solve", "--alpha", "inf"], "--alpha"),
        (["solve", "--nodes", "1000"], "--nodes"), (["solve", "--replicates", "0"], "--replicates"),
        (["solve", "--branch", "lexical"], "--branch"), (["solve", "--mixing", ".6", ".6", ".4", ".6"], "--mixing"),
        (["solve", "--rtol", "0"], "--rtol"), (["solve", "--rtol", "1e-20"], "rtol"),
        (["solve", "--rtol", "1e-3", "--nodes", "4096"], "--nodes"), (["solve", "--rule", "grid"], "--rule"),
        (["solve", "--seed", "-1"], "--seed"), (["solve", "--out", "/dev/null/here"], "--out"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_code_two(capsys, arguments, option):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert len(err.strip().splitlines()) == 1 and option in err


def test_interrupt_leaves_nothing(capsys, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transition, "sweep", stop)
    code = cli.main(["transition", "--out", str(tmp_path / "out"), *SMALL])
    assert code == 130 and not (tmp_path / "out").exists()
    assert "interrupted" in capsys.readouterr().err
