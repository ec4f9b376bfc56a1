"""Every public function is listed by its derivatives; those of all orders are the same in loops as they are plainly."""

import jax
import jax.numpy as jnp
import numpy as np
import public
import pytest
from jax import lax

import tiedattn_jax as ta

FEW, FEWER = ta.Sobol(2**6, replicates=1), ta.Sobol(2**4, replicates=1)


def solved(sigma):
    return ta.solve(ta.DotProduct(sigma=sigma), 2.0, "semantic", FEW).gen_error


def solved_wide(sigma):
    return ta.wide.solve(ta.wide.DotProduct(tau=0.2 * sigma), 1.0, nodes=FEW).gen_error


def optimal(sigma):
    return ta.bayes.solve(ta.DotProduct(sigma=sigma), 0.4, start="uninformed", nodes=FEW).gen_error


def on_endless_data(sigma):
    point = ta.dynamics.population(ta.DotProduct(sigma=sigma), 0.1, nodes=FEW)
    return point.gen_error + jnp.sum(point.Theta)


def fluctuations(sigma):
    """Overlaps with encodings on two orthogonal directions grow; four tokens have two equal eigenvalues of zero."""
    encodings = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    model = ta.DotProduct(sigma=sigma, mixing=np.full((4, 4), 0.25), encodings=encodings)
    end = ta.dynamics.emergence(model, 1.0, 0.05, 1.0, nodes=FEWER, points=2, steps=1).mean
    return end.teacher[-1] + end.encodings[-1]


def cosine(sigma):
    return ta.bayes.spectral_overlap(ta.DotProduct(sigma=sigma), 0.3 / sigma).value


# Public functions with derivatives of every order, and a number whose derivatives are compared, if there is one.
EVERY_ORDER = {
    "solve": solved, "wide.solve": solved_wide, "bayes.solve": optimal, "dynamics.population": on_endless_data,
    "dynamics.emergence": fluctuations, "bayes.spectral_overlap": cosine, "dynamics.sgd": None,
    "dynamics.small_start": None, "dynamics.landscape": None, "dynamics.separation": None, "bayes.weak_recovery": None,
    "bayes.perfect_recovery": None, "wide.onset": None, "wide.bayes": None, "wide.perfect_recovery": None,
    "wide.ridge_recovery": None, "wide.position": None, "state_evolution": None, "finite.risk": None,
    "finite.linear_baseline": None, "bayes.orbit": None,
}  # fmt: skip
# Those with first derivatives only; tests of `with_sensitivities` and `first_order` show that more raise an error.
FIRST_ORDER = {
    "critical_alpha", "find_event", "linear_crossing", "branch_ends", "best_ridge", "rsb.solve", "rsb.transition"
}  # fmt: skip
# Those without derivatives, with the reason.
WITHOUT = {
    "many results": {"sweep", "phase_diagram", "trace_branch", "find_states", "run_instances", "join"},
    "drawn data": {"sample_data", "finite.realised", "finite.diagnose", "finite.heldout_error", "gamp", "train",
                   "bayes.posterior_mean", "bayes.spectral_direction", "wide.sample_data", "wide.train", "wide.gamp",
                   "wide.heldout_error", "wide.run_instances"},
    "a search in numbers": {"wide.best_ridge"},
    "no model": {"wide.singular_values"},
    "no numbers": {"check", "cite", "load", "use_compilation_cache"},
}  # fmt: skip


def test_every_public_function_is_listed():
    rows = [set(EVERY_ORDER), FIRST_ORDER, *WITHOUT.values()]
    assert sum(map(len, rows)) == len(set().union(*rows)) and dict(public.functions()).keys() == set().union(*rows)


def in_loops(number):
    """The number at a scalar, computed inside `lax.scan` of `vmap` of `lax.map`."""

    def mapped(sigma):
        return lax.map(number, sigma[None])[0]

    return lambda sigma: lax.scan(lambda carry, s: (carry, jax.vmap(mapped)(s)[0]), 0, sigma[None, None])[1][0]


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, number in EVERY_ORDER.items() if number is not None])
def test_second_derivatives_in_loops(name):
    number, sigma = EVERY_ORDER[name], jnp.asarray(0.5)
    plain = jax.jit(jax.grad(jax.grad(number)))(sigma)
    assert np.isfinite(plain) and plain != 0
    for outer in (jax.grad, jax.jacfwd):
        value = jax.jit(outer(jax.grad(in_loops(number))))(sigma)
        np.testing.assert_allclose(value, plain, rtol=1e-8)
