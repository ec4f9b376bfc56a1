"""Order parameters: branches, symmetries, and what counts as zero."""

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.model import overlaps
from tiedattn_jax.model.overlaps import BRANCHES, Coordinates, admissible, impose, label
from tiedattn_jax.theory.setting import branch_start


@pytest.mark.parametrize(
    ("theta", "m", "name"),
    [
        (0.022, 0.0, "semantic"), (0.018, 0.0, "uninformed"), (0.0, 0.022, "positional"),
        (0.3, 0.018, "semantic"), (0.3, 0.022, "mixed"),
    ],
)  # fmt: skip
def test_what_counts_as_zero(model, theta, m, name):
    """Sizes of theta and m are shares of the largest possible ones."""
    x = made.overlaps_of(0.1, 12.0, theta * (0.1 * 0.25) ** 0.5, m * 0.1**0.5)
    np.testing.assert_allclose(overlaps.magnitudes(model, x), (theta, m), rtol=1e-12, atol=1e-15)
    assert label(model, x) == name
    semantic = BRANCHES["semantic"].free(model)
    np.testing.assert_allclose(overlaps.order_size(model, x, semantic), theta, rtol=1e-12, atol=1e-15)
    assert bool(overlaps.vanished(model, x, semantic)) is (theta < 0.02)
    assert not bool(overlaps.vanished(model, x, BRANCHES["uninformed"].free(model)))


def test_admissible(model):
    x = state(CASES[0])
    q, largest = np.asarray(x.q), np.asarray(x.theta) ** 2 / 0.25  # beyond it theta is larger than q and rho allow
    for changed, expected in ((q, 1), (1.01 * largest, 1), (0.99 * largest, 0), (-q, 0), (np.nan * q, 0)):
        assert bool(admissible(model, eqx.tree_at(lambda s: s.q, x, jnp.asarray(changed)))) is bool(expected)


def test_gauge_directions_are_those_of_rotations():
    model, free, rng = ta.DotProduct(rank=2), BRANCHES[None].free(ta.DotProduct()), np.random.default_rng(0)
    A, M, m = rng.standard_normal((3, 2, 2))
    q, J = np.stack([A @ A.T + np.eye(2)] * 2), np.array([[0.0, -1.0], [1.0, 0.0]])
    V, theta = q * np.array([1.0, 2.0])[:, None, None], M[:, :, None]
    moved = J @ q - q @ J, J @ V - V @ J, J @ theta, m @ J.T  # the derivative in the angle
    expected = np.concatenate([np.ravel(a) for a in moved])
    x = ta.Overlaps(*map(jnp.asarray, (q, V, theta, m)))
    (tangent,) = Coordinates(model, free).gauge(x, jnp.ones(len(expected)))
    np.testing.assert_allclose(abs(np.asarray(tangent) @ expected), np.linalg.norm(expected), rtol=1e-12)
    for plain in (ta.DotProduct(), ta.DotProduct(rank=2, penalty=ta.L1(0.1))):  # nothing turns, or turning costs
        assert not len(Coordinates(plain, free).generators)


TOKENS = ta.SpectralLaw([1.0], [[0.01, 0.25]], 0.5 * np.eye(2)[None], [[[1.0]]], np.zeros((1, 2, 1)))
COLUMNS = {"start_columns": lambda self, combined: (jnp.ones(self.shape[1:]), jnp.ones(self.shape[1]))}
ALONG = type("Along", (ta.DotProduct,), COLUMNS)
STARTS = {
    "standard": ta.DotProduct(),
    "float32": ta.DotProduct(dtype=jnp.float32),
    "tokens of unequal variances": ta.DotProduct(spectrum=TOKENS),
    "columns of unequal variances": ta.DotProduct(teacher=[[0.05, 0.0], [0.0, 1.0]]),
    "columns along one teacher": ALONG(**vars(ta.DotProduct(rank=4))),
}


MARKED = [pytest.param(name, marks=[pytest.mark.full] * (name == "float32")) for name in STARTS]


@pytest.mark.parametrize("name", MARKED)
def test_starts_are_states_with_the_symmetry_of_their_branch(name):
    model = STARTS[name]

    @jax.jit
    def starts(model):
        found = [branch_start(model, branch) for branch in BRANCHES]
        imposed = [impose(x, kind.free(model)) for x, kind in zip(found, BRANCHES.values(), strict=True)]
        return found, imposed, *([fn(model, x) for x in found] for fn in (overlaps.residual_covariance, admissible))

    for kind, x, same, rest, is_admissible in zip(BRANCHES.values(), *starts(model), strict=True):
        assert {a.dtype for a in jax.tree.leaves(x)} == {model.lam.dtype}
        assert np.linalg.eigvalsh(rest).min() > 0
        assert np.asarray(x.theta).any() == bool(kind.theta) and np.asarray(x.m).any() == bool(kind.m)
        jax.tree.map(np.testing.assert_array_equal, x, same)
        if name in ("standard", "float32"):
            assert is_admissible and label(model, x) == (kind.name or "mixed")


def test_starts_of_a_student_of_rank_two_use_both_columns():
    x = jax.tree.map(np.asarray, jax.jit(branch_start, static_argnums=1)(ta.DotProduct(rank=2), None))
    assert np.all(x.theta[:, 0] > 0) and not np.any(x.theta[:, 1]) and not np.any(x.m[:, 0]) and np.all(x.m[:, 1] != 0)
    with pytest.raises(ta.InputError, match="branch must be one of positional, semantic"):
        overlaps.branch_of("lexical")


@pytest.mark.parametrize(
    ("theta", "m", "name"),
    [
        ((0.3, 0.0), (0.0, 0.4), "semantic + positional"), ((0.2, 0.2), (0.3, -0.3), "semantic + positional"),
        ((0.3, 0.0), (0.4, 0.0), "mixed"), ((0.3, 0.0), (0.2, 0.4), "positional + mixed"),
        ((0.3, 0.0), (0.0, 0.0), "semantic"), ((0.0, 0.0), (0.1, 0.4), "positional"),
        ((0.3, 0.0), (0.018, 0.3), "semantic + positional"), ((0.3, 0.0), (0.022, 0.3), "positional + mixed"),
        ((0.0, 0.0), (0.0, 0.0), "uninformed"),
    ],
)  # fmt: skip
def test_what_the_directions_of_a_student_do(theta, m, name):
    """The label names what every direction of a student does, however different their sizes are, in any gauge."""
    model = ta.DotProduct(rank=2)
    size = np.array([0.1, 0.001])
    for angle in (0.0, 0.4, 2.0):
        O = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        q, theta_part, m_part = O.T @ np.diag(size) @ O, np.sqrt(size * 0.25) * theta @ O, np.sqrt(size) * m @ O
        pairs = [np.stack(pair) for pair in ((q, q), (q, q), (theta_part[:, None],) * 2, (m_part, -m_part))]
        assert label(model, ta.Overlaps(*map(jnp.asarray, pairs))) == name
    assert label(model, ta.Overlaps(*(jnp.asarray(np.nan * a) for a in pairs))) == "uninformed"
    # Directions with the same theta are told apart by m.
    eye = np.stack([np.eye(2)] * 2)
    x = map(jnp.asarray, (eye, eye, 0.1 * eye, 0.3 * np.array([[0.6, 0.8], [-0.6, -0.8]])))
    assert label(ta.DotProduct(rank=2, teacher=np.eye(2)), ta.Overlaps(*x)) == "semantic + mixed"


@pytest.mark.parametrize("length", [1.0, 1e-3])
def test_a_student_along_short_encodings_is_positional(length):
    """Its m is small because the encodings are, and as large as they allow."""
    model = ta.DotProduct(encodings=[[length], [-length]])
    free = BRANCHES["positional"].free(model)
    x, smaller = (made.overlaps_of(0.25 * 0.3**2, 1.0, m=share * 0.3 * length) for share in (1, 0.009))
    assert label(model, x) == "positional" and not bool(overlaps.vanished(model, x, free))
    assert bool(overlaps.vanished(model, smaller, free))


def test_sizes_of_states_of_several_columns():
    """|theta| is relative to sqrt(tr q tr rho), and |m| to sqrt(tr q), over all tokens and columns."""
    model = ta.DotProduct(rank=2)
    q = jnp.asarray([[[0.1, 0.0], [0.0, 0.3]], [[0.2, 0.0], [0.0, 0.4]]])
    x = ta.Overlaps(q, q, jnp.array([[[0.1], [0.0]], [[0.0], [0.2]]]), jnp.array([[0.1, 0.2], [0.2, 0.0]]))
    sizes = overlaps.magnitudes(model, x)
    np.testing.assert_allclose(sizes, [(0.05 / (1.0 * 0.25)) ** 0.5, 0.3], rtol=1e-9)
    for free, size in (((1.0, 0.0), sizes[0]), ((0.0, 1.0), sizes[1]), ((1.0, 1.0), sum(sizes))):
        np.testing.assert_allclose(overlaps.order_size(model, x, jnp.array(free)), size, rtol=1e-9)
    assert [overlaps.learned_directions(model, a) for a in (x, impose(x, jnp.zeros(2)))] == [2, 0]


def test_scales_and_the_order_of_coordinates(model):
    """A scale is a root mean square, or a fiftieth of the largest possible one if that is more."""
    numbers = [0.1, 0.3, 10, 14, 0.03, 0.04, 0.3, -0.4]
    *matrices, m = np.reshape(numbers, (4, 2, 1))
    x = ta.Overlaps(*(jnp.asarray(a[..., None]) for a in matrices), jnp.asarray(m))
    coordinates = Coordinates(model, jnp.ones(2))
    np.testing.assert_allclose(coordinates.pack(x), numbers)
    jax.tree.map(np.testing.assert_array_equal, coordinates.unpack(coordinates.pack(x)), x)
    rms = (0.0025 / 2) ** 0.5, (0.25 / 2) ** 0.5
    np.testing.assert_allclose(coordinates.scale(x), np.repeat([0.2, 12.0, *rms], 2), rtol=1e-9)
    still = impose(x, jnp.zeros(2))
    np.testing.assert_allclose(coordinates.scale(still)[4:], np.repeat([0.02 * 0.2**0.5 * 0.5, 0.02 * 0.2**0.5], 2))
    for free, order in (((1.0, 1.0), [1, 1, 1, 1]), ((1.0, 0.0), [1, 1, 0, 0]), ((0.0, 1.0), [0, 0, 1, 1])):
        np.testing.assert_array_equal(Coordinates(model, jnp.array(free)).order, [0, 0, 0, 0, *order])


def test_a_number_of_two_tokens():
    """The number of an order parameter is the mean over tokens, and m is that of the first token."""

    def result(q, m):
        given = ta.Overlaps(*[np.asarray(q)] * 3, np.asarray(m))
        numbers = {name: overlaps.OrderNumber("given") for name in ("q", "m")}
        return type("Result", (), {**numbers, "given": given})()

    one, several = [[[1.0]], [[3.0]]], [[[[1.0]], [[3.0]]], [[[2.0]], [[6.0]]]]
    assert (result(one, [[5.0], [-7.0]]).q, result(one, [[5.0], [-7.0]]).m) == (2.0, 5.0)
    batch, wide = result(several, [[[5.0], [-7.0]], [[10.0], [-14.0]]]), result(np.ones((2, 2, 2)), np.ones((3, 2)))
    np.testing.assert_array_equal([batch.q, batch.m], [[2, 4], [5, 10]])
    for name, shape in (("q", r"\(2, 2, 2\)"), ("m", r"\(3, 2\)")):
        text = f"^model must have two tokens and rank one for the number {name}, got {name} of shape {shape}: use given"
        with pytest.raises(ta.InputError, match=text):
            getattr(wide, name)


def test_shapes_of_order_parameters():
    spectrum = ta.SpectralLaw.of_classes((0.2, 0.3, 0.4), {(0, 1): 0.5, (2, 0): 0.5})
    shapes = {"q": (3, 2, 2), "V": (3, 2, 2), "theta": (3, 2, 1), "m": (5, 2)}
    assert overlaps.shapes_of(ta.DotProduct(rank=2, spectrum=spectrum)) == shapes
    assert ta.Overlaps(*map(jnp.ones, shapes.values())).encoded.shape == (2, 2)
