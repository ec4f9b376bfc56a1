"""Bad models raise one sentence: the argument and what to give, before anything is compiled."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, Sampled, model_of
from scipy import special

import tiedattn_jax as ta
from tiedattn_jax.model.checks import check, check_provides, kink, needs
from tiedattn_jax.model.parameters import Parameter

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


def penalised(lam=0.01, rank=1, **methods):
    """The preset with a penalty of the given methods; by default it is |w|, which is valid."""
    valid = {
        "value": lambda self, w: jnp.abs(w),
        "prox": lambda self, v, c: jnp.sign(v) * jnp.maximum(jnp.abs(v) - c, 0),
    }
    members = {k: v for k, v in (valid | methods).items() if v is not None}
    penalty = type("Own", (ta.Penalty,), members)()
    return eqx.tree_at(lambda m: m.lam, ta.DotProduct(rank=rank, penalty=penalty), jnp.asarray(lam))


def with_means(**means):
    """The preset with a penalty, and with other means in its law."""
    numbers = {k: None if v is None else jnp.asarray(v) for k, v in means.items()}
    law = lambda self: dataclasses.replace(ta.DotProduct.law(self), **numbers)  # noqa: E731
    return type("Lawful", (ta.DotProduct,), {"law": law})(**vars(ta.DotProduct(penalty=ta.L1(0.01))))


def two_atoms(**changed):
    """`Plain` with every atom of its law twice."""
    return plain(**{k: np.repeat(np.asarray(getattr(MODEL.law(), k)), 2, 0) for k in ("gamma", "tau", "pi", "cross")}
                 | changed)  # fmt: skip


def test_good_models_pass():
    for model in (
        MODEL, plain(), ta.DotProduct(rank=2), ta.DotProduct(teacher=[[1.0, 0.2], [0.2, 1.0]]),
        own(_target=lambda Y: Y),  # helpers of a model may have any name
        two_atoms(weights=[0.5, 0.5], gamma=[[1.0, 1.0], [0.0, 2.0]]),
        penalised(), penalised(0.0), ta.DotProduct(lam=0.0, penalty=ta.L1(0.01)), with_means(tau_mean=[[0.0, 0.0]]),
    ):  # fmt: skip
        check(model)
    check(own(loss=lambda Z, Y: jnp.sum(Z)), even=False)
    positive_part = {
        "value": lambda self, w: jnp.maximum(w, 0),
        "prox": lambda self, v, c: jnp.where(v > c, v - c, jnp.minimum(v, 0)),
    }
    check(penalised(**positive_part), even=False)


@pytest.mark.parametrize("missing", ["tau_mean", "pi_mean"])
def test_a_law_has_both_means_or_none(missing):
    law = MODEL.law()
    complete = dataclasses.replace(law, tau_mean=jnp.zeros((1, 2)), pi_mean=jnp.zeros((1, 1)))
    assert complete.means == (complete.tau_mean, complete.pi_mean)
    with pytest.raises(ta.InputError, match=f"{missing} must be given for a penalty"):
        _ = dataclasses.replace(complete, **{missing: None}).means


def test_a_sharp_bend_is_no_kink():
    """A smooth function that bends within a thousandth of the fields' size is taken, in both precisions."""

    class Bent(ta.DotProduct):
        def attention(self, Z):
            return jax.nn.softmax(jax.nn.softplus(1e3 * Z @ Z.T) / 1e3)

    for dtype in (jnp.float64, jnp.float32):
        ta.check(jax.tree.map(lambda a, dtype=dtype: a.astype(dtype), Bent(**vars(ta.DotProduct()))))


NO_SCALAR, ONE_COLUMN = "loss must return a finite real scalar", lambda Z, Y: jnp.sum((Z[:, :1] ** 2 - Y**2) ** 2)


TWO_COLUMNS = {"shape": (2, 2, 1), "loss": ONE_COLUMN}


MODELS = [
    (lambda: plain(weights=[0.5]), r"law\(\).weights must be shares >= 0 that sum to one.*0.5"),
    (lambda: plain(weights=[2.0]), r"law\(\).weights must be shares"),
    (lambda: two_atoms(weights=[1.5, -0.5]), r"law\(\).weights must be shares"),
    (lambda: plain(weights=1.0), r"law\(\).weights must be of shape \(1,\), got shape \(\)"),
    (lambda: plain(gamma=[[-0.25, 0.25]]), r"law\(\).gamma must be eigenvalues >= 0"),
    (lambda: plain(gamma=[[0.0, 0.25]]), r"law\(\).gamma must be .*not all zero"),
    (lambda: plain(gamma=[[NAN, 0.25]]), r"law\(\).gamma must be finite"),
    (lambda: plain(gamma=[[0.25]]), r"law\(\).gamma must be of shape \(1, 2\), got shape \(1, 1\)"),
    (lambda: plain(np.float32(0.01)), r"law\(\).weights must be float32 like lam, got float64"),
    (lambda: plain(cross=[[[0.0]]]), r"law\(\).cross must be of shape \(1, 2, 1\)"),
    (lambda: plain(cross=[[[2.0], [-2.0]]]), "positive semidefinite"),
    (lambda: plain(tau=[[[1.0, 0.5], [-0.5, 1.0]]]), "symmetric"),
    (lambda: plain(pi=[[[-1.0]]]), "positive semidefinite"),
    (lambda: plain(pi=[[[0.0]]]), "rho must be positive definite"),
    (lambda: plain(0.0), "lam must be one positive number, got lam=0.0"),
    (lambda: plain([0.1, 0.2]), "lam must be one positive number"),
    (lambda: Plain(lam=0.01), r"lam must hold jax arrays, got 0.01: write jnp.asarray\(0.01, float\)"),
    (lambda: plain(1), r"lam must be float32 or float64, got int64: write jnp.asarray\(lam, float\)"),
    (lambda: own(loss=lambda Z, Y: None), NO_SCALAR + ", got None"),
    (lambda: own(loss=lambda Z, Y: NAN * Z.sum()), NO_SCALAR),
    (lambda: own(loss=lambda Z, Y: 1j * Z.sum()), NO_SCALAR),
    (lambda: own(loss=lambda Z, Y: Z[:, 0] ** 2), NO_SCALAR),
    (lambda: own(loss=lambda Z, Y: Z.sum()), "loss must be even in Z and in Y"),
    (lambda: own(loss=lambda Z, Y: Y.sum()), "loss must be even in Z and in Y"),
    (lambda: own(loss=lambda Z, Y: jnp.sum(Y**2) - jnp.sum(Z**4)),
     r"loss must not fall faster than -\|Z\|\^2, or it has no proximal operator, got -.*e\+04, -.*e\+08 for fields"),
    (lambda: own(loss=lambda Z, Y: jnp.sum(jnp.abs(Z)) + jnp.sum(Y**2)),
     r"loss must not have a slope that jumps upwards, as it does at Z = \[.*\]: minima would sit in the kink"),
    (lambda: own(loss=lambda Z, Y: jnp.sum(Z**2) - jnp.sum(jnp.abs(Z)) + jnp.sum(Y**2)),
     r"nonsmooth must be True for a loss whose slope jumps, as it does at Z = \["),
    (lambda: own(loss=lambda Z: Z.sum()), r"loss must take \(Z, Y\) of a model with noise = 0, got \(Z\)"),
    (lambda: own(noise=1), r"loss must take \(Z, Y, noise\) of a model with noise = 1, got \(Z, Y\)"),
    (lambda: own(loss=lambda Z, Y: jnp.sum((Z @ Z.T - jnp.eye(3)) ** 2)),
     r"loss must be written in jax.numpy, .* \(2, 1\), \(2, 1\), got TypeError: sub got incompatible shapes"),
    (lambda: own(loss=lambda Z, Y: np.sum(np.asarray(Z) ** 2)),
     "loss must be written in jax.numpy, .*got TracerArrayConversionError"),
    (lambda: own(loss=lambda Z, Y: jax.lax.while_loop(lambda x: x < 9.0, lambda x: x * 2.0, jnp.sum(Z**2))),
     "loss must be written in jax.numpy, with derivatives, .*got ValueError: Reverse-mode differentiation"),
    (lambda: own(loss=lambda Z, Y: _once_differentiable(Z)),
     "loss must be written in jax.numpy, with derivatives, .*got TypeError: can't apply forward-mode"),
    (lambda: own(target=lambda Y: Y[:, 0]), r"target must return an \(2, 2\) matrix, got shape"),
    (lambda: own(target=lambda Y: Y @ Y), "target must be written in jax.numpy, .*got TypeError"),
    (lambda: own(target=lambda Y: NAN * Y @ Y.T), "target must return an array of finite real num"),
    (lambda: own(target=lambda Y: 1j * Y @ Y.T), "target must return an array of finite real"),
    (lambda: own(target=lambda Y: [[1, 0], [0, 1]]), "target must return an array of finite real"),
    (lambda: own(target=lambda Y, noise: Y), r"target must take \(Y\) of a model with noise = 0, got \(Y, noise\)"),
    (lambda: own(noise=1, loss=lambda Z, Y, *noise: 0.0, target=lambda Y: Y),
     r"target must take \(Y, noise\) of a model with noise = 1, got \(Y\)"),
    (lambda: own(student=lambda Z: Z.sum()), r"student must return an \(2, 2\) matrix"),
    (lambda: own(student=lambda Z, Y: Z), r"student must take \(Z\), got \(Z, Y\)"),
    (lambda: own(with_teacher=lambda: MODEL), r"with_teacher must take \(gram\), got \(\)"),
    (lambda: type("Own", (Plain,), {"law": lambda: None})(lam=jnp.asarray(0.01)),
     r"law must take \(\), got one that cannot be called so"),
    (lambda: own(law=lambda: None), "law must be a method that returns a SpectralLaw, got law=None"),
    (lambda: own(law=lambda: dataclasses.replace(MODEL.law(), gamma=0.25)),
     r"law\(\).gamma must be an array, got one of <class 'float'>: write jnp.asarray\(gamma, float\)"),
    (lambda: own(shape=2), r"shape must be a tuple \(L, r, t\), got shape=2"),
    (lambda: own(field_scale=-1.0), "field_scale must be one positive number, got"),
    (lambda: own(tagret=lambda Y: Y @ Y.T), "tagret must be called target if it is what a Model calls so"),
    (lambda: type("Mine", (ta.DotProduct,), {"targt": lambda self, Y: Y @ Y.T})(**vars(ta.DotProduct())),
     "targt must be called target if it is what a Model calls so"),
    (lambda: own(rotation_invariant=True, **TWO_COLUMNS),
     "rotation_invariant must be left out for a loss that changes when the columns of Z are rotated"),
    (lambda: own(generators=np.array([[[0.0, 1.0], [-1.0, 0.0]]]), **TWO_COLUMNS),
     "generators must be left out for a loss that changes"),
    (lambda: with_numbers(lam=0.0), "lam must be"),
    (lambda: with_numbers(mixing=[[0.6, 0.6], [0.4, 0.6]]), "mixing must be row-stochastic"),
    (lambda: with_numbers(omega=1.5), "omega must be in"),
    (lambda: with_numbers(omega=1), "omega must be float64 like lam, got int64: what is no number is"),
    (lambda: with_numbers(sigma=1), "sigma must be float64 like lam, got int64"),
    (lambda: with_numbers(mixing=np.eye(2, dtype=int)), "mixing must be float64 like lam, got int64"),
    (lambda: with_numbers(omega=jnp.float32(0.3)), "omega must be float64 like lam, got float32"),
    (lambda: penalised(prox=None), r"penalty must have a method `prox\(v, c\)`, got Own without it"),
    (lambda: penalised(value=None), r"penalty must have a method `value\(w\)`, got Own without it"),
    (lambda: penalised(prox=lambda self, v: v), r"penalty.prox must take \(v, c\), got \(v\)"),
    (lambda: penalised(value=lambda self, w, c: w), r"penalty.value must take \(w\), got \(w, c\)"),
    (lambda: penalised(value=lambda self, w: jnp.sum(jnp.abs(w))), "penalty must have a finite value for"),
    (lambda: penalised(prox=lambda self, v, c: NAN * v), "penalty must have a finite prox for every entry"),
    (lambda: penalised(value=lambda self, w: jnp.sqrt(jnp.abs(w))), "penalty must be convex, got Own, whose"),
    (lambda: penalised(prox=lambda self, v, c: v),
     r"penalty must have prox\(v, c\) = argmin_w \(w - v\)\^2 / 2 \+ c value\(w\), got Own"),
    (lambda: penalised(value=lambda self, w: jnp.maximum(w, 0)), "penalty must be even for a branch by name"),
    (lambda: penalised(0.0, value=lambda self, w: 0 * w, prox=lambda self, v, c: v),
     "lam must be positive where the penalty does not grow, got lam=0.0"),
    (lambda: with_means(tau_mean=None), r"law\(\).tau_mean must be given for a penalty, got None: zeros for"),
    (lambda: with_means(pi_mean=None), r"law\(\).pi_mean must be given for a penalty"),
    (lambda: with_means(tau_mean=[1.0, -1.0]), r"law\(\).tau_mean must be of shape \(1, 2\), got shape \(2,\)"),
    (lambda: with_means(tau_mean=[[2.0, -2.0]]), r"law\(\) must have second moments that are no smaller"),
    (lambda: 3.0, "model must be a tiedattn_jax.Model, such as DotProduct"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "message"), MODELS, ids=[message for _, message in MODELS])
def test_models(make, message):
    model, calls = make(), [check, partial(ta.solve, alpha=1.0)]
    if "even" not in message:  # only named branches need an even loss
        calls.append(partial(ta.find_states, alpha=1.0))
    for call in calls:
        with pytest.raises(ta.InputError, match=message):
            call(model)


# Arguments of `DotProduct`. Some values are such that numpy turns into other numbers without a word.
LAYERS = [
    ({"omega": [0.1, 0.2]}, r"omega must be one number, got shape \(2,\)"), ({"omega": -0.1}, "omega must be in"),
    ({"omega": NAN}, "omega must be in"), ({"sigma": [0.1, 0.2]}, "sigma must be one number"),
    ({"sigma": "a"}, "sigma must be a real number"), ({"sigma": 1e200}, "sigma must be"),
    ({"sigma": 0.0}, "sigma must be"), ({"sigma": np.inf}, "sigma must be"),
    ({"sigma": np.True_}, "sigma must be a real number"), ({"lam": [0.1, 0.2]}, "lam must be one number"),
    ({"lam": -1.0}, "lam must be"),
    ({"penalty": "l1"}, r"penalty must be a tiedattn_jax.Penalty, such as L1\(0.01\), or None"),
    ({"mixing": np.zeros((0, 0))}, "mixing must be a square L x L matrix"), ({"mixing": "ab"}, "mixing must be"),
    ({"mixing": [[0.6, 0.4]]}, "mixing must be"), ({"mixing": [[1.4, -0.4], [0.4, 0.6]]}, "mixing must be"),
    ({"mixing": MASKED}, r"mixing must be .*, got mixing=masked_array\( data=\[\[--, 0.4\]"),
    ({"mixing": [["0.6", "0.4"], ["0.4", "0.6"]]}, "mixing must be a real number"),
    ({"mixing": [[True, False], [False, True]]}, "mixing must be a real number"),
    ({"encodings": np.zeros((2, 0))}, "encodings must be"), ({"encodings": [[1.0]]}, "encodings must be"),
    ({"teacher": NAN}, "teacher must be positive"), ({"teacher": -1.0}, "teacher must be positive"),
    ({"teacher": [[1.0, 0.9], [0.0, 1.0]]}, "teacher must be"),
    ({"rank": 1.5}, "rank must be an integer of at least 1, got rank=1.5"),
    ({"dtype": complex}, "dtype must be float32 or float64"),
    ({"dtype": "double precision"}, "dtype must be float32 or float64, got dtype='double precision'"),
]  # fmt: skip


def with_matrices(factor, turned=1.0, **options):
    return ta.SpectralLaw.from_matrices([factor * np.eye(4)] * 2, turned * np.eye(2, 4), np.ones((4, 1)), **options)


def complex_law():
    law = MODEL.law()
    return ta.SpectralLaw(law.weights, law.gamma, law.tau, law.pi, (1 + 1j) * law.cross)


CALLS = [
    *((partial(ta.DotProduct, **arguments), message) for arguments, message in LAYERS),
    (lambda: ta.L1(-1.0), "strength must be zero or positive, and finite, got strength=-1.0"),
    (lambda: Parameter("lamda").read(MODEL, 1.0, "x"), "x must name one of alpha, lam, omega, sigma, or an entry"),
    (lambda: with_matrices(1 + 1j), "covariances must be an array of real numbers"),
    (lambda: with_matrices(np.ma.array(1.0, mask=True)), "covariances must be an array of real numbers"),
    (lambda: with_matrices(1.0, 1j), "encodings must be an array of real numbers"),
    (lambda: with_matrices(1.0, dtype="half"), "dtype must be float32 or float64"),
    (lambda: ta.DotProduct(spectrum=complex_law()), "spectrum must be a real number or an array of them"),
    (lambda: ta.SpectralLaw.of_classes([1.0], {(0, 0): 1.0}, teacher_means=[0.1j]),
     "teacher_means must be an array of real numbers"),
    (lambda: ta.check(MODEL, even="no"), "even must be True or False, got even='no' of <class 'str'>"),
    (lambda: ta.TokenClassMixture.of({(True, 0): 1.0}), "sentences must be a dictionary of shares"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_layers_and_laws(call, message):
    with pytest.raises(ta.InputError, match=message):
        call()


def test_labels_drawn_from_a_row():
    """The sampled loss, averaged over its noise, is the cross-entropy of the target's rows."""
    model = model_of(Sampled, mixing=[[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.1, 0.2, 0.7]], encodings=np.eye(3))
    Z, Y = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 1)))
    levels = special.ndtri((np.arange(4000) + 0.5) / 4000)
    mean = np.mean(jax.jit(jax.vmap(lambda e: model.loss(Z, Y, jnp.full((3, 1), e))))(levels))
    exact = -0.25 * np.sum(eqx.filter_jit(model.target)(Y) * special.log_softmax(Z @ Z.T, 1))
    np.testing.assert_allclose(mean, exact, rtol=1e-3)
    check(model)


def test_what_a_loss_with_noise_must_be():
    class Odd(Noisy):
        def loss(self, Z, Y, noise):
            return jnp.sum(Z * Y) + jnp.sum(noise**2)

    class Negative(Noisy):
        noise = -1

    other_nodes = ta.Sobol(64).rule(ta.DotProduct())
    check(model_of(Odd), even=False)
    for call, message in (
        (lambda: check(model_of(Odd)), "loss must be even in Z and in Y"),
        (lambda: check(model_of(Negative)), "noise must be an integer of at least 0"),
        (
            lambda: ta.solve(model_of(Noisy), 1.0, nodes=other_nodes),
            r"nodes must .* \(L, r, t\) = \(2, 1, 2\)",
        ),
    ):
        with pytest.raises(ta.InputError, match=message):
            call()


SENTENCES = ta.SpectralLaw.of_classes((0.25, 0.36), {(0, 0): 0.5, (1, 1): 0.5})
# A keyword of `needs`, a model that is not of this kind, and the message.
KINDS = [
    ({"provides": {"target": "for labels"}}, plain, "must have a method `target` for labels, got Plain without it"),
    ({"float64": True}, lambda: ta.DotProduct(dtype=jnp.float32), "must be in float64 for maps: use .*, got float32"),
    ({"smooth": True}, ta.ReLUAttention, "must have a loss without kinks for maps, got ReLUAttention"),
    ({"ridge_only": True}, penalised, "must have no penalty besides the ridge for maps, got Own"),
    ({"independent": True}, lambda: ta.DotProduct(spectrum=SENTENCES), "must have tokens without classes for maps"),
    ({"orthogonal": True}, lambda: plain(cross=[[[1.2e-6], [-1.2e-6]]]), "zero, a teacher orthogonal to .* maps"),
    ({"same": ("gamma",)}, lambda: two_atoms(weights=[0.5, 0.5], gamma=[[1.0, 1.0], [1.0, 1.0 + 1.2e-6]]),
     "gamma must be the same at all atoms of positive weight, with one eigenvalue each for maps"),
    ({"same": ("gamma", "pi")}, lambda: two_atoms(weights=[0.5, 0.5], pi=[[[1.0]], [[1.1]]]), "pi must be the same at"),
]  # fmt: skip
ALL_KINDS = {
    "provides": {"target": "for labels", "student": "for errors"}, "float64": True, "smooth": True, "ridge_only": True,
    "independent": True, "orthogonal": True, "same": ("gamma", "pi"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "make", "message"), KINDS, ids=[next(iter(kind)) for kind, *_ in KINDS])
def test_the_kind_of_model_that_a_computation_takes(kind, make, message):
    """A model of another kind is refused where it matters, and taken without the keyword."""
    needs(make(), "maps", even=False)
    with pytest.raises(ta.InputError, match=message):
        needs(make(), "maps", even=False, **kind)


def test_models_of_every_kind_that_a_computation_takes():
    needs(MODEL, "maps", **ALL_KINDS)
    for model in (
        two_atoms(weights=[0.5, 0.5], gamma=[[1.0, 1.0], [1.0, 1.0 + 9e-7]]),
        two_atoms(weights=[1.0, 0.0], gamma=[[1.0, 1.0], [9.0, 4.0]]),  # an atom without weight may differ
        plain(cross=[[[9e-7], [-9e-7]]]),
    ):
        needs(model, "maps", **(ALL_KINDS | {"provides": {}}))
    check_provides(MODEL, "preimages", "for labels")
    with pytest.raises(ta.InputError, match="loss must be even"):
        needs(own(loss=lambda Z, Y: jnp.sum(Z)), "maps")
    jax.jit(lambda lam: needs(eqx.tree_at(lambda m: m.lam, MODEL, lam), "maps", **ALL_KINDS) or lam)(0.1)


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
     "nonsmooth must be True"),
    (lambda: own(nonsmooth=True, loss=lambda Z, Y: jnp.sum(Y**2) + jnp.sum(Z**2) - jnp.sum(jnp.abs(Z))),
     lambda: own(nonsmooth=True, loss=lambda Z, Y: jnp.sum(Y**2) + jnp.sum(Z**2) + 1e-4 * jnp.sum(jnp.abs(Z))),
     "loss must not have a slope that jumps upwards"),
    (lambda: plain(weights=[1 + 1e-14]), lambda: plain(weights=[1 + 1e-13]), r"law\(\).weights must be shares"),
    (lambda: two_atoms(weights=[1.0, 0.0]), lambda: two_atoms(weights=[1.0 + 1e-3, -1e-3]), "weights must be shares"),
    (lambda: two_atoms(weights=[0.5, 0.5], gamma=[[0.0, 0.2], [0.2, 0.0]]),
     lambda: two_atoms(weights=[0.5, 0.5], gamma=[[0.0, 0.2], [0.0, 0.2]]), "gamma must be eigenvalues >= 0, not"),
    (lambda: plain(tau=[[[1.0, 0.3], [0.3, 1.0]]]), lambda: plain(tau=[[[1.0, 0.3], [0.3 + 1e-9, 1.0]]]), "symmetric"),
    (lambda: plain(cross=[[[1.0], [-1.0]]]), lambda: plain(cross=[[[1.0 + 1e-9], [-1.0 - 1e-9]]]), "semidefinite"),
    (lambda: plain(pi=[[[1e-9]]]), lambda: plain(pi=[[[0.0]]]), "rho must be positive definite"),
    (lambda: with_means(tau_mean=[[1.0, -1.0]]), lambda: with_means(tau_mean=[[1.0 + 1e-9, -1.0]]), "no smaller than"),
    (lambda: with_means(tau_mean=[[0.0, 0.0]], pi_mean=[[1.0]]),
     lambda: with_means(tau_mean=[[0.0, 0.0]], pi_mean=[[1.0 + 1e-9]]), "no smaller than those of its means"),
    (lambda: own(field_scale=1e-3), lambda: own(field_scale=0.0), "field_scale must be one positive number"),
    (lambda: own(field_scale=np.float64(2)), lambda: own(field_scale=np.inf), "field_scale must be one positive"),
    (lambda: own(field_scale=2), lambda: own(field_scale=np.ones(1)), "field_scale must be one positive number"),
    (lambda: own(shape=(2, 1, 1)), lambda: own(shape=(2, 1)), r"shape must be a tuple \(L, r, t\), got shape=\(2, 1\)"),
    (lambda: own(shape=(2, 1, 1)), lambda: own(shape=[2, 1, 1]), r"shape must be a tuple \(L, r, t\)"),
    (lambda: own(shape=(2, 1, 1)), lambda: own(shape=(2, 0, 1)), "shape must be an integer of at least 1"),
    (lambda: plain(1e-300), lambda: plain(np.inf), "lam must be one positive number"),
    (lambda: penalised(0.0), lambda: penalised(-1e-9), "lam must be"),
    (lambda: own(_taget=lambda Y: Y), lambda: own(studnt=lambda Z: Z @ Z.T), "studnt must be called student if it"),
    (lambda: own(target=lambda Y: Y @ Y.T), lambda: own(target=lambda Y: (Y @ Y.T)[:1]), "target must return an"),
    (lambda: ta.DotProduct(0.0), lambda: with_numbers(omega=-1e-9), r"omega must be in \[0, 1\]"),
    (lambda: ta.DotProduct(1.0), lambda: with_numbers(omega=1 + 1e-9), r"omega must be in \[0, 1\]"),
    (lambda: with_numbers(mixing=[[0.6, 0.4 + 5e-6], [0.4, 0.6]]),
     lambda: with_numbers(mixing=[[0.6, 0.4 + 2e-5], [0.4, 0.6]]),
     "mixing must be row-stochastic"),
    (lambda: with_numbers(mixing=[[0.0, 1.0], [1.0, 0.0]]), lambda: with_numbers(mixing=[[-1e-9, 1.0], [1.0, 0.0]]),
     "mixing must be row-stochastic"),
    (lambda: with_numbers(sigma=1e-100), lambda: with_numbers(sigma=1e-160), "sigma must be positive, with a finite"),
    (lambda: ta.DotProduct(teacher=[[1.0, 0.999], [0.999, 1.0]]),
     lambda: with_numbers(teacher=[[1.0, 1.0], [1.0, 1.0]]),
     "teacher must be positive"),
]  # fmt: skip


@pytest.mark.parametrize(("within", "beyond", "message"), BOUNDS)
def test_bounds_of_what_a_model_may_be(within, beyond, message):
    check(within())
    with pytest.raises(ta.InputError, match=message):
        check(beyond())


def test_the_size_of_a_kink_and_its_place():
    """A jump of the slope is found in the direction that is asked for, and is relative to the largest slope."""
    bent = own(loss=lambda Z, Y: jnp.sum(Z**2) - 0.5 * jnp.abs(Z[0, 0] - 0.3))
    jump, place = kink(bent, [jnp.ones((2, 1))], -1)
    assert 0.05 < jump < 1 and abs(place[0, 0] - 0.3) < 1e-9 and place.shape == (2, 1)
    assert kink(bent, [jnp.ones((2, 1))], 1)[0] < 1e-9
    line = np.random.default_rng(1).standard_normal((2, 4, 2, 1))
    slopes = []
    for origin, direction in zip(*line[..., 0], strict=True):
        s = np.linspace(-4, 4, 100001)[:, None]
        z = origin + s * direction
        slope = np.abs(2 * np.sum(z * direction, 1) - 0.5 * np.sign(z[:, 0] - 0.3) * direction[0])
        is_crossed = np.ptp(np.sign(z[:, 0] - 0.3)) > 0
        slopes.append(is_crossed * np.abs(direction[0]) / slope.max())
    np.testing.assert_allclose(jump, max(slopes), rtol=1e-3)
