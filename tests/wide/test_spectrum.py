"""The spectrum of Y = M S* + sqrt(N) G: moments, the prior's derivatives by two routes, and random matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.wide.spectrum import Eigenvalues, Wishart, convolution, prior, stability

LAWS = {
    "few": Wishart(0.5),
    "square": Wishart(1.0),
    "many": Wishart(2.0),
    "thin": Wishart(0.01),
    "atoms": Eigenvalues([0.3, 0.0, 2.5, 0.3, 0.0, 1.0]),
}

pytestmark = pytest.mark.usefixtures("fast_compilation")


def at(law, M, N, tau):
    curve = convolution(law, jnp.asarray(M), jnp.asarray(N))
    return curve, prior(curve, jnp.asarray(tau), curve.place(jnp.asarray(tau)))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_eigenvalues_have_the_moments_of_their_law(law):
    x = law.eigenvalues(60_000)
    assert np.all(np.diff(x) >= 0)
    moments = [x.mean(), np.mean(x**2), np.mean(x == 0)]
    np.testing.assert_allclose(moments, [law.trace, law.rho, law.zeros], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("N", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_the_density_has_the_moments_of_a_free_sum(law, N):
    M = 0.3
    Y = jax.jit(lambda: convolution(law, jnp.asarray(M), jnp.asarray(N)).nodes())()
    moments = [float(jnp.sum(Y.weight * Y.y**k)) for k in range(4)]
    # Free cumulants add, and a semicircle has the second one only.
    mean, square = M * float(law.trace), M**2 * float(law.rho)
    third = M**3 * float(np.mean(law.eigenvalues(60_000) ** 3)) + 3 * mean * N
    np.testing.assert_allclose(moments[:3], [1, mean, square + N], rtol=1e-9)
    np.testing.assert_allclose(moments[3], third, rtol=1e-3)  # by the quantiles of the law


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_derivatives_of_the_potential(law):
    """The written averages are the gradient of Phi, and their own derivatives are those of differences."""
    args = jnp.array([0.25, 0.01, 0.05])

    @jax.jit
    def values(args):
        return at(law, *args)[1]

    P, gradient = values(args), jax.grad(lambda args: values(args).phi)(args)
    np.testing.assert_allclose(gradient, [P.by_M, P.by_N, -P.trace], rtol=1e-9)
    hessian = jax.jit(jax.jacfwd(lambda args: jnp.stack([values(args).by_M, values(args).by_N])))(args)
    step = 1e-4 * args
    for k in range(3):
        high, low = (values(args.at[k].add(sign * step[k])) for sign in (1, -1))
        slopes = [(high.by_M - low.by_M) / (2 * step[k]), (high.by_N - low.by_N) / (2 * step[k])]
        np.testing.assert_allclose(hessian[:, k], slopes, rtol=1e-4)


@pytest.mark.long
def test_derivative_in_the_width_of_the_teacher():
    def phi(kappa):
        return at(Wishart(kappa), 0.25, 0.01, 0.05)[1].phi

    slope = (phi(0.5 + 1e-4) - phi(0.5 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(phi)(0.5), slope, rtol=1e-6)


@pytest.mark.parametrize("kappa", [0.5, 2.0])
def test_quantiles_and_the_closed_form_agree_with_random_matrices(kappa):
    d, M, N, tau = 600, 0.3, 0.01, 0.1
    draws = np.random.default_rng(0)
    law = Wishart(kappa)
    W, G = draws.standard_normal((d, int(kappa * d))), draws.standard_normal((d, d))
    teacher = W @ W.T / (d * np.sqrt(kappa))
    Y = np.linalg.eigvalsh(M * teacher + np.sqrt(N / d / 2) * (G + G.T))
    curve, P = at(law, M, N, tau)
    f = np.maximum(Y - tau, 0)
    np.testing.assert_allclose([P.trace, 2 * P.phi, P.share], [f.mean(), (f**2).mean(), (f > 0).mean()], rtol=0.02)
    np.testing.assert_allclose(curve.top, Y[-1], rtol=0.02)
    np.testing.assert_allclose(law.eigenvalues(d)[:-6], np.linalg.eigvalsh(teacher)[:-6], atol=0.06)  # edges fluctuate
    gap = Y[:, None] - Y + np.eye(d)
    slopes = np.where(np.eye(d) > 0, f > 0, (f[:, None] - f) / gap)
    np.testing.assert_allclose(
        stability(curve, jnp.asarray(tau), curve.place(jnp.asarray(tau))), 0.5 * (slopes**2).mean(), rtol=0.02
    )


def test_the_closed_form_agrees_with_its_quantiles():
    law = Wishart(0.5)
    _, exact = at(law, 0.28, 8e-4, 0.05)
    _, atoms = at(Eigenvalues(law.eigenvalues(300)), 0.28, 8e-4, 0.05)
    np.testing.assert_allclose(jnp.stack(atoms), jnp.stack(exact), rtol=2e-3)


@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_a_share_of_the_eigenvalues_lies_above_its_quantile(share):
    curve = convolution(Wishart(0.5), jnp.asarray(0.3), jnp.asarray(0.01))
    np.testing.assert_allclose(jnp.sum(curve.nodes(curve.quantile(jnp.asarray(share))).weight), share, rtol=1e-10)


@pytest.mark.parametrize(
    "kappa, islands",
    [
        (0.25, [[0, 0], [1, 9]]),
        (1.0, [[0, 0], [0, 8]]),
        (2.25, [[1 / 3, 1 / 3], [1 / 3, 25 / 3]]),
        (4.0, [[1, 1], [1, 9]]),
    ],
)
def test_islands_of_a_wishart_matrix(kappa, islands):
    """The zeros of a thin matrix are an island of their own."""
    np.testing.assert_allclose(Wishart(kappa).islands(jnp.asarray(2.0)), islands, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("law", [Wishart(0.5), Wishart(2.0)])
def test_every_eigenvalue_stands_for_the_middle_of_its_share(law):
    np.testing.assert_allclose(law.eigenvalues(3), law.eigenvalues(9)[1::3], rtol=1e-12)
    atoms = Eigenvalues([3.0, 1.0, 2.0])
    assert atoms.eigenvalues(2).tolist() == [1, 3] and atoms.eigenvalues(6).tolist() == [1, 1, 2, 2, 3, 3]


def test_few_islands_have_many_nodes_each():
    for count, nodes in ((4, 400), (5, 120)):
        curve = convolution(Eigenvalues(np.arange(1.0, count + 1)), jnp.asarray(1.0), jnp.asarray(1e-3))
        assert curve.nodes().u.shape == (nodes,)


def test_laws_print_what_they_are():
    assert str(Wishart(0.5)) == "Wishart matrix of width 0.5 d"
    assert str(Eigenvalues([2.5, 0.25, 1.0])) == "3 eigenvalues from 0.25 to 2.5"


def test_one_eigenvalue_is_a_law():
    law = Eigenvalues([0.5])
    assert [float(number) for number in (law.trace, law.rho, law.zeros)] == [0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    "values, sentence",
    [
        ([], "eigenvalues must be a vector of at least one number, got eigenvalues=[0]"),
        ([[1.0, 2.0]], "eigenvalues must be a vector of at least one number, got eigenvalues=[1, 2]"),
        (1.0, "eigenvalues must be a vector of at least one number, got eigenvalues=[]"),
        ([1.0, -1e-9], "eigenvalues must be finite and at least zero"),
        ([1.0, np.inf], "eigenvalues must be finite and at least zero"),
        ([0.0, 0.0], "eigenvalues must be positive for at least one"),
    ],
)
def test_bad_eigenvalues(unchecked, values, sentence):
    with pytest.raises(InputError) as error:
        Eigenvalues(values)
    assert str(error.value).startswith(sentence)
