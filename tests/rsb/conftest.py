"""Conjugates of 1RSB at random, which several tests of the room take."""

import jax
import jax.numpy as jnp
import pytest

from tiedattn_jax.rsb.potentials import OneRSBOverlaps


def _random_hats(r: int = 1) -> OneRSBOverlaps:
    key = jax.random.split(jax.random.key(0), 5)

    def positive(key, size):
        a = jax.random.normal(key, (2, r, r))
        return size * (a @ jnp.swapaxes(a, 1, 2) + jnp.eye(r))

    q0 = positive(key[0], 1e-4)
    q1 = q0 + positive(key[1], 1e-6)
    theta, m = 1e-3 * jax.random.normal(key[3], (2, r, 1)), 1e-3 * jax.random.normal(key[4], (2, r))
    return OneRSBOverlaps(q1, q0, positive(key[2], 0.01), theta, m)


@pytest.fixture(scope="session")
def random_hats():
    """A function of the rank of a student that returns random conjugates of two tokens, with qhat1 > qhat0 > 0."""
    return _random_hats
