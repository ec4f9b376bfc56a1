"""Exact twins: settings that differ in units or in how they are written, but not in what they compute.

A public function joins with a `Question` in `asked`: how it is asked of a setting, and which of its numbers are
compared. A number has a dimension, the powers of the units of weights, fields and loss by which it scales.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Fields, Rule

ALPHA, LAM, D, N = 4.0, 0.02, 40, 60
MIXING, ENCODINGS = np.array([[0.6, 0.4], [0.35, 0.65]]), np.array([[1.0, 0.0], [-0.8, 0.3]])
GRAM = np.array([[1.0, 0.3], [0.3, 0.6]])  # of a teacher of two columns
_RNG = np.random.default_rng(7)
_SPECTATOR = {"x": 0.08 * _RNG.standard_normal((1, N, D)), "y": _RNG.standard_normal((N, 1, 2))}
_TURN = np.linalg.qr(_RNG.standard_normal((D, D)))[0]
_ROTATION = np.array([[0.6, 0.8], [-0.8, 0.6]])

_LOSSES = "train_loss gen_error train_loss_direct rs_error by_alpha by_omega energy elevation risk positional semantic"
# Powers of the units of (weights, fields, loss); numbers that are not listed have none.
DIMENSIONS = {
    **dict.fromkeys(("q", "theta", "q1", "q0"), (0, 2, 0)),
    **dict.fromkeys(("R", "Theta"), (2, 0, 0)),
    **dict.fromkeys(_LOSSES.split(), (0, 0, 1)),
    **dict.fromkeys(("lam", "kappa", "curvature", "rate"), (-2, 0, 1)),
    **dict.fromkeys(("gen_error_linear", "output"), (-2, 2, 0)),  # squares of outputs, whatever the loss is
    "token": (-1, 1, 0),
    **dict.fromkeys(("m", "field"), (0, 1, 0)),
    "V": (0, 2, -1),
    "s": (0, 0, -1),
    "eta": (2, 0, -1),
    "loss_by_lam": (2, 0, 0),
    "alpha_by_lam": (2, 0, -1),
    "weight": (1, 0, 0),
    "gradient": (-1, 0, 1),
}


class Unit(NamedTuple):
    """Units of a twin; powers of two, so that its numbers are rounded as those of the standard setting."""

    weights: float = 1.0
    fields: float = 1.0
    loss: float = 1.0

    def of(self, name: str) -> float:
        return float(np.prod(np.power(np.array(self), DIMENSIONS.get(name, (0, 0, 0)))))


class Own(ta.DotProduct):
    """Dot-product attention of the first two tokens, with units of its own for fields and loss."""

    loss_unit: Any = 1.0
    field_unit: Any = 1.0

    @property
    def field_scale(self):
        return self.field_unit

    def attention(self, fields):
        seen, L = fields[:2] / self.field_unit, len(fields)
        return jnp.eye(L, dtype=fields.dtype).at[:2, :2].set(jax.nn.softmax(seen @ seen.T))

    def loss(self, Z, Y, *noise):
        return self.loss_unit * super().loss(Z, Y, *noise)

    def preimages(self, Y):
        return ta.bayes.orbit(Y)


ONE = Unit()


def isotropic(unit: Unit = ONE, encodings: Any = ENCODINGS, mixing: Any = MIXING, **options: Any) -> ta.Model:
    token, own = unit.of("token"), {}
    if unit.fields != 1 or unit.loss != token**2 or len(encodings) > 2:
        own = {"loss_unit": unit.loss / token**2, "field_unit": unit.fields}
    options = {"lam": LAM, "teacher": 1.0} | options
    scaled = {
        "sigma": 0.5 * token,
        "encodings": token * np.array(encodings),
        "lam": options.pop("lam") * unit.of("lam"),
    }
    teacher = unit.weights**2 * np.array(options.pop("teacher"))
    return (Own if own else ta.DotProduct)(omega=0.3, mixing=mixing, teacher=teacher, **scaled, **own, **options)


def in_atoms(**options: Any) -> ta.Model:
    """One atom in two that share the encodings unequally, and an empty one."""
    tau = np.array([2.0, 0.4 / 0.7, 5.0])[:, None, None] * (ENCODINGS @ ENCODINGS.T)
    gamma = [[0.25, 0.25], [0.25, 0.25], [7.0, 7.0]]
    law = ta.SpectralLaw([0.3, 0.7, 0.0], gamma, tau, [[[1.0]], [[1.0]], [[9.0]]], np.zeros((3, 2, 1)))
    return ta.DotProduct(omega=0.3, mixing=MIXING, spectrum=law, **{"lam": LAM} | options)


def in_classes(**options: Any) -> ta.Model:
    """Tokens of four equal classes in three kinds of sentences."""
    law = ta.SpectralLaw.of_classes([0.25] * 4, {(0, 1): 0.25, (2, 3): 0.5, (3, 1): 0.25}, encodings=ENCODINGS)
    return ta.DotProduct(omega=0.3, mixing=MIXING, spectrum=law, **{"lam": LAM} | options)


def with_spectator(**options: Any) -> ta.Model:
    mixing = np.block([[MIXING, np.zeros((2, 1))], [np.zeros((1, 2)), np.ones((1, 1))]])
    return isotropic(encodings=np.vstack([ENCODINGS, [0.0, 0.0]]), mixing=mixing, **options)


class Twin(NamedTuple):
    """A setting, and how it lies to the standard one.

    Attributes:
        model: function that makes the model, with further options.
        order: its tokens, by their places in the standard setting; 2 is the spectator.
        mirror: sign of all fields.
        turn: rotation of the space of the tokens.
        columns: rotation of the columns of the teacher, and of the student if it has as many.
        same: whether nodes and draws of the standard setting are those of the twin.
        recompiled: whether it needs other programs than the standard setting.
    """

    model: Callable[..., ta.Model] = isotropic
    unit: Unit = ONE
    order: tuple[int, ...] = (0, 1)
    mirror: float = 1.0
    turn: Any = np.eye(D)
    columns: Any = None
    same: bool = False
    recompiled: bool = False


def _units(**units: float) -> Twin:
    unit = Unit(**units)
    own = unit.of("token") ** 2 != unit.loss or unit.fields != 1
    return Twin(lambda **options: isotropic(unit, **options), unit, same=True, recompiled=own)


def _of_columns(columns: Any) -> Twin:
    return Twin(lambda **options: isotropic(teacher=columns @ GRAM @ columns.T, **options), columns=columns)


UNITS = {
    "": Twin(same=True),
    "small tokens": _units(weights=2.0**7, loss=2.0**-14),
    "large tokens": _units(weights=2.0**-8, loss=2.0**16),
    "unit of the loss": _units(loss=2.0**24),
    "unit of the fields": _units(weights=2.0**-6, fields=2.0**-6),
}
TWINS = UNITS | {
    "signs": Twin(lambda **options: isotropic(encodings=-ENCODINGS, **options), turn=-np.eye(D)),
    "span of the encodings": Twin(
        lambda **options: isotropic(encodings=ENCODINGS @ [[0.6, 0.0, 0.8], [0.8, 0.0, -0.6]], **options),
        turn=_TURN,
        recompiled=True,
    ),
    "atoms": Twin(in_atoms, recompiled=True),
    "classes": Twin(in_classes, recompiled=True),
    "exchanged tokens": Twin(
        lambda **options: isotropic(encodings=ENCODINGS[::-1], mixing=MIXING[::-1, ::-1], **options),
        order=(1, 0),
        mirror=-1.0,
    ),
    "a spectator": Twin(with_spectator, order=(0, 1, 2), recompiled=True),
}
# Wide layers: scores, the teacher's matrix and the temperature in other units; tau is a slope of the loss in a matrix.
_EIGENVALUES = [0.0, 0.3, 1.0, 2.5]


def _wide(c: float, eigenvalues: Any = _EIGENVALUES) -> Twin:
    options = {"beta": 1 / c, "tau": 0.05 / c, "teacher": c * np.array(eigenvalues)}
    split = len(eigenvalues) > len(_EIGENVALUES)
    return Twin(lambda **more: ta.wide.DotProduct(**options, **more), Unit(fields=c), recompiled=split)


WIDE = {"": _wide(1.0), "small": _wide(2.0**-13), "large": _wide(2.0**13), "split atoms": _wide(1.0, _EIGENVALUES * 2)}
COLUMNS = {"": _of_columns(np.eye(2)), "turned columns": _of_columns(_ROTATION), "signs": _of_columns(-np.eye(2))}


class Case:
    """A twin that a question is asked of."""

    def __init__(self, twin: Twin, standard: Twin):
        self.twin, self.standard = twin, standard

    @cached_property
    def model(self) -> ta.Model:
        return self.twin.model()

    def unit(self, value: Any, name: str) -> Any:
        """Return an argument in the units of the twin."""
        return value * self.twin.unit.of(name)

    def _columns(self, count: int) -> np.ndarray:
        """Return the rotation of so many columns."""
        return np.eye(count) if self.twin.columns is None or count == 1 else self.twin.columns

    def rule(self, recipe: Any, student: int | str | None = None) -> Rule:
        """Return the rule of a recipe; single nodes are in the fields of the twin.

        Args:
            student: as in `Fields.of`, or "label": as many fields as a label has.
        """
        twin, t = self.twin, self.model.shape[2]
        student = self.standard.model().columns[1] if student == "label" else student
        if twin.same or isinstance(recipe, ta.Lines):
            return recipe.rule(Fields.of(self.model, student))
        O = self._columns(t)
        root, turned = (np.linalg.cholesky(g[:t, :t]) for g in (GRAM, O @ GRAM[:t, :t] @ O.T))
        to_normals = np.linalg.inv(turned) @ O @ root  # Cholesky roots of turned columns are not turned roots

        def moved(a: Any) -> Any:
            return jnp.asarray(twin.mirror * np.concatenate([a, 0 * a[..., :1, :, :]], -3)[..., twin.order, :, :])

        def of(stack: Any) -> Any:
            teacher = moved(np.einsum("st,...tn->...sn", to_normals, stack.teacher))
            return eqx.tree_at(lambda s: (s.student, s.teacher), stack, (moved(stack.student), teacher))

        rule = recipe.rule(Fields.of(self.standard.model(), student))
        return Rule(of(rule.stack), of(rule.coarse))

    def data(self, **options: Any) -> ta.Data:
        """Return sentences of the standard setting as those of the twin."""
        model, twin = self.standard.model(**options), self.twin
        data = ta.sample_data(model, D, N / D, jax.random.key(5))
        order, token, O = np.array(twin.order), self.twin.unit.of("token"), self._columns(model.shape[2])
        x, y = np.concatenate([data.x, _SPECTATOR["x"]]), _SPECTATOR["y"][..., : model.shape[2]]
        y, p = np.concatenate([data.y, y], 1), np.concatenate([data.encodings, np.zeros((1, D))])
        gamma = np.concatenate([data.gamma, data.gamma[:1]])
        arrays = {
            "x": token * x[order] @ twin.turn,
            "y": twin.unit.fields * y[:, order] @ O.T,
            "teacher": self.weights(data.teacher),
            "encodings": token * p[order] @ twin.turn,
            "gamma": token**2 * gamma[order],
        }
        return ta.Data(**{name: jnp.asarray(a) for name, a in arrays.items()})

    def labelled(self) -> ta.Data:
        """Return the data with their exact labels."""
        data = self.data()
        arrays = {name: getattr(data, name) for name in ("teacher", "encodings", "gamma", "means", "classes")}
        return ta.Data.from_sentences(data.inputs(), data.raw_labels(self.model), **arrays)

    def weights(self, Q: Any) -> Any:
        """Return weights of the standard setting as those of the twin."""
        return jnp.asarray(self.unit(self.twin.turn.T @ Q @ self._columns(Q.shape[1]).T, "weight"))

    def overlaps(self, x: ta.Overlaps) -> ta.Overlaps:
        """Return overlaps of the standard setting as those of the twin."""
        theta = np.asarray(x.theta) @ self._columns(x.theta.shape[2]).T
        arrays = {"q": x.q, "V": x.V, "theta": theta, "m": self.twin.mirror * x.m}
        order = np.array(self.twin.order)
        return ta.Overlaps(**{name: jnp.asarray(self.unit(a[order], name)) for name, a in arrays.items()})

    def back(self, dimension: str, a: Any) -> np.ndarray:
        """Return a number of the twin as that of the standard setting."""
        a, places = np.asarray(a) / self.twin.unit.of(dimension), np.argsort(self.twin.order)[:2]
        if dimension in ("q", "V", "theta") and a.ndim > 2:
            a = np.take(a, places, -3)
        if dimension == "m" and a.ndim > 1:
            a = self.twin.mirror * np.take(a, places, -2)
        if dimension in ("theta", "Theta") and a.ndim > 1:
            a = a @ self._columns(a.shape[-1])
        if dimension == "weight" and a.ndim > 1:
            a = self.twin.turn @ a @ self._columns(a.shape[1])
        return a


class Question(NamedTuple):
    """How a function is asked.

    Attributes:
        function: the public function.
        ask: function of a case that returns the numbers by name, each with its dimension, and texts.
        twins: the settings that it is asked of.
        without: further twins that do not apply.
        long: whether its tests are long, those of all twins or of those that need other programs.
    """

    function: Callable
    ask: Callable[[Case], dict]
    twins: dict[str, Twin] = TWINS
    without: tuple[str, ...] = ()
    long: bool | str = False

    def is_long(self, twin: str) -> bool:
        return self.twins[twin].recompiled if self.long == "recompiled" else bool(self.long)

    @property
    def room(self) -> str:
        return "wide" if self.twins is WIDE else self.function.__module__.split(".")[1]


def numbers(source: Any, names: str) -> dict:
    """Return attributes of a result with their dimensions: `names` lists "name" or "name:dimension"."""
    pairs = [(name, dimension or name) for name, _, dimension in (item.partition(":") for item in names.split())]
    return {name: (getattr(source, name), dimension) for name, dimension in pairs}


_standard: dict[str, dict] = {}


def _asked(name: str, question: Question, twin: str) -> dict:
    return asked_of(question, Case(question.twins[twin], question.twins[""]))


def asked_of(question: Question, case: Case) -> dict:
    """Return the numbers of a case as those of the standard setting, and its texts."""
    found = question.ask(case)
    return {name: a if isinstance(a, str) else case.back(a[1], a[0]) for name, a in found.items()}


def check(name: str, question: Question, twin: str) -> None:
    """Assert that the numbers of a twin are those of the standard setting, in its units."""
    if name not in _standard:
        _standard[name] = _asked(name, question, "")
    compare(_asked(name, question, twin), _standard[name])


def compare(found: dict, expected: dict, rtol: float = 1e-7, least: float = 0.0) -> None:
    """Assert that numbers are the expected ones to `rtol`, relative to their size or to the `least` one."""
    assert list(found) == list(expected)
    for key, b in expected.items():
        if isinstance(b, str):
            assert found[key] == b, key
        else:
            # The error by breaking and an error bar have the rounding of the loss and of the value.
            whole = key.replace("rs_error", "train_loss").replace("stderr of", "mean").replace("stderr", "value")
            scale = expected.get(whole, b)
            size = np.max(np.abs(scale[np.isfinite(scale)]), initial=least)
            np.testing.assert_allclose(found[key], b, rtol=rtol, atol=rtol * size, err_msg=key)
