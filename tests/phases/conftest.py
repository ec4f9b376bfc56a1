import made
import pytest

from tiedattn_jax.theory.states import State


@pytest.fixture(scope="session")
def known(model) -> State:
    """The semantic state at alpha = 2 in four replicates that agree, without a solve; what is not known is zero."""
    return made.states(model)
