"""Order parameters: branches, symmetries, and what counts as zero."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.model import overlaps
from tiedattn_jax.model.overlaps import BRANCHES, Coordinates, admissible, impose, label
from tiedattn_jax.theory.solve import branch_start


def with_sizes(model, theta, m):
    """A state whose theta and m are given shares of their largest possible sizes."""
    ones = jnp.ones((2, 1, 1))
    q, rho = 0.1, float(model.rho[0, 0, 0])
    return ta.Overlaps(q * ones, 12.0 * ones, theta * (q * rho) ** 0.5 * ones, m * q**0.5 * jnp.array([[1.0], [-1.0]]))


def test_branches():
    assert {b.name: (b.theta, b.m, b.order) for b in BRANCHES.values()} == {
        "positional": (0, 1, "m"),
        "semantic": (1, 0, "theta"),
        "uninformed": (0, 0, None),
        None: (1, 1, None),
    }
    with pytest.raises(ta.InputError, match="branch must be one of positional, semantic"):
        overlaps.branch_of("lexical")


@pytest.mark.parametrize("name", BRANCHES)
def test_starts_have_the_symmetry_of_their_branch(model, name):
    x = branch_start(model, name)
    assert bool(admissible(model, x)) and label(model, x) == (name or "mixed")
    jax.tree.map(np.testing.assert_array_equal, x, impose(x, BRANCHES[name].free(model)))
    start = branch_start(ta.DotProduct(dtype=jnp.float32), name)
    assert {a.dtype for a in jax.tree.leaves(start)} == {jnp.dtype("float32")}


class OneTeacher(ta.DotProduct):
    """A layer whose columns all start along the single teacher."""

    def start_columns(self, combined):
        return jnp.ones(self.shape[1:]), jnp.ones(self.shape[1])


@pytest.mark.parametrize("name", ["semantic", None])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_starts_of_columns_with_one_teacher_are_states(name, rank):
    x = branch_start(OneTeacher(**vars(ta.DotProduct(rank=rank))), name)
    noise = x.q - x.theta @ jnp.swapaxes(x.theta, 1, 2) / ta.DotProduct().rho
    assert np.linalg.eigvalsh(noise).min() > 0
    assert bool(jnp.all(x.theta == x.theta[0, 0]))


def test_starts_of_a_student_of_rank_two_use_both_columns():
    model = ta.DotProduct(rank=2)
    theta, m = (np.asarray(a) for a in (branch_start(model, None).theta, branch_start(model, None).m))
    assert np.all(theta[:, 0] > 0) and not np.any(theta[:, 1]) and not np.any(m[:, 0]) and np.all(m[:, 1] != 0)


@pytest.mark.parametrize(
    ("theta", "m", "name"),
    [
        (0.022, 0.0, "semantic"), (0.018, 0.0, "uninformed"), (0.0, 0.022, "positional"),
        (0.3, 0.018, "semantic"), (0.3, 0.022, "mixed"),
    ],
)  # fmt: skip
def test_what_counts_as_zero(model, theta, m, name):
    x = with_sizes(model, theta, m)
    np.testing.assert_allclose(overlaps.magnitudes(model, x), (theta, m), rtol=1e-12, atol=1e-15)
    assert label(model, x) == name
    semantic = BRANCHES["semantic"].free(model)
    np.testing.assert_allclose(overlaps.order_size(model, x, semantic), theta, rtol=1e-12, atol=1e-15)
    assert bool(overlaps.vanished(model, x, semantic)) is (theta < 0.02)
    assert not bool(overlaps.vanished(model, x, BRANCHES["uninformed"].free(model)))


@pytest.mark.parametrize(
    ("theta", "m", "name"),
    [
        ((0.3, 0.0), (0.0, 0.4), "semantic + positional"), ((0.0, 0.3), (0.4, 0.0), "semantic + positional"),
        ((0.2, 0.2), (0.3, -0.3), "semantic + positional"), ((0.3, 0.0), (0.4, 0.0), "mixed"),
        ((0.3, 0.0), (0.2, 0.4), "positional + mixed"), ((0.3, 0.0), (0.0, 0.0), "semantic"),
        ((0.0, 0.0), (0.1, 0.4), "positional"), ((0.3, 0.0), (0.018, 0.3), "semantic + positional"),
        ((0.3, 0.0), (0.022, 0.3), "positional + mixed"), ((0.0, 0.0), (0.0, 0.0), "uninformed"),
    ],
)  # fmt: skip
def test_what_the_directions_of_a_student_do(theta, m, name):
    """The label names what every direction of a student does, however different their sizes are, in any gauge."""
    model = ta.DotProduct(rank=2)
    size, rho = np.array([0.1, 0.001]), float(model.rho[0, 0, 0])
    for angle in (0.0, 0.4, 2.0):
        O = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        q, theta_part, m_part = O.T @ np.diag(size) @ O, np.sqrt(size * rho) * theta @ O, np.sqrt(size) * m @ O
        pairs = [jnp.stack(pair) for pair in ((q, q), (q, q), (theta_part[:, None],) * 2, (m_part, -m_part))]
        assert label(model, ta.Overlaps(*pairs)) == name
    assert label(model, ta.Overlaps(*(np.nan * a for a in pairs))) == "uninformed"


def test_two_teachers_in_two_directions():
    """Directions with the same theta are told apart by m."""
    model = ta.DotProduct(rank=2, teacher=np.eye(2))
    eye = jnp.stack([jnp.eye(2)] * 2)
    x = ta.Overlaps(eye, eye, 0.1 * eye, 0.3 * jnp.array([[0.6, 0.8], [-0.6, -0.8]]))
    assert label(model, x) == "semantic + mixed"


def test_admissible(model):
    x = state(CASES[0])
    assert bool(admissible(model, x))
    for q in (-x.q, jnp.nan * x.q, 0.99 * x.theta**2 / 0.25):  # in the last one theta is larger than q and rho allow
        assert not bool(admissible(model, eqx.tree_at(lambda s: s.q, x, q)))
    assert bool(admissible(model, eqx.tree_at(lambda s: s.q, x, 1.01 * x.theta**2 / 0.25)))


def test_branches_set_to_zero_what_they_do_not_leave_free(model):
    for name, branch in BRANCHES.items():
        y = impose(with_sizes(model, 0.3, 0.4), branch.free(model))
        assert bool(np.any(y.theta)) is (name in ("semantic", None))
        assert bool(np.any(y.m)) is (name in ("positional", None))


def test_coordinates_round_trip(model):
    x = state(CASES[1])
    coordinates = Coordinates(model, BRANCHES["positional"].free(model))
    jax.tree.map(np.testing.assert_array_equal, coordinates.unpack(coordinates.pack(x)), x)
    scale = coordinates.unpack(coordinates.scale(x))
    np.testing.assert_allclose(scale.m, np.abs(x.m))
    np.testing.assert_allclose(scale.theta, 0.02 * np.sqrt(x.q * 0.25))  # theta is zero, which is no scale


def test_gauge_directions_are_those_of_rotations():
    model, free, rng = ta.DotProduct(rank=2), BRANCHES[None].free(ta.DotProduct()), np.random.default_rng(0)
    A, M, m = (jnp.asarray(a) for a in (*rng.standard_normal((2, 2, 2)), rng.standard_normal((2, 2))))
    q = A @ A.T + jnp.eye(2)
    x = ta.Overlaps(jnp.stack([q, q]), jnp.stack([q, 2 * q]), M[:, :, None], m)

    def rotated(angle):
        O = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
        return ta.Overlaps(O @ x.q @ O.T, O @ x.V @ O.T, O @ x.theta, x.m @ O.T)

    coordinates = Coordinates(model, free)
    (tangent,) = coordinates.gauge(x, jnp.ones(len(coordinates.pack(x))))
    expected = coordinates.pack(jax.jvp(rotated, (0.0,), (1.0,))[1])
    np.testing.assert_allclose(jnp.abs(tangent @ expected), jnp.linalg.norm(expected), rtol=1e-12)
    assert Coordinates(ta.DotProduct(), free).gauge(state(CASES[0]), jnp.ones(8)).shape == (0, 8)


def test_starts_of_the_branches_at_the_standard_setting(model):
    """V is 3.75 over the variance of the tokens; theta and m are shares of what q, 0.1 to 0.6 of rho, allows."""
    for name, q, theta, m in (
        ("positional", 0.025, 0, 0.25), ("semantic", 0.15, 0.125, 0), ("uninformed", 0.1, 0, 0),
        (None, 0.15, 0.125, 0.25),
    ):  # fmt: skip
        x = branch_start(model, name)
        numbers = [a[0].item() for a in (x.q, x.V, x.theta)]
        np.testing.assert_allclose(numbers, [q, 15.0, theta], rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(x.m[:, 0], [m, -m], rtol=1e-6, atol=1e-12)
        jax.tree.map(lambda a: np.testing.assert_array_equal(np.abs(a[0]), np.abs(a[1])), x)


@pytest.mark.parametrize(("unit", "factor"), [(1.0, 1.0), (5.0, 1.0), (0.5, 1.0), (30.0, 64.0), (0.01, 1 / 64)])
def test_a_loss_in_another_unit_changes_the_start_of_its_response(unit, factor):
    """A loss counts as one in another unit from a factor of eight on; factors are powers of 64."""

    class Scaled(ta.DotProduct):
        def loss(self, Z, Y):
            return unit * super().loss(Z, Y)

    x = branch_start(Scaled(**vars(ta.DotProduct())), "semantic")
    np.testing.assert_allclose(x.V, 15.0 / factor, rtol=1e-6)
    assert float(overlaps._loss_scale(ta.DotProduct())) == 0.25


def test_a_low_temperature_changes_the_unit_of_a_start():
    class Cold(ta.DotProduct):
        field_scale = 0.2

        def attention(self, fields):
            return jax.nn.softmax(fields @ fields.T / 0.2**2)

    x, plain = (branch_start(kind(**vars(ta.DotProduct())), None) for kind in (Cold, ta.DotProduct))
    np.testing.assert_allclose(x.V, 0.2**2 * plain.V, rtol=1e-6)
    np.testing.assert_allclose(x.m, 0.2 * plain.m, rtol=1e-6)


def test_the_start_of_m_follows_the_principal_direction_of_the_encodings():
    """The first token has a positive m, and the entries are of order one."""
    three = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=[[-1.0, 0.0], [0.0, 0.1], [2.0, 0.0]])
    direction = np.array([1, 0, -2]) * (3 / 5) ** 0.5
    np.testing.assert_allclose(branch_start(three, "positional").m[:, 0], 0.25 * direction, rtol=1e-6, atol=1e-7)


def test_sizes_of_states_of_several_columns():
    """|theta| is relative to sqrt(tr q tr rho), and |m| to sqrt(tr q), over all tokens and columns."""
    model = ta.DotProduct(rank=2)
    q = jnp.stack([jnp.diag(jnp.array([0.1, 0.3])), jnp.diag(jnp.array([0.2, 0.4]))])
    theta, m = jnp.array([[[0.1], [0.0]], [[0.0], [0.2]]]), jnp.array([[0.1, 0.2], [0.2, 0.0]])
    x = ta.Overlaps(q, q, theta, m)
    sizes = overlaps.magnitudes(model, x)
    np.testing.assert_allclose(sizes, [(0.05 / (1.0 * 0.25)) ** 0.5, 0.3], rtol=1e-9)
    for free, size in (((1.0, 0.0), sizes[0]), ((0.0, 1.0), sizes[1]), ((1.0, 1.0), sum(sizes))):
        np.testing.assert_allclose(overlaps.order_size(model, x, jnp.array(free)), size, rtol=1e-9)
    assert (
        overlaps.learned_directions(model, x) == 2 and overlaps.learned_directions(model, impose(x, jnp.zeros(2))) == 0
    )
    symmetric = overlaps.symmetric(jnp.array([[1.0, 2.0], [4.0, 5.0]]))
    np.testing.assert_array_equal(symmetric, [[1, 3], [3, 5]])


def test_scales_and_the_order_of_coordinates(model):
    """A scale is a root mean square, or a fiftieth of the largest possible one if that is more."""
    x = ta.Overlaps(*(jnp.array([a, b])[:, None, None] for a, b in ((0.1, 0.3), (10.0, 14.0), (0.03, 0.04))),
                    jnp.array([[0.3], [-0.4]]))  # fmt: skip
    coordinates = Coordinates(model, jnp.ones(2))
    rms = (0.0025 / 2) ** 0.5, (0.25 / 2) ** 0.5
    np.testing.assert_allclose(coordinates.scale(x), np.repeat([0.2, 12.0, *rms], 2), rtol=1e-9)
    np.testing.assert_allclose(coordinates.pack(x), [0.1, 0.3, 10, 14, 0.03, 0.04, 0.3, -0.4])
    still = eqx.tree_at(lambda x: (x.theta, x.m), x, (0 * x.theta, 0 * x.m))
    np.testing.assert_allclose(coordinates.scale(still)[4:], np.repeat([0.02 * 0.2**0.5 * 0.5, 0.02 * 0.2**0.5], 2))
    for free, order in (((1.0, 1.0), [1, 1, 1, 1]), ((1.0, 0.0), [1, 1, 0, 0]), ((0.0, 1.0), [0, 0, 1, 1])):
        np.testing.assert_array_equal(Coordinates(model, jnp.array(free)).order, [0, 0, 0, 0, *order])
    assert Coordinates(ta.DotProduct(rank=2, penalty=ta.L1(0.1)), jnp.ones(2)).generators.shape == (0, 2, 2)
    assert Coordinates(ta.DotProduct(rank=2), jnp.ones(2)).generators.shape == (1, 2, 2)


def test_a_number_of_two_tokens():
    """The number of an order parameter is the mean over tokens, and m is that of the first token."""

    class Result:
        q, m = overlaps.OrderNumber("given"), overlaps.OrderNumber("given")

        def __init__(self, given):
            self.given = given

    x = ta.Overlaps(*(jnp.array([1.0, 3.0])[:, None, None],) * 3, jnp.array([[5.0], [-7.0]]))
    assert Result(x).q == 2.0 and Result(x).m == 5.0
    several = Result(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x))
    np.testing.assert_array_equal(several.q, [2, 4])
    np.testing.assert_array_equal(several.m, [5, 10])
    wide = Result(ta.Overlaps(*(jnp.ones((2, 2, 2)),) * 3, jnp.ones((3, 2))))
    for name, shape in (("q", r"\(2, 2, 2\)"), ("m", r"\(3, 2\)")):
        message = (
            f"^model must have two tokens and rank one for the number {name}, got {name} of shape {shape}: use given"
        )
        with pytest.raises(ta.InputError, match=message):
            getattr(wide, name)
    assert overlaps.OrderNumber().source == "overlaps"


def test_shapes_of_order_parameters():
    spectrum = ta.SpectralLaw.of_classes((0.2, 0.3, 0.4), {(0, 1): 0.5, (2, 0): 0.5})
    model = ta.DotProduct(rank=2, spectrum=spectrum)
    shapes = {"q": (3, 2, 2), "V": (3, 2, 2), "theta": (3, 2, 1), "m": (5, 2)}
    assert overlaps.shapes_of(model) == shapes
    x = ta.Overlaps(*(jnp.ones(shape) for shape in shapes.values()))
    assert x.encoded.shape == (2, 2)
