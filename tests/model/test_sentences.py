"""Correlated tokens: classes of tokens with means and covariances, and kinds of sentences, in theory and in data."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import descending

import tiedattn_jax as ta
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.finite.evaluation import kind_mask
from tiedattn_jax.model.checks import check
from tiedattn_jax.model.overlaps import Overlaps, impose, label, sentence_overlaps
from tiedattn_jax.theory.equations import Equations, averages_expansion
from tiedattn_jax.theory.observables import gen_error_in, gen_error_linear_in, growths_in
from tiedattn_jax.theory.potentials import channel, channel_gradient
from tiedattn_jax.theory.setting import branch_start

SHARES = {(0, 0): 0.5, (1, 1): 0.3, (0, 1): 0.1, (1, 0): 0.1}
DIRECTIONS = {"encodings": [[1.0, 0.0], [-1.0, 0.0]], "means": [[0.0, 1.0], [0.0, -0.6]]}


class Linear(ta.DotProduct):
    """A layer with the squared error of the fields as loss, so that every average is known in closed form."""

    def loss(self, Z, Y):
        return 0.5 * jnp.sum(self.trace[:, None] * (Z - Y) ** 2)


class Smooth(ta.DotProduct):
    def loss(self, Z, Y):
        return jnp.sum(self.trace[:, None] * (0.3 * Z**2 - Y**2) ** 2) + 0.3 * jnp.sum(Z[0] * Z[1])


def law(variances=(0.25, 0.36), sentences=SHARES, teacher_means=(0.3, -0.18), **options):
    return ta.SpectralLaw.of_classes(variances, sentences, teacher_means=teacher_means, **(DIRECTIONS | options))


def model_of(kind=ta.DotProduct, **options):
    return kind(**vars(ta.DotProduct(spectrum=law(**options))))


def point():
    matrices = np.array([[0.1, 0.2], [9.0, 14.0], [0.05, 0.09]])[..., None, None]
    return Overlaps(*map(jnp.asarray, matrices), jnp.array([[0.2], [-0.1], [0.15], [-0.05]]))


def exact(model, x, V=None):
    """E (h - y)^2 D / 2 over sentences of all kinds, or the Moreau envelope of that loss with responses V."""
    rho, D, nu, total = model.rho[:, 0, 0], model.trace, model.teacher_mean[:, 0], 0.0
    for share, classes in zip(model.spectrum.sentences.weights, model.spectrum.sentences.classes, strict=True):
        for l, s in enumerate(classes):
            bias = x.m[l, 0] + x.m[2 + s, 0] - nu[s]
            square = bias**2 + x.q[s, 0, 0] - 2 * x.theta[s, 0, 0] + rho[s]
            total += share * 0.5 * square * D[s] / (1 if V is None else 1 + D[s] * V[s, 0, 0])
    return total


def grid(model):
    return descending(ta.GaussHermite(5, replicates=1).rule(model)).replicate(0)


def test_the_test_error_of_a_squared_error_is_known():
    model, x = model_of(Linear), point()
    np.testing.assert_allclose(jax.jit(gen_error_in)(model, x, grid(model)), jax.jit(exact)(model, x), rtol=1e-9)


@pytest.mark.full
def test_the_channel_of_a_squared_error_is_known():
    """The channel potential and its gradient equal closed forms; slopes come from the weights of the nodes."""
    model, x, nodes = model_of(Linear), point(), grid(model_of(Linear))
    M, gradient, _ = channel_gradient(model, x, nodes)
    value, (expected_by_model, expected) = jax.jit(jax.value_and_grad(lambda m, x: exact(m, x, x.V), (0, 1)))(model, x)
    np.testing.assert_allclose(M, value, rtol=1e-9)
    for name, slope in vars(gradient).items():
        np.testing.assert_allclose(slope, getattr(expected, name), rtol=1e-7, atol=1e-12, err_msg=name)
    by_model = jax.jit(jax.grad(lambda m: channel(m, x, nodes)))(model)
    assert by_model.kind is None
    by_law, by_law_exact = by_model.spectrum, expected_by_model.spectrum
    np.testing.assert_allclose(by_law.sentences.weights, by_law_exact.sentences.weights, rtol=1e-8)
    np.testing.assert_allclose(by_law.cross, by_law_exact.cross, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(by_law.gamma, by_law_exact.gamma, rtol=1e-7)


@pytest.mark.full
def test_the_expansion_of_the_averages_is_that_of_the_gradient():
    model, x = model_of(Linear), point()

    def setting(u):
        changed = eqx.tree_at(lambda m: m.spectrum.sentences.weights, model, u[:4])
        return changed, jnp.ones(()), eqx.tree_at(lambda x: x.V, x, u[4:].reshape(2, 1, 1))

    def closed_form(u):
        value, slopes = jax.value_and_grad(lambda x: exact(setting(u)[0], x, x.V))(setting(u)[2])
        return (value, slopes), value

    u = jnp.asarray([*SHARES.values(), *np.ravel(x.V)])
    (M, _), slopes, _ = averages_expansion(setting, grid(model), u)
    expected, value = jax.jit(jax.jacobian(closed_form, has_aux=True))(u)
    np.testing.assert_allclose(M, value, rtol=1e-9)
    for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-10)


@pytest.mark.full
def test_the_baseline_is_that_of_drawn_sentences():
    model = model_of(variances=(0.09, 0.81), sentences={(0, 0): 0.1, (1, 1): 0.1, (0, 1): 0.4, (1, 0): 0.4})
    data = ta.sample_data(model, 20, 2500.0, jax.random.key(0), normalise=True)
    D = np.asarray(model.trace)[np.asarray(data.classes)]
    T = np.asarray(jax.jit(jax.vmap(model.target))(data.y))
    W = np.mean(T * D[:, None], 0) / np.mean(D, 0)
    losses = 0.5 * np.sum((T - W) ** 2 * D[:, None], (1, 2))
    baseline = jax.jit(gen_error_linear_in)(model, ta.Lines(5, replicates=1).rule(model).replicate(0))
    assert abs(baseline - losses.mean()) < 3 * losses.std() / len(losses) ** 0.5 < 0.025 * baseline


@pytest.mark.full
@pytest.mark.parametrize("free", [(1.0, 0.0), (0.0, 1.0)])
def test_growth_is_the_slope_of_the_map_in_the_sector_that_is_zero(free):
    """The growth is an eigenvalue of the map's Jacobian, in the sector that vanishes in the state, for a smooth loss.

    The sector is theta with the overlaps with the classes' means, or m.
    """
    shares = {(0, 0): 0.4, (1, 1): 0.4, (0, 1): 0.1, (1, 0): 0.1}
    means = {"means": [[0.0, 0.5], [0.0, -0.5]], "teacher_means": (0.15, -0.15)}
    model = model_of(Smooth, sentences=shares, variances=(0.25, 0.3), **means)
    model = eqx.tree_at(lambda m: m.lam, model, jnp.asarray(1.0))
    alpha, x = jnp.asarray(0.8), impose(point(), jnp.asarray(free))
    x = Overlaps(x.q, jnp.full(x.V.shape, 0.2), x.theta, 0.5 * (x.m - x.m[jnp.array([1, 0, 3, 2])]))
    replicate = ta.GaussHermite(7, replicates=1).rule(model).replicate(0)
    growth = jax.jit(growths_in)(model, alpha, x, replicate, jnp.asarray(free))[int(free[0])]

    def image(v):
        trial = Overlaps(x.q, x.V, x.theta + v[:2].reshape(2, 1, 1), x.m + v[2:][:, None])
        mapped = Equations(model, alpha, replicate, jnp.ones(2)).step(trial)[0]
        return jnp.concatenate([mapped.theta.ravel(), mapped.m.ravel()])

    slopes = np.asarray(jax.jit(jax.jacobian(image))(jnp.zeros(6)))
    sector = [2, 3] if free[0] else [0, 1, 4, 5]
    eigenvalues = np.linalg.eigvals(slopes[np.ix_(sector, sector)])
    np.testing.assert_allclose(growth, eigenvalues.real.max(), rtol=1e-3)
    assert abs(growth) > 1e-3


@pytest.mark.full
def test_classes_that_are_alike_are_one():
    """Classes of equal law act as one: without means, sums over the classes are those over the tokens."""
    split = model_of(variances=(0.25, 0.25), means=[[0.0, 0.0]] * 2, teacher_means=(0.0, 0.0))
    plain, alpha, free = ta.DotProduct(), jnp.asarray(1.5), jnp.ones(2)
    y = branch_start(plain, None)
    x = Overlaps(y.q, y.V, y.theta, jnp.concatenate([y.m, 0 * y.m]))
    nodes, step = descending(ta.Sobol(2**8, replicates=1).rule(plain)).replicate(0), jax.jit(Equations.step)
    overlaps, answer = step(Equations(split, alpha, nodes, free), x)
    expected, expected_answer = step(Equations(plain, alpha, nodes, free), y)
    np.testing.assert_allclose(answer.train_loss, expected_answer.train_loss, rtol=1e-9)
    for name in ("q", "V", "theta"):
        np.testing.assert_allclose(getattr(overlaps, name), getattr(expected, name), rtol=1e-9, err_msg=name)
        total = [np.sum(getattr(s.conjugates, name)) for s in (answer, expected_answer)]
        np.testing.assert_allclose(*total, rtol=1e-9)
    np.testing.assert_allclose(overlaps.m[:2], expected.m, rtol=1e-9)
    np.testing.assert_array_equal(overlaps.m[2:], 0.0)


def test_a_kind_gives_the_fields_of_its_tokens():
    model, x = model_of(), point()
    kinds = model.law().sentences.kinds
    conditioned, equal = model.condition_on(kinds[2]), model.condition_on(kinds[1])  # kinds (0, 1) and (1, 1)
    tokens = sentence_overlaps(conditioned, x)
    np.testing.assert_array_equal(tokens.q, x.q)
    np.testing.assert_allclose(conditioned.sentence.share, 0.1)
    np.testing.assert_allclose(np.ravel(conditioned.teacher_mean), [0.3, -0.18], rtol=1e-6)
    slope = np.ravel(x.theta) / np.ravel(model.rho)
    np.testing.assert_allclose(np.ravel(tokens.m), [0.35 - slope[0] * 0.3, -0.15 + slope[1] * 0.18], rtol=1e-6)
    np.testing.assert_array_equal(sentence_overlaps(equal, x).V, np.asarray(x.V)[[1, 1]])
    np.testing.assert_array_equal(equal.sentence.to_classes(jnp.array([3.0, 4.0])), [0.0, 7.0])


def test_branches_hold_the_means_of_the_classes_with_theta():
    model = model_of()
    for free, m, name in (([1, 0], [0, 0, 0.15, -0.05], "semantic"), ([0, 1], [0.2, -0.1, 0, 0], "positional")):
        x = impose(point(), jnp.array(free, float))
        np.testing.assert_array_equal(np.ravel(x.m), m)
        assert label(model, x) == name
    start = jax.jit(branch_start, static_argnums=1)(model, "semantic")
    assert start.q.shape == (2, 1, 1)
    slope = np.ravel(start.theta) / np.ravel(model.rho)
    np.testing.assert_allclose(np.ravel(start.m)[2:], slope * np.ravel(model.teacher_mean), rtol=1e-6)


@pytest.mark.full
def test_sentences_are_drawn_from_their_law():
    model = model_of()
    data = ta.sample_data(model, 100, 20.0, jax.random.key(1), normalise=True)
    arrays = data.classes, data.means, data.encodings, data.teacher, data.inputs(), data.y
    (classes, means, p, Q, x, y), n = map(np.asarray, arrays), data.shape[1]
    counts = [int(np.sum(np.all(classes == kind, 1))) for kind in SHARES]
    np.testing.assert_allclose(counts, [share * n for share in SHARES.values()], atol=1)
    assert counts == [int(kind_mask(model.condition_on(k), data.classes).sum()) for k in model.law().sentences.kinds]
    np.testing.assert_allclose(means @ means.T, [[1, -0.6], [-0.6, 0.36]], atol=1e-6)
    np.testing.assert_allclose(means @ p.T, 0, atol=1e-6)
    np.testing.assert_allclose(means @ Q[:, 0] / 10, [0.3, -0.18], atol=1e-6)
    for s in range(2):
        inputs, fields = x[classes == s], y[classes == s]
        np.testing.assert_allclose(inputs.mean(0), means[s], atol=5 * 0.6 / len(inputs) ** 0.5)
        np.testing.assert_allclose(inputs.var(0).mean(), (0.25, 0.36)[s], rtol=0.01)
        assert abs(fields.mean() - (0.3, -0.18)[s]) < 4 * fields.std() / len(fields) ** 0.5
    np.testing.assert_allclose(y[..., 0], x @ Q[:, 0] / 10, atol=1e-5)
    rebuilt = ta.Data(data.x, data.y, data.teacher, data.encodings, means=data.means, classes=data.classes)
    np.testing.assert_allclose(np.asarray(rebuilt.gamma)[:, 0], [0.25, 0.36], rtol=0.01)


@pytest.mark.full
def test_message_passing_ends_in_a_minimum_of_the_risk():
    """Message passing ends at a critical point, where tokens of each class have their own D in the loss."""
    model = eqx.tree_at(lambda m: m.omega, model_of(), jnp.asarray(0.1))
    data = ta.sample_data(model, 100, 4.0, jax.random.key(2), normalise=True)
    result = ta.gamp(model, data, "semantic")
    assert result.ok and result.gradient_norm < 1e-8
    assert result.overlaps.V.shape == (2, 1, 1) and result.overlaps.m.shape == (4, 1)
    trained = ta.train(model, data, result.Q, optimizer="lbfgs", steps=20)
    np.testing.assert_allclose(trained.train_loss, result.train_loss, rtol=1e-9)
    D = np.asarray(model.trace)[np.asarray(data.classes)]
    Z = np.asarray(jnp.einsum("lnd,dr->nlr", data.x, result.Q))
    S, T = (np.asarray(jax.jit(jax.vmap(f))(jnp.asarray(a))) for f, a in ((model.student, Z), (model.target, data.y)))
    losses = 0.5 * np.sum((S - T) ** 2 * D[:, None], (1, 2))
    expected = (losses.sum() + 0.5 * 0.01 * np.sum(np.asarray(result.Q) ** 2)) / 100
    np.testing.assert_allclose(result.train_loss, expected, rtol=1e-6)


@pytest.mark.full
def test_fresh_sentences_come_from_all_kinds():
    """The held-out error with fields drawn from their law, or with full sentences, equals the theory's test error."""
    model = model_of(variances=(0.09, 0.81))
    data = ta.sample_data(model, 400, 1.0, jax.random.key(3), normalise=True)
    Q = 0.3 * data.teacher + 0.2 * 400**0.5 * data.encodings[:1].T
    from_fields, from_sentences = (
        ta.finite.heldout_error(model, data, Q, jax.random.key(4), sentences=20_000, exact=e) for e in (False, True)
    )
    expected = gen_error_in(model, data.overlaps(Q), ta.GaussHermite(12, replicates=1).rule(model).replicate(0))
    for error in (from_fields, from_sentences):
        assert abs(error.value - expected) < 4 * error.stderr < 0.1 * expected


@pytest.mark.full
@pytest.mark.parametrize(("omega", "alpha", "branch"), [(0.1, 3.0, "semantic"), (0.6, 4.0, "positional")])
def test_theory_and_training_agree(omega, alpha, branch):
    """Means over instances agree with the theory for unequal covariances, at states without jumps."""
    shares = {(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05}
    options = {"means": [[0.0, 1.0], [0.0, -1.0]], "teacher_means": (0.3, -0.3)}
    model = ta.DotProduct(omega, spectrum=law(sentences=shares, **options))
    state = ta.solve(model, alpha, branch, ta.Lines(5, replicates=2).rule(model))
    assert state.ok and state.diagnostics.jump_mass < 1e-3
    rows = []
    for k in range(8):
        data = ta.sample_data(model, 500, alpha, jax.random.key(k), normalise=True)
        run = ta.train(model, data, branch, optimizer="lbfgs", tol=1e-8)
        overlap = run.overlaps.theta if branch == "semantic" else run.overlaps.m[:2]
        rows.append([run.train_loss, *run.overlaps.q.ravel(), *np.abs(overlap).ravel()])
    overlap = state.overlaps.theta if branch == "semantic" else state.overlaps.m[:2]
    expected = np.array([state.train_loss, *state.overlaps.q.ravel(), *np.abs(overlap).ravel()])
    rows = np.array(rows)
    bar = rows.std(0, ddof=1) / len(rows) ** 0.5
    assert np.all(np.abs(rows.mean(0) - expected) < 4 * bar) and np.all(bar < 0.03 * expected)


@pytest.mark.usefixtures("unchecked")
def test_bad_laws_and_data_are_refused():
    model, rng = model_of(), np.random.default_rng(0)
    arrays = [jnp.asarray(0.3 * rng.standard_normal(shape)) for shape in ((2, 12, 6), (12, 2, 1), (6, 1), (2, 6))]
    data = ta.Data(*arrays, means=0 * arrays[3], classes=jnp.array([[0, 1]] * 12))
    along = {"encodings": [[1.0], [-1.0]], "means": [[0.5], [-0.3]], "teacher_means": (0.0, 0.0)}

    def cosine(c):
        direction = np.array([c, (1 - c**2) ** 0.5])
        return model_of(means=[direction, -0.6 * direction], teacher_means=(0.0, 0.0))

    def crossed(c):
        law = ta.SpectralLaw([1.0], [[0.3, 0.2]], np.eye(2)[None], [[[4.0]]], [[[0.0], [2 * c]]])
        return ta.DotProduct(spectrum=law)

    for draw in (cosine, crossed):
        check(draw(0.15), even=True)  # drawn means and teachers have such overlaps with the encodings by chance
        check(draw(0.25), even=False)
    for call, message in (
        (lambda: check(cosine(0.25), even=True), r"law\(\).tau must be means of .* orthogonal to the encodings"),
        (lambda: check(crossed(0.25), even=True), r"law\(\).cross must be a teacher orthogonal to the encodings"),
        (lambda: check(model_of(**along)), "orthogonal to the encodings"),
        (lambda: ta.TokenClassMixture.of({(0, 0): 0.5, (0, 1, 1): 0.5}), "sentences"),
        (lambda: check(model_of(sentences={(0, 0): 0.5, (2, 2): 0.5}, variances=(0.2, 0.3))), "classes"),
        (lambda: check(model_of(teacher_means=(1.5, -0.9))), "semidefinite"),
        (lambda: check(model_of(sentences={(0, 0): 0.5, (1, 1): 0.3, (0, 1): 0.2})), "exchange of"),
        (lambda: check(model_of(encodings=[[1.0, 0.0], [-0.5, 0.0]])), "exchange of tokens"),
        (lambda: ta.train(ta.DotProduct(), data), "classes"),
        (lambda: ta.gamp(model, ta.Data(*arrays)), "classes"),
        (lambda: ta.Data(*arrays, means=data.means, classes=data.classes + 1), "classes"),
        (lambda: ta.train(model_of(sentences={(0, 0): 0.5, (1, 1): 0.5}), data), "kinds of sentences"),
        (lambda: ta.rsb.solve(model, 1.0, "positional"), "classes"),
        (lambda: ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.2, 0.3, 0.4], {(0, 1, 2): 1.0})),
         "L = 2, got L = 3"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            call()
    # A sentence may have fewer tokens than there are classes.
    model = ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.2, 0.3, 0.4], {(0, 1): 0.5, (2, 0): 0.5}))
    assert model.shape == (2, 1, 1) and model.law().tokens == 2
    check(model)
