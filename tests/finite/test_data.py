"""Shapes and fields of data, the two ways to make them, and starts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, model_of

import tiedattn_jax as ta
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.diagnosis import check_estimate, check_fit
from tiedattn_jax.finite.evaluation import sentence_losses
from tiedattn_jax.finite.products import back_project, student_fields, token_gram
from tiedattn_jax.finite.sampling import start

pytestmark = pytest.mark.usefixtures("fast_compilation")


def test_shapes_and_fields(data):
    assert data.shape == (2, 600, 400, 1) and data.alpha == 1.5
    x = data.inputs()
    np.testing.assert_allclose(data.x, np.swapaxes(x + data.encodings, 0, 1) / 20, atol=1e-14)
    np.testing.assert_allclose(data.y, x @ data.teacher / 20, atol=1e-13)
    # 480,000 independent entries of variance sigma^2 = .25; the relative error of a variance is sqrt(2 / N) = .2 %
    np.testing.assert_allclose(jnp.var(x), 0.25, rtol=0.01)
    assert abs(np.mean(x)) < 5 * 0.5 / x.size**0.5


def test_another_variance_than_the_model_s_is_told(model, data):
    x, teacher = data.inputs(), data.teacher
    with pytest.warns(UserWarning, match="data have 3.99 times the model's variance of inputs"):
        check_fit(model, Data.from_sentences(2 * x, teacher=teacher))
    check_fit(model, Data.from_sentences(1.1 * x, teacher=teacher))
    check_fit(model, Data.from_sentences(2 * x[:1, :, :9], teacher=teacher[:9]))  # so few numbers say nothing


def test_products_equal_those_of_the_whole_arrays(data):
    Q = np.asarray(jax.random.normal(jax.random.key(0), (400, 2)))
    x = np.asarray(data.x)
    fields = student_fields(data.x, Q)
    np.testing.assert_allclose(fields, np.swapaxes(x @ Q, 1, 2), atol=1e-13)
    np.testing.assert_allclose(back_project(data.x, fields), np.einsum("lni,lan->ia", x, fields), rtol=1e-11)
    np.testing.assert_allclose(token_gram(data.x), np.einsum("kni,lni->kln", x, x), rtol=1e-11)


def test_data_from_raw_sentences(model, data):
    rebuilt = Data.from_sentences(
        data.inputs(), data.raw_labels(model), teacher=data.teacher, encodings=data.encodings, gamma=data.gamma
    )
    for a, b in zip(jax.tree.leaves(data), jax.tree.leaves(rebuilt), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    estimated = Data.from_sentences(data.inputs(), fields=data.y, encodings=data.encodings)
    np.testing.assert_allclose(estimated.gamma, 0.25, rtol=0.02)
    assert estimated.teacher is None and np.all(np.isnan(estimated.overlaps(data.teacher).theta))


def test_overlaps_of_an_estimate(data):
    Q = np.asarray(jax.random.normal(jax.random.key(0), (400, 1)))
    x = data.overlaps(Q)
    np.testing.assert_allclose(x.q, np.full((2, 1, 1), 0.25 * np.sum(Q**2) / 400), rtol=1e-12)
    np.testing.assert_allclose(x.theta, np.full((2, 1, 1), 0.25 * np.sum(Q * data.teacher) / 400), rtol=1e-10)
    np.testing.assert_allclose(x.m, data.encodings @ Q / 20, rtol=1e-12)
    assert np.all(np.isnan(x.V)) and np.all(data.overlaps(Q, jnp.ones((2, 1, 1))).V == 1)


def test_starts(model, data):
    np.testing.assert_array_equal(start(model, data, "semantic"), data.teacher)
    Q = start(model, data, "positional", scale=400**-0.5)
    np.testing.assert_allclose(Q, data.encodings[:1].T, atol=1e-13)
    np.testing.assert_allclose(jnp.linalg.norm(start(model, data, "positional")), 5.0)
    assert jnp.any(start(model, data, "random", jax.random.key(1)) != start(model, data, "random", jax.random.key(2)))
    np.testing.assert_allclose(start(model, data, "semantic", scale=0.5), 0.5 * data.teacher, rtol=1e-14)
    for name in ("semantic", "positional", "random"):
        unit = start(model, data, name, scale=1.0)
        np.testing.assert_allclose(start(model, data, name, scale=0.5), 0.5 * unit, rtol=1e-14)
        np.testing.assert_allclose(jnp.linalg.norm(unit), 20.0, rtol=0.2)
    wide = start(ta.DotProduct(rank=2), data, "semantic", scale=1.0)
    np.testing.assert_array_equal(wide[:, :1], data.teacher)
    np.testing.assert_allclose(jnp.std(wide[:, 1]), 0.1, rtol=0.2)  # 400 normals scatter by 3.5 %


def test_estimates_are_cast_and_checked(model, data):
    assert check_estimate("Q", model, data, np.ones((400, 1), np.float32)).dtype == data.x.dtype
    with pytest.raises(InputError, match="Q must be finite, got 400 entries") as raised:
        check_estimate("Q", model, data, jnp.full((400, 1), jnp.nan))
    assert raised.value.argument == "Q"


def test_exact_labels_alone(model, data):
    """Without teacher and fields, training on exact labels does the same; what needs them says so."""
    inputs, labels = data.inputs(), data.raw_labels(model)
    whole = ta.Data.from_sentences(inputs, labels, teacher=data.teacher, encodings=data.encodings)
    alone = ta.Data.from_sentences(inputs, labels, encodings=data.encodings)
    assert alone.y is None and "with labels only" in repr(alone) and "with teacher and labels" in repr(whole)
    Q = 0.3 * whole.teacher
    options = {"optimizer": "lbfgs", "steps": 20, "exact": True}
    expected, result = (ta.train(model, sentences, Q, **options) for sentences in (whole, alone))
    for of in (lambda run: run.Q, lambda run: run.losses, lambda run: run.overlaps.m):
        np.testing.assert_array_equal(of(result), of(expected))
    assert np.isnan(result.overlaps.theta).all() and np.isfinite(expected.overlaps.theta).all()
    assert "not known without the teacher" in str(result) and "not known" not in str(expected)
    assert "theta" not in result.to_dict()
    baselines = [ta.linear_baseline(sentences) for sentences in (whole, alone)]
    np.testing.assert_array_equal(baselines[0].W, baselines[1].W)
    assert alone.shard().y is None
    with_values = ta.train(model, alone, Q, value=model.lam, labels=labels, optimizer="lbfgs", steps=2)
    assert np.isfinite(with_values.train_loss) and np.isnan(with_values.overlaps.theta).all()
    positional = ta.train(model, alone, "positional", **{**options, "steps": 2})
    assert positional.iterations == 2
    for needs_fields in (ta.train, ta.gamp, ta.risk, lambda model, data, Q: data.raw_labels(model)):
        with pytest.raises(ta.InputError, match=r"data must have a teacher or its fields .* got labels only"):
            needs_fields(model, alone, Q)
    for call in (lambda: ta.train(model, alone, **options), lambda: ta.realised(model, alone)):
        with pytest.raises(ta.InputError, match="teacher must be known"):
            call()


def test_neither_fields_nor_labels(data):
    with pytest.raises(ta.InputError, match=r"labels must be given, \(n, L, d\), or teacher, .*, got none"):
        ta.Data.from_sentences(data.inputs())
    with pytest.raises(ta.InputError, match=r"y must be given, .* where there are no labels"):
        ta.Data(data.x, None)
    with pytest.raises(ta.InputError, match="y must be given beside a teacher"):
        ta.Data(data.x, None, data.teacher, labels=data.labels)


def test_data_carry_the_noise(unchecked):
    noisy = model_of(Noisy)
    data, plain = (ta.sample_data(m, 60, 2.0, jax.random.key(0)) for m in (noisy, ta.DotProduct()))
    assert data.noise.shape == (120, 2, 1) and data.fields.shape == (2, 2, 120) and data.y.shape == (120, 2, 1)
    # Sentences and teacher are those of the model without noise.
    np.testing.assert_allclose(data.x, plain.x, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(data.y, plain.y, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose([data.noise.mean(), data.noise.std()], [0, 1], atol=0.2)
    targets = jax.jit(jax.vmap(noisy.target))(data.y, data.noise)
    np.testing.assert_allclose(data.raw_labels(noisy), targets @ data.inputs(), atol=1e-13)
    known = {name: getattr(data, name) for name in ("teacher", "encodings", "gamma", "noise")}
    rebuilt = ta.Data.from_sentences(data.inputs(), data.raw_labels(noisy), **known)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), data, rebuilt)
    losses = sentence_losses(noisy, data, student_fields(data.x, data.teacher))
    expected = eqx.filter_jit(noisy.loss)(data.x[:, 7] @ data.teacher, data.y[7], data.noise[7])
    np.testing.assert_allclose(losses[7], expected)
    for call, message in (
        (lambda: ta.train(noisy, plain), "data must have 1 fields of noise a token as the model has, got 0"),
        (lambda: ta.train(ta.DotProduct(), data), "data must have 0 fields of noise a token as the model has, got 1"),
        (lambda: ta.Data(data.x, data.y, noise=data.noise[:5]), r"noise must have shape \(n, L, k\)"),
    ):
        with pytest.raises(ta.InputError, match=message):
            call()


def test_classes_are_counted_from_zero(unchecked):
    x, y, means = jnp.ones((2, 3, 4)), jnp.ones((3, 2, 1)), jnp.zeros((2, 4))
    classes = np.array([[0, 1], [1, 0], [0, 0]])
    np.testing.assert_array_equal(ta.Data(x, y, means=means, classes=classes).classes, classes)
    for wrong in (classes - 1, classes + 1, classes[:2], 1.0 * classes):
        with pytest.raises(InputError, match="classes must be integers from 0 to 1, the class of every token"):
            ta.Data(x, y, means=means, classes=wrong)
