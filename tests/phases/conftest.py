import jax
import jax.numpy as jnp
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.overlaps import Conjugates
from tiedattn_jax.theory.fixed_points import DIAGNOSTICS, State
from tiedattn_jax.theory.observables import Diagnostics


@pytest.fixture(scope="session")
def known(model) -> State:
    """The semantic state at alpha = 2 in four replicates that agree, without a solve; what is not known is zero."""
    case, zero = CASES[0], jnp.zeros(4)
    x = jax.tree.map(lambda a: jnp.broadcast_to(a, (4, *a.shape)), state(case))
    return State(
        overlaps=x,
        conjugates=Conjugates(x.q, x.V, x.theta, x.m),
        train_loss=zero + case.train_loss,
        gen_error=zero + case.gen_error,
        gen_error_linear=zero,
        residual=zero,
        status=jnp.full(4, int(ta.Status.converged)),
        diagnostics=Diagnostics(*[zero] * len(DIAGNOSTICS)),
        train_loss_partials=(jax.tree.map(lambda a: jnp.zeros((4, *a.shape)), model), zero),
    )
