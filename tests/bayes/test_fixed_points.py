"""The Bayes-optimal learner: overlaps and errors against other routes, its limits, refusals and pages."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import NOISE, Noisy, PhaseRetrieval, Plain, Sampled

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SOBOL_SIZES
from tiedattn_jax.bayes import channel
from tiedattn_jax.bayes.fixed_points import averages_of, check_bayes, has_closed_form
from tiedattn_jax.model.overlaps import Overlaps
from tiedattn_jax.theory.observables import gen_error_in, gen_error_linear

SIGMA_SQUARE = 0.25


def overlap(model, alpha, **options):
    """The overlap in units of rho."""
    point = ta.bayes.solve(model, alpha, **options)
    assert point.ok
    return float(jnp.mean(point.mean.q / model.rho))


def three_tokens(kind=ta.DotProduct):
    return kind(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3))


# Overlaps by inversion of alpha(q) with an adaptive quadrature, and errors by Sobol points with their accuracy.
@pytest.mark.parametrize(
    ("model", "alpha", "expected", "error", "rel"),
    [
        pytest.param(ta.DotProduct(), 0.2, 0.0451504, None, None, id="two-.2"),
        pytest.param(ta.DotProduct(), 0.4, 0.5920117, 1.29528e-3, 3e-5, id="two-.4"),
        pytest.param(Noisy(), 1.0, 0.6427555, 2.3853e-3, 1e-3, id="noisy"),
        pytest.param(three_tokens(), 0.2, 0.4370078, None, None, id="three", marks=pytest.mark.full),
        pytest.param(three_tokens(Noisy), 0.5, 0.5806438, None, None, id="three-noisy", marks=pytest.mark.full),
    ],
)
def test_overlaps_and_errors(model, alpha, expected, error, rel):
    assert overlap(model, alpha) == pytest.approx(expected, abs=2e-7)
    assert error is None or float(ta.bayes.solve(model, alpha).gen_error) == pytest.approx(error, rel=rel)


@pytest.mark.full
def test_hardly_noisy_labels_are_not_exact():
    """With noise s = 3e-6 the error is of order s^2, and the free entropy of order -log s; zero and inf came out."""

    class Faint(Noisy):
        def target(self, Y, noise):
            return super().target(Y, 1e-5 * noise)

        def preimages(self, Y, noise):
            return ta.bayes.orbit(Y + 1e-5 * NOISE * noise, (1e-5 * NOISE) ** 2)

    state = ta.bayes.solve(Faint(), 2.0, start="informed")
    assert state.ok and 1e-15 < state.gen_error < 1e-11 and 20 < state.free_entropy < 40


def test_limits_without_and_with_full_overlap(model):
    blind, known = ta.bayes.solve(model, 0.1), ta.bayes.solve(model, 0.7)
    assert float(np.max(blind.mean.q)) == 0
    linear = gen_error_linear(model, ta.GaussHermite(32).rule(model)).value
    assert float(blind.gen_error) == pytest.approx(float(linear), rel=3e-5)  # by the default averages
    np.testing.assert_allclose(blind.mean.V, SIGMA_SQUARE, rtol=1e-12)
    assert float(known.gen_error) == 0 and float(np.min(known.mean.q)) == pytest.approx(SIGMA_SQUARE, rel=1e-15)
    assert float(known.free_entropy) == np.inf and known.ok and not known.hard
    assert np.all(np.asarray(known.mean.V) == 0)


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


@pytest.mark.full
def test_the_error_of_the_pair_is_twice_that_of_the_optimal_predictor(model):
    """`gen_error` of `theory` takes the pair's second teacher as its student."""
    pair = PosteriorPair(base=model, lam=model.lam)
    grid = ta.GaussHermite(16, replicates=2).rule(pair)
    point = ta.bayes.solve(model, 0.4, nodes=grid)
    error = gen_error_in(pair, Overlaps(model.rho, model.rho, point.mean.q, jnp.zeros((2, 1))), grid.replicate(0))
    assert float(error) / 2 == pytest.approx(float(point.replicates.gen_error[0]), rel=1e-10)


@pytest.mark.full
def test_the_closed_form_is_the_average_over_labels(model):
    closed, averaged = ta.bayes.solve(model, 0.4), ta.bayes.solve(Plain(), 0.4, nodes=ta.Sobol(2**12))
    assert averaged.ok
    for name in ("q", "gen_error", "free_entropy"):
        expected, value = getattr(closed, name), getattr(averaged, name)
        assert np.all(np.abs(value - expected) < 3 * getattr(averaged.stderr, name)), name
        assert np.all(np.abs(value / expected - 1) < 0.02), name


def test_equations_are_gradients(model):
    """q is twice the gradient of psi, and E[g g^T] twice that of the log evidence, where q + V = rho."""
    law = ta.SpectralLaw.from_matrices(np.linspace([0.2, 0.5], [0.9, 0.3], 8).T, np.eye(2, 8), np.ones((8, 1)))
    several = ta.DotProduct(spectrum=law)
    hats, q = np.array([0.7, 1.9])[:, None, None], 0.4 * model.rho
    x, slope = jax.jit(lambda h: (channel.posterior(several, h), jax.grad(partial(channel.teacher_prior, several))(h)))(
        hats
    )
    np.testing.assert_allclose(x.q, 2 * slope, rtol=1e-10)
    np.testing.assert_allclose(x.q + x.V, several.rho, rtol=1e-12)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def evidence(q):
        found = channel.sign_channel(model, channel.Posterior(q, model.rho - q), jnp.zeros(()))
        return found.log_evidence, found.information

    slope, information = evidence(q)
    np.testing.assert_allclose(information, 2 * slope, rtol=1e-8)


def test_derivatives(model):
    def error(sigma, alpha):
        return ta.bayes.solve(ta.DotProduct(sigma=sigma), alpha, start="uninformed").gen_error

    step, at = 1e-4, (0.5, 0.4)
    slope = jax.grad(error, (0, 1))
    by_sigma = (error(0.5 + step, 0.4) - error(0.5 - step, 0.4)) / (2 * step)
    by_alpha = (error(0.5, 0.4 + step) - error(0.5, 0.4 - step)) / (2 * step)
    np.testing.assert_allclose(slope(*at), [by_sigma, by_alpha], rtol=1e-5)
    assert np.all(np.abs(np.stack([slope(0.5, a)[1] for a in (0.1, 0.8)])) < 1e-10)


@pytest.mark.full
def test_second_derivatives(model):
    slope = jax.grad(lambda alpha: ta.bayes.solve(model, alpha, start="uninformed").gen_error)
    difference = (slope(0.4 + 1e-4) - slope(0.4 - 1e-4)) / 2e-4
    assert float(jax.grad(slope)(0.4)) == pytest.approx(float(difference), rel=1e-5)


@pytest.mark.full
def test_a_teacher_of_two_columns_is_resolved_as_far_as_the_grid_of_angles():
    """Steps stay where conjugates are positive definite; V below (2 spacing)^2 rho is not resolved."""
    model, nodes = three_tokens(COLUMNS), ta.Sobol(2**5, replicates=2)
    for alpha, expected in ((0.3, [False, False]), (0.4, [True, True])):
        states = ta.bayes.solve(model, alpha, nodes=nodes, start="uninformed").replicates
        assert np.all(np.isfinite(states.q)) and np.all(np.linalg.eigvalsh(states.conjugates) > 0)
        least = np.linalg.eigvalsh(states.V).min((-2, -1))
        coarse = least < (2 * 2 * np.pi / 128) ** 2 * SIGMA_SQUARE
        assert coarse.tolist() == expected and np.max(least) > 1e-3 * SIGMA_SQUARE
        np.testing.assert_array_equal(states.status, np.where(coarse, ta.Status.unresolved, ta.Status.converged))


@pytest.mark.full
def test_many_alphas(model):
    alphas = jnp.array([0.1, 0.4, 0.8])
    together = jax.jit(jax.vmap(lambda alpha: ta.bayes.solve(model, alpha).gen_error))(alphas)
    np.testing.assert_allclose(together, [ta.bayes.solve(model, a).gen_error for a in alphas], rtol=1e-9, atol=1e-15)


@pytest.mark.full
def test_a_hard_phase_is_named():
    """One token: between the information limit and 1.128 message passing does not find the teacher."""
    retrieval = PhaseRetrieval(lam=jnp.asarray(0.01))
    hard = ta.bayes.solve(retrieval, 1.1)
    assert hard.hard and float(jnp.min(hard.mean.q)) == pytest.approx(1) and "hard phase" in str(hard)
    assert 0.3 < overlap(retrieval, 1.1, start="uninformed") < 0.9
    assert not ta.bayes.solve(retrieval, 1.2).hard


def test_failures_and_differences_of_the_starts(model):
    """Two starts agree up to a millionth of the teacher, in the mean over the replicates, which scatter by more."""
    point = ta.bayes.solve(model, 0.4)
    for part in (lambda p: p.replicates.status, lambda p: p.other.status):
        failed = eqx.tree_at(part, point, np.where(np.arange(len(part(point))) == 1, ta.Status.max_steps, part(point)))
        assert point.ok and not failed.ok and failed.status_name == "max steps"
    scatter = np.linspace(-1e-3, 1e-3, len(point.replicates.q))[:, None, None]
    for share, hard in ((0.8e-6, False), (1.2e-6, True)):  # in one token
        q = np.array(point.replicates.q)
        q[:, 1] += share * SIGMA_SQUARE + scatter
        other = eqx.tree_at(lambda p: p.other.q, point, jnp.asarray(q))
        assert bool(other.hard) == hard and (len(other.details()) == 1) == hard


def test_omega_mixing_and_ridge_do_not_matter(model):
    other = ta.DotProduct(omega=0.8, lam=0.1, mixing=((0.9, 0.1), (0.2, 0.8)))
    np.testing.assert_allclose(ta.bayes.solve(other, 0.35).q, ta.bayes.solve(model, 0.35).q, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.8])
def test_single_precision(model, alpha):
    single, double = (ta.bayes.solve(m, alpha) for m in (ta.DotProduct(dtype=jnp.float32), model))
    assert single.ok and single.q.dtype == jnp.float32
    np.testing.assert_allclose(single.q, double.q, rtol=2e-6)
    np.testing.assert_allclose(single.gen_error, double.gen_error, rtol=1e-5, atol=1e-12)


@pytest.mark.full
def test_several_eigenvalues_and_equal_ones():
    """A law of one atom gives the isotropic layer; of two atoms the one with larger variance is learned better."""
    encodings, teacher = np.eye(2, 64), np.ones((64, 1))  # a cosine of 1 / 8
    same = ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(np.full((2, 64), 0.25), encodings, teacher))
    np.testing.assert_allclose(ta.bayes.solve(same, 0.4).q, ta.bayes.solve(ta.DotProduct(), 0.4).q, rtol=1e-8)
    spread = np.where(np.arange(64) < 32, 0.1, 0.4)
    other = ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(np.stack([spread, spread]), encodings, teacher))
    assert ta.bayes.weak_recovery(other).alpha < ta.bayes.weak_recovery(same).alpha
    assert overlap(other, 0.3) > overlap(same, 0.3)
    assert float(ta.bayes.perfect_recovery(same).alpha) == 0.5


MEANS = {"means": np.eye(2, 4, 2), "encodings": np.eye(2, 4), "teacher_means": [0.3, 0.0]}
PLAIN, BLIND = ta.DotProduct, np.array([[1.0], [0.0]])
COLUMNS = partial(ta.DotProduct, teacher=np.eye(2), rank=2)
ONE_EIGENVALUE = "one eigenvalue each for perfect recovery"


def learner(base, **methods):
    """Ask for the optimal learner of a layer with methods of its own."""
    return lambda: ta.bayes.solve(type("Kind", (base,), methods)(), 1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ta.bayes.solve(ta.DotProduct(penalty=ta.L1(0.01)), 1.0), "must have no penalty"),
        (lambda: ta.bayes.solve(ta.DotProduct(omega=1.0), 1.0), "omega below one"),
        (lambda: ta.bayes.solve(ta.CausalDotProduct(), 1.0), "three tokens or more"),
        (lambda: ta.bayes.solve(ta.UntiedDotProduct(), 1.0), "declare `preimages"),
        (lambda: ta.bayes.solve(ta.LinearAttention(), 1.0), "preimages"),
        (lambda: ta.bayes.solve(ta.DotProduct(), -1.0), "alpha must be positive"),
        (lambda: ta.bayes.solve(ta.DotProduct(), 1.0, start="semantic"), "start"),
        (lambda: ta.bayes.solve(three_tokens(COLUMNS), 1.0), "Sobol"),
        (lambda: ta.bayes.solve(ta.DotProduct(), 1.0, nodes=ta.Sobol(2**6).rule(three_tokens())), "nodes"),
        (lambda: ta.bayes.solve(COLUMNS(), 1.0), "fewer columns"),
        (lambda: ta.bayes.perfect_recovery(Noisy()), "exact labels"),
        (lambda: ta.bayes.perfect_recovery(ta.DotProduct(spectrum=two_atoms())), ONE_EIGENVALUE),
        (lambda: ta.bayes.spectral_overlap(ta.DotProduct(), 0.0), "alpha must be positive"),
        (lambda: ta.bayes.spectral_overlap(three_tokens(COLUMNS), 1.0), "one column"),
        (lambda: ta.bayes.spectral_overlap(in_classes(), 1.0), "without classes"),
        (lambda: check_bayes(in_classes(**MEANS)), r"^law\.cross must be zero"),
        (
            learner(PLAIN, preimages=lambda self, Y: ta.bayes.orbit(Y + 1)),
            "^preimages.Y..fields must be fields of",
        ),
        (
            learner(Noisy, preimages=lambda self, Y, e: ta.bayes.orbit(Y + NOISE * e, NOISE)),
            "the variance of the noise",
        ),
        (learner(Noisy, preimages=lambda self, Y, e: ta.bayes.orbit(Y, NOISE**2)), "same target"),
        # The second token is labelled with nothing but its position.
        (learner(PLAIN, target=lambda self, Y: PLAIN.target(self, Y * BLIND)), "must be all fields of the same target"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ta.InputError, match=message):
        build()


SILENT = {"noise": 1, "target": lambda self, Y, noise: PLAIN.target(self, Y + NOISE * noise)}


@pytest.mark.parametrize("columns", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        (type("Silent", (ta.DotProduct,), SILENT), " with that of DotProduct for labels without noise"),
        (type("Heard", (Sampled,), {}), " with that of DotProduct for labels without noise"),  # noise in the loss alone
        (type("Shouted", (ta.LinearAttention,), {"noise": 1}), ""),
    ],
)
def test_noise_needs_preimages_of_its_own(kind, owner, columns):
    """The message says so to somebody who wrote none: what is missing, whose are there, and how they are written."""
    start = f"^model must have a method `preimages.Y, noise.`, as its labels have noise, got {kind.__name__}{owner}"
    advice = f"Write `return tiedattn_jax.bayes.orbit.Y . s . noise, s..2.`.*, with noise = {columns}"
    model = three_tokens(partial(kind, teacher=np.eye(columns)))
    for ask in (lambda m: ta.bayes.solve(m, 1.0), lambda m: ta.bayes.weak_recovery(m)):
        with pytest.raises(ta.InputError, match=f"{start}. {advice}"):
            ask(model)


def one_atom(cross=0.0, pi=(1.0, 1.0), weights=(0.5, 0.5)):
    """Two atoms of one eigenvalue; encodings of length one, of cosine `cross` with the teacher."""
    tau, one = np.array([[1.0, -1.0], [-1.0, 1.0]]) * np.ones((2, 1, 1)), np.ones((2, 1, 1))
    crosses = cross * np.array([[1.0], [-1.0]]) * one
    return ta.SpectralLaw(weights, np.full((2, 2), 0.25), tau, np.array(pi)[:, None, None], crosses)


def two_atoms():
    return dataclasses.replace(one_atom(), gamma=jnp.array([[0.2, 0.2], [0.4, 0.4]]))


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (one_atom(0.9), r"^law\.cross must be zero up to chance: .*got law\.cross='cosines up to 0\.9'"),
        (one_atom(pi=(0.5, 1.5)), r"^law\.pi must be the same at all atoms: .*got law\.pi='relative differences"),
        (one_atom(pi=(0.0, 2.0)), r"^law\.pi must be the same"),
    ],
    ids=["cross", "drawn", "sparse"],
)
def test_what_the_learner_would_know_of_the_teacher(law, message):
    """Its projections on the encodings, and the squares of its entries."""
    for ask in (lambda m: ta.bayes.solve(m, 0.4), lambda m: ta.bayes.weak_recovery(m)):
        with pytest.raises(ta.InputError, match=message):
            ask(ta.DotProduct(spectrum=law))
    check_bayes(ta.DotProduct(spectrum=one_atom(0.19, (1.0, 9.0), (1.0, 0.0))))  # an atom without weight, and chance
    check_bayes(in_classes())


GRID = ta.GaussHermite(4, replicates=1)


@pytest.mark.full
def test_laws_that_are_refused_give_nan_where_jax_traces_them():
    @jax.jit
    def traced(cross, pi):
        given = dataclasses.replace(one_atom(), cross=cross, pi=pi)
        point = ta.bayes.solve(ta.DotProduct(spectrum=given), 0.4, nodes=GRID, start="uninformed")
        return point.status, point.q, point.gen_error

    for law in (one_atom(0.9), one_atom(pi=(0.5, 1.5)), one_atom(pi=(0.0, 2.0)), one_atom(0.1)):
        status, *values = traced(law.cross, law.pi)
        is_good = law.cross.max() < 0.2 and np.all(law.pi == 1)
        assert (status == 0 and np.all(np.isfinite(values))) if is_good else np.all(np.isnan(values))


@pytest.mark.full
def test_numbers_that_are_refused_are_nan_where_jax_traces_them():
    @jax.jit
    def ask(alpha, omega):
        model = ta.DotProduct(omega=omega)
        point, weak = ta.bayes.solve(model, alpha, nodes=GRID, start="uninformed"), ta.bayes.weak_recovery(model)
        return point.status, (point.q, point.gen_error, ta.bayes.spectral_overlap(model, alpha).value), weak

    for alpha, omega in ((-1.0, 0.3), (0.0, 0.3), (np.inf, 0.3), (0.4, 1.0)):
        status, values, weak = ask(alpha, omega)
        assert status > ta.Status.stalled and np.all(np.isnan(values)), (alpha, omega)
    assert np.isnan(weak.alpha) and weak.status == ta.Status.absent
    _, values, weak = ask(0.4, 0.3)
    assert np.all(np.isfinite(values)) and weak.ok


def test_what_is_shown_of_a_state(model):
    """The title says the start, if one was asked for. Limits of the numbers are said in words."""
    both, one = ta.bayes.solve(model, 0.4), ta.bayes.solve(model, 0.4, start="informed")
    assert both.title == "Bayes-optimal at alpha = 0.4" and one.title == "Bayes-optimal, informed start at alpha = 0.4"
    assert both.details() == [] and one.details() == [] and not one.hard
    known = [("q", "rho", "exact"), ("gen_error", "0", "exact"), ("free_entropy", "infinite", "the teacher is known")]
    assert all(
        ta.bayes.solve(model, alpha).describe().numbers == known for alpha in (0.5, 0.7)
    )  # from the threshold on
    assert "known" not in str(ta.bayes.solve(model, 0.4999999))


def in_classes(**means):
    return ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25] * 2, {(0, 1): 1.0}, **means))


def test_labels_have_a_closed_form_if_tokens_are_alike():
    """Without one, averages over finitely many preimages have Sobol points by default; so have those over a grid."""
    spectra = (np.repeat([[a], [0.3]], 8, 1) for a in (0.3, 0.2))
    laws = [ta.SpectralLaw.from_matrices(spectrum, np.eye(2, 8), np.ones((8, 1))) for spectrum in spectra]
    alike, different = (ta.DotProduct(spectrum=law) for law in laws)
    retrieval = PhaseRetrieval(lam=jnp.asarray(0.01))
    assert [has_closed_form(m) for m in (ta.DotProduct(), Noisy(), alike, retrieval)] == [True] * 4
    assert [has_closed_form(m) for m in (Plain(), different, in_classes())] == [False] * 3
    assert averages_of(three_tokens(COLUMNS), None).size == SOBOL_SIZES["label grids"]
    assert averages_of(Plain(), None).size == SOBOL_SIZES["labels"] == 2**13


class FirstToken(ta.DotProduct):
    """The label is the noisy field of the first token."""

    variance: jax.Array = eqx.field(default=0.0, converter=jnp.asarray)
    noise = 1

    def target(self, Y, noise):
        label = Y[0, 0] + jnp.sqrt(self.variance) * noise[0, 0]
        return jnp.zeros((2, 2)).at[0, 0].set(label / self.sigma)

    def preimages(self, Y, noise):
        fields = (Y + jnp.sqrt(self.variance) * noise)[None]
        return ta.bayes.Preimages(fields, jnp.zeros(1), jnp.stack([self.variance, jnp.inf]))


@pytest.mark.parametrize("variance", [0.0, 0.1])
def test_labels_of_one_token_are_linear_regression(variance):
    """``V = sigma^2 / (1 + alpha sigma^2 / (V + noise))``, and without noise ``sigma^2 (1 - alpha)``."""
    model, alpha, s = FirstToken(variance=variance), 0.6, SIGMA_SQUARE
    b = alpha * s + variance - s
    V = 0.5 * (np.sqrt(b**2 + 4 * s * variance) - b)
    point = ta.bayes.solve(model, alpha)
    assert point.ok
    bars = np.asarray(point.stderr.q).max()
    assert bars < 3e-4 * s
    np.testing.assert_allclose(point.mean.q.ravel(), s - V, atol=4 * bars)
    assert float(point.gen_error) == pytest.approx((V + variance) / 2, rel=2e-3)
    assert (ta.bayes.solve(model, 1.2).mean.q[0, 0, 0] == pytest.approx(s, rel=1e-9)) == (variance == 0)


class SizeOfFirstToken(FirstToken):
    """The label is the square of the noisy field of the first token."""

    def target(self, Y, noise):
        return super().target(Y, noise) ** 2

    def preimages(self, Y, noise):
        label = super().preimages(Y, noise)
        fields = jnp.concatenate([label.fields, label.fields.at[:, 0].multiply(-1)])
        return ta.bayes.Preimages(fields, jnp.full(2, -np.log(2.0)), label.noise)


def test_weak_recovery_from_one_of_two_tokens():
    """It is that of phase retrieval of one token, ``(1 + Delta)^2 / 2``."""
    threshold = ta.bayes.weak_recovery(SizeOfFirstToken(variance=0.1), nodes=ta.Sobol(2**12))
    assert float(threshold.alpha) == pytest.approx(1.4**2 / 2, abs=4 * float(threshold.stderr))


def test_noise_of_the_wrong_shape():
    class Three(FirstToken):
        def preimages(self, Y, noise):
            label = super().preimages(Y, noise)
            return ta.bayes.Preimages(label.fields, label.log_weight, jnp.zeros(3))

    with pytest.raises(ta.InputError, match="noise must be one variance, or 2 of them"):
        ta.bayes.solve(Three(), 0.5)


def test_labels_with_a_sign_have_no_weak_recovery():
    with pytest.raises(ta.InputError, match="model must be one whose labels do not tell the sign"):
        ta.bayes.weak_recovery(FirstToken())


def test_a_noise_for_every_token_is_that_of_all():
    class Each(Noisy):
        def preimages(self, Y, noise):
            label = super().preimages(Y, noise)
            return ta.bayes.Preimages(label.fields, label.log_weight, jnp.full(2, label.noise))

    nodes = ta.Sobol(2**8)
    one, each = (ta.bayes.solve(kind(), 1.0, nodes=nodes) for kind in (Noisy, Each))
    assert float(each.gen_error) == pytest.approx(float(one.gen_error), abs=5 * float(each.stderr.gen_error))
