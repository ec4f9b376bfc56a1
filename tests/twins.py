"""Exact twins: settings that differ in units or in how they are written, but not in what they compute.

A public function joins with a `Question`: how it is asked of a model whose fields have the unit c, and the power of c
by which each of its numbers scales. `check` compares the numbers of a twin with those of the standard setting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import tiedattn_jax as ta

NODES = ta.GaussHermite(8, replicates=2)


class Question(NamedTuple):
    ask: Callable[[ta.Model, float], Any]  # a result, whose numbers are attributes
    powers: dict[str, int]
    labels: tuple[str, ...] = ()  # attributes that are the same for all twins


def isotropic(c=1.0, encodings=((1.0,), (-1.0,)), lam=0.01):
    """Tokens and encodings c times as large, teacher 1 / c times: the teacher's fields are the same."""
    return ta.DotProduct(sigma=0.5 * c, encodings=c * np.array(encodings), teacher=c**-2, lam=lam * c**4)


def in_atoms(weights, tau, pi, gamma):
    tau, pi = np.multiply.outer(tau, [[1.0, -1.0], [-1.0, 1.0]]), np.array(pi)[:, None, None]
    law = ta.SpectralLaw(weights, np.outer(gamma, [1.0, 1.0]), tau, pi, np.zeros((len(weights), 2, 1)))
    return ta.DotProduct(spectrum=law)


# Every twin with its unit of the fields.
TWINS: dict[str, tuple[Callable[[], ta.Model], float]] = {
    "small fields": (lambda: isotropic(0.02), 0.02),
    "large fields": (lambda: isotropic(100.0), 100.0),
    "signs": (lambda: isotropic(encodings=((-1.0,), (1.0,))), 1.0),
    "directions": (lambda: isotropic(encodings=((0.6, 0.8, 0.0), (-0.6, -0.8, 0.0))), 1.0),
    "atoms": (lambda: in_atoms([0.3, 0.7, 0.0], [2.0, 0.4 / 0.7, 5.0], [1.0, 1.0, 9.0], [0.25, 0.25, 7.0]), 1.0),
}


def _sgd(model, c):
    start = 0.5 / c**2, 0.15 / c**2, 0.15
    return ta.sgd(model, start, c**-4, 12.0, kappa=0.005 * c**4, nodes=NODES, points=5, steps=2)


def _emergence(model, c):
    options = {"kappa": 0.005 * c**4, "nodes": NODES, "points": 3, "steps": 1}
    return ta.emergence(model, 0.5 / c**2, c**-4, 12.0, **options)


_POINT = {"R": -2, "Theta": -2, "m": 0, "risk": 2, "gen_error": 2, "curvature": 4}
_HEIGHTS = {"semantic": 2, "positional": 2} | {
    f"{a}_{b}": 4 for a in ("curvature", "slope") for b in ("semantic", "positional")
}

QUESTIONS = {
    **{
        f"population {branch}": Question(
            lambda model, c, branch=branch: ta.population(model, 0.005 * c**4, branch, nodes=NODES), _POINT, ("stable",)
        )
        for branch in ("semantic", "positional", None)
    },
    "landscape": Question(lambda model, c: ta.landscape(model, 0.005 * c**4, nodes=NODES), _HEIGHTS, ("label",)),
    "sgd": Question(_sgd, {"R": -2, "Theta": -2, "m": 0, "gen_error": 2}),
    "emergence": Question(
        _emergence,
        {"R": -2, "encodings": -2, "teacher": -2, "growth_encodings": 0, "growth_teacher": 0},
        ("first",),
    ),
    "small_start": Question(
        lambda model, c: ta.small_start(model, 2.0),
        {"encodings": 4, "teacher": 4, "bulk": 4},
        ("first",),
    ),
    "bayes": Question(lambda model, c: ta.bayes(model, 0.4, nodes=NODES), {"q": 0, "gen_error": 2, "free_entropy": 0}),
}
_standard: dict[str, Any] = {}


def check(question: str, twin: str) -> None:
    """Assert that the numbers of a twin are those of the standard setting, in its units."""
    ask, powers, labels = QUESTIONS[question]
    if question not in _standard:
        _standard[question] = ask(isotropic(), 1.0)
    build, c = TWINS[twin]
    expected, result = _standard[question], ask(build(), c)
    assert result.status_name == expected.status_name
    for name, power in powers.items():
        a, b = (np.asarray(getattr(r.mean, name)) for r in (result, expected))
        np.testing.assert_allclose(c ** float(-power) * a, b, rtol=1e-6, atol=1e-7 * np.max(np.abs(b)), err_msg=name)
    for name in labels:
        assert getattr(result, name) == getattr(expected, name)
