"""Other label channels than those of the shipped layers, some of them with noise."""

import jax
import jax.numpy as jnp

import tiedattn_jax as ta

NOISE = 0.3


class Noisy(ta.DotProduct):
    """A target that sees the teacher's fields with noise on them."""

    noise = 1

    def target(self, Y, noise):
        return super().target(Y + NOISE * noise)

    def preimages(self, Y, noise):
        return ta.bayes.orbit(Y + NOISE * noise, NOISE**2)


class Plain(ta.DotProduct):
    """The dot product, but without the knowledge that its preimages are two signs: averages over nodes."""

    def preimages(self, Y):
        signs = super().preimages(Y)
        return ta.bayes.Preimages(signs.fields, signs.log_weight, signs.noise)


class Unheard(ta.DotProduct):
    """Noise on the labels that changes nothing: all numbers are those of `DotProduct`."""

    noise = 1

    def target(self, Y, noise):
        return super().target(Y)

    def preimages(self, Y, noise):
        return super().preimages(Y)


class NoisyPlain(Noisy):
    """The same for noisy labels."""

    def preimages(self, Y, noise):
        signs = super().preimages(Y, noise)
        return ta.bayes.Preimages(signs.fields, signs.log_weight, signs.noise)


class PhaseRetrieval(ta.Model):
    """One token, and labels that are the square of its field: real phase retrieval."""

    shape = (1, 1, 1)

    def target(self, Y):
        return Y @ Y.T

    def loss(self, Z, Y):
        return 0.5 * jnp.sum((Z @ Z.T - self.target(Y)) ** 2)

    def law(self):
        one = jnp.ones((1, 1), self.lam.dtype)
        return ta.SpectralLaw(one[0], one, 0 * one[None], one[None], 0 * one[None])

    def preimages(self, Y):
        return ta.bayes.orbit(Y)


class Sampled(ta.DotProduct):
    """Every token is labelled by one token, drawn from its row of the target, and the student pays cross-entropy."""

    noise = 1

    def loss(self, Z, Y, noise):
        token = jnp.sum(jnp.cumsum(self.target(Y), 1)[:, :-1] < jax.scipy.special.ndtr(noise), 1)
        return -(self.sigma**2) * jnp.sum(jax.nn.log_softmax(Z @ Z.T) * jax.nn.one_hot(token, len(Z)))


def model_of(kind, **options):
    """A layer of another kind with the numbers of `DotProduct`."""
    return kind(**vars(ta.DotProduct(**options)))
