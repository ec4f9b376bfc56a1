"""`tiedattn --check`: known numbers pass, other numbers fail, and both are told."""

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

    def solve(*arguments):
        calls.append(arguments[1:])
        return state[0]

    monkeypatch.setattr(check, "solve", solve)
    return state, calls


def run(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--check"])
    return stop.value.code, capsys.readouterr().out


def test_known_numbers_pass(solved, capsys):
    code, text = run(capsys)
    assert code == 0 and solved[1] == [(2.0, "semantic")] * 2
    assert "agree with the known ones" in text and "float64" in text and f"tiedattn_jax {VERSION}" in text
    assert "first call" in text and "second call" in text and "cores of the host" in text


@pytest.mark.parametrize("name", ["train_loss", "overlaps.theta", "overlaps.q", "overlaps.V"])
def test_other_numbers_fail(name, solved, capsys):
    part, _, entry = name.rpartition(".")
    get = lambda p: getattr(getattr(p.replicates, part) if part else p.replicates, entry)  # noqa: E731
    solved[0][0] = eqx.tree_at(get, solved[0][0], 1.001 * get(solved[0][0]))
    code, text = run(capsys)
    assert code == 1 and "WRONG" in text and "1e-03" in text


def test_a_state_that_failed_fails(solved, capsys):
    state = solved[0][0]
    solved[0][0] = eqx.tree_at(lambda p: p.replicates.status, state, state.replicates.status + int(ta.Status.max_steps))
    assert run(capsys)[0] == 1


def test_a_machine_without_the_device_says_so(monkeypatch, capsys):
    def missing(*_):
        raise AssertionError

    monkeypatch.setattr(jax, "devices", missing)
    with pytest.raises(SystemExit) as stop:
        main(["--check"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("tiedattn: JAX must find a device, got 'AssertionError'")


def test_known_numbers_are_those_of_the_cases():
    assert {name: getattr(CASES[0], name) for name in check.KNOWN} == check.KNOWN and CASES[0].alpha == 2.0
