"""The commands that run instances of finite size beside the theory."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.cli import finite
from tiedattn_jax.cli.main import main
from tiedattn_jax.results import Status, error_bar

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


def instances(**given):
    """Three instances made by hand: the second diverged, the third has no theory."""
    count, values = 3, np.array([1.0, np.inf, 2.0])
    theory = [{"q": k + 1.0, "status": "converged", "stderr": {"q": 0.1 * (k + 1)}} for k in range(count)]
    own = {
        "found": SimpleNamespace(**dict.fromkeys(finite.NAMES, values)),
        "branch": np.array(["semantic", "semantic", "positional"]),
        "rho": np.array([0.2, 0.3, 0.4]),
        "status": np.array([Status.converged, Status.nonfinite, Status.converged]),
        "finished": np.array([False, False, True]),
        "gradient_norm": np.array([1e-9, 1.0, 1e-8]),
        "iterations": np.array([3, 5, 4]),
        "theory_status": np.array([Status.converged, Status.stalled, Status.absent]),
        "points": theory,
    }
    own |= given
    return SimpleNamespace(**own, usable=own["status"] <= Status.max_steps, ok=own["status"] == 0, table=lambda: "rows")


def test_what_is_told_of_instances(monkeypatch):
    monkeypatch.setattr(finite, "state_report", lambda point: point)
    report = finite.finite_report(instances(), ta.dot_product(), 60, 2.0)
    assert report["q"] == 1.5 and report["stderr"]["q"] == pytest.approx(float(error_bar(np.array([1.0, 2.0]))))
    assert (report["branch"], report["status"], report["iterations"]) == ("mixed", "nonfinite", 5)
    assert report["gradient_norm"] == 1.0 and report["rho"] == pytest.approx(0.3)
    # Only of the instances for which theory has a state; but the worst status.
    assert report["theory"]["q"] == 1.5 and report["theory"]["stderr"]["q"] == pytest.approx(0.15)
    assert report["theory"]["status"] == "absent"
    assert [one["finished_by_lbfgs"] for one in report["instances"]] == [False, False, True]
    none = instances(theory_status=np.full(3, Status.absent), status=np.full(3, Status.nonfinite))
    report = finite.finite_report(none, ta.dot_product(), 60, 2.0)
    assert report["q"] is None and report["theory"]["q"] == 2.0


def test_what_is_asked_for(capsys, monkeypatch):
    asked = {}

    def spy(name):
        return lambda *words, **named: asked.update({name: (words, named)})

    def run_instances(model, d, alpha, run, keys, *, nodes, progress):
        run("data", "key")
        asked["instances"] = d, alpha, keys, nodes.size
        return instances(status=np.zeros(3), theory_status=asked.get("theory_status", np.zeros(3)))

    monkeypatch.setattr(finite, "run_instances", run_instances)
    monkeypatch.setattr(finite, "state_report", lambda point: point)
    monkeypatch.setattr(finite, "gamp", spy("gamp"))
    monkeypatch.setattr(finite, "train", spy("train"))
    assert main("gamp --d 60 --alpha 3 --init positional --seed 5 --instances 2 --json".split()) == 0
    (_, data, init), named = asked["gamp"]
    assert (data, init, named["steps"], named["tol"], named["key"]) == ("data", "positional", 1000, 1e-10, "key")
    d, alpha, keys, size = asked["instances"]
    assert (d, alpha) == (60, 3.0) and size == ta.default_nodes(ta.dot_product(), ta.SIZES["instances"]).size
    assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.split(jax.random.key(5), 2)))
    asked["theory_status"] = np.array([0, 0, Status.absent])
    assert main("train --optimizer adam --steps 7 --json".split()) == 1  # theory has no state there
    (_, data, method, init), named = asked["train"]
    assert (method, init, named["steps"]) == ("adam", "semantic", 7)
    d, alpha, _, size = asked["instances"]
    assert (d, alpha) == (1000, 2.0) and size == ta.default_nodes(ta.dot_product()).size
    main(["train", "--json"])
    assert asked["train"][0][2] == "lbfgs" and asked["train"][1]["steps"] == 2000
