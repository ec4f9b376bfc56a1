"""Bad models raise one sentence: the argument and what to give, before anything is compiled."""

import dataclasses
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, model_of

import tiedattn_jax as ta
from tiedattn_jax.model.checks import check, check_provides, needs
from tiedattn_jax.model.layers import LAYERS

MODEL = ta.DotProduct()
NAN = float("nan")
MASKED = np.ma.array([[0.6, 0.4], [0.4, 0.6]], mask=[[True, False], [False, False]])


class Plain(ta.Model):
    """A short layer whose law and methods the tests replace."""

    changed: tuple = eqx.field(static=True, default=())
    shape = (2, 1, 1)

    def loss(self, Z, Y):
        return jnp.sum((Z @ Z.T - Y @ Y.T) ** 2)

    def law(self):
        return dataclasses.replace(MODEL.law(), **{k: jnp.asarray(v) for k, v in self.changed})


def plain(lam=0.01, **changed):
    """`Plain` with other parts of its law."""
    return Plain(tuple((k, np.asarray(v).tolist()) for k, v in changed.items()), lam=jnp.asarray(lam))


def own(**members):
    """`Plain` with other methods, written without `self`, and other attributes."""
    members = {k: staticmethod(v) if callable(v) else v for k, v in members.items()}
    return type("Own", (Plain,), members)(lam=jnp.asarray(0.01))


@jax.custom_vjp
def _once_differentiable(z):
    """A sum of squares with a derivative in one mode only, so without a second one."""
    return jnp.sum(z**2)


_once_differentiable.defvjp(lambda z: (_once_differentiable(z), z), lambda z, g: (2 * g * z,))


def with_numbers(**numbers):
    """The preset with numbers that its constructor would refuse."""
    return eqx.tree_at(lambda m: [getattr(m, k) for k in numbers], MODEL, [jnp.asarray(v) for v in numbers.values()])


def penalised(lam=0.01, **methods):
    """The preset with the penalty |w|, or with other methods of it."""
    penalty = type("Own", (ta.L1,), methods)(1.0)
    return eqx.tree_at(lambda m: m.lam, ta.DotProduct(penalty=penalty), jnp.asarray(lam))


def with_means(**means):
    """The preset with a penalty, and with other means in its law."""
    numbers = {k: None if v is None else jnp.asarray(v) for k, v in means.items()}
    law = lambda self: dataclasses.replace(ta.DotProduct.law(self), **numbers)  # noqa: E731
    return type("Lawful", (ta.DotProduct,), {"law": law})(**vars(ta.DotProduct(penalty=ta.L1(0.01))))


def two_atoms(**changed):
    """`Plain` with every atom of its law twice."""
    law = {k: np.repeat(np.asarray(getattr(MODEL.law(), k)), 2, 0) for k in ("gamma", "tau", "pi", "cross")}
    return plain(**law | changed)


@jax.jit
def checked(model):
    return jax.tree.leaves(check(model))


def test_good_models_pass():
    """Those just within a bound are below."""
    check(ta.DotProduct(rank=2, teacher=[[1.0, 0.2], [0.2, 1.0]]))
    check(own(loss=lambda Z, Y: jnp.sum(Z)), even=False)
    positive_part = penalised(
        value=lambda self, w: jnp.maximum(w, 0), prox=lambda self, v, c: jnp.where(v > c, v - c, jnp.minimum(v, 0))
    )
    check(positive_part, even=False)
    # A smooth function that bends within a thousandth of the fields' size has no kink, in either precision.
    bent = {"attention": lambda self, Z: jax.nn.softmax(jax.nn.softplus(1e3 * Z @ Z.T) / 1e3)}
    for dtype in (np.float64, np.float32):
        check(type("Bent", (ta.DotProduct,), bent)(dtype=dtype))
    jax.tree.map(np.testing.assert_array_equal, checked(MODEL), jax.tree.leaves(MODEL))
    assert all(np.all(np.isnan(a)) for a in checked(with_numbers(omega=1 + 1e-9)))


NO_SCALAR = "loss must return a finite real scalar"
TWO_COLUMNS = {"shape": (2, 2, 1), "loss": lambda Z, Y: jnp.sum((Z[:, :1] ** 2 - Y**2) ** 2)}
MODELS = [
    (lambda: plain(weights=[0.5]), r"law\(\).weights must be shares >= 0 that sum to one.*0.5"),
    (lambda: plain(gamma=[[NAN, 0.25]]), r"law\(\).gamma must be finite"),
    (lambda: plain(gamma=[[0.25]]), r"law\(\).gamma must be of shape \(1, 2\), got shape \(1, 1\)"),
    (lambda: plain(np.float32(0.01)), r"law\(\).weights must be float32 like lam, got float64"),
    (lambda: plain(cross=[[[0.0]]]), r"law\(\).cross must be of shape \(1, 2, 1\)"),
    (lambda: plain(cross=[[[2.0], [-2.0]]]), "positive semidefinite"),
    (lambda: plain([0.1, 0.2]), "lam must be one positive number"),
    (lambda: Plain(lam=0.01), r"lam must hold jax arrays, got 0.01: write jnp.asarray\(0.01, float\)"),
    (lambda: plain(1), r"lam must be float32 or float64, got int64: write jnp.asarray\(lam, float\)"),
    (lambda: own(loss=lambda Z, Y: None), NO_SCALAR + ", got None"),
    (lambda: own(loss=lambda Z, Y: Z[:, 0] ** 2), NO_SCALAR),
    (lambda: own(loss=lambda Z, Y: Y.sum()), "loss must be even in Z and in Y"),
    (lambda: own(loss=lambda Z: Z.sum()), r"loss must take \(Z, Y\) of a model with noise = 0, got \(Z\)"),
    (lambda: own(noise=1), r"loss must take \(Z, Y, noise\) of a model with noise = 1, got \(Z, Y\)"),
    (lambda: own(loss=lambda Z, Y: jnp.sum((Z @ Z.T - jnp.eye(3)) ** 2)),
     r"loss must be written in jax.numpy, .* \(2, 1\), \(2, 1\), got TypeError: sub got incompatible shapes"),
    (lambda: own(loss=lambda Z, Y: _once_differentiable(Z)),
     "loss must be written in jax.numpy, with derivatives, .*got TypeError: can't apply forward-mode"),
    (lambda: own(target=lambda Y: Y[:, 0]), r"target must return an \(2, 2\) matrix, got shape"),
    (lambda: own(target=lambda Y, noise: Y), r"target must take \(Y\) of a model with noise = 0, got \(Y, noise\)"),
    (lambda: own(target=lambda Y: NAN * Y @ Y.T), "target must return an array of finite real num"),
    (lambda: own(target=lambda Y: [[1, 0], [0, 1]]), "target must return an array of finite real"),
    (lambda: own(student=lambda Z: Z.sum()), r"student must return an \(2, 2\) matrix"),
    (lambda: own(with_teacher=lambda: MODEL), r"with_teacher must take \(gram\), got \(\)"),
    (lambda: own(law=lambda: None), "law must be a method that returns a SpectralLaw, got law=None"),
    (lambda: own(law=lambda: dataclasses.replace(MODEL.law(), gamma=0.25)),
     r"law\(\).gamma must be an array, got one of <class 'float'>: write jnp.asarray\(gamma, float\)"),
    (lambda: type("Mine", (ta.DotProduct,), {"targt": lambda self, Y: Y @ Y.T})(**vars(ta.DotProduct())),
     "targt must be called target if it is what a Model calls so"),
    (lambda: own(rotation_invariant=True, **TWO_COLUMNS),
     "rotation_invariant must be left out for a loss that changes when the columns of Z are rotated"),
    (lambda: own(generators=np.array([[[0.0, 1.0], [-1.0, 0.0]]]), **TWO_COLUMNS),
     "generators must be left out for a loss that changes"),
    (lambda: with_numbers(mixing=np.eye(2, dtype=int)), "mixing must be float64 like lam, got int64: what is"),
    (lambda: penalised(prox=ta.Penalty.prox), r"penalty must have a method `prox\(v, c\)`, got Own without it"),
    (lambda: penalised(prox=lambda self, v: v), r"penalty.prox must take \(v, c\), got \(v\)"),
    (lambda: penalised(value=lambda self, w: jnp.sum(jnp.abs(w))), "penalty must have a finite value for"),
    (lambda: penalised(prox=lambda self, v, c: NAN * v), "penalty must have a finite prox for every entry"),
    (lambda: with_means(tau_mean=None), r"law\(\).tau_mean must be given for a penalty, got None: zeros for"),
    (lambda: with_means(tau_mean=[1.0, -1.0]), r"law\(\).tau_mean must be of shape \(1, 2\), got shape \(2,\)"),
    (lambda: 3.0, "model must be a tiedattn_jax.Model, such as DotProduct"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "message"), MODELS, ids=[message for _, message in MODELS])
def test_models(make, message):
    with pytest.raises(ta.InputError, match=message):
        check(make())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call", [ta.solve, ta.find_states])
def test_functions_check_their_model(call):
    """Only named branches need an even loss."""
    for make, message in (MODELS[0], MODELS[-2], (lambda: own(loss=lambda Z, Y: Z.sum()), "loss must be even")):
        if "even" not in message or call is not ta.find_states:
            with pytest.raises(ta.InputError, match=message):
                call(make(), alpha=1.0)


# Arguments of `DotProduct`. Some values are such that numpy turns into other numbers without a word.
ARGUMENTS = [
    ({"omega": [0.1, 0.2]}, r"omega must be one number, got shape \(2,\)"), ({"omega": NAN}, "omega must be in"),
    ({"sigma": np.True_}, "sigma must be a real number"), ({"sigma": 1e200}, "sigma must be"),
    ({"lam": -1.0}, "lam must be"),
    ({"penalty": "l1"}, r"penalty must be a tiedattn_jax.Penalty, such as L1\(0.01\), or None"),
    ({"mixing": np.zeros((0, 0))}, "mixing must be a square L x L matrix"),
    ({"mixing": [[1.4, -0.4], [0.4, 0.6]]}, "mixing must be row-stochastic"),
    ({"mixing": MASKED}, r"mixing must be .*, got mixing=masked_array\( data=\[\[--, 0.4\]"),
    ({"mixing": [["0.6", "0.4"], ["0.4", "0.6"]]}, "mixing must be a real number"),
    ({"encodings": np.zeros((2, 0))}, "encodings must be"), ({"encodings": [[1.0]]}, "encodings must be"),
    ({"teacher": NAN}, "teacher must be positive"), ({"teacher": [[1.0, 0.9], [0.0, 1.0]]}, "teacher must be"),
    ({"rank": 1.5}, "rank must be an integer of at least 1, got rank=1.5"),
    ({"dtype": "double precision"}, "dtype must be float32 or float64, got dtype='double precision'"),
]  # fmt: skip


COMPLEX = ta.SpectralLaw(*(np.array(a) for a in ([1.0], [[0.3, 0.2]], np.eye(2)[None], [[[4.0]]], [[[0.1j], [0.0]]])))
CALLS = [
    *((partial(ta.DotProduct, **arguments), message) for arguments, message in ARGUMENTS),
    *((partial(make, omega=1.5), "omega must be in") for make in LAYERS.values()),
    *((partial(make, mixing=np.eye(3)), "encodings must be given for L = 3 tokens") for make in LAYERS.values()),
    (partial(ta.CausalDotProduct, mixing=[[0.3, 0.7], [0.8, 0.2]]), "mixing must be lower triangular"),
    (partial(ta.UntiedDotProduct, teacher=[[1.0]]), "teacher must have as many columns for queries as for keys"),
    (partial(ta.UntiedDotProduct, tied_teacher=1), "tied_teacher must be True or False"),
    (lambda: ta.L1(-1.0), "strength must be zero or positive, and finite, got strength=-1.0"),
    (lambda: ta.DotProduct(spectrum=COMPLEX), "spectrum must be a real number or an array of them"),
    (lambda: dataclasses.replace(MODEL.law(), tau_mean=np.zeros((1, 2))).means, "pi_mean must be given for a penalty"),
    (lambda: dataclasses.replace(MODEL.law(), pi_mean=np.zeros((1, 1))).means, "tau_mean must be given for a penalty"),
    (lambda: ta.SpectralLaw.of_classes([1.0], {(0, 0): 1.0}, teacher_means=[0.1j]),
     "teacher_means must be an array of real numbers"),
    (lambda: ta.check(MODEL, even="no"), "even must be True or False, got even='no' of <class 'str'>"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_layers_and_laws(call, message):
    with pytest.raises(ta.InputError, match=message):
        call()


def test_what_a_loss_with_noise_must_be():
    odd = model_of(type("Odd", (Noisy,), {"loss": lambda self, Z, Y, noise: jnp.sum(Z * Y) + jnp.sum(noise**2)}))
    check(odd, even=False)
    check(model_of(Noisy))
    for model, message in (
        (odd, "loss must be even in Z and in Y"),
        (model_of(type("Negative", (Noisy,), {"noise": -1})), "noise must be an integer of at least 0"),
    ):
        with pytest.raises(ta.InputError, match=message):
            check(model)


SENTENCES = ta.SpectralLaw.of_classes((0.25, 0.36), {(0, 0): 0.5, (1, 1): 0.5})
# A keyword of `needs`, a model that is not of this kind, and the message.
KINDS = [
    ({"float64": True}, lambda: ta.DotProduct(dtype=jnp.float32), "must be in float64 for maps: use .*, got float32"),
    ({"smooth": True}, ta.ReLUAttention, "must have a loss without kinks for maps, got ReLUAttention"),
    ({"independent": True}, lambda: ta.DotProduct(spectrum=SENTENCES), "must have tokens without classes for maps"),
    ({"orthogonal": True}, lambda: plain(cross=[[[1.2e-6], [-1.2e-6]]]), "zero, a teacher orthogonal to .* maps"),
    ({"same": ("gamma",)}, lambda: two_atoms(weights=[0.5, 0.5], gamma=[[1.0, 1.0], [1.0, 1.0 + 1.2e-6]]),
     "gamma must be the same at all atoms of positive weight, with one eigenvalue each for maps"),
    ({"same": ("gamma", "pi")}, lambda: two_atoms(weights=[0.5, 0.5], pi=[[[1.0]], [[1.1]]]), "pi must be the same at"),
]  # fmt: skip
ALL_KINDS = dict.fromkeys(("float64", "smooth", "independent", "orthogonal"), True) | {"same": ("gamma", "pi")}


@pytest.mark.parametrize(("kind", "make", "message"), KINDS, ids=[next(iter(kind)) for kind, *_ in KINDS])
def test_the_kind_of_model_that_a_computation_takes(kind, make, message):
    """A model of another kind is refused where it matters, and taken without the keyword."""
    needs(make(), "maps", even=False)
    with pytest.raises(ta.InputError, match=message):
        needs(make(), "maps", even=False, **kind)


def test_penalties_and_missing_methods():
    with pytest.raises(ta.InputError, match="must have no penalty besides the ridge for maps, got Own"):
        needs(penalised(), "maps")
    with pytest.raises(ta.InputError, match="must have a method `target` for labels, got Plain without it"):
        check_provides(plain(), "target", "for labels")


def test_models_of_every_kind_that_a_computation_takes():
    needs(MODEL, "maps", **ALL_KINDS)
    for model in (
        two_atoms(weights=[0.5, 0.5], gamma=[[1.0, 1.0], [1.0, 1.0 + 9e-7]]),
        two_atoms(weights=[1.0, 0.0], gamma=[[1.0, 1.0], [9.0, 4.0]]),  # an atom without weight may differ
        plain(cross=[[[9e-7], [-9e-7]]]),
    ):
        needs(model, "maps", **ALL_KINDS)
    with pytest.raises(ta.InputError, match="loss must be even"):
        needs(own(loss=lambda Z, Y: jnp.sum(Z)), "maps")
    jax.jit(lambda lam: needs(eqx.tree_at(lambda m: m.lam, MODEL, lam), "maps", **ALL_KINDS) or lam)(0.1)
    law = two_atoms(weights=[0.5, 0.5]).law()  # its numbers stay known beside one that is traced
    jax.vmap(lambda w: needs(ta.DotProduct(omega=w, spectrum=law), "maps", same=("gamma",)))(jnp.array([0.3, 0.4]))


def power(exponent):
    """A loss that falls like a power of the fields' size."""
    return lambda Z, Y: jnp.sum(Y**2) - (1e-3 + jnp.sum(Z**2)) ** (exponent / 2)


# Models that are just within a bound, and a message for those just beyond it.
BOUNDS = [
    (lambda: own(loss=power(2.6)), lambda: own(loss=power(2.8)), r"loss must not fall faster than -\|Z\|\^2"),
    (lambda: own(loss=lambda Z, Y: jnp.sum(Z**2) + 1e-3 * Z[0, 0] + jnp.sum(Y**2)),
     lambda: own(loss=lambda Z, Y: jnp.sum(Z**2) + 1e-2 * Z[0, 0] + jnp.sum(Y**2)), "loss must be even"),
    (lambda: own(loss=lambda Z, Y: jnp.sum(Y**2) + jnp.sum(Z**2) - 1e-10 * jnp.sum(jnp.abs(Z))),
     lambda: own(loss=lambda Z, Y: jnp.sum(Y**2) + jnp.sum(Z**2) - 1e-4 * jnp.sum(jnp.abs(Z))),
     r"nonsmooth must be True for a loss whose slope jumps, as it does at Z = \["),
    (lambda: own(nonsmooth=True, loss=lambda Z, Y: jnp.sum(Y**2) + jnp.sum(Z**2) - jnp.sum(jnp.abs(Z))),
     lambda: own(nonsmooth=True, loss=lambda Z, Y: jnp.sum(Y**2) + jnp.sum(Z**2) + 1e-4 * jnp.sum(jnp.abs(Z))),
     r"loss must not have a slope that jumps upwards, as it does at Z = \[.*\]: minima would"),
    (lambda: plain(weights=[1 + 1e-14]), lambda: plain(weights=[1 + 1e-13]), r"law\(\).weights must be shares"),
    (lambda: two_atoms(weights=[0.5, 0.5], gamma=[[0.0, 0.2], [0.2, 0.0]]),
     lambda: two_atoms(weights=[0.5, 0.5], gamma=[[0.0, 0.2], [0.0, 0.2]]), "gamma must be eigenvalues >= 0, not"),
    (lambda: plain(tau=[[[1.0, 0.3], [0.3, 1.0]]]), lambda: plain(tau=[[[1.0, 0.3], [0.3 + 1e-9, 1.0]]]), "symmetric"),
    (lambda: plain(pi=[[[1e-9]]]), lambda: plain(pi=[[[0.0]]]), "rho must be positive definite"),
    (lambda: with_means(tau_mean=[[1.0, -1.0]]), lambda: with_means(tau_mean=[[1.0 + 1e-9, -1.0]]), "no smaller than"),
    (lambda: with_means(tau_mean=[[0.0, 0.0]], pi_mean=[[1.0]]),
     lambda: with_means(tau_mean=[[0.0, 0.0]], pi_mean=[[1.0 + 1e-9]]), "no smaller than those of its means"),
    (lambda: own(field_scale=1e-3), lambda: own(field_scale=0.0), "field_scale must be one positive number"),
    (lambda: own(shape=(2, 1, 1)), lambda: own(shape=(2, 1)), r"shape must be a tuple \(L, r, t\), got shape=\(2, 1\)"),
    (lambda: own(shape=(2, 1, 1)), lambda: own(shape=(2, 0, 1)), "shape must be an integer of at least 1"),
    (lambda: plain(1e-300), lambda: plain(np.inf), "lam must be one positive number"),
    (lambda: penalised(0.0), lambda: penalised(-1e-9), "lam must be"),
    (lambda: own(_taget=lambda Y: Y), lambda: own(studnt=lambda Z: Z @ Z.T), "studnt must be called student if it"),
    (lambda: ta.DotProduct(1.0), lambda: with_numbers(omega=1 + 1e-9), r"omega must be in \[0, 1\]"),
    (lambda: with_numbers(mixing=[[0.6, 0.4 + 5e-6], [0.4, 0.6]]),
     lambda: with_numbers(mixing=[[0.6, 0.4 + 2e-5], [0.4, 0.6]]),
     "mixing must be row-stochastic"),
    (lambda: with_numbers(sigma=1e-100), lambda: with_numbers(sigma=1e-160), "sigma must be positive, with a finite"),
    (lambda: ta.DotProduct(teacher=[[1.0, 0.999], [0.999, 1.0]]),
     lambda: with_numbers(teacher=[[1.0, 1.0], [1.0, 1.0]]),
     "teacher must be positive"),
]  # fmt: skip


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("within", "beyond", "message"), BOUNDS)
def test_bounds_of_what_a_model_may_be(within, beyond, message, traced):
    """Where jax traces the numbers, a model out of range consists of NaN. Kinks are not looked for."""
    good, bad = within(), beyond()
    if not traced:
        assert check(good) is good
        with pytest.raises(ta.InputError, match=message):
            check(bad)
        return
    jax.tree.map(np.testing.assert_array_equal, checked(good), jax.tree.leaves(good))
    try:
        numbers = checked(bad)
    except ta.InputError as error:  # a structure, which jax does not trace
        assert re.search(message, str(error))
    else:
        assert "slope" in message or "nonsmooth" in message or all(np.all(np.isnan(a)) for a in numbers)


@pytest.mark.parametrize(
    ("transform", "share"),
    [(jax.grad, 0.0), (jax.jacfwd, 0.5), (jax.jit, 0.0), (lambda f: lambda w: jax.vmap(f)(w[None]), 0.5)],
)
def test_a_class_that_closes_over_a_traced_number(transform, share):
    """Its derivative would miss the motion of the state, and checks of the class would fail inside jax."""

    def number(w):
        class Layer(ta.DotProduct):
            def loss(self, Z, Y):
                return w * super().loss(Z, Y)

        check(Layer(sigma=share * w if share else 0.5))
        return w

    with pytest.raises(ta.InputError, match="loss must take every number that jax traces from the fields"):
        transform(number)(jnp.ones(()))


def test_known_numbers_are_checked_in_every_step_of_a_fit():
    """A class that passed once is refused under `jax.grad` at numbers at which its loss is not even."""

    class Shifted(ta.DotProduct):
        shift: jax.Array = eqx.field(default=0.0, converter=jnp.asarray)

        def loss(self, Z, Y):
            return super().loss(Z, Y) + self.shift * jnp.tanh(jnp.sum(Z))

    slope = jax.grad(lambda model: check(model).lam)
    assert float(slope(Shifted()).lam) == 1
    with pytest.raises(ta.InputError, match="loss must be even"):
        slope(Shifted(shift=0.1))
    with pytest.raises(ta.InputError, match="omega must be in"):
        slope(dataclasses.replace(Shifted(), omega=jnp.asarray(1.5)))
