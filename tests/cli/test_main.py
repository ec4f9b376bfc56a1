"""Behaviour shared by all subcommands: reports, files, errors in one line with exit code 2, interrupts; `--check`."""

import contextlib
import errno
import io
import json
import os
from operator import attrgetter

import equinox as eqx
import jax
import made
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.base import VERSION
from tiedattn_jax.cli import main as module
from tiedattn_jax.cli.main import main

SOLVE = ["solve", "--nodes", "1024"]  # the program that states on lines of order 5 share


def failed(capsys, *arguments):
    """Return the line on stderr of a call that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.endswith("\n") and err.count("\n") == 1
    return err


def raising(error):
    def fails(*_, **__):
        raise error

    return fails


@pytest.fixture
def found(monkeypatch):
    """Let `solve` find a state that is made by hand."""
    monkeypatch.setattr("tiedattn_jax.cli.theory.solve", lambda *_, **__: made.fixed_point())


def test_report_and_files(capsys, tmp_path):
    out = tmp_path / "new" / "folder"
    assert main([*SOLVE, "--teacher", "2", "--seed", "3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    averages = "averages: 6300 nodes in each of 4 replicates (lines)"
    assert text.startswith("semantic branch at alpha = 2") and text.endswith(f"\nteacher: 2.0\n{averages}\n")
    report = json.loads((out / "solve.json").read_text())
    origin = {"version": VERSION, "seed": 3, "layer": "dot_product", "rank": 1, "teacher": 2.0, "tied_teacher": False}
    assert origin.items() < report.items() and report["nodes"] == {"rule": "lines", "size": 6300, "replicates": 4}
    assert main([*SOLVE, "--teacher", "2", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main([*SOLVE, "--alpha", "0.03", "--branch", "positional", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)  # JSON has no infinity and no NaN
    assert report["status"] == "absent" and report["train_loss"] is None


@pytest.mark.usefixtures("found")
def test_a_reader_that_has_seen_enough(tmp_path):
    """`tiedattn solve | head -3` ends like `tiedattn solve`, not with a traceback."""
    closed = type("Closed", (io.FileIO,), {"write": raising(BrokenPipeError())})
    with closed(tmp_path / "pipe", "w") as pipe, contextlib.redirect_stdout(pipe):
        assert main(SOLVE) == 0
        assert os.path.samestat(os.fstat(pipe.fileno()), os.stat(os.devnull))


@pytest.mark.usefixtures("found")
def test_a_disk_that_is_full(capsys, tmp_path, monkeypatch):
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", full)
    err = failed(capsys, *SOLVE, "--out", str(tmp_path))
    assert f"argument --out: must be a folder that can be written, got '{tmp_path}' (No space left on device)" in err
    assert "free space or use another one, what was finished is there" in err and list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_and_a_defect_is_raised(capsys, monkeypatch):
    for error in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: out of memory\nin lines")):
        monkeypatch.setattr("tiedattn_jax.cli.theory.solve", raising(error))
        assert "the memory is not enough, ask for less" in failed(capsys, "solve")
    monkeypatch.setattr("tiedattn_jax.cli.theory.solve", raising(ValueError("shapes differ")))
    with pytest.raises(ValueError, match="shapes differ"):
        main(["solve"])


@pytest.mark.parametrize(
    ("command", "function", "told"),
    [
        ("transition --nodes 1024 --out", "cli.theory.sweep", "nothing was written"),
        ("diagram --out", "cli.theory.phase_diagram", "finished tracks are kept: go on with --resume --out {}"),
        ("histogram --samples 500 --json", "counting.train", "nothing was written"),
        ("histogram --samples 500 --out", "counting.train", "the same call resumes from {}"),
    ],
)
def test_interrupts(capsys, tmp_path, monkeypatch, command, function, told):
    monkeypatch.setattr(f"tiedattn_jax.{function}", raising(KeyboardInterrupt()))
    place = str(tmp_path / "out")
    assert main([*command.split(), *[place] * command.endswith("--out")]) == 130
    assert capsys.readouterr().err == f"tiedattn: interrupted, {told.format(place)}\n"
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.usefixtures("found")
def test_without_a_home_nothing_is_kept(capsys, monkeypatch):
    """Neither HOME nor an entry of the user: the command says so in one line and works."""
    homeless = raising(RuntimeError("Could not determine home directory."))
    monkeypatch.setattr("tiedattn_jax.base.programs.Path.home", homeless)
    monkeypatch.delenv("TIEDATTN_CACHE")
    message = "programs are not kept without a home directory: set TIEDATTN_CACHE to a folder"
    assert main(SOLVE) == 0 and capsys.readouterr().err == f"tiedattn: {message}\n"
    with pytest.warns(UserWarning, match=f"^{message}$"):
        ta.use_compilation_cache()


@pytest.mark.parametrize("wrong", [None, "train_loss", "overlaps.theta", "overlaps.q", "overlaps.V", "status"])
def test_check(capsys, monkeypatch, wrong):
    """Known numbers pass, other ones fail, and both are told."""
    assert {name: getattr(CASES[0], name) for name in module.KNOWN} == module.KNOWN and CASES[0].alpha == 2.0
    state = made.fixed_point(CASES[0], status=[2 * (wrong == "status")] * 4)  # max steps
    if wrong not in (None, "status"):
        get = attrgetter(f"replicates.{wrong}")
        state = eqx.tree_at(get, state, 1.001 * get(state))
    asked = {(2.0, "semantic"): state}
    monkeypatch.setattr(module, "solve", lambda model, *setting: asked[setting])
    with pytest.raises(SystemExit) as stop:
        main(["--check"])
    text = capsys.readouterr().out
    assert stop.value.code == (wrong is not None) and f"tiedattn_jax {VERSION}" in text
    assert ("agree with the known ones" in text) is (wrong is None) and ("WRONG" in text) is (wrong is not None)
    assert wrong in (None, "status") or "1e-03" in text


def test_a_machine_without_the_device_says_so(monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", raising(AssertionError()))
    assert failed(capsys, "--check").startswith("tiedattn: JAX must find a device, got 'AssertionError'")
