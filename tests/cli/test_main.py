"""What all subcommands share: bad input is one line and exit code 2, an interrupt leaves nothing."""

import json
import math

import pytest

from tiedattn_jax.cli import solve, transition
from tiedattn_jax.cli.main import main
from tiedattn_jax.cli.options import Report
from tiedattn_jax.errors import InputError


def failed(capsys, *arguments):
    """The line on stderr of a call that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.endswith("\n") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["solve", "--omega", "1.5"], "--omega"), (["solve", "--omega", "x"], "--omega"),
        (["solve", "--sigma", "0"], "--sigma"), (["solve", "--lam", "-1"], "--lam"),
        (["solve", "--alpha", "nan"], "--alpha"), (["solve", "--alpha", "inf"], "--alpha"),
        (["solve", "--nodes", "1000"], "--nodes"), (["solve", "--replicates", "0"], "--replicates"),
        (["solve", "--branch", "lexical"], "--branch"), (["solve", "--mixing", ".6", ".6", ".4", ".6"], "--mixing"),
        (["solve", "--rtol", "0"], "--rtol"), (["solve", "--rtol", "1e-20"], "--rtol"),
        (["solve", "--rtol", "1e-3", "--nodes", "4096"], "--nodes"), (["solve", "--rule", "grid"], "--rule"),
        (["solve", "--seed", "-1"], "--seed"), (["solve", "--out", "/dev/null/here"], "--out"),
        (["transition", "--branch", "semantic"], "--branch"), (["lines"], "command"), ([], "command"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_code_two(capsys, arguments, option):
    assert option in failed(capsys, *arguments)


def test_an_error_is_told_by_its_argument(capsys, monkeypatch):
    def refuse(problem):
        def model_of(args):
            raise problem

        monkeypatch.setattr(solve, "model_of", model_of)

    refuse(InputError("omega", "must not be named sigma"))
    assert failed(capsys, "solve") == "tiedattn: argument --omega: must not be named sigma\n"
    for name in ("teacher", "run", "command"):  # no options
        refuse(InputError(name, "must be another one"))
        assert failed(capsys, "solve") == f"tiedattn: {name} must be another one\n"
    refuse(ValueError("omega: this is a defect, not bad input"))
    with pytest.raises(ValueError, match="this is a defect"):
        main(["solve"])


@pytest.fixture
def report(monkeypatch):
    """A `solve` that solves nothing."""
    fixed = Report({"alpha": 2.0, "stderr": {"q": math.nan}, "ends": [math.inf]}, "in words", {"a.txt": b"a"}, True)
    monkeypatch.setattr(solve, "run", lambda args, averages: fixed)
    return fixed


def test_report_and_files(capsys, tmp_path, monkeypatch, report):
    out = tmp_path / "new" / "folder"
    assert main(["solve", "--out", str(out)]) == 0
    assert capsys.readouterr().out == "in words\n"
    assert (out / "a.txt").read_bytes() == b"a"
    numbers = {"alpha": 2.0, "stderr": {"q": None}, "ends": [None]}  # what JSON can say
    assert json.loads((out / "solve.json").read_text()) == numbers
    assert main(["solve", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == numbers
    monkeypatch.setattr(solve, "run", lambda args, averages: report._replace(ok=False))
    assert main(["solve"]) == 1 and capsys.readouterr().out == "in words\n"


def test_a_disk_that_is_full(capsys, tmp_path, monkeypatch, report):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tiedattn_jax.cli.main.write_whole", full)
    err = failed(capsys, "solve", "--out", str(tmp_path))
    assert "argument --out: must be a folder that can be written" in err and "No space left" in err


def test_interrupt_leaves_nothing(capsys, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transition, "sweep", stop)
    assert main(["transition", "--out", str(tmp_path / "out"), "--nodes", "4096"]) == 130
    assert not (tmp_path / "out").exists()
    assert "interrupted, nothing was written" in capsys.readouterr().err
