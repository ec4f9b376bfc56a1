from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, PhaseRetrieval, Plain

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SOBOL_SIZES
from tiedattn_jax.bayes import channel
from tiedattn_jax.bayes.fixed_points import _tried, averages_of, check_bayes, has_closed_form, noise_of
from tiedattn_jax.model.overlaps import Overlaps
from tiedattn_jax.theory.observables import gen_error_in, gen_error_linear

SIGMA_SQUARE = 0.25


def overlap(model, alpha, **options):
    """The overlap in units of rho."""
    point = ta.bayes(model, alpha, **options)
    assert point.ok
    return float(jnp.mean(point.mean.q / model.rho))


def three_tokens(kind=ta.DotProduct):
    return kind(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3))


# Overlaps by inversion of alpha(q) with an adaptive quadrature.
@pytest.mark.parametrize(
    ("model", "alpha", "expected"),
    [
        (ta.DotProduct(), 0.2, 0.0451504),
        (ta.DotProduct(), 0.4, 0.5920117),
        (Noisy(), 1.0, 0.6427555),
        (three_tokens(), 0.2, 0.4370078),
        (three_tokens(Noisy), 0.5, 0.5806438),
    ],
    ids=["two-.2", "two-.4", "noisy", "three", "three-noisy"],
)
def test_overlaps(model, alpha, expected):
    assert overlap(model, alpha) == pytest.approx(expected, abs=2e-7)


def test_a_fixed_point_lies_on_the_curve_alpha_of_q(model):
    """The other route: alpha(q) = q / (1 - q) . W / I_L(q / W), without an iteration."""
    for kind, alpha in ((model, 0.3), (Noisy(sigma=0.8), 0.7)):
        q, delta = overlap(kind, alpha), float(noise_of(kind) / kind.rho[0, 0, 0])
        W = 1 - q + delta
        information = float(channel.sign_information(2, jnp.asarray(q / W)))
        assert q / (1 - q) * W / information == pytest.approx(alpha, rel=1e-9)


def test_errors(model):
    """Values at alpha = .4 and for noise at 1 by Sobol points, and the limits without and with full overlap."""
    assert float(ta.bayes(model, 0.4).gen_error) == pytest.approx(1.29528e-3, rel=3e-5)
    assert float(ta.bayes(Noisy(), 1.0).gen_error) == pytest.approx(2.3853e-3, rel=1e-3)
    grid = ta.GaussHermite(24, replicates=2)
    blind = ta.bayes(model, 0.1, nodes=grid)
    assert float(jnp.max(blind.mean.q)) == 0
    linear = gen_error_linear(model, ta.GaussHermite(32).rule(model)).value
    assert float(blind.gen_error) == pytest.approx(float(linear), rel=1e-8)
    np.testing.assert_allclose(blind.mean.V, SIGMA_SQUARE, rtol=1e-12)
    known = ta.bayes(model, 0.7)
    assert float(known.gen_error) == 0 and float(jnp.min(known.mean.q)) == pytest.approx(SIGMA_SQUARE, rel=1e-15)
    assert "the teacher is known" in str(known) and "inf" not in str(known).replace("infinite", "")
    assert float(known.free_entropy) == np.inf and known.ok and not known.hard
    assert np.all(known.mean.V == 0)
    for point in (blind, known):  # the searches ended at a limit, where nothing remains
        assert np.all(point.replicates.residual == 0) and np.all(point.other.residual == 0)


class PosteriorPair(ta.Model):
    """A model whose student is a second teacher: another draw from the posterior of the first one."""

    base: ta.Model

    @property
    def shape(self):
        L, _, t = self.base.shape
        return L, t, t

    def loss(self, Z, Y):
        return 0.5 * jnp.sum(self.base.trace * (self.base.target(Z) - self.base.target(Y)) ** 2)

    def law(self):
        return self.base.law()


def test_the_error_of_the_pair_is_twice_that_of_the_optimal_predictor(model):
    """`gen_error` of `theory` takes the pair's second teacher as its student."""
    pair = PosteriorPair(base=model, lam=model.lam)
    grid = ta.GaussHermite(16, replicates=2).rule(pair)
    point = ta.bayes(model, 0.4, nodes=grid)
    error = gen_error_in(pair, Overlaps(model.rho, model.rho, point.mean.q, jnp.zeros((2, 1))), grid.replicate(0))
    assert float(error) / 2 == pytest.approx(float(point.replicates.gen_error[0]), rel=1e-10)


def test_the_closed_form_is_the_average_over_labels(model):
    plain = Plain()
    nodes = ta.Sobol(2**12)
    closed, averaged = ta.bayes(model, 0.4), ta.bayes(plain, 0.4, nodes=nodes)
    assert averaged.ok
    for name in ("q", "gen_error", "free_entropy"):
        expected, value = getattr(closed, name), getattr(averaged, name)
        assert np.all(np.abs(value - expected) < 3 * getattr(averaged.stderr, name)), name
        assert np.all(np.abs(value / expected - 1) < 0.02), name


def test_equations_are_gradients(model):
    """q is twice the gradient of psi, and E[g g^T] twice that of the log evidence, where q + V = rho."""
    law = ta.SpectralLaw.from_matrices(
        np.stack([np.linspace(0.2, 0.9, 8), np.linspace(0.5, 0.3, 8)]), np.eye(2, 8), np.ones((8, 1))
    )
    several = ta.DotProduct(spectrum=law)
    hats = jnp.array([0.7, 1.9])[:, None, None]
    x = channel.posterior(several, hats)
    np.testing.assert_allclose(x.q, 2 * jax.grad(lambda h: channel.prior(several, h))(hats), rtol=1e-10)
    np.testing.assert_allclose(x.q + x.V, several.rho, rtol=1e-12)

    def evidence(q):
        return channel.sign_channel(model, channel.Posterior(q, model.rho - q), jnp.zeros(())).log_evidence

    q = 0.4 * model.rho
    information = channel.sign_channel(model, channel.Posterior(q, model.rho - q), jnp.zeros(())).information
    np.testing.assert_allclose(information, 2 * jax.grad(evidence)(q), rtol=1e-8)


def test_derivatives(model):
    def error(sigma, alpha):
        return ta.bayes(ta.DotProduct(sigma=sigma), alpha, start="uninformed").gen_error

    step, at = 1e-4, (0.5, 0.4)
    slopes = jax.grad(error, (0, 1))(*at)
    by_sigma = (error(0.5 + step, 0.4) - error(0.5 - step, 0.4)) / (2 * step)
    by_alpha = (error(0.5, 0.4 + step) - error(0.5, 0.4 - step)) / (2 * step)
    np.testing.assert_allclose(slopes, [by_sigma, by_alpha], rtol=1e-5)
    second = jax.grad(jax.grad(error, 1), 1)(*at)
    difference = (jax.grad(error, 1)(0.5, 0.4 + step) - jax.grad(error, 1)(0.5, 0.4 - step)) / (2 * step)
    assert float(second) == pytest.approx(float(difference), rel=1e-5)
    assert np.all(np.abs(jnp.stack([jax.grad(error, 1)(0.5, a) for a in (0.1, 0.8)])) < 1e-10)


def test_a_teacher_of_two_columns_is_resolved_as_far_as_the_grid_of_angles():
    """Steps stay where conjugates are positive definite; V below (2 spacing)^2 rho is not resolved."""
    model = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3), teacher=np.eye(2), rank=2)
    nodes = ta.Sobol(2**5, replicates=2)
    for alpha, expected in ((0.3, [False, False]), (0.4, [True, True])):
        states = ta.bayes(model, alpha, nodes=nodes, start="uninformed").replicates
        assert np.all(np.isfinite(states.q)) and np.all(np.linalg.eigvalsh(states.conjugates) > 0)
        least = np.linalg.eigvalsh(states.V).min((-2, -1))
        coarse = least < (2 * 2 * np.pi / 128) ** 2 * SIGMA_SQUARE
        assert coarse.tolist() == expected and np.max(least) > 1e-3 * SIGMA_SQUARE
        np.testing.assert_array_equal(states.status, np.where(coarse, ta.Status.unresolved, ta.Status.converged))


def test_many_alphas(model):
    alphas = jnp.array([0.1, 0.4, 0.8])
    together = jax.jit(jax.vmap(lambda alpha: ta.bayes(model, alpha).gen_error))(alphas)
    np.testing.assert_allclose(together, [ta.bayes(model, a).gen_error for a in alphas], rtol=1e-9, atol=1e-15)


def test_a_hard_phase_is_named():
    """One token: between the information limit and 1.128 message passing does not find the teacher."""
    retrieval = PhaseRetrieval(lam=jnp.asarray(0.01))
    hard = ta.bayes(retrieval, 1.1)
    assert hard.hard and float(jnp.min(hard.mean.q)) == pytest.approx(1) and "hard phase" in str(hard)
    assert 0.3 < overlap(retrieval, 1.1, start="uninformed") < 0.9
    assert not ta.bayes(retrieval, 1.2).hard


@pytest.mark.parametrize("part", [lambda p: p.replicates.status, lambda p: p.other.status], ids=["state", "other"])
def test_a_failure_of_either_start_is_told(model, part):
    point = ta.bayes(model, 0.4)
    failed = eqx.tree_at(part, point, part(point).at[1].set(ta.Status.max_steps))
    assert point.ok and not failed.ok and failed.status_name == "max steps"


def test_omega_mixing_and_ridge_do_not_matter(model):
    other = ta.DotProduct(omega=0.8, lam=0.1, mixing=((0.9, 0.1), (0.2, 0.8)))
    np.testing.assert_allclose(ta.bayes(other, 0.35).q, ta.bayes(model, 0.35).q, rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.8])
def test_single_precision(model, alpha):
    single, double = ta.bayes(ta.DotProduct(dtype=jnp.float32), alpha), ta.bayes(model, alpha)
    assert single.ok and single.q.dtype == jnp.float32
    np.testing.assert_allclose(single.q, double.q, rtol=2e-6)
    np.testing.assert_allclose(single.gen_error, double.gen_error, rtol=1e-5, atol=1e-12)


def test_several_eigenvalues_and_equal_ones():
    """A law of one atom gives the isotropic layer; of two atoms the one with larger variance is learned better."""
    encodings, teacher = np.eye(2, 16), np.ones((16, 1))
    same = ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(np.full((2, 16), 0.25), encodings, teacher))
    np.testing.assert_allclose(ta.bayes(same, 0.4).q, ta.bayes(ta.DotProduct(), 0.4).q, rtol=1e-8)
    spread = np.where(np.arange(16) < 8, 0.1, 0.4)
    other = ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(np.stack([spread, spread]), encodings, teacher))
    assert ta.threshold(other, "weak_recovery").alpha < ta.threshold(same, "weak_recovery").alpha
    assert overlap(other, 0.3) > overlap(same, 0.3)
    assert float(ta.threshold(same, "perfect_recovery").alpha) == 0.5
    with pytest.raises(ta.InputError, match="one eigenvalue each for perfect recovery"):
        ta.threshold(other, "perfect_recovery")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ta.bayes(ta.DotProduct(penalty=ta.L1(0.01)), 1.0), "must have no penalty"),
        (lambda: ta.bayes(ta.DotProduct(omega=1.0), 1.0), "omega below one"),
        (lambda: ta.bayes(ta.CausalDotProduct(), 1.0), "three tokens or more"),
        (lambda: ta.bayes(ta.UntiedDotProduct(), 1.0), "declare `preimages"),
        (lambda: ta.bayes(ta.LinearAttention(), 1.0), "preimages"),
        (lambda: ta.bayes(ta.DotProduct(), -1.0), "alpha must be positive"),
        (lambda: ta.bayes(ta.DotProduct(), 1.0, start="semantic"), "start"),
        (lambda: ta.bayes(three_tokens(partial(ta.DotProduct, teacher=np.eye(2), rank=2)), 1.0), "Sobol"),
        (lambda: ta.bayes(ta.DotProduct(), 1.0, nodes=ta.Sobol(2**6).rule(three_tokens())), "nodes"),
        (lambda: ta.bayes(ta.DotProduct(teacher=np.eye(2), rank=2), 1.0), "fewer columns"),
        (lambda: ta.threshold(Noisy(), "perfect_recovery"), "exact labels"),
        (lambda: ta.spectral_overlap(ta.DotProduct(), 0.0), "alpha must be positive"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ta.InputError, match=message):
        build()


def test_wrong_preimages_are_refused():
    class Wrong(ta.DotProduct):
        def preimages(self, Y):
            return ta.orbit(Y + 1)

    class Silent(ta.DotProduct):
        noise = 1

        def target(self, Y, noise):
            return super().target(Y + noise)

    for kind, message in ((Wrong, "same target"), (Silent, "noise")):
        with pytest.raises(ta.InputError, match=message):
            ta.bayes(kind(), 1.0)


def test_what_is_shown_of_a_state(model):
    """The title says the start, if one was asked for. Limits of the numbers are said in words."""
    both, one = ta.bayes(model, 0.4), ta.bayes(model, 0.4, start="informed")
    assert both.title == "Bayes-optimal at alpha = 0.4" and one.title == "Bayes-optimal, informed start at alpha = 0.4"
    assert both.details() == [] and one.details() == [] and not one.hard
    known = ta.bayes(model, 0.7).describe().numbers
    assert known == [
        ("q", "rho", "exact"),
        ("gen_error", "0", "exact"),
        ("free_entropy", "infinite", "the teacher is known"),
    ]
    assert [row[0] for row in both.describe().numbers] == ["q", "gen_error", "free_entropy"]


@pytest.mark.parametrize(("share", "hard"), [(0.8e-6, False), (1.2e-6, True)])
def test_two_starts_agree_up_to_a_millionth_of_the_teacher(model, share, hard):
    """One token decides, and the mean over the replicates: they scatter by more."""
    point = ta.bayes(model, 0.4)
    scatter = jnp.linspace(-1e-3, 1e-3, len(point.replicates.q))[:, None, None]
    q = point.replicates.q.at[:, 1].add(share * SIGMA_SQUARE + scatter)
    other = eqx.tree_at(lambda p: p.other.q, point, q)
    assert bool(other.hard) == hard and (len(other.details()) == 1) == hard


def _laws():
    encodings, teacher = np.eye(2, 8), np.ones((8, 1))
    return [
        ta.SpectralLaw.from_matrices(np.repeat([[a], [b]], 8, 1), encodings, teacher)
        for a, b in ((0.3, 0.3), (0.2, 0.3))
    ]


def in_classes(**means):
    return ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25] * 2, {(0, 1): 1.0}, **means))


def test_labels_have_a_closed_form_if_tokens_are_alike():
    alike, different = (ta.DotProduct(spectrum=law) for law in _laws())
    for model, closed in (
        (ta.DotProduct(), True), (Noisy(), True), (alike, True), (PhaseRetrieval(lam=jnp.asarray(0.01)), True),
        (Plain(), False), (different, False), (in_classes(), False),
    ):  # fmt: skip
        assert has_closed_form(model) == closed, model


def test_default_averages_follow_the_labels():
    """A closed form has a product rule. Averages over finitely many preimages or a grid have Sobol points."""
    assert averages_of(ta.DotProduct(), None).size not in SOBOL_SIZES.values()
    columns = three_tokens(partial(ta.DotProduct, teacher=np.eye(2), rank=2))
    assert averages_of(columns, None).size == SOBOL_SIZES["label grids"]
    assert averages_of(Plain(), None).size == SOBOL_SIZES["labels"]


class Shifted(ta.DotProduct):
    """Preimages that lie beside those of the target by a given distance."""

    by: float = eqx.field(static=True, default=0.0)

    def preimages(self, Y):
        return ta.orbit(Y + self.by * jnp.array([[1.0], [0.0]]))


def test_preimages_give_the_target_up_to_a_thousandth():
    Y = jnp.asarray(Shifted().field_scale * np.random.default_rng(0).standard_normal((2, 1)))
    step = 1e-4
    rate = float(np.max(_tried(Shifted(by=step), Y)[2])) / step
    check_bayes(Shifted(by=0.8e-3 / rate))
    with pytest.raises(ta.InputError, match="same target"):
        check_bayes(Shifted(by=1.2e-3 / rate))


class Uneven(ta.DotProduct):
    def loss(self, Z, Y):
        return super().loss(Z, Y) + 0.01 * jnp.sum(Z)


def test_which_models_have_an_optimal_learner():
    """The student's loss need not be even. The teacher must not overlap with the means of classes."""
    check_bayes(Uneven())
    check_bayes(in_classes())
    means = {"means": np.eye(2, 4, 2), "encodings": np.eye(2, 4), "teacher_means": [0.3, 0.0]}
    with pytest.raises(ta.InputError, match=r"^law\.cross must be zero"):
        check_bayes(in_classes(**means))
    columns = three_tokens(partial(ta.DotProduct, teacher=np.eye(2), rank=2))
    for model, message in ((columns, "one column"), (in_classes(), "without classes")):
        with pytest.raises(ta.InputError, match=message):
            ta.spectral_overlap(model, 1.0)
