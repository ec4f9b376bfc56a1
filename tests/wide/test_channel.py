"""Averages over the scores of wide layers: the nodes, the fields, and the proximal points against a root search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import root

import tiedattn_jax as ta
from tiedattn_jax.wide import channel

MIXING = [[0.8, 0.2], [0.3, 0.7]]
UNEVEN = {"omega": 0.3, "mixing": MIXING}

pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(**options):
    return ta.WideDotProduct(**{"teacher": ta.Wishart(0.5), "tau": 0.05, **options})


class OneField(ta.WideLayer):
    def loss(self, H, Y):
        return 0.5 * jnp.sum((H - Y) ** 2)


class Wells(ta.WideLayer):
    """A loss with minima near H = -1 and H = 1, of which the first is lower."""

    def loss(self, H, Y):
        return jnp.sum((H**2 - 1) ** 2 + 0.2 * H)


def one_field():
    return OneField(teacher=ta.Wishart(0.5), tau=0.05, tokens=1)


def replicate(nodes, k):
    return jax.tree.map(lambda a: a[k], nodes)


def nodes_of(*arrays):
    """Nodes of one replicate; the checks of shapes when they are made know several."""
    return replicate(channel.WideNodes(*(jnp.asarray(a)[None] for a in arrays)), 0)


def at_random(n, tokens, size=6):
    draws = np.random.default_rng(1)
    weight = draws.uniform(0.5, 1.5, size)
    fields = (draws.standard_normal((axis, size)) for axis in (n, n, tokens))
    return nodes_of(*fields, weight / weight.sum())


@pytest.mark.parametrize(
    "model, steps, parts",
    [
        (one_field(), (0.6 / np.sqrt(1.5), 1.0), 2),
        (layer(beta=0.3), (0.6, 0.6, 1.0, 1.0), 2),
        (layer(beta=0.3, **UNEVEN), (0.6, 0.6, 1.0, 1.0), 1),
    ],
    ids=["one field", "even", "uneven"],
)
def test_the_lattice_fills_a_ball(model, steps, parts):
    """It has a point for every cell of its volume; of an even loss, for every second cell. A tenth is padding."""
    nodes = channel.wide_nodes(model, None)
    volume = np.pi * 6.2**2 if len(steps) == 2 else np.pi**2 / 2 * 6.2**4
    used = np.asarray(nodes.weight > 0)
    np.testing.assert_allclose(used.sum(1), volume / np.prod(steps) / parts, rtol=0.05)
    assert used.shape[0] == 2 and used.shape[1] <= 1.13 * used.sum(1).max()
    assert nodes.along.shape == (2, 0, used.shape[1])
    n = len(steps) // 2
    for k, shift in enumerate((0.0, 0.5)):
        for field, step in ((nodes.teacher[k, n - 1], steps[0]), (nodes.student[k, 0], steps[-1])):
            np.testing.assert_allclose(np.min(np.abs(field[used[k]])), shift * step, atol=1e-12)


@pytest.mark.parametrize("options", [{}, UNEVEN], ids=["even", "uneven"])
def test_the_lattice_has_the_moments_of_normals(options):
    nodes = channel.wide_nodes(layer(**options), None)
    x = np.concatenate([nodes.student, nodes.teacher], 1)
    np.testing.assert_allclose(nodes.weight.sum(1), 1, rtol=1e-12)
    for k in (0, 1):
        np.testing.assert_allclose((nodes.weight[k] * x[k]) @ x[k].T, np.eye(4), atol=3e-6)
        np.testing.assert_allclose((x[k] ** 4) @ nodes.weight[k], 3, atol=4e-5)
        if options:
            np.testing.assert_allclose(x[k] @ nodes.weight[k], 0, atol=1e-6)


def test_layers_of_similar_spread_share_their_number_of_nodes():
    first, second = (channel.wide_nodes(layer(beta=beta), None).weight.shape for beta in (1.0, 1.02))
    assert first == second


@pytest.mark.parametrize("options, accuracy", [({}, 3e-6), ({"noise": 3.0, "beta": 1.5}, 1e-7)])
def test_both_replicates_of_the_lattice_have_the_same_averages(options, accuracy):
    model = layer(**options)
    q, m, none = jnp.asarray(0.87), jnp.asarray(1.0), jnp.zeros(0)
    error = jax.jit(lambda nodes: channel.test_error(model, nodes, q, m, none))
    nodes = channel.wide_nodes(model, None)
    first, second = (error(replicate(nodes, k)) for k in (0, 1))
    np.testing.assert_allclose(first, second, rtol=accuracy)
    if not options:
        whole = channel.wide_nodes(model, None, whole=True)
        assert whole.weight.shape[1] > 1.8 * nodes.weight.shape[1]
        np.testing.assert_allclose([error(replicate(whole, k)) for k in (0, 1)], [first, second], rtol=1e-11)


def test_sobol_points_stand_in_where_a_lattice_would_be_large():
    assert channel.wide_nodes(layer(tokens=3), None).weight.shape == (ta.Sobol(16).replicates, 2**14)
    nodes = channel.wide_nodes(layer(encodings=1.5), ta.Sobol(2**12, replicates=3, seed=4))
    assert [a.shape for a in jax.tree.leaves(nodes)] == [(3, 2, 2**12)] * 3 + [(3, 2**12)]
    np.testing.assert_allclose(nodes.weight, 2.0**-12)
    x = np.concatenate([nodes.student, nodes.teacher, nodes.along], 1)
    for k in range(3):
        np.testing.assert_allclose(x[k] @ x[k].T / 2**12, np.eye(6), atol=0.02)
    assert channel.wide_nodes(layer(), nodes) is nodes
    other = channel.wide_nodes(layer(encodings=1.5), ta.Sobol(2**12, replicates=3, seed=5))
    assert not np.any(other.student == nodes.student)
    with pytest.raises(ta.InputError, match="nodes must be None or a Sobol recipe for a wide layer, got nodes=64"):
        channel.wide_nodes(layer(), 64)


def test_fields_have_the_covariance_of_student_and_teacher():
    nodes = replicate(channel.wide_nodes(layer(**UNEVEN), None), 1)
    w, y = channel.fields(nodes, jnp.asarray(1.2), jnp.asarray(0.7), jnp.asarray(1.5))
    found = np.einsum("aiN,bjN,N->aibj", *[np.stack([w, y])] * 2, nodes.weight)
    expected = np.einsum("ab,ij->aibj", [[1.2, 0.7], [0.7, 1.5]], np.eye(2))
    np.testing.assert_allclose(found, expected, atol=5e-6)


@pytest.mark.parametrize("q", [0.98, 0.9799999])
def test_a_student_that_knows_the_teacher_has_no_field_of_its_own(q):
    """q may be below m^2 / rho by rounding errors."""
    nodes = at_random(2, 0)

    def student(q):
        return channel.fields(nodes, q, jnp.asarray(0.7), jnp.asarray(0.5))[0]

    np.testing.assert_allclose(student(jnp.asarray(q)), 0.7 / np.sqrt(0.5) * nodes.teacher, rtol=1e-6)
    assert np.all(np.isfinite(jax.jacfwd(student)(q)))


def test_directions_in_which_encodings_shift_the_scores():
    nodes = at_random(2, 2)
    long = channel.directions(layer(encodings="long"), nodes)
    np.testing.assert_array_equal(long, np.broadcast_to(np.eye(2)[..., None], (2, 2, 6)))
    assert channel.directions(layer(), nodes).shape == (2, 0, 6)
    model = layer(encodings=1.5)
    spike = channel.directions(model, nodes)
    for k, z in enumerate(np.asarray(nodes.along).T):
        shifted = z + 1.5 * np.array([1, -1])
        expected = model.coordinates(jnp.asarray(np.outer(shifted, shifted) - np.eye(2)))
        np.testing.assert_allclose(spike[:, 0, k], expected, rtol=1e-12)


def test_averages_are_those_of_proximal_points_found_otherwise():
    model = layer(beta=2.0, omega=0.3, mixing=MIXING, loss="cross_entropy", noise=0.2, encodings=1.5)
    nodes, spike = at_random(2, 2), 0.3
    q, m, V = 1.1, 0.6, 3.0
    rho, weight = 1.5 + 0.2, np.asarray(nodes.weight)
    y = np.sqrt(rho) * np.asarray(nodes.teacher).T
    w = m / np.sqrt(rho) * np.asarray(nodes.teacher).T + np.sqrt(q - m**2 / rho) * np.asarray(nodes.student).T
    D = np.asarray(channel.directions(model, nodes))[:, 0].T

    def node_loss(h, y):
        return model.node_loss(h, y)

    loss, slope, bend = (jax.jit(fn) for fn in (node_loss, jax.grad(node_loss), jax.hessian(node_loss)))

    def point(k, w=w, y=y, t=spike):
        def residual(h):
            return h - w[k] + V * np.asarray(slope(jnp.asarray(h + t * D[k]), jnp.asarray(y[k])))

        return root(residual, w[k], tol=1e-13).x

    def mean(of_node):
        return np.einsum("N,N...->...", weight, np.array([of_node(k) for k in range(len(weight))]))

    def push(t):
        return mean(lambda k: D[k] @ (point(k, t=t) - w[k]) / V)

    h, step = np.array([point(k) for k in range(len(weight))]), 1e-4

    def slopes(k, by_teacher):
        """The derivatives of g = (h - w) / V in the coordinates of w or y, by differences."""
        columns = []
        for i in range(2):
            ends = []
            for sign in (1, -1):
                moved = (y if by_teacher else w) + sign * step * np.eye(2)[i]
                h_moved = point(k, y=moved) if by_teacher else point(k, w=moved)
                ends.append((h_moved - (w[k] if by_teacher else moved[k])) / V)
            columns.append((ends[0] - ends[1]) / (2 * step))
        return np.stack(columns, 1)

    values = np.array([loss(jnp.asarray(h[k] + spike * D[k]), jnp.asarray(y[k])) for k in range(len(weight))])
    square = np.sum((h - w) ** 2, 1)
    by_w = np.array([slopes(k, False) for k in range(len(weight))])
    expected = {
        "moreau": weight @ (values + square / (2 * V)),
        "train_loss": weight @ values,
        "information": -weight @ np.trace(by_w, axis1=1, axis2=2),
        "signal": mean(lambda k: np.trace(slopes(k, True))),
        "force": weight @ square / V**2,
        "curvature": mean(lambda k: np.trace(by_w[k] @ by_w[k])),
        "push": [push(spike)],
        "stiffness": [[-(push(spike + step) - push(spike - step)) / (2 * step)]],
        "margin": min(
            np.linalg.det(np.eye(2) + V * np.asarray(bend(jnp.asarray(h[k] + spike * D[k]), jnp.asarray(y[k]))))
            for k in range(len(weight))
        ),
    }

    @jax.jit
    def averages(model, q, m, V, t):
        return channel.averages(model, nodes, q, m, V, t)

    at = (model, jnp.asarray(q), jnp.asarray(m), jnp.asarray(V), jnp.array([spike]))
    found, points = averages(*at)
    np.testing.assert_allclose(points.T, h, atol=1e-9)
    for name, number in expected.items():
        np.testing.assert_allclose(getattr(found, name), number, rtol=1e-6, err_msg=name)
    # The proximal points have derivatives in all that they depend on.
    change = jax.tree.map(lambda a: 0.3 * jnp.ones_like(a), at)
    ends = [averages(*jax.tree.map(lambda a, b, s=s: a + s * 1e-5 * b, at, change))[0] for s in (1, -1)]
    slope_of = jax.jvp(averages, at, change)[1][0]
    for name in ("moreau", "train_loss", "force"):
        difference = (getattr(ends[0], name) - getattr(ends[1], name)) / 2e-5
        np.testing.assert_allclose(getattr(slope_of, name), difference, rtol=1e-6, err_msg=name)
    answer = channel.response(model, points, jnp.asarray(y.T), jnp.asarray(V), jnp.asarray(spike * D.T))
    np.testing.assert_allclose(answer.gradient, (h - w).T / V, atol=1e-9)
    np.testing.assert_allclose(answer.information, -np.mean(np.trace(by_w, axis1=1, axis2=2)), rtol=1e-6)


def test_the_test_error_has_no_noise():
    model, nodes = layer(noise=0.7, encodings="long", **UNEVEN), at_random(2, 0)
    q, m, t = 0.9, 0.5, np.array([0.3, -0.2])
    y = np.sqrt(1.5) * np.asarray(nodes.teacher)
    w = m / 1.5 * y + np.sqrt(q - m**2 / 1.5) * np.asarray(nodes.student) + t[:, None]
    losses = [model.node_loss(jnp.asarray(w[:, k]), jnp.asarray(y[:, k])) for k in range(6)]
    found = channel.test_error(model, nodes, jnp.asarray(q), jnp.asarray(m), jnp.asarray(t))
    np.testing.assert_allclose(found, np.dot(nodes.weight, losses), rtol=1e-12)


def test_a_second_start_takes_the_lower_point_and_counts_where_both_differ():
    """A search from the student's fields ends in the well where they are."""
    model, V = Wells(teacher=ta.Wishart(0.5), tau=0.05, tokens=1), jnp.asarray(3.0)
    zero, shift = jnp.zeros(0), jnp.zeros((1, 1))
    own, w = 0.1 + np.sqrt(1.5), jnp.array([[0.6, 0.6, -0.6, 0.1, 0.1]])
    weight = jnp.array([0.4, 0.3, 0.2, 0.07, 0.03])
    nodes = nodes_of(w, 0 * w, jnp.zeros((0, 5)), weight)
    right = channel.prox(model, w, 0 * w, V, shift, jnp.full_like(w, 0.7))
    left = channel.prox(model, w, 0 * w, V, shift, jnp.full_like(w, -0.7))
    assert np.all(right > 0.5) and np.all(left < -0.5)
    # The same well, the lower one, the higher one, and places beside the own well, too far from it and near.
    far, near = right[0, 3] + 1.25e-3 * own, right[0, 4] + 0.8e-3 * own
    points = jnp.array([[right[0, 0], left[0, 1], right[0, 2], far, near]])
    lowest, share = channel.second_start(model, nodes, jnp.asarray(1.0), jnp.asarray(0.0), V, zero, points)
    np.testing.assert_allclose(lowest[0, :3], [right[0, 0], left[0, 1], left[0, 2]], rtol=1e-9)
    np.testing.assert_allclose(lowest[0, 4], near, rtol=1e-12)
    np.testing.assert_allclose(share, 0.3 + 0.2 + 0.07, rtol=1e-12)
