import made
import pytest

import tiedattn_jax as ta
from tiedattn_jax.theory import engine
from tiedattn_jax.theory.states import State


@pytest.fixture(scope="session")
def semantic_states(model) -> State:
    """The semantic state at alpha = 2 in four equal replicates, made without a solve; unknown numbers are zero."""
    return made.states(model)


@pytest.fixture(scope="session")
def rule(model):
    """An averaging rule of few nodes, for searches in closed form, which average nothing."""
    return ta.Lines(3, replicates=2).rule(model)


@pytest.fixture(scope="session")
def two_lines(model):
    """The averages `lines` in two replicates, for grids and sweeps."""
    return ta.Lines(5, replicates=2).rule(model)


@pytest.fixture
def theory(monkeypatch):
    """A function that lets the engine ask a toy theory instead of solving."""
    return lambda toy: monkeypatch.setattr(engine, "result_of", toy.result_of)
