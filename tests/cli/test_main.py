"""Behaviour shared by all subcommands: bad input prints one line and gives exit code 2, an interrupt leaves nothing."""

import errno
import io
import json
import math
import os
import sys

import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.cli import theory
from tiedattn_jax.cli.main import main
from tiedattn_jax.cli.options import Report


def failed(capsys, *arguments):
    """Return the line on stderr of a call that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.endswith("\n") and err.count("\n") == 1
    return err


@pytest.fixture
def refuse(monkeypatch):
    """Let the subcommand `solve` raise an exception when it makes its model."""

    def replace(problem):
        def model_of(args):
            raise problem

        monkeypatch.setattr(theory, "model_of", model_of)

    return replace


def test_an_error_is_told_by_its_argument(capsys, refuse):
    for argument, text, told in (
        ("omega", "must not be named sigma", "argument --omega: must not be named sigma"),
        ("omega", "must be less, got omega=0.5", "argument --omega: must be less, got 0.5"),
        *((name, "must be another one", f"{name} must be another one") for name in ("penalty", "run", "command")),
    ):  # the last ones are no options
        refuse(InputError(argument, text))
        assert failed(capsys, "solve") == f"tiedattn: {told}\n"
    for problem in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: out of memory\nin lines")):
        refuse(problem)
        assert "the memory is not enough, ask for less" in failed(capsys, "solve")
    refuse(ValueError("shapes differ"))
    with pytest.raises(ValueError, match="shapes differ"):  # a defect is raised
        main(["solve"])


def replace_solve(monkeypatch, run):
    """Let the subcommand `solve` run another function."""
    commands = [c._replace(run=run) if c.name == "solve" else c for c in theory.COMMANDS]
    monkeypatch.setattr(theory, "COMMANDS", commands)


@pytest.fixture
def report(monkeypatch):
    """Replace `solve` by a stub that solves nothing and returns a fixed report."""
    fixed = Report({"alpha": 2.0, "stderr": {"q": math.nan}, "ends": [math.inf]}, "in words", {"a.txt": b"a"}, True)
    replace_solve(monkeypatch, lambda args: fixed)
    return fixed


def test_report_and_files(capsys, tmp_path, monkeypatch, report):
    out = tmp_path / "new" / "folder"
    assert main(["solve", "--out", str(out), "--seed", "3"]) == 0
    assert capsys.readouterr().out == "in words\n"
    assert (out / "a.txt").read_bytes() == b"a"
    numbers = {"version": ta.__version__, "seed": 3, "layer": "dot_product", "alpha": 2.0}
    numbers |= {"rank": 1, "teacher": 1.0, "tied_teacher": False}
    numbers |= {"stderr": {"q": None}, "ends": [None]}  # JSON has no infinity and no NaN
    assert json.loads((out / "solve.json").read_text()) == numbers
    assert main(["solve", "--json", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == numbers
    replace_solve(monkeypatch, lambda args: report._replace(ok=False))
    assert main(["solve"]) == 1 and capsys.readouterr().out == "in words\n"


def test_a_reader_that_has_seen_enough(report, monkeypatch, tmp_path):
    """`tiedattn solve | head -3` ends like `tiedattn solve`, not with a traceback."""

    class Closed(io.FileIO):
        def write(self, text):
            raise BrokenPipeError

    with Closed(tmp_path / "pipe", "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["solve"]) == 0
        assert os.path.samestat(os.fstat(pipe.fileno()), os.stat(os.devnull))


def test_the_averages_and_the_layer_are_told(capsys, monkeypatch, report, lines):
    layer = "--layer relu_attention".split()
    words = "--rank 3 --teacher 2 --layer untied_dot_product --tied-teacher".split()
    averages = {"rule": "LineNodes", "size": 6300, "replicates": 4}
    for arguments, rule, numbers, text in (
        (layer, None, {"layer": "relu_attention"}, "in words\nlayer: relu_attention\n"),
        (words, None, {"rank": 3, "teacher": 2.0, "tied_teacher": True},
         "in words\nlayer: untied_dot_product\nrank: 3\nteacher: 2.0\ntied teacher: True\n"),
        ([], lines, {"nodes": averages}, "in words\naverages: 6300 nodes in each of 4 replicates (LineNodes)\n"),
    ):  # fmt: skip
        replace_solve(monkeypatch, lambda args, rule=rule: report._replace(nodes=rule) if rule else report)
        assert main(["solve", *arguments, "--json"]) == 0
        assert numbers.items() <= json.loads(capsys.readouterr().out).items()
        assert main(["solve", *arguments]) == 0 and capsys.readouterr().out == text


def test_a_disk_that_is_full(capsys, tmp_path, monkeypatch, report):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", lambda file: full() if (tmp_path / "a.txt").exists() else 0)
    err = failed(capsys, "solve", "--out", str(tmp_path))
    assert f"argument --out: must be a folder that can be written, got '{tmp_path}' (No space left on device)" in err
    assert "free space or use another one, what was finished is there" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    replace_solve(monkeypatch, full)
    with pytest.raises(OSError, match="No space left"):  # without --out the full disk holds another file
        main(["solve"])


def test_interrupt_leaves_nothing(capsys, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(theory, "sweep", interrupt)
    assert main(["transition", "--out", str(tmp_path / "out"), "--nodes", "4096"]) == 130
    assert not (tmp_path / "out").exists()
    assert "interrupted, nothing was written" in capsys.readouterr().err


def test_the_cache_of_programs(capsys, monkeypatch, report, tmp_path):
    settings = {}
    monkeypatch.setattr("tiedattn_jax.cli.main.jax.config.update", settings.__setitem__)
    for cache, folder in (("0", None), (str(tmp_path / "own"), str(tmp_path / "own"))):
        settings.clear()
        monkeypatch.setenv("TIEDATTN_CACHE", cache)
        assert main(["solve"]) == 0 and settings["jax_enable_x64"] is True
        assert settings.get("jax_compilation_cache_dir") == folder
    capsys.readouterr()
    if hasattr(os, "getuid"):  # Windows has other permissions
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o777)
        monkeypatch.setenv("TIEDATTN_CACHE", str(tmp_path / "shared"))
        message = "TIEDATTN_CACHE must be a folder to which only you can write, because its programs are executed"
        text = f"tiedattn: {message}: chmod 700 it or use another, got TIEDATTN_CACHE='{tmp_path}"
        assert failed(capsys, "solve").startswith(text)


def test_without_a_home_nothing_is_kept(capsys, monkeypatch, report):
    """Neither HOME nor an entry of the user: the command says so in one line and works."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    settings = {}
    monkeypatch.setattr("tiedattn_jax.cli.main.jax.config.update", settings.__setitem__)
    monkeypatch.setattr("tiedattn_jax.base.programs.Path.home", homeless)
    monkeypatch.delenv("TIEDATTN_CACHE")
    assert main(["solve"]) == 0 and "jax_compilation_cache_dir" not in settings
    message = "programs are not kept without a home directory: set TIEDATTN_CACHE to a folder"
    assert capsys.readouterr().err == f"tiedattn: {message}\n"
    with pytest.warns(UserWarning, match=f"^{message}$"):
        ta.use_compilation_cache()
