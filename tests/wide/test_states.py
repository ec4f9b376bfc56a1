"""States of wide layers: reference numbers, the potential, derivatives, the cone of the offsets, the bound on the rank.

The reference numbers are from an independent prototype with another quadrature and another solver.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import tiedattn_jax as ta
from tiedattn_jax.wide import channel, fixed_points, states
from tiedattn_jax.wide.spectrum import convolution, spectral_prior

MIXING = [[0.8, 0.2], [0.3, 0.7]]
NAMES = "q m V Lam M N trace train_loss gen_error distance share largest energy replicon"
layer = partial(ta.wide.DotProduct, tau=0.05)
LONG = {"mixing": MIXING, "encodings": "long"}
SPIKE = {"tau": 0.03, "omega": 0.4, "mixing": [[0.75, 0.25], [0.25, 0.75]], "encodings": 1.5}
CROSS = {"loss": "cross_entropy"}
REFERENCE = {
    "squared": (
        {}, 1.0, NAMES, "0.86877 1.13669 0.936626 0.335478 0.277673 0.000811405 0.513916 0.00408464 0.00582587 "
        "0.0953825 0.492201 3.26575 0.0297804 0.189922", 1.2e-5,
    ),
    "noisy": (
        {"noise": 0.3}, 1.0, NAMES, "0.781645 1.0482 0.952937 0.344001 0.262548 0.00998137 0.506785 0.034784 0.0184972 "
        "0.185247 0.57779 3.04578 0.0601232 0.198515", 1.2e-5,
    ),
    "cross-entropy": (
        {"tau": 0.2} | CROSS, 1.0, NAMES, "0.854818 1.1231 0.342418 0.830208 0.715001 0.00836464 0.495346 0.914213 "
        "0.920559 0.108618 0.461704 3.31434 1.01328 0.150934", 1.2e-5,
    ),
    "bounded": ({"kappa": 0.3}, 1.0, "energy q replicon", "0.033392 0.8650 inf", 2e-4),
    "bounded more": ({"kappa": 0.2}, 1.0, "energy q replicon", "0.047183 0.7812 inf", 2e-4),
    # These two average over Sobol points.
    "encodings of length of order one": (
        SPIKE, 1.0, "R q m trace train_loss gen_error share energy",
        "0.0448 0.2357 0.5812 0.2783 0.01139 0.01744 0.588 0.01974", 1.1e-3,
    ),
    "three tokens": ({"tau": 0.1, "tokens": 3} | CROSS, 0.3, "q m trace energy", "0.9655 1.1936 0.5305 0.7357", 0.02),
}  # fmt: skip


class OneField(ta.wide.Layer):
    """One score of one token, with a quadratic loss; it is uneven if the target bends."""

    bend = 0.0

    def loss(self, H, Y):
        return 0.5 * jnp.sum((H - Y - self.bend * Y**2) ** 2)


class Bent(OneField):
    bend = 0.2


@pytest.fixture(scope="module")
def state():
    return ta.wide.solve(layer(), 1.0)


@pytest.mark.parametrize(
    "options, alpha, names, numbers, rtol",
    [pytest.param(*case, id=name, marks=[pytest.mark.full] * (name != "squared")) for name, case in REFERENCE.items()],
)
def test_reference_numbers(options, alpha, names, numbers, rtol):
    state = ta.wide.solve(layer(**options), alpha, nodes=ta.Sobol(2**11) if "tokens" in options else None)
    assert state.status_name == "converged" and np.all(np.abs(state.replicates.residual) < 1e-6)
    np.testing.assert_array_equal(state.replicates.binds, "kappa" in options)
    np.testing.assert_allclose(state.share, options.get("kappa", state.share), rtol=1e-9)
    for name, number in zip(names.split(), map(float, numbers.split()), strict=True):
        np.testing.assert_allclose(getattr(state, name), number, rtol=rtol, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("kind", [OneField, Bent])
def test_quadratic_loss_of_one_field(kind):
    """Every average is known in closed form; the state is that of another implementation."""
    state = ta.wide.solve(kind(teacher=ta.wide.Wishart(0.5), tau=0.05, tokens=1), 0.3)
    assert state.model.is_even is (kind is OneField)
    # One field has twice the variance, so its loss counts twice in the coordinates.
    V, rho = float(state.V), float(state.model.teacher.rho)
    e = float(rho - 2 * state.m + state.q) + 6 * kind.bend**2 * rho**2
    np.testing.assert_allclose(state.replicates.margin, 1 + 2 * V, rtol=1e-6)
    np.testing.assert_allclose(state.Lam, 0.3 * 2 / (1 + 2 * V), rtol=1e-10)
    tolerance = 1e-6 if kind.bend else 1e-7  # the fourth moment of a normal number misses 3e-7 beyond 6.2
    np.testing.assert_allclose(state.N, 0.3 / 2 * 4 * e / (1 + 2 * V) ** 2, rtol=tolerance)
    np.testing.assert_allclose(state.gen_error, e, rtol=tolerance)
    np.testing.assert_allclose(state.train_loss, e / (1 + 2 * V) ** 2, rtol=tolerance)
    if kind is OneField:
        numbers = {
            "q": 1.08064, "m": 1.17718, "V": 2.58403, "trace": 0.556675, "energy": 0.029618, "replicon": 0.690906,
        }  # fmt: skip
        for name, number in numbers.items():
            np.testing.assert_allclose(getattr(state, name), number, rtol=5e-6, err_msg=name)


def of_a_power_law(teacher, kappa, **options):
    return ta.wide.solve(OneField(teacher=teacher, tau=0.05, noise=0.05, tokens=1, kappa=kappa), 1.0, **options)


def power_law(d, gamma=1.25):
    values = np.arange(1.0, d + 1) ** -gamma
    return values * np.sqrt(d / np.sum(values**2))


@pytest.mark.full
@pytest.mark.parametrize("kappa, share", [(0.99, 0.532578), (0.2, 0.2)])
def test_a_power_law_agrees_with_random_matrices(kappa, share):
    """The channel is known in closed form; the prior's averages are those of random matrices of as many eigenvalues."""
    teacher, d, draws = power_law(400), 400, np.random.default_rng(0)
    state = of_a_power_law(teacher, kappa)
    Lam, M, N, V = (float(getattr(state, name)) for name in ("Lam", "M", "N", "V"))
    error = float(1.05 - 2 * state.m + state.q)
    np.testing.assert_allclose([Lam, M, N], np.array([1, 1, error / (1 + 2 * V)]) * 2 / (1 + 2 * V), rtol=1e-6)
    numbers = []
    for _ in range(4):
        G = draws.standard_normal((d, d))
        Y, vectors = np.linalg.eigh(np.diag(M * teacher) + np.sqrt(N / d / 2) * (G + G.T))
        f = np.maximum(Y - 0.05, 0) / Lam * (np.arange(d) >= d - round(kappa * d))
        numbers.append([np.mean(f**2), np.mean(f * (vectors**2 * teacher[:, None]).sum(0)), f.mean()])
    np.testing.assert_allclose([state.q, state.m, state.trace], np.mean(numbers, 0), rtol=3e-3)
    np.testing.assert_allclose(state.share, share, atol=1e-6)
    assert bool(state.replicates.binds.all()) == (kappa == 0.2)


@pytest.mark.full
@pytest.mark.parametrize("kappa", [0.99, 0.2])
def test_derivatives_in_the_eigenvalues(kappa):
    teacher, step = jnp.asarray(power_law(30)), 1e-4

    def q(teacher):
        return of_a_power_law(teacher, kappa, nodes=ta.Sobol(2**8, replicates=1)).q

    slopes = jax.grad(q)(teacher)[np.array([0, 29])]  # the law sorts its eigenvalues
    for index, slope in zip((0, 29), slopes, strict=True):
        high, low = (q(teacher.at[index].add(sign * step)) for sign in (1, -1))
        np.testing.assert_allclose(slope, (high - low) / (2 * step), rtol=1e-5)


def first(tree):
    return jax.tree.map(lambda a: a[0], tree)


def potential_at(state, model, alpha, nodes):
    """Return the derivatives of the potential in the logarithms of the order parameters, in units of the energy."""

    @jax.jit
    @jax.value_and_grad
    def potential(x):
        q, m, V, Lam, M, N = x[:6]
        A, _ = channel.channel_averages(model, nodes, q, m, V, x[6:])
        curve = convolution(model.teacher, M, N)
        phi = spectral_prior(curve, model.tau, curve.place(model.tau)).phi
        return alpha * A.moreau - phi / Lam + M * m + N * V - Lam * q / 2

    x = np.array([state.q, state.m, state.V, state.Lam, state.M, state.N, *state.offset])
    value, slopes = potential(x)
    np.testing.assert_allclose(value, state.energy, rtol=1e-9)
    return np.asarray(slopes) * x / float(state.energy)


@pytest.mark.full
def test_the_equations_are_the_derivatives_of_the_potential(state):
    one = first(state.replicates)
    slopes = potential_at(one, state.model, 1.0, first(channel.wide_nodes(state.model, None)))
    # The lattice averages by parts to 1e-6; the prior's part is exact.
    np.testing.assert_allclose(slopes[:3], 0, atol=2e-4)
    np.testing.assert_allclose(slopes[3:], 0, atol=1e-8)
    np.testing.assert_allclose(one.train_loss + 0.05 * one.trace, one.energy, rtol=1e-8)  # it is the risk


@pytest.mark.full
def test_derivatives_of_a_state(state):
    def energy(model, alpha):
        return ta.wide.solve(model, alpha).energy

    by_model, by_alpha = jax.jit(jax.grad(energy, (0, 1)))(state.model, jnp.asarray(1.0))
    np.testing.assert_allclose(by_model.tau, state.trace, rtol=1e-4)  # the energy is stationary
    nodes = first(channel.wide_nodes(state.model, None))
    A = channel.channel_averages(state.model, nodes, state.q, state.m, state.V, jnp.zeros(0))[0]
    np.testing.assert_allclose(by_alpha, A.moreau, rtol=1e-4)
    h = 1e-4
    for name, value in (("beta", 1.0), ("noise", 0.1)):
        model = layer(**{name: value})
        slope = getattr(jax.grad(lambda m: ta.wide.solve(m, 1.0).q)(model), name)
        high, low = (ta.wide.solve(layer(**{name: value + sign * h}), 1.0, start=state).q for sign in (1, -1))
        np.testing.assert_allclose(slope, (high - low) / (2 * h), rtol=1e-3, err_msg=name)


@pytest.mark.full
def test_numbers_out_of_range_that_jax_traces():
    """Every lane has one bad number; the first one has none."""
    names = "tau kappa noise omega beta share width alpha".split()
    good, bad = [0.1, 0.8, 0.1, 0.3, 1.0, 0.5, 0.5, 1.0], [-0.1, 0.0, -0.1, 1.5, -1.0, 0.6, -0.5, -1.0]
    rows = jnp.asarray(np.vstack([good, np.where(np.eye(8) > 0, bad, good)]))

    def made(row):
        numbers = dict(zip(names, row, strict=True))
        teacher, alpha = ta.wide.Wishart(numbers.pop("width")), numbers.pop("alpha")
        mixing = jnp.array([[numbers.pop("share"), 0.5], [0.5, 0.5]])
        return layer(mixing=mixing, teacher=teacher, **numbers), alpha

    def answers(row):
        model, alpha = made(row)
        state, best = ta.wide.solve(model, alpha, nodes=ta.Sobol(2**7, replicates=1)), ta.wide.bayes(model, alpha)
        return jnp.stack([state.q, state.energy, best.distance]), jnp.stack([state.status, best.status])

    numbers, status = jax.jit(jax.vmap(answers))(rows)
    assert np.isfinite(numbers[0]).all() and np.isnan(numbers[1:]).all()
    assert not status[0].any() and np.all(status[1:] == 4)
    slopes = jax.jit(jax.jacrev(lambda row: answers(row)[0]))
    assert np.isfinite(slopes(rows[0])).all() and not slopes(rows[1]).any()


def test_a_start_leads_to_the_same_state(state):
    np.testing.assert_allclose(ta.wide.solve(state.model, 1.0, start=state).q, state.q, rtol=1e-9)
    with pytest.raises(ta.InputError, match="start must be one state with 2 offsets like the layer"):
        ta.wide.solve(layer(**LONG), 1.0, start=state)


@pytest.mark.full
def test_single_precision(state):
    with jax.enable_x64(False):
        single = ta.wide.solve(ta.wide.DotProduct(tau=0.05), 1.0)
        assert single.q.dtype == jnp.float32 and single.status_name == "converged"
        assert "float32" in str(single)
    for name, rtol in {"q": 1e-4, "m": 1e-4, "trace": 1e-4, "energy": 2e-4}.items():
        np.testing.assert_allclose(getattr(single, name), getattr(state, name), rtol=rtol, err_msg=name)


@pytest.mark.full
def test_a_lane_that_fails_leaves_the_others_of_a_batch_alone(state):
    alphas = jnp.array([jnp.nan, 1.0, 1e-4])  # none, content, no content

    def numbers(alphas):
        states = jax.vmap(lambda alpha: ta.wide.solve(layer(), alpha))(alphas)
        return states.q, states

    q, states = numbers(alphas)
    assert states.status_name == ["nonfinite", "converged", "converged"]
    np.testing.assert_allclose(q[1:], [state.q, 0.0], rtol=1e-9)
    slopes = jax.grad(lambda a: numbers(a)[0][1])(alphas)
    np.testing.assert_allclose(slopes, [0.0, jax.grad(lambda a: ta.wide.solve(layer(), a).q)(1.0), 0.0], rtol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    "options, numbers, offsets",
    [
        pytest.param({"tau": 0.03, "omega": 0.4}, (0.231475, 0.58532, 0.268176, 0.0114813), (0.53949, 0.35817),
                     id="squared"),
        pytest.param({"tau": 0.1, "omega": 0.8, "loss": "cross_entropy"}, (0.016441, 0.151221, 0.0623867, 1.20325),
                     (1.05876, 0.67158), id="cross-entropy"),
    ],
)  # fmt: skip
def test_long_encodings(options, numbers, offsets):
    state = ta.wide.solve(layer(**LONG, **options), 1.0)
    found = [float(getattr(state, name)) for name in ("q", "m", "trace", "energy")]
    np.testing.assert_allclose(found, numbers, rtol=1e-5)
    np.testing.assert_allclose(_offsets(state), offsets, atol=6e-6)  # five decimals are known
    assert any(line.split()[0] == "shifts" for line in str(state).splitlines())


def _offsets(state):
    """T_11 - T_12 and T_22 - T_12."""
    T = np.asarray(state.shifts)
    return T[0, 0] - T[0, 1], T[1, 1] - T[0, 1]


@pytest.mark.full
@pytest.mark.parametrize(
    "mixing, offsets", [([[0.0, 1.0], [1.0, 0.0]], (0.0, 0.0)), ([[0.2, 0.8], [0.7, 0.3]], (-0.09198, 0.09198))]
)
def test_tied_attention_cannot_prefer_the_other_token(mixing, offsets):
    state, empty = (
        ta.wide.solve(layer(tau=tau, omega=0.4, **CROSS | LONG | {"mixing": mixing}), 1.0) for tau in (0.1, 50.0)
    )
    np.testing.assert_allclose(_offsets(state), offsets, atol=6e-6)
    assert float(empty.q) == 0 and empty.status_name == "converged"
    np.testing.assert_allclose(sum(_offsets(empty)), 0, atol=1e-9)  # the boundary of the cone


class Positions(ta.wide.Layer):
    """Two differences of scores with a quadratic loss, whose targets have a positional part."""

    def loss(self, H, Y):
        return 0.5 * sum((H[a, a] - H[0, 1] - Y[a, a] + Y[0, 1] - 0.4) ** 2 for a in (0, 1))


@pytest.mark.full
def test_a_spike_on_nodes_that_are_exact_for_a_quadratic_loss():
    """The equations are the derivatives of the potential, and derivatives in the length are differences."""
    x, weights = np.polynomial.hermite_e.hermegauss(3)
    grid = np.stack(np.meshgrid(*[x] * 6, indexing="ij")).reshape(1, 6, -1)
    weight = np.prod(np.meshgrid(*[weights / weights.sum()] * 6, indexing="ij"), 0).reshape(1, -1)
    row = np.ones((1, 1, weight.shape[1]))
    nodes = channel.WideNodes(*(jnp.asarray(a) for a in (grid[:, :2], grid[:, 2:4], grid[:, 4:], weight, row)))
    made = partial(Positions, teacher=ta.wide.Wishart(0.5), tau=0.05)

    @jax.jit
    def state(length):
        start = jnp.array([0.7, 0.6, 1.0, 0.0])
        return first(fixed_points.states(made(encodings=length), jnp.asarray(0.4), nodes, start, False))

    def numbers(length):
        at = state(length)
        return jnp.stack([at.q, at.m, at.offset[0], at.gen_error])

    at = state(1.5)
    assert at.status == 0 and at.offset[0] > 0.01
    np.testing.assert_allclose(potential_at(at, made(encodings=1.5), 0.4, first(nodes)), 0, atol=1e-9)
    slopes = (numbers(1.5 + 1e-4) - numbers(1.5 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.jacfwd(numbers)(1.5), slopes, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "options, nodes, tolerance",
    [
        ({"encodings": "long"} | CROSS, None, 1e-6),
        ({"encodings": "long"}, None, 1e-6),
        ({"encodings": 1.5}, ta.Sobol(2**11, replicates=2), 0.05),
    ],
)
def test_the_boundary_of_what_tied_attention_can_learn(options, nodes, tolerance):
    """The slack changes its sign at A_11 + A_22 = 1, whatever the other numbers are."""

    def slack(share):
        mixing = [[share, 1 - share], [1 - share, share]]
        state = ta.wide.solve(layer(omega=0.4, mixing=mixing, **options), 0.6, nodes=nodes)
        assert float(state.slack) < 0 or float(jnp.linalg.norm(state.offset)) > 0
        return float(state.slack)

    high, low = slack(0.55), slack(0.45)
    assert high > 0 > low
    threshold = ta.wide.position(layer(mixing=MIXING, omega=0.4, **options))
    np.testing.assert_allclose(threshold.A_11, 0.3)
    np.testing.assert_allclose(threshold.sensitivities.mixing, [[0, 0], [0, -1]])
    np.testing.assert_allclose(slack(0.5), 0, atol=tolerance * high)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_position_alone_beyond_what_tied_attention_can_learn(loss):
    """At omega = 1 the labels have no content. Where position is forbidden, S fits what position leaves over."""

    def state(omega):
        mixing = [[0.3, 0.7], [0.55, 0.45]]
        return ta.wide.solve(layer(omega=omega, mixing=mixing, encodings="long", loss=loss), 0.5)

    end, near, far = (state(1 - step) for step in (0.0, 1e-3, 2e-3))
    assert end.ok and float(end.slack) < 0 and float(end.q) > 1e-3
    shifts = np.asarray(end.shifts)
    assert shifts[0, 0] + shifts[1, 1] - 2 * shifts[0, 1] == pytest.approx(0, abs=1e-9)
    for name in ("q", "V", "train_loss", "energy"):
        values = [float(getattr(a, name)) for a in (end, near, far)]
        assert values[0] == pytest.approx(2 * values[1] - values[2], rel=1e-4), name


@pytest.mark.full
@pytest.mark.parametrize("alpha", [2.8, 4.0])
def test_a_threshold_in_a_gap_of_the_spectrum(alpha):
    """Half of the eigenvalues of Y lie above tau, across a gap; d = 1000 has its edges at .041 and .168 (alpha = 4)."""
    free, wide, exact, narrow = (ta.wide.solve(layer(tau=0.1, kappa=kappa), alpha) for kappa in (1.0, 0.6, 0.5, 0.4))
    for state in (free, wide, exact):
        assert state.status_name == "converged" and not state.replicates.binds.any()
        np.testing.assert_allclose([state.share, state.replicon, state.q], [0.5, free.replicon, free.q], rtol=1e-7)
    assert narrow.replicates.binds.all() and np.isinf(narrow.replicon)
    spectrum = free.spectrum()
    np.testing.assert_allclose(spectrum.weight.sum(), 0.5, rtol=1e-6)
    assert np.all(spectrum.quantile(np.array([0.0, 0.3, 0.49])) == 0)
    d = 1000
    G = np.random.default_rng(0).standard_normal((d, d))
    teacher = free.model.teacher.eigenvalues(d)
    Y = np.linalg.eigvalsh(np.diag(float(free.M) * teacher) + np.sqrt(float(free.N) / d / 2) * (G + G.T))
    S = np.maximum(Y - 0.1, 0) / float(free.Lam)
    np.testing.assert_allclose(spectrum.quantile(np.array([0.52, 0.75, 0.9])), S[[519, 749, 899]], rtol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("V", [3.0, 20.0])
def test_two_starts_find_the_lowest_proximal_points(V):
    """Also where the loss is flat at the student's fields; many other starts find nothing lower."""
    model = layer()
    nodes = first(channel.wide_nodes(model, ta.Sobol(2**11)))
    q, m, V = (jnp.asarray(number) for number in (1.2, 0.3, V))
    w, y = channel.score_fields(nodes, q, m, model.teacher.rho)
    shift = channel.Inside(jnp.zeros((2, 1)), nodes.row)

    def energy(h):
        return np.asarray(
            V * channel.at_nodes(channel._score_loss)(model, h, y, shift) + 0.5 * jnp.sum((h - w) ** 2, 0)
        )

    search = jax.jit(lambda start: channel.score_prox(model, w, y, V, shift, jnp.broadcast_to(start[:, None], w.shape)))
    from_zero = channel.score_prox(model, w, y, V, shift, jnp.zeros_like(w))
    lowest, weight = channel.second_start(model, nodes, q, m, V, jnp.zeros(0), from_zero)
    others = [energy(search(jnp.array([a, b]))) for a in (-4.0, 0.0, 4.0) for b in (-4.0, 0.0, 4.0)]
    np.testing.assert_allclose(energy(lowest), np.min([energy(from_zero), *others], 0), atol=1e-9)
    missed = np.mean(energy(from_zero) > energy(lowest) + 1e-6)
    assert (0 < missed <= float(weight) < 0.02) if V > 10 else missed == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "alpha, options",
    [
        (0.02, {"tau": 1e-4, "beta": 0.5}),
        (0.05632, {"tau": 0.0185, "beta": 0.536, "omega": 0.561}),  # the map alternates between two places
        (0.02164, {"tau": 0.0326, "beta": 2.07, "omega": 0.487, "encodings": "long"}),  # close to the onset
        (5.0, {"tau": 1e-4, "beta": 3.0, "omega": 0.95, "loss": "cross_entropy", "encodings": "long"}),
    ],
)
def test_the_search_starts_from_afar(alpha, options):
    state = ta.wide.solve(layer(mixing=MIXING, **options), alpha, nodes=ta.Sobol(2**11, replicates=2))
    assert state.status_name == "converged" and float(state.q) > 0


def test_spectrum_of_the_trained_matrix(state, tmp_path):
    spectrum = state.spectrum()
    np.testing.assert_allclose(
        spectrum.quantile(jnp.array([0.55, 0.7, 0.85, 0.95, 0.99])), [0.1058, 0.6022, 1.4117, 2.3052, 2.9239], atol=2e-4
    )
    np.testing.assert_allclose(spectrum.quantile(jnp.array([0.2, 1.0])), [0.0, spectrum.edge])
    np.testing.assert_allclose(jnp.sum(spectrum.weight), 1 - spectrum.zeros, rtol=1e-6)
    np.testing.assert_allclose(jnp.trapezoid(spectrum.density, spectrum.values), 1 - spectrum.zeros, rtol=1e-3)
    np.testing.assert_allclose(spectrum.edge, state.largest)
    np.testing.assert_allclose(jnp.sum(spectrum.weight * spectrum.values**2), state.q, rtol=1e-4)
    state.save(tmp_path / "state.npz")
    assert ta.load(tmp_path / "state.npz") == state
    assert spectrum.plot().axes


def point(encodings=None, offsets=((), ()), alpha=0.75, binds=False):
    """A state in which all numbers of the first replicate are 1.25 and those of the second one 0.75."""
    shape = (*np.shape(alpha), 2)
    numbers = dict.fromkeys(states.WideState.__dataclass_fields__, np.broadcast_to([1.25, 0.75], shape))
    numbers |= {
        "offset": np.array(offsets, float),
        "binds": np.full(shape, binds),
        "status": np.broadcast_to([0, 2], shape),
    }
    if binds:
        numbers["replicon"] = np.full(shape, np.inf)
    state = states.WideState(**{name: jnp.asarray(a) for name, a in numbers.items()})
    return states.WidePoint(layer(encodings=encodings), jnp.asarray(alpha), state)


@pytest.mark.parametrize(
    "encodings, offsets, binds, detail",
    [
        (None, ((), ()), True, "rank bounded by kappa replica symmetry is weakly broken: the replicon is inf"),
        ("long", ((0.3, 0.1), (0.5, 0.1)), False, "shifts ["),
        (1.5, ((0.3,), (0.5,)), False, "R 0.40(70)"),
    ],
)
def test_the_page_of_a_state(encodings, offsets, binds, detail):
    title, *rows = str(point(encodings, offsets, binds=binds)).splitlines()
    assert title == "wide DotProduct at alpha = 0.75: max steps"
    rows = [" ".join(row.split()) for row in rows]
    names = [row.split()[0] for row in rows[:-1]]
    assert names == "q m V trace train_loss gen_error energy distance share largest replicon".split()
    assert rows[0] == "q 1.0(17) Tr S S^T / d" and rows[-1].startswith(detail)


def test_numbers_that_a_state_has_or_not():
    batch = point(1.5, (((0.3,), (0.5,)), ((0.1,), (0.2,))), (1.0, 2.0))
    np.testing.assert_allclose(batch.R, [0.4, 0.15])
    with pytest.raises(ta.InputError, match="encodings must be a number for a spike R, got 'long'"):
        _ = point("long", ((0.3, 0.1), (0.5, 0.1))).R
    with pytest.raises(ta.InputError, match="alpha must be one number for a spectrum, got a batch: index it first"):
        batch.spectrum()


def test_quantiles_and_the_page_of_a_spectrum():
    """A node stands for eigenvalues on both its sides."""
    values, weight = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.25, 0.25, 0.25])
    spectrum = states.WideSpectrum(values, 0 * values, weight, jnp.asarray(0.25), jnp.asarray(5.0))
    levels = jnp.array([0.0, 0.25, 0.37, 0.375, 0.5, 0.625, 0.75, 0.875, 0.88, 1.0])
    np.testing.assert_allclose(spectrum.quantile(levels), [0, 0, 0, 1, 1.5, 2, 3, 4, 5, 5], rtol=1e-12)
    with pytest.raises(ta.InputError, match=r"level must be in \[0, 1\], got level=1.5"):
        spectrum.quantile(1.5)
    assert str(spectrum).split() == "spectrum of the trained matrix zeros 0.25 edge 5".split()


class Bowl(ta.wide.Layer):
    """A loss of one score with a constant second derivative, which may be negative."""

    bend: Float[Array, ""]

    def __init__(self, bend):
        self.bend = jnp.asarray(bend)
        super().__init__(teacher=ta.wide.Wishart(0.5), tau=0.05, tokens=1)

    def loss(self, H, Y):
        return jnp.sum(0.5 * self.bend * H**2 + H * Y)


@jax.jit
def report(model, u, residual, jumps):
    """The state at the unknowns u, on eight nodes."""
    nodes = jax.tree.map(lambda a: a[0, ..., :8], channel.wide_nodes(model, ta.Sobol(16, replicates=1)))
    rules = fixed_points._Rules(jnp.asarray(True), None)
    setting = fixed_points._SearchSetting(model, jnp.asarray(0.7), nodes, jnp.zeros_like(nodes.student), rules)
    return fixed_points._state_at(u, setting, residual, jumps)


@pytest.mark.full
def test_the_status_of_a_state():
    """Proximal points are no minima where the loss bends down by more than 1 / (2 V)."""
    u = np.array([0.3, 0.25, 0.01])
    converged, max_steps, unresolved = ta.Status.converged, ta.Status.max_steps, ta.Status.unresolved
    for residual, jumps, status in ((0, 0, converged), (1e-8, 0, max_steps), (0, 1e-5, unresolved), (1, 1, max_steps)):
        assert int(report(Bowl(1.0), u, 1.0 * residual, 1.0 * jumps).status) == status
    assert report(Bowl(1.0), np.nan * u, 1.0, 1.0).status == ta.Status.nonfinite
    for bend, status in ((-0.1, converged), (-5.0, unresolved)):
        state = report(Bowl(bend), u, 0.0, 0.0)
        np.testing.assert_allclose(state.margin, 1 + 2 * bend * state.V, rtol=1e-9)
        assert int(state.status) == status and (status == 0) == (float(state.margin) > 0)
