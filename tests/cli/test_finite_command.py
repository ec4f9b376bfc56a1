"""The commands that run instances of finite size beside the theory."""

import json

import numpy as np
import pytest

from tiedattn_jax.cli.main import main
from tiedattn_jax.results import error_bar

pytestmark = pytest.mark.usefixtures("quick_programs")

KEYS = {"q", "V", "theta", "m", "train_loss", "gen_error", "gradient_norm", "iterations", "rho", "status", "theory"}
SIZE = ["--nodes", "4096"]


def test_gamp_command(capsys):
    assert main(["gamp", "--d", "60", "--instances", "2", "--json", *SIZE]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == "" and set(report) > KEYS and len(report["instances"]) == 2
    one, two = report["instances"]
    assert report["q"] == pytest.approx((one["q"] + two["q"]) / 2) and one["q"] != two["q"]
    assert report["stderr"]["q"] == pytest.approx(float(error_bar(np.array([one["q"], two["q"]]))))
    assert report["theory"]["q"] == pytest.approx((one["theory"]["q"] + two["theory"]["q"]) / 2)
    assert report["gradient_norm"] < 1e-10 and report["status"] == "converged"


def test_train_command(capsys, tmp_path):
    options = ["train", "--d", "60", "--init", "positional", "--out", str(tmp_path), *SIZE]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "lbfgs from the positional start, d = 60, alpha = 2: converged" in out and "train_loss" in out
    report = json.loads((tmp_path / "train.json").read_text())
    assert report["V"] is None and report["iterations"] > 5 and report["theory"]["branch"] == report["branch"]
    assert main([*options, "--optimizer", "gd", "--steps", "7"]) == 1
    assert "gd from the positional start, d = 60, alpha = 2: max steps" in capsys.readouterr().out
    assert json.loads((tmp_path / "train.json").read_text())["iterations"] == 7
