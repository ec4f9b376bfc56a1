"""Averages over the scores of wide layers: the nodes, the fields, and the proximal points against a root search."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import root

import tiedattn_jax as ta
from tiedattn_jax.wide import channel

UNEVEN = {"omega": 0.3, "mixing": [[0.8, 0.2], [0.3, 0.7]]}
layer = partial(ta.wide.DotProduct, tau=0.05)


class Wells(ta.wide.Layer):
    """A loss with minima near H = -1 and H = 1, of which the first is lower."""

    def loss(self, H, Y):
        return jnp.sum((H**2 - 1) ** 2 + 0.2 * H)


def replicate(nodes, k):
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[k]), nodes)


def nodes_of(*arrays):
    """Nodes of one replicate; the checks of shapes when they are made know several."""
    return replicate(channel.WideNodes(*(jnp.asarray(np.asarray(a)[None]) for a in arrays)), 0)


def at_random(n, tokens, size=6):
    draws = np.random.default_rng(1)
    weight = draws.uniform(0.5, 1.5, size)
    fields = (draws.standard_normal((axis, size)) for axis in (n, n, tokens))
    return nodes_of(*fields, weight / weight.sum(), np.ones((1, size)))


def inside(shift):
    """The coordinates of a tied layer, which has one block, with a shift inside the loss."""
    return channel.Inside(jnp.asarray(shift), jnp.ones((1, np.shape(shift)[-1])))


@pytest.mark.parametrize("options", [{}, UNEVEN], ids=["even", "uneven"])
def test_the_lattice_has_the_moments_of_normals(options):
    nodes = jax.tree.map(np.asarray, channel.wide_nodes(layer(**options), None))
    x = np.concatenate([nodes.student, nodes.teacher], 1)
    np.testing.assert_allclose(nodes.weight.sum(1), 1, rtol=1e-12)
    used = nodes.weight > 0
    assert used.shape[1] <= 1.13 * used.sum(1).max()  # a tenth is padding
    for k in (0, 1):
        np.testing.assert_allclose((nodes.weight[k] * x[k]) @ x[k].T, np.eye(4), atol=3e-6)
        np.testing.assert_allclose((x[k] ** 4) @ nodes.weight[k], 3, atol=4e-5)
        if options:
            np.testing.assert_allclose(x[k] @ nodes.weight[k], 0, atol=1e-6)


@pytest.mark.parametrize("options, accuracy", [({}, 3e-6), ({"noise": 3.0, "beta": 1.5}, 1e-7)])
def test_both_replicates_of_the_lattice_have_the_same_averages(options, accuracy):
    model = layer(**options)
    error = partial(jax.jit(channel.test_error), model, q=0.87, m=1.0, t=np.zeros(0))
    nodes = channel.wide_nodes(model, None)
    first, second = (error(replicate(nodes, k)) for k in (0, 1))
    np.testing.assert_allclose(first, second, rtol=accuracy)
    if not options:
        # Layers of similar spread share their number of nodes.
        assert channel.wide_nodes(layer(beta=1.02), None).weight.shape == nodes.weight.shape
        whole = channel.wide_nodes(model, None, whole=True)
        assert whole.weight.shape[1] > 1.8 * nodes.weight.shape[1]
        np.testing.assert_allclose([error(replicate(whole, k)) for k in (0, 1)], [first, second], rtol=1e-11)


def test_sobol_points_stand_in_where_a_lattice_would_be_large():
    assert channel.wide_nodes(layer(tokens=3), None).weight.shape == (ta.Sobol(16).replicates, 2**14)
    nodes = channel.wide_nodes(layer(encodings=1.5), ta.Sobol(2**12, replicates=3, seed=4))
    assert [a.shape for a in jax.tree.leaves(nodes)] == [(3, 2, 2**12)] * 3 + [(3, 2**12), (3, 1, 2**12)]
    np.testing.assert_array_equal(nodes.weight, 2.0**-12)
    x = np.concatenate([nodes.student, nodes.teacher, nodes.along], 1)
    for k in range(3):
        np.testing.assert_allclose(x[k] @ x[k].T / 2**12, np.eye(6), atol=0.02)
    other = channel.wide_nodes(layer(encodings=1.5), ta.Sobol(2**12, replicates=3, seed=5))
    assert not np.any(other.student == nodes.student) and channel.wide_nodes(layer(), nodes) is nodes


def test_a_student_that_knows_the_teacher_has_no_field_of_its_own():
    """q may be below m^2 / rho by rounding errors."""
    nodes = at_random(2, 0)

    @jax.jit
    def student(q, m, rho):
        return jax.jvp(lambda q: channel.score_fields(nodes, q, m, rho)[0], (q,), (jnp.ones_like(q),))

    for q in (0.98, 0.9799999):
        field, slope = student(q, 0.7, 0.5)
        np.testing.assert_allclose(field, 0.7 / np.sqrt(0.5) * np.asarray(nodes.teacher), rtol=1e-6)
        assert np.all(np.isfinite(slope))


def test_directions_in_which_encodings_shift_the_scores():
    nodes, directions = at_random(2, 2), jax.jit(channel.shift_directions)
    long = directions(layer(encodings="long"), nodes)
    np.testing.assert_array_equal(long, np.broadcast_to(np.eye(2)[..., None], (2, 2, 6)))
    assert directions(layer(), nodes).shape == (2, 0, 6)
    z, model = np.asarray(nodes.along) + 1.5 * np.array([[1], [-1]]), layer(encodings=1.5)
    expected = model.coordinates(jnp.asarray(z[:, None] * z - np.eye(2)[..., None]))
    np.testing.assert_allclose(directions(model, nodes)[:, 0], expected[0], rtol=1e-12)


def test_averages_are_those_of_proximal_points_found_otherwise():
    """All fields have the shape (nodes, coordinates)."""
    model = layer(beta=2.0, **UNEVEN, loss="cross_entropy", noise=0.2, encodings=1.5)
    nodes, spike = at_random(2, 2), 0.3
    q, m, V, rho, weight = 1.1, 0.6, 3.0, 1.5 + 0.2, np.asarray(nodes.weight)
    y = np.sqrt(rho) * np.asarray(nodes.teacher).T
    w = m / rho * y + np.sqrt(q - m**2 / rho) * np.asarray(nodes.student).T
    D = np.asarray(jax.jit(channel.shift_directions)(model, nodes))[:, 0].T
    loss, slope, bend = (
        jax.jit(jax.vmap(derive(lambda h, y: model.node_loss(h, y, jnp.ones(1)))))
        for derive in (lambda f: f, jax.grad, jax.hessian)
    )

    def points(w=w, y=y, t=spike):
        def residual(h):
            return np.ravel(h.reshape(w.shape) - w + V * np.asarray(slope(h.reshape(w.shape) + t * D, y)))

        return root(residual, np.ravel(w), tol=1e-13).x.reshape(w.shape)

    h, step = points(), 1e-4
    g, moves = (h - w) / V, [step * np.eye(2)[i] for i in range(2)]
    # The derivatives of g in the coordinates of w and y, by differences: (nodes, coordinates of g, other coordinates).
    by_w = np.stack([(points(w=w + e) - points(w=w - e) - 2 * e) / (2 * step * V) for e in moves], 2)
    by_y = np.stack([(points(y=y + e) - points(y=y - e)) / (2 * step * V) for e in moves], 2)
    push = [weight @ np.sum(D * (points(t=t) - w), 1) / V for t in (spike - step, spike, spike + step)]
    values = np.asarray(loss(h + spike * D, y))
    expected = {
        "moreau": weight @ (values + V * np.sum(g**2, 1) / 2),
        "train_loss": weight @ values,
        "information": -weight @ np.trace(by_w, axis1=1, axis2=2),
        "signal": weight @ np.trace(by_y, axis1=1, axis2=2),
        "force": weight @ np.sum(g**2, 1),
        "curvature": weight @ np.trace(by_w @ by_w, axis1=1, axis2=2),
        "push": [push[1]],
        "stiffness": [[(push[0] - push[2]) / (2 * step)]],
        "margin": np.min(np.linalg.det(np.eye(2) + V * np.asarray(bend(h + spike * D, y)))),
    }

    averages = jax.jit(lambda model, q, m, V, t: channel.channel_averages(model, nodes, q, m, V, t))
    at = (model, jnp.asarray(q), jnp.asarray(m), jnp.asarray(V), jnp.array([spike]))
    found, places = averages(*at)
    np.testing.assert_allclose(places.T, h, atol=1e-9)
    for name, number in expected.items():
        np.testing.assert_allclose(getattr(found, name), number, rtol=1e-6, err_msg=name)
    # The proximal points have derivatives in all that they depend on.
    change = jax.tree.map(lambda a: 0.3 * np.ones_like(a), at)
    ends = [averages(*jax.tree.map(lambda a, b, s=s: a + s * 1e-5 * b, at, change))[0] for s in (1, -1)]
    slope_of = jax.jit(lambda at: jax.jvp(averages, at, change)[1][0])(at)
    for name in ("moreau", "train_loss", "force"):
        difference = (getattr(ends[0], name) - getattr(ends[1], name)) / 2e-5
        np.testing.assert_allclose(getattr(slope_of, name), difference, rtol=1e-6, err_msg=name)
    message, information = jax.jit(channel.response)(model, places, y.T, V, inside(spike * D.T))
    np.testing.assert_allclose(message, g.T, atol=1e-9)
    np.testing.assert_allclose(information, -np.trace(by_w, axis1=1, axis2=2), rtol=1e-5)


def test_the_test_error_has_no_noise():
    model, nodes = layer(noise=0.7, encodings="long", **UNEVEN), at_random(2, 0)
    q, m, t = 0.9, 0.5, np.array([0.3, -0.2])
    y = np.sqrt(1.5) * np.asarray(nodes.teacher)
    w = m / 1.5 * y + np.sqrt(q - m**2 / 1.5) * np.asarray(nodes.student) + t[:, None]
    losses = jax.jit(jax.vmap(model.node_loss, (1, 1, None)))(w, y, np.ones(1))
    found = jax.jit(channel.test_error)(model, nodes, q, m, t)
    np.testing.assert_allclose(found, np.dot(nodes.weight, losses), rtol=1e-12)


def test_a_second_start_takes_the_lower_point_and_counts_where_both_differ():
    """A search from the student's fields ends in the well where they are."""
    model, V = Wells(teacher=ta.wide.Wishart(0.5), tau=0.05, tokens=1), np.asarray(3.0)
    own, w, weight = 0.1 + np.sqrt(1.5), np.array([[0.6, 0.6, -0.6, 0.1, 0.1]]), np.array([0.4, 0.3, 0.2, 0.07, 0.03])
    nodes, prox = nodes_of(w, 0 * w, np.zeros((0, 5)), weight, np.ones((1, 5))), jax.jit(channel.score_prox)
    right, left = (np.asarray(prox(model, w, 0 * w, V, inside(0 * w), np.full_like(w, h))) for h in (0.7, -0.7))
    assert np.all(right > 0.5) and np.all(left < -0.5)
    # The same well, the lower one, the higher one, and places beside the own well, too far from it and near.
    far, near = right[0, 3] + 1.25e-3 * own, right[0, 4] + 0.8e-3 * own
    points = np.array([[right[0, 0], left[0, 1], right[0, 2], far, near]])
    lowest, share = jax.jit(channel.second_start)(model, nodes, 1.0, 0.0, V, np.zeros(0), points)
    np.testing.assert_allclose(lowest[0, :3], [right[0, 0], left[0, 1], left[0, 2]], rtol=1e-9)
    np.testing.assert_allclose(lowest[0, 4], near, rtol=1e-12)
    np.testing.assert_allclose(share, 0.3 + 0.2 + 0.07, rtol=1e-12)


class Rows(ta.wide.UntiedLayer):
    """A loss of two rows, the second one three times as steep, with a part that no score moves."""

    def loss(self, H, Y):
        return jnp.sum(jnp.array([[1.0], [3.0]]) * (H - Y) ** 2) / 2 + 0.25


def test_rows_of_an_untied_layer_are_averaged_apart():
    """The nodes of one block hold all numbers; a quadratic loss has closed averages."""
    model, nodes = Rows(teacher=[1.0], tau=0.1), replicate(channel.wide_nodes(Rows(teacher=[1.0], tau=0.1), None), 0)
    assert model.blocks.shape == (2, 2, 2, 2) and nodes.row.shape[0] == 2
    found, _ = jax.jit(channel.channel_averages)(model, nodes, 0.8, 0.6, 0.5, np.zeros(0))
    steep, gap = np.array([1.0, 1.0, 3.0, 3.0]), 1.0 - 2 * 0.6 + 0.8
    np.testing.assert_allclose(found.information, np.sum(steep / (1 + 0.5 * steep)), rtol=1e-6)
    np.testing.assert_allclose(found.signal, found.information, rtol=1e-6)
    np.testing.assert_allclose(found.force, np.sum((steep / (1 + 0.5 * steep)) ** 2) * gap, rtol=1e-5)
    np.testing.assert_allclose(found.train_loss, 0.25 + np.sum(steep / (1 + 0.5 * steep) ** 2) * gap / 2, rtol=1e-5)


def test_equal_rows_share_their_nodes():
    """Rows of softmax attention are alike, unless a positional target or encodings tell them apart."""
    untied = partial(ta.wide.UntiedDotProduct, tau=0.1)
    for options, kept in (({}, 1), ({"encodings": "long"}, 2), (UNEVEN, 2)):
        model = untied(**options)
        nodes, whole = (channel.wide_nodes(model, ta.Sobol(16), whole=whole) for whole in (False, True))
        assert len(model.equal_blocks[0]) == kept and whole.student.shape[2] == 32
        assert nodes.student.shape[2] == 16 * kept
        np.testing.assert_allclose(nodes.weight.sum(1), 2.0)
