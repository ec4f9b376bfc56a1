"""The teacher's fields that a label leaves possible, and the rotations of columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.model import over_kinds, rotations_of

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
    Y = jnp.asarray(RNG.normal(size=(model.shape[0], t)))
    found = model.preimages(Y)
    count, spacing = (2, 0.0) if t == 1 else (256, 2 * np.pi / 128)
    assert found.fields.shape == (count, *Y.shape) and found.signs is (t == 1) and found.noise == 0
    assert found.spacing == pytest.approx(spacing, rel=1e-12)
    np.testing.assert_allclose(np.exp(found.log_weight), 1 / count, rtol=1e-12)
    labels = jax.jit(jax.vmap(model.target))(found.fields)
    np.testing.assert_allclose(labels, jnp.broadcast_to(model.target(Y), labels.shape), rtol=1e-9)
    distance = np.linalg.norm(np.asarray(found.fields[:, None] - found.fields), axis=(2, 3))
    assert np.min(distance + 9 * np.eye(count)) > 1e-3
    np.testing.assert_allclose(found.fields[0], Y, rtol=1e-12)
    if t == 2:  # neighbours on the grid are as far apart as the spacing says
        steps = distance[np.arange(127), np.arange(1, 128)]
        np.testing.assert_allclose(steps / np.linalg.norm(Y), 2 * np.sin(spacing / 2), rtol=1e-9)


def test_preimages_of_noisy_labels():
    found = ta.orbit(jnp.array([[0.3], [-0.2]]), 0.09)
    np.testing.assert_allclose(found.fields[..., 0], [[0.3, -0.2], [-0.3, 0.2]])
    assert float(found.noise) == 0.09 and found.noise.dtype == found.fields.dtype
    default = ta.Preimages(found.fields, found.log_weight, found.noise)
    assert default.spacing == 0.0 and default.signs is False


@pytest.mark.parametrize(
    ("model", "t", "message"),
    [
        (ta.DotProduct(teacher=EYE), 2, "fewer columns of the teacher than tokens for its own .* t = 2, L = 2"),
        (ta.CausalDotProduct(teacher=EYE, **THREE), 2, "a teacher of one column and three tokens .* t = 2, L = 3"),
        (ta.CausalDotProduct(), 1, "a teacher of one column and three tokens or more .* t = 1, L = 2"),
        (ta.UntiedDotProduct(), 2, "tied_teacher=True for its own preimages, got queries and keys"),
        (ta.ReLUAttention(teacher=EYE), 2, "a teacher of one column for its own preimages, got t = 2: declare"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, ta.Model) else None,
)
def test_layers_without_preimages_of_their_own(model, t, message):
    Y = jnp.asarray(RNG.normal(size=(model.shape[0], t)))
    with pytest.raises(ta.InputError, match=f"^model must have {message}"):
        model.preimages(Y)


def test_a_layer_that_declares_no_preimages():
    with pytest.raises(NotImplementedError, match=r"LinearAttention must have a method `preimages\(Y\)` for this"):
        ta.LinearAttention().preimages(jnp.ones((2, 1)))


def test_an_orbit_of_three_columns_is_refused():
    with pytest.raises(
        ta.InputError, match=r"^model must declare `preimages\(Y\)` for a teacher of more than two .* 3"
    ):
        ta.orbit(jnp.ones((4, 3)))


def test_generators_of_rotations():
    """There is one for each pair of columns, antisymmetric and of size one."""
    for r in range(1, 5):
        generators = rotations_of(r)
        assert generators.shape == (r * (r - 1) // 2, r, r)
        np.testing.assert_array_equal(generators, -generators.swapaxes(1, 2))
        assert r == 1 or np.linalg.matrix_rank(generators.reshape(len(generators), -1)) == len(generators)
        np.testing.assert_array_equal(np.abs(generators).sum((1, 2)), 2)
    np.testing.assert_array_equal(rotations_of(2), [[[0, -1], [1, 0]]])
    assert ta.DotProduct(rank=3).generators.shape == (3, 3, 3) and ta.DotProduct().generators.shape == (0, 1, 1)


class Plain(ta.Model):
    """A layer that writes only what it must."""

    shape = (2, 2, 1)

    def loss(self, Z, Y):
        return jnp.sum(Z[:, 0] ** 2) * jnp.sum(Y**2)

    def law(self):
        return ta.DotProduct().law()


def test_what_a_layer_is_by_default():
    model = Plain(lam=jnp.asarray(0.01))
    assert (model.noise, model.columns, model.field_scale) == (0, (2, 1), 1.0)
    assert not model.rotation_invariant and not model.nonsmooth and model.generators.shape == (0, 2, 2)
    assert model.penalty is None and model.kind is None and model.teacher_mean is None
    fields = jnp.arange(4.0).reshape(2, 2)
    (whole,) = model.label(fields)
    np.testing.assert_array_equal(whole, fields)
    noisy = type("Noisy", (Plain,), {"noise": 1})(lam=jnp.asarray(0.01))
    assert noisy.columns == (2, 2)
    np.testing.assert_array_equal(np.concatenate(noisy.label(fields), 1), fields)
    assert [a.shape for a in noisy.label(fields)] == [(2, 1), (2, 1)]
    for combined, column in ((False, [1, 0]), (True, [0, 1])):
        semantic, positional = model.start_columns(combined)
        np.testing.assert_array_equal(semantic, [[1], [0]])
        np.testing.assert_array_equal(positional, column)
    np.testing.assert_array_equal(ta.DotProduct().start_columns(True)[1], [1])


def test_sums_over_the_kinds_of_sentences():
    """Without kinds a sum is the function itself; with kinds shares sum to one."""
    assert over_kinds(ta.DotProduct(), lambda model: model.omega) == 0.3
    shares = {(0, 0): 0.5, (1, 1): 0.3, (0, 1): 0.2}
    model = ta.DotProduct(spectrum=ta.SpectralLaw.of_classes((0.25, 0.36), shares))
    traces = over_kinds(model, lambda model: model.sentence.share * model.trace)
    np.testing.assert_allclose(traces, [0.7 * 0.25 + 0.3 * 0.36, 0.5 * 0.25 + 0.5 * 0.36], rtol=1e-6)
    assert ta.DotProduct().sentence.share == 1.0 and model.sentence.indicator is None
