"""The command `tiedattn diagram`."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.cli import theory as command
from tiedattn_jax.cli.main import main

# Four alphas and the smallest lines share the shapes, and so the compiled programs, of test_grid.
GRID = ["diagram", "--x", "alpha", "0.6", "1.8", "4", "--y", "omega", "0.3", "0.4", "3", "--nodes", "1024"]


def test_files_json_and_resume(capsys, tmp_path):
    out = tmp_path / "out"
    assert main([*GRID, "--optimal", "--json", "--out", str(out)]) == 0
    text, err = capsys.readouterr()
    report = json.loads(text)
    assert err == "" and report["omega"] == [0.3, 0.35, 0.4] and len(report["alpha"]) == 4
    assert abs(report["alpha_c"][0] - 1.2515) < 3 * report["alpha_c_stderr"][0] + 0.02
    assert sum(report["regions"].values()) == 12
    assert report["weak_recovery"] == pytest.approx([1 / 6] * 3) and report["perfect_recovery"] == [0.5] * 3
    assert report["nodes"]["size"] == 6300 and report["settings"]["tol"] == 5e-4
    assert "f64" not in text
    names = ["diagram.csv", "diagram.json", "diagram.npz", "diagram.png", "tracks"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert len(list(csv.DictReader((out / "diagram.csv").read_text().splitlines()))) == 12
    diagram = ta.results.PhaseDiagram.load(out / "diagram.npz")
    np.testing.assert_allclose(diagram.alpha_c().alpha, report["alpha_c"])
    # A second run must be told to go on; then everything is already there.
    with pytest.raises(SystemExit) as stop:
        main([*GRID, "--json", "--out", str(out)])
    assert stop.value.code == 2 and "--out" in capsys.readouterr().err
    assert main([*GRID, "--resume", "--out", str(out)]) == 0
    text, _ = capsys.readouterr()
    assert "bistable, semantic global" in text and "alpha_c" in text


def test_other_axes(capsys, monkeypatch):
    arguments = {}

    def spy(model, x, y, *, progress, **options):
        arguments.clear()
        arguments.update(options, x=x, y=y, model=model)
        if progress is not None:
            progress(3, 10)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "phase_diagram", spy)
    words = ["diagram", "--x", "sigma", "0.4", "0.6", "3", "--y", "lam", "0.01", "0.02", "2", "--nodes", "1024"]
    assert main([*words, "--alpha", "1.5", "--resume", "--devices", "1", "--out", "there"]) == 130
    assert "go on with --resume --out there" in capsys.readouterr().err
    assert arguments["x"].name == "sigma" and arguments["y"].name == "lam" and arguments["alpha"] == 1.5
    np.testing.assert_allclose(arguments["y"].values, [0.01, 0.02])
    assert (arguments["devices"], arguments["resume"], arguments["out"]) == (1, True, Path("there/tracks"))
    assert main(words) == 130
    assert (arguments["alpha"], arguments["devices"], arguments["resume"], arguments["out"]) == (2.0, None, False, None)
    assert main(["diagram", "--x", "mixing[0,1]", "0.1", "0.3", "2"]) == 130 and arguments["x"].name == "mixing[0,1]"
    assert main(["diagram", "--nodes", "1024"]) == 130
    assert arguments["x"].name == "alpha" and "alpha" not in arguments
    np.testing.assert_allclose(arguments["x"].values, np.linspace(0.1, 2, 25))
    np.testing.assert_allclose(arguments["y"].values, np.linspace(0.02, 0.5, 25))
    for refused, message in (
        ([*words, "--optimal"], "--optimal: must be left out where alpha is not an axis"),
        (["diagram", "--alpha", "1", "--nodes", "1024"], "--alpha: must be left out where alpha is an axis"),
    ):
        with pytest.raises(SystemExit):
            main(refused)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["diagram"]) == 130 and "3/10" in capsys.readouterr().err
    assert main(["diagram", "--json"]) == 130
    assert capsys.readouterr().err == "tiedattn: interrupted, nothing was written\n"
