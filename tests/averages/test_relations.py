"""Relations between averaging rules: other seeds, other replicates, and the same points in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta

RULES = {
    "sobol": lambda model, **options: ta.Sobol(2**8, **options).rule(model),
    "monte carlo": lambda model, **options: ta.MonteCarlo(2**8, **options).rule(model),
    "gauss hermite": lambda model, **options: ta.GaussHermite(5, **options).rule(model),
    "lines": lambda model, **options: ta.Lines(3, **options).rule(model),
    "sobol lines": lambda model, **options: ta.Lines(lines=2**6, points=8, **options).rule(model),
}
RANDOM = np.random.default_rng(0)
WAVES, PHASES = RANDOM.standard_normal((4, 40)), RANDOM.uniform(0, 2 * np.pi, 40)


def averages(rule):
    """Averages of waves in all four fields, in every replicate: (R, 40)."""

    def of(replicate):
        student, teacher, weight = jax.vmap(replicate.quadrature)(replicate.blocks())
        fields = jnp.concatenate([student[:, :, 0], teacher[:, :, 0]], 1)
        return jnp.einsum("bn,bwn->w", weight, jnp.cos(jnp.einsum("fw,bfn->bwn", WAVES, fields) + PHASES[:, None]))

    return np.asarray(rule.each(of))


@pytest.mark.parametrize("name", RULES)
def test_error_bars_are_the_scatter_over_seeds(model, name):
    """Error bars of four replicates agree with the scatter of their means over eight seeds, within a factor of 3."""
    values = np.stack([averages(RULES[name](model, seed=seed, replicates=4)) for seed in range(8)])
    bars = np.stack([ta.results.error_bar(v) for v in values])
    bar, scatter = np.sqrt(np.mean(bars**2)), np.sqrt(np.mean(values.mean(1).var(0, ddof=1)))
    assert 1e-12 < scatter and 1 / 3 < bar / scatter < 3, (bar, scatter)
    exact = np.exp(-0.5 * np.sum(WAVES**2, 0)) * np.cos(PHASES)
    assert np.sqrt(np.mean((values.mean((0, 1)) - exact) ** 2)) < 3 * bar + 1e-7  # lines end at 5.4 or more


def random_numbers(name, rule):
    """All random arrays of a rule by name, each leading with the replicates."""
    arrays = {k: np.asarray(a) for k, a in vars(rule.stack).items() if isinstance(a, jax.Array)}
    if name != "lines":
        del arrays["weight"]
    first = name == "gauss hermite"  # its first replicate is the grid itself
    return {k: a[first:].reshape(len(a) - first, -1) for k, a in arrays.items()}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("step", [1, 2, 2**31, 2**32 - 1, 2**32, 2**40])
def test_no_replicate_comes_twice(name, step):
    """No replicate of a rule, nor one of a rule with another seed, has a random array of another replicate."""
    a, b = (random_numbers(name, RULES[name](ta.DotProduct(), seed=7 + s, replicates=4)) for s in (0, step))
    for k in a:
        replicates = np.concatenate([a[k], b[k]])
        differences = np.abs(replicates[:, None] - replicates).max(-1)
        assert np.all(differences + np.eye(len(replicates)) > 1e-4), (k, differences)


@pytest.mark.parametrize("name", ["sobol", "monte carlo"])
def test_fields_are_independent(model, name):
    """Fields of tokens, student and teacher are uncorrelated in every replicate, and so are their squares."""
    stack = RULES[name](model, replicates=4).stack
    for fields in np.concatenate([stack.student, stack.teacher], 1)[:, :, 0]:
        for values in (fields, fields**2):
            assert np.abs(np.corrcoef(values) - np.eye(4)).max() < 4 / fields.shape[1] ** 0.5
