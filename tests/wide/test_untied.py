"""Untied wide layers: reference numbers, exact twins, the potential, thresholds, and training in finite dimension."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.wide import best, channel
from tiedattn_jax.wide.channel import wide_nodes
from tiedattn_jax.wide.finite import _divergence, _Spectral
from tiedattn_jax.wide.laws import SingularValues
from tiedattn_jax.wide.layer import require_closed
from tiedattn_jax.wide.spectrum import convolution, spectral_prior

layer = partial(ta.wide.UntiedDotProduct, tau=0.05)
entropy = partial(layer, loss="cross_entropy")
NAMES = "q", "m", "V", "trace", "train_loss", "gen_error", "share", "largest", "energy"


class OneScore(ta.wide.UntiedLayer):
    """One score of one token, with a quadratic loss."""

    def loss(self, H, Y):
        return 0.5 * jnp.sum((H - Y) ** 2)


one_score = partial(OneScore, tokens=1, tau=0.1, teacher=ta.wide.GaussianFactors(0.5))


def target(first, second, omega=0.4):
    return {"omega": omega, "mixing": [[first, 1 - first], [1 - second, second]], "encodings": "long"}


# Numbers of another implementation, to six digits; the offsets are those of own minus other token in both rows.
REFERENCE = {
    "squared": (
        layer(), 1.0, (),
        (0.567032, 0.743673, 2.48603, 0.442377, 0.00374018, 0.0071803, 0.5, 2.38923, 0.025859),
    ),
    "entropy": (
        entropy(tau=0.2), 1.0, (),
        (0.500166, 0.689686, 0.85585, 0.399094, 1.09823, 1.11125, 0.48224, 2.33446, 1.17804),
    ),
    "square factors": (
        layer(tau=0.04, teacher=ta.wide.GaussianFactors(1.0)), 1.0, (),
        (0.565597, 0.736244, 3.56969, 0.512717, 0.00376556, 0.00927947, 0.742154, 2.10049, 0.0242742),
    ),
    "three tokens": (
        entropy(tau=0.1, tokens=3), 0.5, (),
        (0.731621, 0.851313, 1.03223, 0.509995, 2.62502, 2.6315, 0.5, 2.66683, 1.36351),
    ),
    "noise": (
        layer(noise=0.3), 1.0, (),
        (0.590016, 0.695287, 3.30461, 0.501921, 0.0232884, 0.0266067, 0.742082, 2.3234, 0.0483844),
    ),
    "one score": (
        one_score(), 0.8, (),
        (0.666171, 0.769546, 2.19525, 0.477415, 0.00622348, 0.0635394, 0.564564, 2.6443, 0.0527203),
    ),
    "encodings": (
        layer(tau=0.03, **target(0.8, 0.7)), 1.0, (0.520303, 0.344596),
        (0.182862, 0.42149, 2.21879, 0.253231, 0.00163331, 0.00328462, 0.524962, 1.34709, 0.00923023),
    ),
    "forbidden if tied": (
        entropy(tau=0.1, **target(0.25, 0.25)), 1.0, (-0.440847, -0.440847),
        (0.163634, 0.395572, 0.856762, 0.233267, 1.24457, 1.24937, 0.499481, 1.30943, 1.2679),
    ),
}  # fmt: skip
DEFAULT = "squared", "forbidden if tied"


@pytest.mark.parametrize(
    "model, alpha, offsets, numbers",
    [
        pytest.param(*case, id=name, marks=[pytest.mark.full] * (name not in DEFAULT))
        for name, case in REFERENCE.items()
    ],
)
def test_reference_numbers(model, alpha, offsets, numbers):
    state = ta.wide.solve(model, alpha)
    assert state.status_name == "converged" and float(state.replicon) < 0.56
    for name, number in zip(NAMES, numbers, strict=True):
        np.testing.assert_allclose(getattr(state, name), number, rtol=1e-5, err_msg=name)
    if offsets:
        own_minus_other = [state.shifts[a, a] - state.shifts[a, 1 - a] for a in (0, 1)]
        np.testing.assert_allclose(own_minus_other, offsets, rtol=1e-5)
        assert state.region == "content and position" and np.all(np.isinf(state.slack))


@pytest.mark.full
def test_the_equations_are_the_derivatives_of_the_potential():
    state, model = ta.wide.solve(layer(), 1.0), layer()
    nodes = jax.tree.map(lambda a: a[0], channel.wide_nodes(model, None))

    @jax.jit
    @jax.value_and_grad
    def potential(x):
        q, m, V, Lam, M, N = x
        A, _ = channel.channel_averages(model, nodes, q, m, V, x[6:])
        curve = convolution(model.teacher, M, N)
        phi = spectral_prior(curve, model.tau, curve.place(model.tau)).phi
        return 1.0 * A.moreau - phi / Lam + M * m + N * V / 2 - Lam * q / 2

    one = jax.tree.map(lambda a: a[0], state.replicates)
    x = np.array([one.q, one.m, one.V, one.Lam, one.M, one.N])
    value, slopes = potential(x)
    np.testing.assert_allclose(value, one.energy, rtol=1e-9)
    np.testing.assert_allclose(slopes * x / value, 0, atol=1e-6)


@pytest.mark.full
def test_derivatives_of_a_state():
    """They are those of differences, in a number of the loss, of the prior and of the teacher."""

    def numbers(beta, tau, kappa):
        state = ta.wide.solve(layer(beta=beta, tau=tau, teacher=ta.wide.GaussianFactors(kappa)), 1.0)
        return jnp.stack([state.q, state.gen_error, state.energy])

    at = np.array([1.1, 0.05, 0.5])
    slopes = np.stack(jax.jacrev(numbers, (0, 1, 2))(*at), 1)
    for k, step in enumerate(1e-4 * at):
        ends = [numbers(*(at + sign * step * np.eye(3)[k])) for sign in (1, -1)]
        np.testing.assert_allclose(slopes[:, k], (ends[0] - ends[1]) / (2 * step), rtol=1e-5)
    np.testing.assert_allclose(slopes[2, 1], ta.wide.solve(layer(beta=1.1), 1.0).trace, rtol=1e-6)


@pytest.mark.full
def test_exact_twins():
    """Scores of the other sign, tokens that do not see themselves, and rows that a position explains in part."""
    one, other = (ta.wide.solve(layer(tau=0.03, **target(a, b)), 1.0) for a, b in ((0.8, 0.7), (0.2, 0.3)))
    np.testing.assert_allclose(one.shifts, -other.shifts, atol=1e-9)
    np.testing.assert_allclose([one.q, one.gen_error], [other.q, other.gen_error], rtol=1e-9)
    # Only the number of rows with two keys counts: a third of alpha for three such rows in place of two.
    others, cross = ta.wide.solve(layer(tokens=3, sees="others"), 2 / 3), ta.wide.solve(layer(), 1.0)
    np.testing.assert_allclose([others.q, others.m, others.energy], [cross.q, cross.m, cross.energy], rtol=1e-9)


def test_onset():
    """The numbers are those of another implementation; position is learned below the onset, too."""
    for tau, expected in ((0.03, 0.107325), (0.3, 1.72599)):
        alpha = ta.wide.onset(layer(tau=tau, **target(0.8, 0.8, 0.8)))
        np.testing.assert_allclose(alpha.alpha, expected, rtol=1e-5)


@pytest.mark.full
def test_content_appears_at_the_onset():
    model = layer(tau=0.3, **target(0.8, 0.8, 0.8))
    below, above = (ta.wide.solve(model, alpha) for alpha in (0.99 * 1.72599, 1.05 * 1.72599))
    assert float(below.q) == 0 < float(above.q) and below.region == "position, no attention to content"


@pytest.mark.full
def test_onset_with_the_cross_entropy():
    alphas = [ta.wide.onset(entropy(tau=tau, **target(0.8, 0.8))) for tau in (0.03, 0.1, 0.3)]
    np.testing.assert_allclose([a.alpha for a in alphas], [0.00227367, 0.0241425, 0.155719], rtol=1e-5)
    alone = ta.wide.onset(entropy(tau=0.1 / 0.6))
    np.testing.assert_allclose(alphas[1].alpha, alone.alpha, rtol=1e-9)
    # d alpha / d tau by the same scaling.
    np.testing.assert_allclose(alphas[1].sensitivities.tau, alone.sensitivities.tau / 0.6, rtol=1e-6)


@pytest.mark.parametrize("kappa, ridge, perfect", [(0.5, 0.905417, 0.75), (0.2, 0.571690, 0.36)])
def test_recovery(kappa, ridge, perfect):
    """The number for training is published."""
    model = one_score(teacher=ta.wide.GaussianFactors(kappa))
    np.testing.assert_allclose(ta.wide.ridge_recovery(model).alpha, ridge, rtol=1e-6)
    np.testing.assert_allclose(ta.wide.perfect_recovery(model).alpha, perfect, rtol=1e-12)


@pytest.mark.full
def test_training_finds_the_teacher_for_small_tau():
    """Beyond the threshold the distance falls as tau^2; below it stays."""
    for factor, tau, expected in ((0.97, 1e-4, 2.14e-3), (1.03, 1e-3, 6.5e-5), (1.03, 1e-4, 7.9e-7)):
        state = ta.wide.solve(one_score(tau=tau, teacher=ta.wide.GaussianFactors(0.2)), factor * 0.571690)
        assert state.ok
        np.testing.assert_allclose(state.distance, expected, rtol=0.01)


@pytest.mark.parametrize(
    "kappa, alphas, errors",
    [(0.5, (0.1, 0.3, 0.5, 0.7), (0.896456, 0.640551, 0.351455, 0.084382)), (1.0, (0.1, 0.3), (0.899112, 0.683638))],
)
def test_the_optimal_learner(kappa, alphas, errors):
    """The errors are published."""
    model = one_score(teacher=ta.wide.GaussianFactors(kappa))
    found = [float(ta.wide.bayes(model, alpha).distance) for alpha in alphas]
    np.testing.assert_allclose(found, errors, atol=6e-7)


def test_equal_singular_values_are_known_sooner():
    """Half of the values are zero, and a quarter of the symmetric law lies at each of the others: 1 - 1/4 - 2/16."""
    for factor, known in ((0.99, False), (1.01, True)):
        assert (float(ta.wide.bayes(one_score(teacher=[0.0, 1.0]), factor * 5 / 8).distance) == 0) == known


@pytest.mark.full
def test_the_bound_on_the_rank():
    state = ta.wide.solve(layer(kappa=0.3), 1.0)
    np.testing.assert_allclose(
        [state.q, state.m, state.trace, state.energy, state.share],
        [0.577106, 0.71566, 0.392654, 0.0294078, 0.3],
        rtol=2e-6,
    )
    assert bool(state.replicates.binds.all()) and np.isinf(state.replicon)


def test_the_spectrum_of_a_state():
    state = ta.wide.solve(layer(), 1.0)
    spectrum = state.spectrum()
    np.testing.assert_allclose(jnp.sum(spectrum.weight), 1 - spectrum.zeros, rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(spectrum.weight * spectrum.values**2), state.q, rtol=1e-4)
    np.testing.assert_allclose(jnp.trapezoid(spectrum.density, spectrum.values), state.share, rtol=2e-3)


@pytest.fixture(scope="module")
def data():
    return ta.wide.sample_data(layer(), 24, 1.0, jax.random.key(0))


def test_sentences_have_the_fields_of_the_theory(data):
    """Scores of queries with keys are independent, with the variance of the teacher."""
    values = np.linalg.svd(data.teacher, compute_uv=False)[::-1]
    np.testing.assert_allclose(values, layer().teacher.eigenvalues(24), atol=1e-12)
    h = np.asarray(ta.wide.sample_data(layer(noise=0.3), 24, 4.0, jax.random.key(1)).scores).reshape(-1, 4)
    rho = np.mean(values**2) + 0.3
    np.testing.assert_allclose(h.T @ h / len(h), rho * np.eye(4), atol=5 * rho / np.sqrt(len(h)))
    assert data.keys.shape == data.x.shape and not np.any(data.keys == data.x)
    assert ta.wide.sample_data(layer(tokens=3, sees="others"), 6, 1.0, jax.random.key(0)).keys is None


def test_training_and_message_passing_end_at_the_same_matrix(data):
    trained, factors = ta.wide.train(layer(), data), ta.wide.train(layer(), data, over="Q")
    passed = ta.wide.gamp(layer(), data, damping=0.3)
    assert trained.ok and factors.ok and passed.ok
    for other, rtol in ((factors, 1e-4), (passed, 1e-6)):
        np.testing.assert_allclose(other.S, trained.S, atol=rtol * float(jnp.abs(trained.S).max()))
    values = np.linalg.svd(trained.S, compute_uv=False)
    np.testing.assert_allclose([trained.trace, trained.largest], [values.mean(), values[0]], rtol=1e-9)
    np.testing.assert_allclose(trained.energy, trained.train_loss + 0.05 * values.mean(), rtol=1e-9)
    theory = ta.wide.solve(layer(teacher=layer().teacher.eigenvalues(24)), 1.0)
    np.testing.assert_allclose(
        [trained.q, trained.m, trained.energy], [theory.q, theory.m, theory.energy], rtol=0.08
    )  # one draw, and a deviation of 1 / d


@pytest.mark.parametrize("model", [layer(tau=0.7), ta.wide.DotProduct(tau=0.7)], ids=["untied", "tied"])
def test_the_response_of_message_passing_is_a_divergence(model):
    """Its fixed point does not depend on the response, so that only differences of the threshold show a wrong one."""
    d, step = 5, 1e-6
    Y = np.random.default_rng(0).standard_normal((d, d))
    Y = Y if model.sides == 2 else Y + Y.T
    threshold = jax.jit(lambda Y: _Spectral.of(model, Y).beyond(model.tau))
    total = 0.0
    for i, j in zip(*(np.nonzero(np.ones((d, d))) if model.sides == 2 else np.triu_indices(d)), strict=True):
        move = np.zeros((d, d))
        move[i, j] = step
        if model.sides == 1:
            move[j, i] = step
        total += (threshold(Y + move) - threshold(Y - move))[i, j] / (2 * step)
    np.testing.assert_allclose(_divergence(model, _Spectral.of(model, jnp.asarray(Y)).values), total / d**2, rtol=1e-7)


@pytest.mark.full
def test_training_learns_a_direction_that_tied_attention_cannot():
    """The target prefers the other token; the deviation from the limit is 1 / d."""
    model = entropy(tau=0.1, **target(0.25, 0.25))
    runs = [ta.wide.train(model, ta.wide.sample_data(model, 40, 1.0, jax.random.key(k)), over="Q") for k in range(3)]
    own_minus_other = np.mean(
        [(run.offset[0, 0] - run.offset[0, 1], run.offset[1, 1] - run.offset[1, 0]) for run in runs]
    )
    assert -0.441 < own_minus_other < -0.38  # -.40 at this dimension


def test_a_head_with_fewer_columns_has_zeros():
    W_Q, W_K = np.random.default_rng(0).standard_normal((2, 12, 3))
    law = SingularValues(ta.wide.singular_values(W_Q, W_K))
    assert np.sum(np.asarray(law.values) < 1e-12) == 9
    assert layer(teacher=law.values).teacher == law
    np.testing.assert_allclose(law.ties, (9 / 12) ** 2 + 6 / 24**2, rtol=1e-6)
    half = ta.wide.singular_values(*(W.astype(jnp.bfloat16) for W in (W_Q, W_K)))
    np.testing.assert_allclose(half, law.values, atol=0.05 * float(law.values[-1]))


class Mixed(ta.wide.UntiedLayer):
    """A loss that compares two rows."""

    def loss(self, H, Y):
        return jnp.sum((H[0] - H[1] - Y[0] + Y[1]) ** 2)


class Window(ta.wide.UntiedLayer):
    """A student that attends to the first two tokens, and labels that show all."""

    def loss(self, H, Y):
        return 0.5 * jnp.sum((jax.nn.softmax(H[:, :2]) - jax.nn.softmax(Y)[:, :2]) ** 2)


class All(ta.wide.UntiedLayer):
    """A loss of every score, that of a token with itself, too."""

    def loss(self, H, Y):
        return 0.5 * jnp.sum((H - Y) ** 2)


class Uneven(ta.wide.UntiedLayer):
    """A loss of scores with others that pushes a student with content, but not one without."""

    def loss(self, H, Y):
        off = 1 - jnp.eye(3)
        return jnp.sum(off * (0.5 * (H - Y) ** 2 + jnp.exp(H) - 1 - H - 0.5 * H**2))


class FirstRow(ta.wide.UntiedLayer):
    """A loss of one row."""

    def loss(self, H, Y):
        return 0.5 * jnp.sum((H[0, 1:] - Y[0, 1:]) ** 2)


def test_what_a_loss_sees_does_not_depend_on_its_size():
    """Rows are told apart by relative differences, and directions are found where a softmax is nearly saturated."""
    for size in (1.0, 1e-4, 1e4):
        assert Mixed(tau=0.1, teacher=[size]).blocks.shape[0] == 1
        assert All(tau=0.1, teacher=[size]).blocks.shape == (2, 2, 2, 2)
    assert layer(beta=300.0).seen == 2 and ta.wide.DotProduct(tau=0.05, beta=30.0).seen == 2
    require_closed(FirstRow(tau=0.1, teacher=[1.0], tokens=3, sees="others"))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: layer(teacher=ta.wide.Wishart(0.5)), "teacher must be a law of singular values"),
        (
            lambda: ta.wide.DotProduct(tau=0.1, teacher=ta.wide.GaussianFactors(0.5)),
            "teacher must be a law of eigenvalues",
        ),
        (lambda: layer(teacher=[-1.0, 1.0]), "singular values must be finite and at least zero"),
        (lambda: layer(teacher=[np.nan]), "singular values must be finite and at least zero"),
        (lambda: layer(encodings=1.5), 'encodings must be None or "long"'),
        (lambda: layer(sees="self"), "sees must be one of cross, others, all"),
        (lambda: layer(sees="others"), "tokens must be an integer of at least 3"),
        (lambda: ta.wide.solve(layer(sees="all"), 1.0), "sees must not be all for theory"),
        (lambda: ta.wide.bayes(layer(sees="all"), 1.0), "sees must not be all for theory"),
        (lambda: ta.wide.solve(Mixed(tau=0.1, teacher=[1.0], tokens=3, sees="others"), 1.0), "loss must be a sum over"),
        (
            lambda: ta.wide.solve(
                layer(tokens=3, sees="others", omega=0.3, mixing=[[0, 0.9, 0.1], [0.5, 0, 0.5], [0.5, 0.5, 0]]), 1.0
            ),
            'encodings must be "long"',
        ),
        (
            lambda: layer(tokens=3, sees="others", omega=0.3, mixing=np.full((3, 3), 1 / 3)),
            "mixing must be rows of shares",
        ),
        (lambda: require_closed(All(tau=0.1, teacher=[1.0], tokens=3, sees="others")), "loss must not depend on"),
        (lambda: require_closed(Uneven(tau=0.1, teacher=[1.0], tokens=3, sees="others")), 'encodings must be "long"'),
        (lambda: Window(tau=0.1, teacher=[1.0], tokens=3), "loss must depend on all scores of the teacher"),
        (lambda: ta.wide.ridge_recovery(layer(sees="all")), "sees must not be all for theory"),
        (lambda: ta.wide.position(layer(encodings="long")), "model must be a tied DotProduct"),
        (lambda: ta.wide.best_ridge(layer(), 1.0, number="omega"), "number must be one of tau, kappa"),
        (lambda: ta.wide.best_ridge(layer(), 1.0, bracket=(0.1, 0.01)), "bracket must be two numbers 0 < low < high"),
        (lambda: ta.wide.singular_values(np.ones((2, 3)), np.ones((2, 3))), "W_Q must have shape (d, d_head)"),
        (lambda: layer(mixing=[[np.nan, 1.0], [1.0, 0.0]]), "mixing must be finite"),
        (
            lambda: ta.wide.solve(layer(), 1.0, wide_nodes(layer(sees="others", tokens=3), None)),
            "nodes must be of a layer with",
        ),
        (
            lambda: jax.jit(lambda a: ta.wide.sample_data(layer(), 4, a, jax.random.key(0)).x)(1.0),
            "model must have concrete numbers, which set the sizes",
        ),
        (lambda: ta.wide.best_ridge(layer(), -1.0), "alpha must be positive"),
        (
            lambda: jax.grad(lambda noise: ta.wide.best_ridge(layer(noise=noise), 1.0).value)(0.1),
            "model must have concrete numbers",
        ),
        (lambda: ta.wide.singular_values(np.ones((3, 2)), np.ones((2, 2))), "W_K must have shape"),
        (
            lambda: ta.wide.train(layer(), ta.wide.sample_data(layer(sees="all"), 4, 1.0, jax.random.key(0))),
            "data must be sentences of 2 tokens with keys of their own, like the layer",
        ),
        (lambda: ta.wide.singular_values(np.full((3, 2), np.nan), np.ones((3, 2))), "W_Q must be finite"),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(ta.InputError) as error:
        call()
    assert str(error.value).startswith(sentence)


@pytest.mark.full
def test_one_token_has_no_others_to_attend_to():
    state = ta.wide.solve(one_score(encodings="long"), 0.8)
    assert np.isfinite(state.position_shift()).all() and state.learned_positions == 0


def test_large_scores_have_sobol_points():
    rules = [wide_nodes(ta.wide.DotProduct(tau=0.1, beta=beta), None) for beta in (1.0, 2.0, 6.0)]
    assert [len(rule.student) for rule in rules] == [2, 2, 4]


def test_the_text_of_a_loss():
    """It tells losses apart, and does not contain the numbers of a layer."""
    texts = [each.identity_text() for each in (layer(), layer(tau=0.3), layer(loss="cross_entropy"))]
    assert texts[0] == texts[1] != texts[2]


def test_finite_dimension_knows_self_attention():
    model = layer(sees="all", tokens=2)
    data = ta.wide.sample_data(model, 8, 1.0, jax.random.key(0))
    h = np.einsum("nad,de,nbe->nab", data.x, data.teacher, data.x) / np.sqrt(8)
    np.testing.assert_allclose(data.scores, h, atol=1e-12)
    assert ta.wide.train(model, data, steps=20).status_name in ("converged", "max steps")
    shown = {line.split()[0]: line.split()[-1] for line in str(model).splitlines()[1:]}
    assert shown["sees"] == "all"


def test_best_ridge():
    """For a quadratic loss the error is smooth in the ridge; its minimum is bracketed by neighbours."""
    model = one_score(noise=0.3)
    found = ta.wide.best_ridge(model, 0.8, bracket=(0.03, 3.0), error="distance")
    around = [one_score(noise=0.3, tau=float(found.tau) * factor) for factor in (0.95, 1.0, 1 / 0.95)]
    low, least, high = (float(ta.wide.solve(near, 0.8).distance) for near in around)
    assert least < min(low, high) and abs(high - low) < 0.02 * (high + low - 2 * least)
    np.testing.assert_allclose(float(found.distance.value), least, rtol=1e-8)
    assert found.where == "inside" and float(found.stderr) >= 1e-4 * float(found.tau)
    end = ta.wide.best_ridge(model, 0.8, bracket=(1.0, 3.0), error="distance")
    assert end.where == "lower end" and float(end.tau) == pytest.approx(1.0)
    assert str(end).splitlines()[0] == "best tau = 1: converged"


def test_a_width_that_does_not_bind_and_values_without_a_state(monkeypatch):
    model = one_score(tau=0.3, kappa=0.5)
    flat = ta.wide.best_ridge(model, 0.8, number="kappa", bracket=(0.6, 1.0), error="distance")
    assert flat.where == "any value from there on" and float(flat.kappa) == pytest.approx(0.6)

    def failing(model, alpha, nodes, start):
        """A state that fails for small tau, next to the smallest error."""
        state = ta.wide.solve(model, alpha, nodes)
        status = jnp.full_like(state.replicates.status, 4 if float(model.tau) < 0.2 else 0)
        numbers = {"status": status, "distance": jnp.full(2, float(model.tau))}
        return replace(state, replicates=replace(state.replicates, **numbers))

    monkeypatch.setattr(best, "solve", failing)
    beside = ta.wide.best_ridge(model, 0.8, bracket=(0.1, 1.0), error="distance")
    assert beside.where == "beside values without a usable state" and beside.status == ta.Status.unresolved
    assert 0.2 <= float(beside.tau) < 0.35


@pytest.mark.full
def test_the_offsets_of_a_squared_loss_with_three_tokens():
    """The best student without content explains the mean of the target."""
    model = layer(tokens=3, omega=0.6, mixing=0.05 + 0.85 * np.eye(3), encodings="long")
    onset = ta.wide.onset(model)
    state = ta.wide.solve(model, 0.9 * float(onset.alpha))
    assert onset.ok and state.ok and float(state.q) == 0
    np.testing.assert_allclose(jax.nn.softmax(state.shifts, -1), 0.4 / 3 + 0.6 * np.asarray(model.mixing), atol=0.002)


@pytest.mark.full
def test_the_best_width_of_a_teacher_with_a_power_law():
    """Published curves have it near 26 of 400 (arXiv 2606.28242)."""
    values = np.arange(1.0, 401) ** -1.25

    class Quadratic(ta.wide.Layer):
        def loss(self, H, Y):
            return 0.5 * jnp.sum((H - Y) ** 2)

    model = Quadratic(teacher=values * np.sqrt(400 / np.sum(values**2)), tau=0.05, noise=0.05, tokens=1)
    found = ta.wide.best_ridge(model, 1.0, number="kappa", error="distance")
    assert 25 < 400 * float(found.kappa) < 27 and found.where == "inside"
