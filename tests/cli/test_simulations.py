"""The commands that run instances of finite size beside the theory, and the command of the counting task."""

import json

import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.cli.main import main
from tiedattn_jax.finite.instances import means_of

MODEL, D = ta.DotProduct(), 60


def trained(init="semantic", model=MODEL, **options):
    return model, lambda data, key: ta.train(model, data, init, key=key, **options)


def passed(init, **options):
    return MODEL, lambda data, key: ta.gamp(MODEL, data, init, tol=1e-10, key=key, **options)


# Command lines, and what they ask of the library: alpha, number of instances, and the run of one.
ASKED = {
    "train --optimizer gd --steps 7 --init positional --alpha 1.5": (
        1.5,
        1,
        trained("positional", optimizer="gd", steps=7),
    ),
    "train --init random --instances 2": (2.0, 2, trained("random", optimizer="lbfgs", steps=2000)),
    "train --optimizer adam --steps 7": (2.0, 1, trained(optimizer="adam", steps=7)),
    # L-BFGS supports no penalty.
    "train --l1 .01": (2.0, 1, trained(model=ta.DotProduct(penalty=ta.L1(0.01)), optimizer="gd", steps=5000)),
    "gamp --alpha 3 --init positional --instances 2": (3.0, 2, passed("positional", steps=1000)),
}


@pytest.mark.full
@pytest.mark.parametrize("words", ASKED)
def test_a_command_is_a_call_of_the_library(capsys, tmp_path, words):
    """It prints and writes the means of the instances that the library runs with the same options."""
    alpha, count, (model, run) = ASKED[words]
    keys, nodes = jax.random.split(jax.random.key(5), count), ta.Lines(5, seed=5).rule(model)
    expected = ta.run_instances(model, D, alpha, run, keys, nodes=nodes)
    call = [*words.split(), *f"--seed 5 --d {D} --nodes 1024 --out {tmp_path}".split()]
    assert main(call) == int(not np.all(expected.ok))
    out = capsys.readouterr().out
    assert out.partition("\n")[2].startswith(expected.summary()) and f"d = {D}, alpha = {alpha:g}\n" in out
    report = json.loads((tmp_path / f"{call[0]}.json").read_text())
    numbers = json.loads(json.dumps(means_of(expected)), parse_constant=lambda _: None)
    assert numbers.items() <= report.items() and report["nodes"]["size"] == nodes.size


SMALL = "histogram --length 5 --tokens 3 --samples 500 --width 8 --hidden 16 --epochs 3 --free-epochs 2".split()
SHARES = "accuracy accuracy_after_unfreezing distance_frozen_to_sgd distance_formerly_zero distance_init_to_frozen"


@pytest.mark.full
def test_histogram(capsys, tmp_path):
    options = ["--mechanism", "positional", "--runs", "2", "--out", str(tmp_path)]

    def report_of(*words):
        assert main([*SMALL, *options, "--json", *words]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    def refusal_of(*words):
        with pytest.raises(SystemExit, match="2"):
            main([*SMALL, *options, *words])
        return capsys.readouterr().err

    report = report_of()
    assert {f"{name}_{kind}" for name in SHARES.split() for kind in ("mean", "std")} < set(report)
    assert (report["mechanism"], report["runs"], report["epochs"]) == ("positional", 2, 3)
    assert report["positional_share_mean"] > 0.999 and report["seconds_per_epoch"] > 0
    files = "attention.png curves.csv histogram.json learning.png table.md free_from_3.checkpoint frozen.checkpoint"
    # The files of the other mechanism may lie beside these.
    assert {p.name for p in tmp_path.iterdir()} == {f"positional_{name}" for name in files.split()}
    rows = (tmp_path / "positional_curves.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 5 and rows[-1].startswith("free,1,2,")
    assert "| accuracy |" in (tmp_path / "positional_table.md").read_text()
    repeated = report_of()
    assert repeated.pop("seconds_per_epoch") is None and report.pop("seconds_per_epoch")
    assert repeated == report  # nothing was trained again
    assert "argument --out: its checkpoint must be of this configuration" in refusal_of("--seed", "1")
    assert "argument --free-epochs: must be at least the 2 that the checkpoint" in refusal_of("--free-epochs", "1")
    assert main([*SMALL, *options, "--epochs", "4"]) == 0  # trains on, and unfreezes again
    assert capsys.readouterr().out.startswith("positional: 2 runs: 2 max steps\n  accuracy  ")
    assert (tmp_path / "positional_free_from_4.checkpoint").exists()
