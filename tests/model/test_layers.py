"""The shipped layers: the standard one in its own numbers, their attention and limits, and theory against training."""

import pydoc
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, softmax
from simulated import assert_agrees

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.finite.sampling import start
from tiedattn_jax.model.checks import check
from tiedattn_jax.model.layers import LAYERS
from tiedattn_jax.model.overlaps import BRANCHES, admissible, label
from tiedattn_jax.theory.observables import gen_error_linear
from tiedattn_jax.theory.setting import branch_start

THREE = {"mixing": [[1, 0, 0], [0.3, 0.7, 0], [0.2, 0.3, 0.5]], "encodings": [[1.0], [0.0], [-1.0]]}
SWAPPED = [[0.3, 0.7], [0.8, 0.2]]  # the positional part looks at the other token


def fields(model, seed=0, scale=1.0):
    """Student fields (L, r) and teacher fields (L, t)."""
    L, r, t = model.shape
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(scale * rng.standard_normal((L, k))) for k in (r, t))


def test_two_token_softmax_is_the_sigmoid_form(model):
    z, y = np.array([0.7, -0.3]), np.array([0.4, 0.9])
    S, T = (expit([a[0] * (a[0] - a[1]), a[1] * (a[1] - a[0])]) for a in (z, y))
    loss = model.loss(jnp.asarray(z)[:, None], jnp.asarray(y)[:, None])
    np.testing.assert_allclose(loss, 0.25 * np.sum((S - 0.7 * T - 0.3 * 0.6) ** 2), rtol=1e-14)


def test_what_a_layer_offers_is_declared(model):
    """An error inside an optional method is not taken for its absence."""
    members = {"shape": (2, 1, 1), "loss": lambda self, Z, Y: jnp.sum(Z**2), "law": lambda self: model.law()}
    bare = type("Bare", (ta.Model,), members)(lam=model.lam)
    misspelt = type("Misspelt", (ta.DotProduct,), {"target": lambda self, Y: self.omga * Y})(**vars(model))
    methods, nodes = ("target", "student", "with_teacher"), ta.Sobol(64).rule(model)
    assert all(map(model.provides, methods)) and not any(map(bare.provides, methods))
    with pytest.raises(NotImplementedError, match="target"):
        bare.target(jnp.ones((2, 1)))
    for layer, error, message in ((bare, ta.InputError, "target"), (misspelt, AttributeError, "omga")):
        with pytest.raises(error, match=message):
            gen_error_linear(layer, nodes)


# The other layers have closed forms below.
DEAR = "causal_dot_product", "linear_attention", "relu_attention"
MARKED = [pytest.param(name, marks=[pytest.mark.full] * (name in DEAR)) for name in LAYERS]


@pytest.mark.parametrize("name", MARKED)
def test_layers_are_models(name):
    """Layers are even, finite at small and large fields, and twice differentiable, for any tokens, rank and dtype."""
    model = LAYERS[name](0.2, rank=2, **THREE)
    check(model)
    L, r, t = model.shape
    numbers = jax.jit(lambda Z, Y: (model.loss(Z, Y), jax.hessian(model.loss)(Z, Y), model.student(Z), model.target(Y)))
    for scale in (0.0, 1.0, 100.0):
        Z, Y = fields(model, scale=scale)
        loss, hessian, S, T = map(np.asarray, numbers(Z, Y))
        assert np.isfinite(loss) and np.all(np.isfinite(hessian))
        np.testing.assert_allclose([numbers(-Z, Y)[0], numbers(Z, -Y)[0]], [loss] * 2, rtol=1e-12)
        np.testing.assert_allclose(loss, 0.125 * np.sum((S - T) ** 2), rtol=1e-12)
    share = (T - 0.2 * np.asarray(model.mixing)) / 0.8
    assert share.shape == (L, L) and np.all(np.isfinite(share))
    if r == t:
        np.testing.assert_allclose(share, numbers(Y, Y)[2], rtol=1e-10, atol=1e-12)
    single = LAYERS[name](dtype=jnp.float32)
    assert jax.eval_shape(single.loss, *(np.asarray(a, np.float32) for a in fields(single))).dtype == "f4"


def test_constructors_by_name():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "own_layer.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\]", page, re.M) == [layer.__name__ for layer in LAYERS.values()]
    for make in LAYERS.values():
        text = pydoc.plain(pydoc.render_doc(make))
        assert all(f"{name}: " in text for name in ("omega", "teacher", "rank", "penalty", "spectrum", "dtype"))
        assert getattr(ta, make.__name__) is make
    with pytest.raises(TypeError, match="unexpected keyword argument 'tied_teacher'"):
        ta.DotProduct(tied_teacher=True)
    np.testing.assert_array_equal(ta.CausalDotProduct().mixing, [[1.0, 0.0], [0.4, 0.6]])


def test_a_causal_token_sees_what_came_before():
    model, plain = ta.CausalDotProduct(**THREE), ta.DotProduct(**THREE)
    Z, _ = fields(model)
    S = np.asarray(model.student(Z))
    np.testing.assert_allclose(S, np.tril(S), atol=0)
    np.testing.assert_allclose(S[2], plain.student(Z)[2], rtol=1e-13)
    np.testing.assert_allclose(S[:2, :2], model.attention(Z[:2]), rtol=1e-13)


def test_untied_layers():
    tied, model = ta.DotProduct(), ta.UntiedDotProduct(tied_teacher=True)
    assert model.shape == (2, 2, 1) and ta.UntiedDotProduct(rank=2).shape == (2, 4, 2)
    Z, Y = fields(tied)
    np.testing.assert_allclose(model.loss(jnp.concatenate([Z, Z], 1), Y), tied.loss(Z, Y), rtol=1e-13)
    np.testing.assert_allclose(ta.UntiedDotProduct(teacher=0.7).teacher, 0.7 * np.eye(2))
    wide = ta.UntiedDotProduct(rank=2, teacher=np.eye(4))
    Z, Y = fields(wide)
    z = np.asarray(Z)
    np.testing.assert_allclose(wide.student(Z), softmax(z[:, :2] @ z[:, 2:].T, 1), rtol=1e-13)
    (generator,) = np.asarray(wide.generators)
    gradient = np.asarray(jax.jit(jax.grad(wide.loss))(Z, Y))
    one_sided = np.zeros((4, 4))
    one_sided[:2, :2] = generator[:2, :2]
    # Turning queries and keys together changes nothing; scaling one against the other changes only the ridge.
    scaling = np.diag([1.0, 1.0, -1.0, -1.0])
    slopes = [abs(np.sum(gradient * (z @ a.T))) for a in (generator, scaling, one_sided)]
    assert slopes[0] < 1e-14 and slopes[1] < 1e-14 and slopes[2] > 1e-3
    assert np.linalg.norm(generator + generator.T) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_starts_of_untied_layers_use_queries_and_keys(tied):
    for rank, joint_label in ((1, "mixed" if tied else "semantic + mixed"), (2, "semantic + positional")):
        model = ta.UntiedDotProduct(rank=rank, tied_teacher=tied)
        starts = jax.jit(lambda model: [branch_start(model, name) for name in BRANCHES])(model)
        for branch, x in zip(BRANCHES.values(), starts, strict=True):
            assert bool(jax.jit(admissible)(model, x)) and label(model, x) == (branch.name or joint_label)
            theta, m = np.asarray(x.theta), np.asarray(x.m)
            assert not branch.theta or theta[0, 0, 0] == theta[0, rank, 0 if tied else 1]
            assert np.count_nonzero(m[0]) == 2 * branch.m
            np.testing.assert_array_equal(m[:, :rank], m[:, rank:])


@pytest.mark.full
def test_starts_of_untied_weights():
    model, tied = ta.UntiedDotProduct(mixing=SWAPPED), ta.UntiedDotProduct(tied_teacher=True, rank=2)
    data, tied_data = (ta.sample_data(m, 50, 1.0, jax.random.key(0)) for m in (model, tied))
    np.testing.assert_array_equal(start(model, data, "semantic"), data.teacher)
    Q = np.asarray(start(model, data, "positional"))
    np.testing.assert_allclose(Q[:, 0], -Q[:, 1])  # queries look for tokens unlike themselves
    Q = np.asarray(start(tied, tied_data, "semantic"))
    np.testing.assert_array_equal(Q[:, [0, 2]], np.repeat(tied_data.teacher, 2, 1))
    assert 0 < np.std(Q[:, 1]) < 0.2 and not np.allclose(Q[:, 1], Q[:, 3])


def test_linear_attention_is_an_inner_product_of_features():
    model = ta.LinearAttention(rank=2, **THREE)
    Z, _ = fields(model)
    features = np.stack([np.r_[1.0, z, np.outer(z, z).ravel() / 2**0.5] for z in np.asarray(Z)])
    kernel = features @ features.T
    np.testing.assert_allclose(model.student(Z), kernel / kernel.sum(1, keepdims=True), rtol=1e-12)
    # For scores of a tenth the layer is the softmax, to third order.
    small = 0.1**0.5 * np.asarray(Z) / np.abs(Z).max()
    np.testing.assert_allclose(model.student(jnp.asarray(small)), softmax(small @ small.T, 1), atol=1e-3 / 3)


def test_relu_attention():
    model = ta.ReLUAttention()
    np.testing.assert_allclose(model.student(jnp.array([[2.0], [-1.0]])), [[2.0, 0.0], [0.0, 0.5]])
    np.testing.assert_allclose(model.student(jnp.array([[2.0], [1.0]])), [[2.0, 1.0], [1.0, 0.5]])
    assert isinstance(default_recipe(model, 1024).rule(model).stack, type(ta.Sobol(1024).rule(model).stack))


def test_minima_of_a_loss_with_kinks_are_found():
    """The search misses the lowest point of a grid at .15 % of 4000 nodes; without reflected starts at 3 %."""
    model, rng = ta.ReLUAttention(), np.random.default_rng(0)
    h, y = (jnp.asarray(s * rng.standard_normal((2, 1, 500))) for s in (0.35, 0.5))
    V = jnp.full((2, 1, 1), 12.0)
    problem = ProxProblem(model, V, y)
    minima = jax.jit(prox)(problem, h)
    grid = jnp.asarray(np.stack(np.meshgrid(*[np.linspace(-2, 2, 81)] * 2)).reshape(2, 1, -1))

    def lowest(fields):
        h, y = (jnp.broadcast_to(a[..., None], grid.shape) for a in fields)
        return jnp.min(ProxProblem(model, V, y).energy(grid, h))

    grid_minimum = jax.lax.map(lowest, (jnp.moveaxis(h, -1, 0), jnp.moveaxis(y, -1, 0)))
    assert np.mean(jax.jit(problem.energy)(minima.z, h) > grid_minimum + 1e-12) < 0.01 and np.all(minima.converged)


def test_a_layer_of_one_s_own_is_its_attention():
    class Uniform(ta.AttentionLayer):
        part: jax.Array = eqx.field(kw_only=True)
        form: str = eqx.field(static=True, default="plain")

        def attention(self, fields):
            return jnp.full(2 * fields.shape[:1], self.part)

    class Sharp(ta.DotProduct):
        beta: jax.Array  # a number without a default
        gain: jax.Array = 0.5
        made: jax.Array = eqx.field(default_factory=lambda: jnp.array(0.02))

    assert Uniform(0.3, part=0.5, dtype="float32").part.dtype == jnp.float32
    model = Uniform(0.3, part=0.5, form="other")
    check(model)
    assert model.form == "other"
    np.testing.assert_allclose(model.loss(*fields(model)), 0.125 * np.sum((0.3 * (0.5 - model.mixing)) ** 2))
    layer = Sharp(beta=2.0, rank=2)
    assert layer.beta == 2 and layer.rank == 2 and layer.gain.dtype == layer.lam.dtype and layer.made == 0.02
    with pytest.raises(ta.InputError, match="part must be a real number"):
        Uniform(part="half")
    with pytest.raises(TypeError, match="beta"):
        Sharp()


# A state of each layer at which the proximal operator jumps little.
STATES = {
    "causal_dot_product": ({}, 2.0, "semantic"),
    "untied_dot_product": ({"omega": 0.1, "mixing": SWAPPED}, 5.0, "semantic"),
    "linear_attention": ({}, 2.0, "semantic"),
    "relu_attention": ({}, 5.0, "semantic"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", STATES)
def test_theory_agrees_with_training(name):
    options, alpha, branch = STATES[name]
    model = LAYERS[name](**options)
    assert_agrees(model, 300, alpha, branch, default_recipe(model, 2**12).rule(model))


@pytest.mark.full
def test_untied_layer_as_known():
    """The untied layer gives the values of an independent implementation of the theory, to their last digit."""
    model = ta.UntiedDotProduct(0.1, mixing=SWAPPED)
    point = ta.solve(model, 5.0, "semantic", ta.Sobol(2**13).rule(model))
    np.testing.assert_allclose([point.train_loss, point.gen_error], [0.007668, 0.000816], atol=1e-6)
    np.testing.assert_allclose(point.overlaps.q[0], [[0.1287, -0.0358], [-0.0358, 0.1287]], atol=2e-4)
