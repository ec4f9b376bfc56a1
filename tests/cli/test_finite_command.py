"""The commands that run instances of finite size beside the theory."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SIZES, default_recipe
from tiedattn_jax.base.results import Status, error_bar
from tiedattn_jax.cli import simulations
from tiedattn_jax.cli.main import main

pytestmark = pytest.mark.usefixtures("fast_compilation")

KEYS = {"q", "V", "theta", "m", "train_loss", "gen_error", "gradient_norm", "iterations", "rho", "status", "theory"}
SIZE = ["--nodes", "4096"]


def test_gamp_command(capsys):
    assert main(["gamp", "--d", "60", "--instances", "2", "--json", *SIZE]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == "" and set(report) > KEYS and len(report["instances"]) == 2
    first, second = report["instances"]
    assert report["q"] == pytest.approx((first["q"] + second["q"]) / 2) and first["q"] != second["q"]
    assert report["stderr"]["q"] == pytest.approx(float(error_bar(np.array([first["q"], second["q"]]))))
    assert report["theory"]["q"] == pytest.approx((first["theory"]["q"] + second["theory"]["q"]) / 2)
    assert report["gradient_norm"] < 1e-10 and report["status"] == "converged"


def test_train_command(capsys, tmp_path):
    options = ["train", "--d", "60", "--init", "positional", "--out", str(tmp_path), *SIZE]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "lbfgs from the positional start, d = 60, alpha = 2\n1 instances: converged" in out and "train_loss" in out
    report = json.loads((tmp_path / "train.json").read_text())
    assert report["V"] is None and report["iterations"] > 5 and report["theory"]["branch"] == report["branch"]
    assert main([*options, "--optimizer", "gd", "--steps", "7"]) == 1
    assert "gd from the positional start, d = 60, alpha = 2\n1 instances: max steps" in capsys.readouterr().out
    assert json.loads((tmp_path / "train.json").read_text())["iterations"] == 7


@pytest.mark.usefixtures("unchecked")
def test_what_is_asked_for(capsys, monkeypatch):
    calls = {}

    def spy(name):
        return lambda *arguments, **options: calls.update({name: (arguments, options)})

    def run_instances(model, d, alpha, run, keys, *, nodes, progress):
        run("data", "key")
        calls["instances"] = d, alpha, keys, nodes.size
        states = calls.get("theory_status", np.zeros(3))
        return SimpleNamespace(ok=np.ones(3, bool), values={"theory_status": states}.get, summary=lambda: "rows")

    monkeypatch.setattr(simulations, "run_instances", run_instances)
    monkeypatch.setattr(simulations, "means_of", lambda instances: {})
    monkeypatch.setattr(simulations, "gamp", spy("gamp"))
    monkeypatch.setattr(simulations, "train", spy("train"))
    assert main("gamp --d 60 --alpha 3 --init positional --seed 5 --instances 2 --json".split()) == 0
    (_, data, init), options = calls["gamp"]
    assert (data, init, options["steps"], options["tol"], options["key"]) == ("data", "positional", 1000, 1e-10, "key")
    model, (d, alpha, keys, size) = ta.DotProduct(), calls["instances"]
    assert (d, alpha) == (60, 3.0) and size == default_recipe(model, SIZES["instances"]).rule(model).size
    assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.split(jax.random.key(5), 2)))
    calls["theory_status"] = np.array([0, 0, Status.absent])
    assert main("train --optimizer adam --steps 7 --json".split()) == 1  # one instance has no theory
    (_, data, init), options = calls["train"]
    assert (init, options["optimizer"], options["steps"]) == ("semantic", "adam", 7)
    d, alpha, _, size = calls["instances"]
    assert (d, alpha) == (1000, 2.0) and size == default_recipe(model).rule(model).size
    main(["train", "--json"])
    assert calls["train"][1]["optimizer"] == "lbfgs" and calls["train"][1]["steps"] == 2000
    main(["train", "--l1", ".01", "--json"])  # L-BFGS supports no penalty
    assert calls["train"][1]["optimizer"] == "gd" and calls["train"][1]["steps"] == 5000
