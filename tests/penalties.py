"""Models with a penalty that several tests share."""

import dataclasses

import jax
import jax.numpy as jnp

import tiedattn_jax as ta


class Quadratic(ta.Penalty):
    """A user's own ridge, ``k w^2 / 2``, which acts as a larger lambda does."""

    k: jax.Array

    def value(self, w):
        return 0.5 * self.k * w**2

    def prox(self, v, c):
        return v / (1 + c * self.k)


class SparseTeacher(ta.DotProduct):
    """A fifth of the teacher's entries are N(0, 5), the others are zero."""

    def law(self):
        atoms = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), super().law())
        pi = jnp.stack([0 * self.teacher, 5 * self.teacher])
        return dataclasses.replace(atoms, weights=jnp.array([0.8, 0.2]), pi=pi)


def sparse(model):
    return SparseTeacher(**vars(model))
