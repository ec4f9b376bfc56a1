"""The teacher's fields that a label leaves possible, and the rotations of columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.model import rotations_of

THREE = {"mixing": [[1, 0, 0], [0.3, 0.7, 0], [0.2, 0.3, 0.5]], "encodings": [[1.0], [0.0], [-1.0]]}
RNG = np.random.default_rng(0)
EYE = np.eye(2)
LAYERS = [  # with the number of columns of the teacher
    (ta.DotProduct(), 1), (ta.DotProduct(teacher=EYE, **THREE), 2), (ta.CausalDotProduct(**THREE), 1),
    (ta.UntiedDotProduct(tied_teacher=True), 1),
    (ta.UntiedDotProduct(tied_teacher=True, teacher=EYE, **THREE), 2), (ta.ReLUAttention(), 1),
]  # fmt: skip


@pytest.mark.parametrize(("model", "t"), LAYERS, ids=lambda v: type(v).__name__ if isinstance(v, ta.Model) else v)
def test_preimages_have_the_same_label(model, t):
    """For one column they are two signs; for two they are all rotations and reflections, on a grid of 128 angles."""
    Y = RNG.normal(size=(model.shape[0], t))
    found = model.preimages(jnp.asarray(Y))
    count, spacing = (2, 0.0) if t == 1 else (256, 2 * np.pi / 128)
    assert found.fields.shape == (count, *Y.shape) and found.signs is (t == 1) and found.noise == 0
    assert found.spacing == pytest.approx(spacing, rel=1e-12)
    np.testing.assert_allclose(np.exp(found.log_weight), 1 / count, rtol=1e-12)
    fields, labels = np.asarray(found.fields), np.asarray(jax.jit(jax.vmap(model.target))(found.fields))
    np.testing.assert_allclose(fields[0], Y, rtol=1e-12)
    np.testing.assert_allclose(labels, np.broadcast_to(labels[0], labels.shape), rtol=1e-9)
    distance = np.linalg.norm(fields[:, None] - fields, axis=(2, 3))
    assert np.min(distance + 9 * np.eye(count)) > 1e-3
    if t == 2:  # neighbours on the grid are as far apart as the spacing says
        steps = distance[np.arange(127), np.arange(1, 128)]
        np.testing.assert_allclose(steps / np.linalg.norm(Y), 2 * np.sin(spacing / 2), rtol=1e-9)


def test_layers_without_preimages_of_their_own():
    for preimages, Y, message in (
        (ta.DotProduct(teacher=EYE).preimages, (2, 2), "fewer columns of the teacher than tokens .* t = 2, L = 2"),
        (ta.CausalDotProduct(teacher=EYE, **THREE).preimages, (3, 2), "a teacher of one column and .* t = 2, L"),
        (ta.CausalDotProduct().preimages, (2, 1), "a teacher of one column and three tokens or more .* L = 2"),
        (ta.UntiedDotProduct().preimages, (2, 2), "tied_teacher=True for its own preimages, got queries and keys"),
        (ta.ReLUAttention(teacher=EYE).preimages, (2, 2), "a teacher of one column for .* got t = 2: declare"),
    ):
        with pytest.raises(ta.InputError, match=f"^model must have {message}"):
            preimages(jnp.ones(Y))
    with pytest.raises(ta.InputError, match=r"^model must declare `preimages\(Y\)` for a teacher of more than two"):
        ta.bayes.orbit(jnp.ones((4, 3)))
    with pytest.raises(NotImplementedError, match=r"LinearAttention must have a method `preimages\(Y\)` for this"):
        ta.LinearAttention().preimages(jnp.ones((2, 1)))


def test_generators_of_rotations():
    """There is one for each pair of columns, antisymmetric and of size one."""
    for r in range(1, 5):
        generators = np.asarray(rotations_of(r))
        assert generators.shape == (r * (r - 1) // 2, r, r)
        np.testing.assert_array_equal(generators, -generators.swapaxes(1, 2))
        assert r == 1 or np.linalg.matrix_rank(generators.reshape(len(generators), -1)) == len(generators)
        np.testing.assert_array_equal(np.abs(generators).sum((1, 2)), 2)
    assert ta.DotProduct(rank=3).generators.shape == (3, 3, 3) and ta.DotProduct().generators.shape == (0, 1, 1)


def test_what_a_layer_is_by_default():
    members = {
        "shape": (2, 2, 1),
        "loss": lambda self, Z, Y: jnp.sum(Z[:, 0] ** 2) * jnp.sum(Y**2),
        "law": lambda self: ta.DotProduct().law(),
    }
    model, noisy = (type("Own", (ta.Model,), members | n)(lam=jnp.asarray(0.01)) for n in ({}, {"noise": 1}))
    assert (model.noise, model.columns, model.field_scale) == (0, (2, 1), 1.0)
    assert not model.rotation_invariant and not model.nonsmooth and model.generators.shape == (0, 2, 2)
    assert model.penalty is None and model.kind is None and model.teacher_mean is None
    fields = jnp.arange(4.0).reshape(2, 2)
    np.testing.assert_array_equal(model.label(fields), [fields])
    assert noisy.columns == (2, 2) and [a.shape for a in noisy.label(fields)] == [(2, 1), (2, 1)]
    np.testing.assert_array_equal(np.concatenate(noisy.label(fields), 1), fields)
