"""The command of the counting task."""

import argparse
import json

import jax
import numpy as np
import pytest

from tiedattn_jax import counting
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.cli import simulations
from tiedattn_jax.cli.main import main

pytestmark = pytest.mark.usefixtures("fast_compilation")

KEYS = (
    "mechanism runs epochs accuracy_mean accuracy_std accuracy_after_unfreezing_mean distance_frozen_to_sgd_mean "
    "distance_frozen_to_sgd_std distance_formerly_zero_mean distance_init_to_frozen_mean positional_share_mean "
    "semantic_share_mean seconds_per_epoch status"
).split()
SMALL = "--length 5 --tokens 3 --samples 5000 --width 8 --hidden 16 --epochs 3 --free-epochs 2".split()


def command(capsys, *arguments):
    code = main(["histogram", *SMALL, *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_command(capsys, tmp_path):
    options = ["--mechanism", "positional", "--runs", "2", "--json", "--out", str(tmp_path)]
    code, out, err = command(capsys, *options)
    assert code == 0 and err == ""
    report = json.loads(out)
    assert set(KEYS) < set(report) and report["mechanism"] == "positional" and report["runs"] == 2
    assert report["positional_share_mean"] > 0.999 and report["seconds_per_epoch"] > 0
    assert report["status"] == "max steps"
    files = "attention.png curves.csv histogram.json learning.png table.md".split()
    checkpoints = ["free_from_3.checkpoint", "frozen.checkpoint"]
    # The files of the other mechanism may lie beside these.
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"positional_{name}" for name in files + checkpoints)
    rows = (tmp_path / "positional_curves.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 5 and rows[-1].startswith("free,1,2,")
    repeated = json.loads(command(capsys, *options)[1])
    assert repeated.pop("seconds_per_epoch") is None and report.pop("seconds_per_epoch")
    assert repeated == report  # nothing was trained again
    with pytest.raises(SystemExit) as end:
        command(capsys, *options, "--seed", "1")
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.count("\n") == 1
    assert message.startswith("tiedattn: argument --out: its checkpoint must be of this configuration")
    with pytest.raises(SystemExit):
        command(capsys, *options, "--free-epochs", "1")
    assert "argument --free-epochs: must be at least the 2 that the checkpoint" in capsys.readouterr().err
    extended = command(capsys, *options[:-3], "--out", str(tmp_path), "--epochs", "4")  # trains on, and unfreezes again
    assert extended[0] == 0 and extended[1].startswith("positional: 2 runs: 2 max steps\n  accuracy  ")
    assert (tmp_path / "positional_free_from_4.checkpoint").exists()
    assert "| accuracy |" in (tmp_path / "positional_table.md").read_text()


def test_the_worse_status_of_both_stages_counts(monkeypatch):
    w = jax.tree.map(
        lambda a: a[None].repeat(2, 0), counting.Transformer(jax.random.key(0), length=3, tokens=3, width=4, hidden=2)
    )
    stages = (
        counting.Training(w, w, w, counting.History(*[np.ones((2, 1))] * 5), np.array(s)) for s in ([0, 4], [2, 0])
    )
    monkeypatch.setattr(simulations, "_trained", lambda args: (None, *stages, None))
    sizes = {"length": 3, "tokens": 3, "width": 4, "hidden": 2, "epochs": 1, "free_epochs": 1}
    report = simulations.run_histogram(argparse.Namespace(**sizes, runs=2, mechanism="free", out=None))
    assert report.numbers["status"] == "nonfinite" and not report.ok
    assert report.text.startswith("free: 2 runs: 1 max steps, 1 nonfinite\n  accuracy ")


def test_an_interrupted_command_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tiedattn_jax.counting.train", interrupt)
    code, out, err = command(capsys, "--out", str(tmp_path), "--json")
    assert code == 130 and out == "" and f"the same call resumes from {tmp_path}" in err
    assert "nothing was written" in command(capsys, "--json")[2]


def test_what_is_asked_for(capsys, monkeypatch):
    calls = []

    def train(keys, data, mechanism, *, width, hidden, epochs, **options):
        sizes = len(keys), data.train.shape[1], data.tokens, mechanism, width, hidden, epochs
        calls.append((sizes, jax.random.key_data(keys)))
        raise KeyboardInterrupt

    monkeypatch.setattr("tiedattn_jax.counting.train", train)
    assert command(capsys, "--runs", "4", "--mechanism", "free")[0] == 130
    command(capsys, "--runs", "4", "--seed", "1")
    (sizes, keys), (_, other_keys) = calls
    assert sizes == (4, 5, 3, "free", 8, 16, 3) and (keys != other_keys).all()


def test_a_folder_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    def refuse(folder, argument):
        raise InputError(argument, f"must be another, got {argument}='{folder}'")

    monkeypatch.setattr("tiedattn_jax.cli.simulations.make_folder", refuse)
    with pytest.raises(SystemExit) as end:
        command(capsys, "--out", str(tmp_path))
    assert end.value.code == 2
    assert capsys.readouterr().err == f"tiedattn: argument --out: must be another, got '{tmp_path}'\n"
    monkeypatch.setattr("tiedattn_jax.counting.train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # without a folder there is nothing to ask for
        command(capsys)


def test_the_memory_of_the_weights(monkeypatch):
    requests = []
    monkeypatch.setattr(simulations, "require_memory", lambda *arguments: requests.append(arguments[:3]))
    sizes = {"width": 8, "hidden": 16, "length": 5, "tokens": 3, "runs": 4}
    simulations._check_memory(argparse.Namespace(**sizes))
    per_run = 24 * (3 * 8 + 5 * (8 + 16) + 3 * 8 * 8 + 16 * 8)
    assert requests == [(per_run, "width", 8), (4 * per_run, "runs", 4)]
    for name in ("hidden", "length", "tokens"):
        simulations._check_memory(argparse.Namespace(**{**sizes, name: 10**6}))
        assert requests[-2][1] == name


def test_the_time_of_an_epoch_is_without_compiling(unchecked, monkeypatch):
    """It is the median after the first epoch, for one of the runs, and absent if nothing was trained."""
    clock = iter([0.0, 10.0, 13.0, 16.0, 20.0, 21.0])

    def train(*_, progress, **__):
        for k in range(5):
            progress(k, 4)

    monkeypatch.setattr(simulations.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(counting, "train", train)
    monkeypatch.setattr(counting, "unfreeze", lambda *_, progress, **__: progress(0, 1))
    sizes = {"samples": 50, "length": 3, "tokens": 3, "width": 8, "hidden": 4, "epochs": 4, "free_epochs": 1}
    args = argparse.Namespace(**sizes, seed=0, runs=2, mechanism="free", out=None, json=True)
    assert simulations._trained(args)[3] == 1.5
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(counting, "train", lambda *_, progress, **__: progress(4, 4))
    assert simulations._trained(args)[3] is None
