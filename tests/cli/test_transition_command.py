"""`tiedattn transition`."""

import csv
import json
from types import SimpleNamespace

import numpy as np

from tiedattn_jax.cli import transition
from tiedattn_jax.cli.main import main
from tiedattn_jax.theory.fixed_points import DIAGNOSTICS

PAIR = {"positional", "semantic"}
NUMBERS = {"omega", "sigma", "lam"}


def test_json_and_files(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(transition, "CURVE_POINTS", 6)
    monkeypatch.setattr(transition, "CURVE_RANGE", (0.6, 1.6))
    out_dir = tmp_path / "out"
    code = main(["transition", "--json", "--out", str(out_dir), "--nodes", "4096"])
    out, err = capsys.readouterr()
    assert code == 0 and err == ""
    report = json.loads(out)
    assert abs(report["alpha_c"] - 1.25154) <= 3 * report["alpha_c_stderr"]
    assert abs(report["alpha_l"] - 1.492272) <= 3 * report["alpha_l_stderr"]
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
    np.testing.assert_allclose(alphas["semantic"], np.linspace(0.6, 1.6, 6))  # ends near .72
    assert np.isfinite(float(rows[-1]["train_loss_stderr"]))
    assert {name for k in DIAGNOSTICS for name in (k, f"{k}_stderr")} < set(rows[0])
    assert json.loads((out_dir / "transition.json").read_text()) == report
    assert (out_dir / "transition.png").read_bytes()[:4] == b"\x89PNG"


def test_the_end_that_is_met_first():
    def end(alpha, side):
        return SimpleNamespace(alpha=alpha, side=side)

    lower, higher, upper, beyond = end(0.7, "lower"), end(0.8, "lower"), end(2.0, "upper"), end(3.0, "upper")
    assert transition.main_end([lower, higher, upper]) is higher
    assert transition.main_end([upper, beyond]) is upper
    assert transition.main_end([]) is None
