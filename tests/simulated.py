"""Simulations to hold the theory against: one-pass stochastic gradient descent, and instances that are trained."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import tiedattn_jax as ta


def block_columns(rng, size):
    """Three orthogonal columns of mean square one."""
    return np.linalg.qr(rng.standard_normal((size, 3)))[0] * np.sqrt(size)


def setting(d, eigenvalues=((0.25, 0.25),), seed=0, **options):
    """A layer of two tokens with opposite encodings, its matrices, and random entries of a student orthogonal to them.

    Args:
        eigenvalues: of the two tokens, each on an equal share of the dimensions.
    """
    rng, share = np.random.default_rng(seed), d // len(eigenvalues)
    columns = np.concatenate([block_columns(rng, share) for _ in eigenvalues])
    teacher, p, rest = columns[:, :1], columns[:, 1] / np.sqrt(d), columns[:, 2]
    Sigma = np.repeat(np.array(eigenvalues).T, share, 1)
    law = ta.SpectralLaw.from_matrices(Sigma, np.stack([p, -p]), teacher)
    return ta.DotProduct(spectrum=law, **options), Sigma, np.stack([p, -p]), teacher[:, 0], rest


@partial(jax.jit, static_argnames=("runs", "steps", "every"))
def descend(model, Sigma, p, teacher, Q0, eta, kappa, key, *, runs, steps, every):
    """Overlaps (R, Theta, m) of independent runs, every so many steps: (times, runs, 3)."""
    d = len(teacher)

    def overlaps(Q):
        return jnp.stack([jnp.sum(Q**2, 1) / d, Q @ teacher / d, Q @ p[0] / d**0.5], 1)

    def step(Q, key):
        x = jnp.sqrt(Sigma) * jax.random.normal(key, (runs, *Sigma.shape))
        Y = (x @ teacher)[..., None] / d**0.5
        Z = jnp.einsum("rld,rd->rl", x + p, Q)[..., None] / d**0.5
        u = jax.vmap(jax.grad(model.loss))(Z, Y)[..., 0]
        return Q - eta * (jnp.einsum("rld,rl->rd", x + p, u) / d**0.5 + kappa / d * Q), None

    def stretch(Q, key):
        Q, _ = jax.lax.scan(step, Q, jax.random.split(key, every))
        return Q, overlaps(Q)

    Q = jnp.tile(Q0, (runs, 1))
    return jax.lax.scan(stretch, Q, jax.random.split(key, steps // every))[1]


def runs_of(setting, start, eta, kappa, until, points, *, runs, seed=0):
    """Means and standard errors of (R, Theta, m) at `points` equal times after the start, each (points, 3)."""
    model, Sigma, p, teacher, rest = setting
    d, (R, Theta, m) = len(teacher), start
    Q0 = Theta * teacher + m * np.sqrt(d) * p[0] + np.sqrt(R - Theta**2 - m**2) * rest
    every = round(until * d / points)
    arrays = (jnp.asarray(a) for a in (Sigma, p, teacher, Q0))
    samples = descend(model, *arrays, eta, kappa, jax.random.key(seed), runs=runs, steps=points * every, every=every)
    return np.mean(samples, 1), np.std(samples, 1, ddof=1) / np.sqrt(runs)


def trained(model, data, branch, **options):
    return ta.train(model, data, branch, optimizer="lbfgs", **{"steps": 2000, "tol": 1e-7} | options)


def assert_agrees(model, d, alpha, branch, nodes, run=None, *, normalise=True, bars=0.05, slack=0.02, but=("V",)):
    """Assert that eight instances end on a branch with its numbers within three error bars, and return them.

    Args:
        bars: the largest error bar relative to the theory; `slack` is added to three of them.
        but: numbers that are not compared, as are those that vanish.
    """
    run = run or (lambda data, key: trained(model, data, branch))
    keys = jax.random.split(jax.random.key(0), 8)
    result = ta.run_instances(model, d, alpha, run, keys, normalise=normalise, nodes=nodes)
    assert np.all(result.ok) and result.groups == {branch: 8}
    for k, (_, theory, gap, bar) in result.difference(branch).items():
        if k not in but and theory != 0 and np.isfinite(gap):
            assert bar < bars * theory and abs(gap) < 3 * bar + slack * theory, k
    return result
