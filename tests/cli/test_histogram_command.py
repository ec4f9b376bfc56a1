"""The command of the counting task."""

import json

import pytest

from tiedattn_jax.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_programs")

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
    written = "attention.png curves.csv histogram.json learning.png table.md".split()
    left = ["positional_free.checkpoint", "positional_frozen.checkpoint"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(written + left)
    rows = (tmp_path / "curves.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 5 and rows[-1].startswith("free,1,2,")
    again = json.loads(command(capsys, *options)[1])
    assert again.pop("seconds_per_epoch") is None and report.pop("seconds_per_epoch")
    assert again == report  # nothing was trained again
    with pytest.raises(SystemExit) as end:
        command(capsys, *options, "--seed", "1")
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.count("\n") == 1
    assert message.startswith("tiedattn: argument --out: its checkpoint must be of this configuration")


def test_an_interrupted_command_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tiedattn_jax.cli.histogram.train", interrupt)
    code, out, err = command(capsys, "--out", str(tmp_path), "--json")
    assert code == 130 and out == "" and f"the same call resumes from {tmp_path}" in err
    assert "nothing was written" in command(capsys, "--json")[2]
