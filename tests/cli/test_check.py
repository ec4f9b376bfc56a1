"""`tiedattn --check`: known numbers pass, other numbers fail, and both are told."""

from operator import attrgetter

import equinox as eqx
import jax
import made
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.base import VERSION
from tiedattn_jax.cli import main as check
from tiedattn_jax.cli.main import main


@pytest.fixture
def solved(monkeypatch):
    """Replace the solve by a state made by hand, which tests may change; record the calls."""
    calls, state = [], [made.fixed_point(CASES[0])]
    monkeypatch.setattr(check, "solve", lambda *arguments: calls.append(arguments[1:]) or state[0])
    return state, calls


def run(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--check"])
    return stop.value.code, *capsys.readouterr()


def test_known_numbers_pass(solved, capsys):
    assert {name: getattr(CASES[0], name) for name in check.KNOWN} == check.KNOWN and CASES[0].alpha == 2.0
    code, text, _ = run(capsys)
    assert code == 0 and solved[1] == [(2.0, "semantic")] * 2
    for words in ("agree with the known ones", "float64", f"tiedattn_jax {VERSION}", "first call", "second call",
                  "cores of the host"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("name", ["train_loss", "overlaps.theta", "overlaps.q", "overlaps.V"])
def test_other_numbers_fail(name, solved, capsys):
    get = attrgetter(f"replicates.{name}")
    solved[0][0] = eqx.tree_at(get, solved[0][0], 1.001 * get(solved[0][0]))
    code, text, _ = run(capsys)
    assert code == 1 and "WRONG" in text and "1e-03" in text


def test_a_state_that_failed_fails(solved, capsys):
    solved[0][0] = made.fixed_point(CASES[0], status=[int(ta.Status.max_steps)] * 4)
    assert run(capsys)[0] == 1


def test_a_machine_without_the_device_says_so(monkeypatch, capsys):
    def missing(*_):
        raise AssertionError

    monkeypatch.setattr(jax, "devices", missing)
    code, _, err = run(capsys)
    assert code == 2 and err.startswith("tiedattn: JAX must find a device, got 'AssertionError'")
