import made
import pytest

from tiedattn_jax.theory.states import State


@pytest.fixture(scope="session")
def semantic_states(model) -> State:
    """The semantic state at alpha = 2 in four equal replicates, made without a solve; unknown numbers are zero."""
    return made.states(model)
