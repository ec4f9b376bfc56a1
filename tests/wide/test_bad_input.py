"""What wide layers refuse: numbers and losses of a layer, eigenvalues of its teacher, and calls without a wide form."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.wide.laws import Eigenvalues

layer = partial(ta.wide.DotProduct, tau=0.1)
wide, hard = cache(layer), cache(partial(layer, target="hardmax"))
KEY = jax.random.key(0)
SHARES = "mixing must be rows of shares that sum to one"
VECTOR = "eigenvalues must be a vector of at least one number, got eigenvalues="
FINITE, POSITIVE = "eigenvalues must be finite and at least zero", "eigenvalues must be positive for at least one"
SMOOTH = "target must be softmax for the theory of training"
SHIFT = "encodings need two tokens and a loss that does not see a common shift of all scores, got 2 tokens and 1 d"
SENTENCES = "data must be sentences from wide.sample_data"


@cache
def few():
    return ta.wide.sample_data(wide(), 6, 0.5, KEY)


def nothing(data, key):
    return None


def refused(call, sentence):
    with pytest.raises(ta.InputError) as error:
        call()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"omega": -0.1}, "omega must be in [0, 1], got omega=-0.1"),
        ({"omega": 1.5}, "omega must be in [0, 1], got omega=1.5"),
        ({"mixing": [[1.1, -0.1], [0.5, 0.5]]}, SHARES),
        ({"mixing": [[0.8, 0.3], [0.2, 0.7]]}, SHARES),  # columns do
        *(({"mixing": [[0.5, 0.5], [0.5 + error, 0.5]]}, SHARES) for error in (1.2e-6, -1.2e-6)),
        ({"mixing": [1.0]}, "mixing must be of shape (2, 2)"),
        ({"tau": None}, "tau must be given, or lam in its place, got tau=None and lam=None"),
        ({"lam": 1.0}, "tau must be given, or lam in its place, got tau=0.1 and lam=1.0"),
        ({"tau": -1.0}, "tau must be positive"),
        ({"tau": None, "lam": 0.0}, "lam must be positive and finite"),
        ({"kappa": 0.0}, "kappa must be positive"),
        ({"noise": -0.1}, "noise must be zero or positive"),
        ({"loss": "hinge"}, "loss must be one of squared, cross_entropy"),
        ({"target": "sparse"}, "target must be one of softmax, hardmax"),
        ({"teacher": [1.0, np.nan]}, "eigenvalues must be finite"),
        ({"teacher": ta.wide.Wishart}, "eigenvalues"),
        *(({"encodings": length}, "encodings must be positive") for length in (0.0, -1.5)),
        ({"encodings": "short"}, "encodings must be one of"),
        *(({"encodings": kind, "tokens": 3}, "encodings need two tokens") for kind in (1.5, "long")),
        ({"tokens": 1}, "tokens must be an integer of at least 2"),
    ],
)
def test_bad_layers(unchecked, options, sentence):
    refused(lambda: layer(**options), sentence)


@pytest.mark.parametrize(
    "loss, options, sentence",
    [
        (lambda self, H, Y: 0.0 * jnp.sum(H), {}, "loss must depend on the scores"),
        (lambda self, H, Y: H, {}, "loss must return one number"),
        (lambda self, H, Y: jnp.log(jnp.sum(H)), {}, "loss must be finite and smooth for all scores"),
        # The square root is finite everywhere, but its slope at zero is not.
        (lambda self, H, Y: jnp.sum(H) ** 2 + jnp.sqrt(0 * jnp.sum(H**2)), {}, "loss must be finite and smooth"),
        (lambda self, H, Y: jnp.sum(H) ** 2, {"encodings": "long"}, SHIFT),
    ],
)
def test_bad_losses(unchecked, loss, options, sentence):
    kind = type("Kind", (ta.wide.Layer,), {"loss": loss})
    refused(lambda: kind(teacher=ta.wide.Wishart(0.5), tau=0.1, **options), sentence)


@pytest.mark.parametrize(
    "call, sentence",
    [
        *(
            (partial(Eigenvalues, bad), VECTOR + shape)
            for bad, shape in (([], "[0]"), ([[1, 2]], "[1, 2]"), (1.0, "[]"))
        ),
        *((partial(Eigenvalues, [1.0, bad]), FINITE) for bad in (-1e-9, np.inf)),
        (partial(Eigenvalues, [0.0, 0.0]), POSITIVE),
        (lambda: ta.wide.solve(wide(), 0.0), "alpha must be positive"),
        *(
            (partial(verb, ta.DotProduct(), *more), "model must be a wide layer such as")
            for verb, more in (
                (ta.wide.solve, (1.0,)),
                (ta.wide.onset, ()),
                (ta.wide.bayes, (1.0,)),
                (ta.wide.train, (3,)),
            )
        ),
        *((partial(verb, wide()), "model must be a") for verb in (ta.critical_alpha, partial(ta.solve, alpha=1.0))),
        (
            lambda: ta.wide.solve(wide(), 1.0, nodes=64),
            "nodes must be None or a Sobol recipe for a wide layer, got nodes=64",
        ),
        (lambda: ta.wide.solve(wide(), 1.0, start=3.0), "start must be a state of a wide layer"),
        (lambda: ta.wide.solve(hard(), 1.0), SMOOTH),
        (lambda: ta.wide.onset(hard()), SMOOTH),
        (lambda: ta.wide.bayes(layer(omega=1.0), 1.0), "omega must be below one"),
        (lambda: ta.wide.bayes(layer(target="hardmax", tokens=3), 1.0), "tokens must be two for hard attention"),
        (lambda: ta.bayes.weak_recovery(wide()), "model must be a"),
        (lambda: ta.wide.position(wide()), "model must be a tied DotProduct with encodings"),
        (lambda: ta.wide.ridge_recovery(hard()), "target must be softmax"),
        (lambda: ta.wide.perfect_recovery(layer(noise=0.1)), "noise must be zero"),
        (lambda: ta.wide.ridge_recovery(layer(teacher=[1.0, 2.0])), "teacher must be a law of Gaussian factors"),
        (lambda: ta.rsb.solve(wide(), 1.0), "model must be"),
        (lambda: ta.dynamics.sgd(wide(), (0.1, 0.1, 0.1), eta=1.0, until=1.0), "model must be"),
        (lambda: ta.dynamics.small_start(wide(), 1.0), "model must be"),
        (lambda: ta.wide.sample_data(layer(tokens=3), 2, 1.0, KEY), "d must be an integer of at least 3"),
        (lambda: ta.wide.sample_data(wide(), 5000, 1.0, KEY), "d must be smaller, got d=5000: "),
        (lambda: ta.wide.sample_data(wide(), 1, 1.0, KEY), "d must be an integer of at least 2"),
        (lambda: ta.wide.sample_data(wide(), 10, -1.0, KEY), "alpha must be positive"),
        (lambda: ta.wide.sample_data(wide(), 10, 1.0, 3), "key must be one key"),
        (lambda: ta.wide.train(wide(), 3), "data must be sentences"),
        (lambda: ta.wide.train(wide(), few(), over="W"), "over must be one of S, Q"),
        (lambda: ta.wide.train(wide(), few(), steps=0), "steps must be an integer"),
        (lambda: ta.wide.gamp(wide(), few(), steps=0), "steps must be an integer"),
        *((lambda bad=bad: ta.wide.gamp(wide(), few(), damping=bad), "damping must be in") for bad in (-0.1, 1.0)),
        (lambda: ta.wide.gamp(layer(encodings="long"), few()), "model must have no encodings"),
        (lambda: ta.wide.heldout_error(wide(), None, np.eye(6)), SENTENCES),
        (lambda: ta.wide.heldout_error(wide(), few(), jnp.eye(9)), "S must have shape"),
        (lambda: ta.wide.heldout_error(wide(), few(), few().teacher, 3), "key must be"),
        (lambda: ta.wide.heldout_error(wide(), few(), few().teacher, KEY, sentences=1), "sentences must be an integer"),
        (lambda: ta.sweep(ta.solve, wide(), alpha=1.0), "model must be a"),
        (lambda: ta.sweep(ta.wide.solve, wide(), tau=[0.1]), "alpha must be given"),
        (lambda: ta.sweep(ta.wide.bayes, wide(), noise=[0.1]), "alpha must be given"),
        (lambda: ta.sweep(ta.wide.onset, wide(), alpha=[0.1]), "alpha must be left out"),
        (lambda: ta.sweep(ta.wide.solve, wide(), alpha=1.0, lam=[0.1]), "lam must be a number of the setting"),
        (lambda: ta.sweep(ta.wide.solve, wide(), alpha=1.0, tau=[-0.1, 0.1]), "tau must be positive"),
        (lambda: ta.sweep(ta.wide.solve, wide(), alpha=1.0, omega=[0.0, 2.0]), "omega must be in"),
        (
            lambda: ta.sweep(ta.wide.solve, wide(), alpha=1.0, **{"teacher.kappa": [-1.0, 1.0]}),
            "kappa must be positive",
        ),
        (lambda: ta.sweep(ta.wide.solve, wide(), alpha=1.0, follow=True), "follow must be left out but for solve"),
        (lambda: ta.sweep(ta.wide.bayes, wide(), alpha=1.0, nodes=64), "nodes must be a number of the setting"),
        (lambda: ta.sweep(ta.wide.solve, [wide(), ta.DotProduct()], alpha=1.0), "model must give models of one"),
        (lambda: ta.wide.run_instances(wide(), 6, 0.5, nothing, KEY[None], theory=False), "run must be a function"),
        (lambda: ta.wide.run_instances(wide(), 6, 0.5, lambda data: None, KEY[None]), "run must take"),
        (lambda: ta.wide.run_instances(wide(), 6, 0.5, nothing, KEY), "keys must be"),
    ],
)
def test_calls_without_a_wide_form(unchecked, call, sentence):
    refused(call, sentence)
