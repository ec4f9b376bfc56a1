"""States of wide layers: reference numbers, the potential, derivatives, the cone of the offsets, the bound on the rank.

The reference numbers are from an independent prototype with another quadrature and another solver.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.wide import channel, solve
from tiedattn_jax.wide.spectrum import convolution, prior

MIXING = [[0.8, 0.2], [0.3, 0.7]]
NAMES = "q m V Lam M N trace train_loss gen_error distance share largest energy replicon".split()
REFERENCE = {
    "squared": (
        {"tau": 0.05},
        "0.86877 1.13669 0.936626 0.335478 0.277673 0.000811405 0.513916 0.00408464 0.00582587 0.0953825 0.492201 "
        "3.26575 0.0297804 0.189922",
    ),
    "noisy": (
        {"tau": 0.05, "noise": 0.3},
        "0.781645 1.0482 0.952937 0.344001 0.262548 0.00998137 0.506785 0.034784 0.0184972 0.185247 0.57779 3.04578 "
        "0.0601232 0.198515",
    ),
    "cross-entropy": (
        {"tau": 0.2, "loss": "cross_entropy"},
        "0.854818 1.1231 0.342418 0.830208 0.715001 0.00836464 0.495346 0.914213 0.920559 0.108618 0.461704 3.31434 "
        "1.01328 0.150934",
    ),
}

pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(**options):
    return ta.WideDotProduct(**{"teacher": ta.Wishart(0.5), "tau": 0.05, **options})


class OneField(ta.WideLayer):
    """One score of one token, with a quadratic loss; it is uneven if the target bends."""

    bend = 0.0

    def loss(self, H, Y):
        return 0.5 * jnp.sum((H - Y - self.bend * Y**2) ** 2)


class Bent(OneField):
    bend = 0.2


@pytest.fixture(scope="module")
def state():
    return ta.solve(layer(), 1.0)


@pytest.mark.parametrize("options, numbers", REFERENCE.values(), ids=REFERENCE)
def test_reference_numbers(options, numbers):
    state = ta.solve(layer(**options), 1.0)
    assert state.status_name == "converged"
    assert np.all(np.abs(state.replicates.residual) < 1e-6)
    for name, number in zip(NAMES, map(float, numbers.split()), strict=True):
        np.testing.assert_allclose(getattr(state, name), number, rtol=1.2e-5, err_msg=name)


@pytest.mark.parametrize("kind", [OneField, Bent])
def test_quadratic_loss_of_one_field(kind):
    """Every average is known in closed form; the state is that of another implementation."""
    state = ta.solve(kind(teacher=ta.Wishart(0.5), tau=0.05, tokens=1), 0.3)
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


def test_the_equations_are_the_derivatives_of_the_potential(state):
    model, alpha = state.model, 1.0
    nodes = jax.tree.map(lambda a: a[0], channel.wide_nodes(model, None))
    one = jax.tree.map(lambda a: a[0], state.replicates)

    @jax.jit
    def potential(x):
        q, m, V, Lam, M, N = x
        A, _ = channel.averages(model, nodes, q, m, V, jnp.zeros(0))
        curve = convolution(model.teacher, M, N)
        phi = prior(curve, model.tau, curve.place(model.tau)).phi
        return alpha * A.moreau - phi / Lam + M * m + N * V - Lam * q / 2

    x = jnp.stack([one.q, one.m, one.V, one.Lam, one.M, one.N])
    # The lattice averages by parts to 1e-6; the prior's part is exact.
    np.testing.assert_allclose(jax.grad(potential)(x) * x / float(one.energy), 0, atol=2e-4)
    np.testing.assert_allclose(jax.grad(potential)(x)[3:] * x[3:] / float(one.energy), 0, atol=1e-8)
    np.testing.assert_allclose(potential(x), one.energy, rtol=1e-9)
    np.testing.assert_allclose(alpha * one.train_loss + model.tau * one.trace, one.energy, rtol=1e-8)  # it is the risk


@pytest.mark.long
def test_derivatives_of_a_state(state):
    def energy(model, alpha):
        return ta.solve(model, alpha).energy

    by_model, by_alpha = jax.jit(jax.grad(energy, (0, 1)))(state.model, jnp.asarray(1.0))
    np.testing.assert_allclose(by_model.tau, state.trace, rtol=1e-4)  # the energy is stationary
    A = channel.averages(
        state.model, jax.tree.map(lambda a: a[0], channel.wide_nodes(state.model, None)), state.q, state.m, state.V,
        jnp.zeros(0),
    )[0]  # fmt: skip
    np.testing.assert_allclose(by_alpha, A.moreau, rtol=1e-4)
    h = 1e-4
    for name, value in (("beta", 1.0), ("noise", 0.1)):
        model = layer(**{name: value})
        slope = getattr(jax.grad(lambda m: ta.solve(m, 1.0).q)(model), name)
        high, low = (ta.solve(layer(**{name: value + sign * h}), 1.0, start=state).q for sign in (1, -1))
        np.testing.assert_allclose(slope, (high - low) / (2 * h), rtol=1e-3, err_msg=name)


@pytest.mark.long
def test_a_batch_has_the_same_states(state):
    batch = jax.vmap(lambda tau: ta.solve(layer(tau=tau), 1.0))(jnp.array([0.05, 0.1]))
    np.testing.assert_allclose(batch.q[0], state.q, rtol=1e-9)
    with pytest.raises(ta.InputError, match="alpha must be one number"):
        batch.spectrum()


def test_a_start_leads_to_the_same_state(state):
    np.testing.assert_allclose(ta.solve(state.model, 1.0, start=state).q, state.q, rtol=1e-9)
    with pytest.raises(ta.InputError, match="start must have 2 offsets like the layer, got 0"):
        ta.solve(layer(mixing=MIXING, encodings="long"), 1.0, start=state)


@pytest.mark.parametrize("tokens", [2, 3])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_coordinates_hold_all_that_the_loss_sees(tokens, loss):
    """The coordinates of random scores are independent with variance one, and the loss follows from them."""
    model = layer(tokens=tokens, loss=loss, omega=0.3)
    a, b = np.triu_indices(tokens)
    units = np.zeros((len(a), tokens, tokens))
    units[range(len(a)), a, b] = units[range(len(a)), b, a] = np.where(a == b, np.sqrt(2), 1)
    C = jnp.stack([model.coordinates(jnp.asarray(unit)) for unit in units], 1)
    np.testing.assert_allclose(C @ C.T, np.eye(model.seen), atol=1e-9)
    H, Y = jnp.tensordot(np.random.default_rng(0).standard_normal((2, len(a))), units, 1)
    np.testing.assert_allclose(model.node_loss(*map(model.coordinates, (H, Y))), model.loss(H, Y), rtol=1e-9)


def test_the_ridge_of_the_factor():
    """lam / 2 ||Q||^2 is tau d Tr S for S = Q Q^T / (d sqrt(kappa))."""
    d, kappa = 8, 0.5
    Q = np.random.default_rng(0).standard_normal((d, 4))
    S = Q @ Q.T / (d * np.sqrt(kappa))
    np.testing.assert_allclose(layer(tau=None, lam=0.3, kappa=kappa).tau * d * np.trace(S), 0.15 * np.sum(Q**2))


def test_single_precision(state):
    with jax.enable_x64(False):
        single = ta.solve(ta.WideDotProduct(tau=0.05), 1.0)
        assert single.q.dtype == jnp.float32 and single.status_name == "converged"
    for name, rtol in {"q": 1e-4, "m": 1e-4, "trace": 1e-4, "energy": 2e-4}.items():
        np.testing.assert_allclose(getattr(single, name), getattr(state, name), rtol=rtol, err_msg=name)


@pytest.mark.long
def test_a_lane_that_fails_leaves_the_others_alone(state):
    alphas = jnp.array([jnp.nan, 1.0, 1e-4])  # none, content, no content

    def numbers(alphas):
        states = jax.vmap(lambda alpha: ta.solve(layer(), alpha))(alphas)
        return states.q, states

    q, states = numbers(alphas)
    assert states.status_name == ["nonfinite", "converged", "converged"]
    np.testing.assert_allclose(q[1:], [state.q, 0.0], rtol=1e-9)
    slopes = jax.grad(lambda a: numbers(a)[0][1])(alphas)
    np.testing.assert_allclose(slopes, [0.0, jax.grad(lambda a: ta.solve(layer(), a).q)(1.0), 0.0], rtol=1e-9)


@pytest.mark.parametrize(
    "options, numbers, offsets",
    [
        ({"tau": 0.03, "omega": 0.4}, (0.231475, 0.58532, 0.268176, 0.0114813), (0.53949, 0.35817)),
        (
            {"tau": 0.1, "omega": 0.8, "loss": "cross_entropy"},
            (0.016441, 0.151221, 0.0623867, 1.20325),
            (1.05876, 0.67158),
        ),
    ],
    ids=["squared", "cross-entropy"],
)
def test_long_encodings(options, numbers, offsets):
    state = ta.solve(layer(mixing=MIXING, encodings="long", **options), 1.0)
    found = [float(getattr(state, name)) for name in ("q", "m", "trace", "energy")]
    np.testing.assert_allclose(found, numbers, rtol=1e-5)
    np.testing.assert_allclose(_offsets(state), offsets, atol=6e-6)  # five decimals are known
    assert any(line.split()[0] == "offset" for line in str(state).splitlines())


def _offsets(state):
    """T_11 - T_12 and T_22 - T_12."""
    T = np.tensordot(np.asarray(state.offset), state.model.basis, 1)
    return T[0, 0] - T[0, 1], T[1, 1] - T[0, 1]


@pytest.mark.parametrize(
    "mixing, offsets",
    [
        ([[0.0, 1.0], [1.0, 0.0]], (0.0, 0.0)),
        ([[0.2, 0.8], [0.7, 0.3]], (-0.09198, 0.09198)),
    ],
    ids=["forbidden", "closure"],
)
def test_tied_attention_cannot_prefer_the_other_token(mixing, offsets):
    model = layer(tau=0.1, omega=0.4, loss="cross_entropy", mixing=mixing, encodings="long")
    np.testing.assert_allclose(_offsets(ta.solve(model, 1.0)), offsets, atol=6e-6)
    empty = ta.solve(layer(tau=50.0, omega=0.4, loss="cross_entropy", mixing=mixing, encodings="long"), 1.0)
    assert float(empty.q) == 0 and empty.status_name == "converged"
    np.testing.assert_allclose(sum(_offsets(empty)), 0, atol=1e-9)  # the boundary of the cone


class Positions(ta.WideLayer):
    """Two differences of scores with a quadratic loss, whose targets have a positional part."""

    def loss(self, H, Y):
        return 0.5 * sum((H[a, a] - H[0, 1] - Y[a, a] + Y[0, 1] - 0.4) ** 2 for a in (0, 1))


@pytest.fixture(scope="module")
def spike():
    """A function that returns the state for encodings of a length, on nodes that are exact for a quadratic loss."""
    x, weights = np.polynomial.hermite_e.hermegauss(3)
    grid = np.stack(np.meshgrid(*[x] * 6, indexing="ij")).reshape(1, 6, -1)
    weight = np.prod(np.meshgrid(*[weights / weights.sum()] * 6, indexing="ij"), 0).reshape(1, -1)
    nodes = channel.WideNodes(*(jnp.asarray(a) for a in (grid[:, :2], grid[:, 2:4], grid[:, 4:], weight)))

    @jax.jit
    def state(length):
        model = Positions(teacher=ta.Wishart(0.5), tau=0.05, encodings=length)
        found = solve.states(model, jnp.asarray(0.4), nodes, jnp.array([0.7, 0.6, 1.0, 0.0]), False)
        return jax.tree.map(lambda a: a[0], found)

    return state, jax.tree.map(lambda a: a[0], nodes)


def test_the_equations_with_a_spike_are_the_derivatives_of_the_potential(spike):
    state, nodes = spike
    at = state(1.5)
    assert int(at.status) == 0 and float(at.offset[0]) > 0.01
    model = Positions(teacher=ta.Wishart(0.5), tau=0.05, encodings=1.5)

    @jax.jit
    def potential(x):
        q, m, V, Lam, M, N, R = x
        A, _ = channel.averages(model, nodes, q, m, V, R[None])
        curve = convolution(model.teacher, M, N)
        phi = prior(curve, model.tau, curve.place(model.tau)).phi
        return 0.4 * A.moreau - phi / Lam + M * m + N * V - Lam * q / 2

    x = jnp.stack([at.q, at.m, at.V, at.Lam, at.M, at.N, at.offset[0]])
    slopes = np.asarray(jax.grad(potential)(x) * x / float(at.energy))
    np.testing.assert_allclose(slopes[[0, 1, 2, 3, 6]], 0, atol=1e-10)
    np.testing.assert_allclose(slopes[4:6], 0, atol=1e-9)  # the prior integrates on 100 nodes, to 1e-10
    np.testing.assert_allclose(potential(x), at.energy, rtol=1e-10)


def test_derivatives_in_the_length_of_the_encodings(spike):
    def numbers(length):
        at = spike[0](length)
        return jnp.stack([at.q, at.m, at.offset[0], at.gen_error])

    slopes = (numbers(1.5 + 1e-4) - numbers(1.5 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.jacfwd(numbers)(1.5), slopes, rtol=1e-6)


@pytest.mark.long
def test_encodings_of_length_of_order_one():
    """The reference averages over Sobol points, to 1e-3."""
    state = ta.solve(layer(tau=0.03, omega=0.4, mixing=[[0.75, 0.25], [0.25, 0.75]], encodings=1.5), 1.0)
    assert state.status_name == "converged" and "R  " in str(state)
    numbers = {"R": "0.0448", "q": "0.2357", "m": "0.5812", "trace": "0.2783", "train_loss": "0.01139",
               "gen_error": "0.01744", "share": "0.588", "energy": "0.01974"}  # fmt: skip
    for name, number in numbers.items():
        assert f"{float(getattr(state, name)):.{len(number) - 2}f}" == number, name


@pytest.mark.parametrize(
    "encodings, nodes, tolerance",
    [
        ("long", ta.Sobol(2**10, replicates=2), 0.05),
        pytest.param("long", None, 1e-6, marks=pytest.mark.long),
        pytest.param(1.5, ta.Sobol(2**11, replicates=2), 0.05, marks=pytest.mark.long),
    ],
)
def test_the_boundary_of_what_tied_attention_can_learn(encodings, nodes, tolerance):
    """The slack changes its sign at A_11 + A_22 = 1, whatever the other numbers are."""

    def slack(share):
        mixing = [[share, 1 - share], [1 - share, share]]
        state = ta.solve(layer(omega=0.4, mixing=mixing, encodings=encodings), 0.6, nodes=nodes)
        assert float(state.slack) < 0 or float(jnp.linalg.norm(state.offset)) > 0
        return float(state.slack)

    high, low = slack(0.55), slack(0.45)
    assert high > 0 > low
    threshold = ta.threshold(layer(mixing=MIXING, omega=0.4, encodings=encodings), "position")
    np.testing.assert_allclose(threshold.A_11, 0.3)
    np.testing.assert_allclose(threshold.sensitivities.mixing, [[0, 0], [0, -1]])
    np.testing.assert_allclose(slack(0.5), 0, atol=tolerance * high)


def test_a_spike_needs_encodings_of_order_one(state):
    with pytest.raises(ta.InputError, match="encodings must be a number for a spike"):
        _ = state.R


@pytest.mark.parametrize("kappa, energy, q", [(0.3, 0.033392, 0.8650), (0.2, 0.047183, 0.7812)])
def test_a_bound_on_the_rank(kappa, energy, q):
    state = ta.solve(layer(kappa=kappa), 1.0)
    assert state.replicates.binds.all()
    assert np.isinf(state.replicon)
    np.testing.assert_allclose(state.share, kappa, rtol=1e-9)
    np.testing.assert_allclose([state.energy, state.q], [energy, q], rtol=2e-4)
    assert "bounded" in str(state)


def test_a_wide_enough_layer_is_free(state):
    same = ta.solve(layer(kappa=0.6), 1.0)
    np.testing.assert_allclose(same.energy, state.energy, rtol=1e-12)


@pytest.mark.parametrize("V", [3.0, 20.0])
def test_two_starts_find_the_lowest_proximal_points(V):
    """Also where the loss is flat at the student's fields; many other starts find nothing lower."""
    model = layer()
    nodes = jax.tree.map(lambda a: a[0], channel.wide_nodes(model, ta.Sobol(2**11)))
    q, m, V = (jnp.asarray(number) for number in (1.2, 0.3, V))
    w, y = channel.fields(nodes, q, m, model.teacher.rho)
    shift = jnp.zeros((2, 1))

    def energy(h):
        return np.asarray(V * channel.at_nodes(channel._loss)(model, h, y, shift) + 0.5 * jnp.sum((h - w) ** 2, 0))

    search = jax.jit(lambda start: channel.prox(model, w, y, V, shift, jnp.broadcast_to(start[:, None], w.shape)))
    first = channel.prox(model, w, y, V, shift, jnp.zeros_like(w))
    lowest, weight = channel.second_start(model, nodes, q, m, V, jnp.zeros(0), first)
    others = [energy(search(jnp.array([a, b]))) for a in (-4.0, 0.0, 4.0) for b in (-4.0, 0.0, 4.0)]
    np.testing.assert_allclose(energy(lowest), np.min([energy(first), *others], 0), atol=1e-9)
    missed = np.mean(energy(first) > energy(lowest) + 1e-6)
    assert (0 < missed <= float(weight) < 0.02) if V > 10 else missed == 0


@pytest.mark.long
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
    state = ta.solve(layer(mixing=MIXING, **options), alpha, nodes=ta.Sobol(2**11, replicates=2))
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


@pytest.mark.long
def test_three_tokens_on_sobol_points():
    model = layer(tau=0.1, loss="cross_entropy", tokens=3)
    assert model.seen == 5
    state = ta.solve(model, 0.3, nodes=ta.Sobol(2**11))
    for name, number in {"q": 0.9655, "m": 1.1936, "trace": 0.5305, "energy": 0.7357}.items():
        np.testing.assert_allclose(getattr(state, name), number, rtol=0.02, err_msg=name)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"lam": 0.1}, "tau must be given, or lam in its place"),
        ({"tau": -1.0}, "tau must be positive"),
        ({"kappa": 0.0}, "kappa must be positive"),
        ({"omega": 1.5}, "omega must be in"),
        ({"noise": -0.1}, "noise must be zero or positive"),
        ({"loss": "hinge"}, "loss must be one of squared, cross_entropy"),
        ({"teacher": [1.0, -1.0]}, "eigenvalues must be finite and at least zero"),
        ({"teacher": [1.0, np.nan]}, "eigenvalues must be finite"),
        ({"teacher": [0.0, 0.0]}, "eigenvalues must be positive for at least one"),
        ({"teacher": ta.Wishart}, "eigenvalues"),
        ({"mixing": [[1.0, 1.0], [0.0, 1.0]]}, "mixing must be rows of shares"),
        ({"mixing": [1.0]}, "mixing must be of shape"),
        ({"encodings": "short"}, "encodings must be one of"),
        ({"encodings": -1.5}, "encodings must be positive"),
        ({"encodings": 1.5, "tokens": 3}, "encodings need two tokens"),
        ({"target": "sparse"}, "target must be one of softmax, hardmax"),
        ({"encodings": "long", "tokens": 3}, "encodings need two tokens"),
        ({"tokens": 1}, "tokens must be an integer of at least 2"),
    ],
)
def test_bad_layers(unchecked, options, sentence):
    with pytest.raises(ta.InputError, match=sentence):
        layer(**options)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda m: ta.solve(m, 0.0), "alpha must be positive"),
        (lambda m: ta.solve(m, 1.0, "semantic"), "branch must be left out"),
        (lambda m: ta.solve(m, 1.0, rtol=1e-3), "rtol must be left out"),
        (lambda m: ta.solve(m, 1.0, nodes=64), "nodes must be None or a Sobol recipe"),
        (lambda m: ta.solve(m, 1.0, start=3.0), "start must be a state of a wide layer"),
        (lambda m: ta.bayes(m, 1.0, nodes=64), "nodes must be left out"),
        (lambda m: ta.threshold(m, "weak_recovery"), "name must be one of"),
        (lambda m: ta.solve(layer(target="hardmax"), 1.0), "target must be softmax for the theory of training"),
        (lambda m: ta.critical_alpha(layer(target="hardmax")), "target must be softmax for the theory of training"),
        (lambda m: ta.threshold(m, "position"), "model must be a WideDotProduct with encodings"),
        (lambda m: ta.critical_alpha(m, bracket=(1.0, 2.0)), "bracket must be left out"),
        (lambda m: ta.solve_1rsb(m, 1.0), "model must be"),
        (lambda m: ta.sgd(m, (0.1, 0.1, 0.1), eta=1.0, until=1.0), "model must be"),
        (lambda m: ta.small_start(m, 1.0), "model must be"),
    ],
)
def test_calls_without_a_wide_form(unchecked, call, sentence):
    with pytest.raises(ta.InputError, match=sentence):
        call(layer())


@pytest.mark.parametrize(
    "loss, sentence",
    [
        (lambda self, H, Y: 0.0 * jnp.sum(H), "loss must depend on the scores"),
        (lambda self, H, Y: H, "loss must return one number"),
        (lambda self, H, Y: jnp.log(jnp.sum(H)), "loss must be finite and smooth"),
    ],
)
def test_bad_losses(unchecked, loss, sentence):
    with pytest.raises(ta.InputError, match=sentence):
        type("Own", (ta.WideLayer,), {"loss": loss})(teacher=ta.Wishart(0.5), tau=0.1)
