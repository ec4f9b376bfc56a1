"""The functions of the room refuse bad input, each in one sentence; see also `test_kinds`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated import setting

import tiedattn_jax as ta

MODEL, PENALTY, KINKS = ta.DotProduct(), ta.DotProduct(penalty=ta.L1(0.1)), ta.ReLUAttention()
PLANE = [[1.0, 0.0], [0.0, 1.0]]


class Unbounded(ta.DotProduct):
    """A target that grows with the teacher's fields."""

    def loss(self, Z, Y):
        return jnp.sum((Z @ Z.T - Y @ Y.T) ** 2)


def two_atoms(change=0.0, cross=0.0):
    """Two eigenvalues of the covariance, and tokens of different variance."""
    p, unit = np.array([[1.0], [-1.0]]), np.ones((2, 1, 1))
    gamma = [[0.4, 0.1], [0.2, 0.05 * (1 + change)]]
    return ta.DotProduct(spectrum=ta.SpectralLaw([0.5, 0.5], gamma, unit * (p @ p.T), unit, unit * cross * p))


ARGUMENTS = {
    "sgd": {"model": MODEL, "start": (0.5, 0.15, 0.15), "eta": 1.0, "until": 1.0},
    "emergence": {"model": MODEL, "R": 0.5, "eta": 2.0, "until": 40.0},
    "population": {"model": MODEL},
    "landscape": {"model": MODEL, "size": 1.0},
    "small_start": {"model": MODEL, "alpha": 2.0},
}
ONE_DIRECTION = "size must be None unless student, teacher and encodings have one direction each"
STUDENT = "start must have overlaps that a student can have"
REFUSED = {
    "sgd": [
        ({"model": KINKS}, "without kinks"),
        ({"model": PENALTY}, "no penalty"),
        ({"eta": 0.0}, "eta must be positive"),
        ({"until": -1.0}, "until must be positive"),
        ({"kappa": -0.1}, "kappa must be zero or positive"),
        ({"points": 1}, "points"),
        *(({"steps": n}, f"steps must be a power of two up to 1024, got steps={n}") for n in (3, 6, 2048)),
        ({"nodes": ta.Sobol(16).rule(ta.DotProduct(teacher=np.eye(2)))}, "nodes"),
        ({"start": (0.04, 0.2, 0.1)}, "R larger than"),
        ({"start": (0.5, 0.2)}, "start must be .*, got 2 entries"),
        ({"start": 0.5}, "start must be"),
        ({"start": (0.5, 0.2, [[0.1], [0.1]])}, STUDENT + r" \(m_1 = -m_2"),
        ({"start": (0.5, [[0.2, 0.1]], 0.1)}, "Theta of shape"),
        ({"start": (0.5, 0.2, np.zeros((3, 1)))}, r"start must have m of shape \(2, 1\), got shape \(3, 1\)"),
        ({"start": (np.ones((2, 2)), 0.2, 0.1)}, r"start must have R of shape \(1, 1\), got shape \(2, 2\)"),
    ],
    "emergence": [
        ({"R": -1.0}, "R must be positive definite"),
        ({"R": 0.0}, "R must be positive definite"),
        ({"R": np.ones((2, 2))}, "R must be"),
        *(({"model": ta.DotProduct(rank=2), "R": R}, "R must be")
          for R in ([[0.5, 0.2], [0.1, 0.5]], [[0.5, 0.6], [0.6, 0.5]], np.ones((1, 2)))),
        ({"eta": 0.0}, "eta"),
        ({"until": -1.0}, "until"),
        ({"kappa": -1.0}, "kappa"),
        ({"points": 1}, "points"),
        ({"steps": 0}, "steps"),
        ({"model": KINKS}, "without kinks"),
        ({"model": setting(20, ((0.1, 0.15), (0.5, 0.3)))[0]}, "one eigenvalue"),
    ],
    "population": [
        ({"kappa": -0.1}, "kappa must be zero or positive, and finite"),
        ({"branch": "uninformed"}, "branch must be 'semantic'"),
        ({"model": PENALTY}, "model must have no penalty"),
        ({"model": KINKS}, "model must have a loss without kinks"),
        ({"branch": None, "start": (1.0, 0.5, 0.1)}, r"start must be \(Theta, m\)"),
        ({"branch": None, "start": (0.5, [[0.1], [0.1]])}, STUDENT),
        ({"branch": None, "start": [np.ones((1, 1)), np.ones((2, 1))]}, r"start must be \(Theta, m\)"),
        ({"start": (0.0, 0.5)}, "start must overlap with what the branch leaves free"),
        ({"start": (1e5, 0.0)}, "start must overlap .* by fields of size at most 256"),
    ],
    "landscape": [
        ({"size": -1.0}, "size"),
        ({"kappa": -1.0}, "kappa"),
        ({"model": KINKS}, "without kinks"),
        *(({"model": ta.DotProduct(**options)}, ONE_DIRECTION) for options in (
            {"teacher": np.eye(2)}, {"rank": 2}, {"encodings": PLANE},
            {"mixing": np.full((3, 3), 1 / 3), "encodings": [*PLANE, [-1.0, 0.0]]},
        )),
    ],
    "small_start": [
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"model": PENALTY}, "model must have no penalty"),
        ({"model": KINKS}, "model must have a loss without kinks"),
        ({"model": Unbounded()}, "model must have a bounded target"),
        ({"model": ta.UntiedDotProduct()}, "model must have a loss with the same second derivative"),
        ({"model": two_atoms(cross=0.1)}, r"law\.cross must be zero"),
        *(({"model": two_atoms(c)}, r"law\.gamma must be those of covariances Sigma_l = s_l") for c in (1e-5, 0.5)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [pytest.param(name, *row, id=f"{name}-{k}") for name, rows in REFUSED.items() for k, row in enumerate(rows)],
)
def test_bad_input(name, change, message, unchecked):
    with pytest.raises(ta.InputError, match=message):
        getattr(ta.dynamics, name)(**ARGUMENTS[name] | change)


@pytest.mark.parametrize(("change", "message"), REFUSED["landscape"][:4])
def test_a_sweep_refuses_what_its_question_does(change, message):
    with pytest.raises(ta.InputError, match=message):
        ta.sweep(ta.dynamics.landscape, **{"omega": [0.3]} | ARGUMENTS["landscape"] | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("encoding", 100), "mechanism"), (("teacher", -1), "d"),
        *((("teacher", 9, share), "share must be between 0 and 1") for share in (0.0, 1.0, 2.0)),
    ],
)  # fmt: skip
def test_bad_questions(arguments, message, unchecked):
    path = ta.results.Emergence(MODEL, jnp.asarray(1.0), jnp.asarray(0.0), jnp.linspace(0, 1, 3), None)
    with pytest.raises(ta.InputError, match=message):
        path.time(*arguments)


GRID = ta.GaussHermite(5, replicates=1)


PATH = {"nodes": GRID, "points": 3, "steps": 2}
# Each row has a function of numbers, the names of what it returns, numbers that are right, and others that are wrong.
TRACED = {
    "sgd": (
        lambda R, **numbers: ta.dynamics.sgd(MODEL, (R, 0.15, 0.15), **PATH, **numbers),
        lambda p: (p.R[-1], p.risk[-1], p.crossing("risk below", 1.0).t),
        {"R": 0.5, "eta": 1.0, "until": 12.0, "kappa": 0.005}, {"R": 0.01, "eta": -1.0, "until": 0.0, "kappa": -0.1},
    ),
    "emergence": (
        lambda **numbers: ta.dynamics.emergence(MODEL, **PATH, **numbers),
        lambda p: (p.mean.R[-1], p.mean.growth_teacher[-1], p.time("encodings", 1.0, 0.9).t),
        {"R": 0.5, "eta": 1.0, "until": 12.0, "kappa": 0.0}, {"R": -0.5, "eta": 0.0, "until": np.inf, "kappa": -1.0},
    ),
    "population": (
        lambda **numbers: ta.dynamics.population(MODEL, nodes=GRID, **numbers),
        lambda p: (p.R, p.risk, p.curvature), {"kappa": 0.005}, {"kappa": -0.1},
    ),
    **{
        name: (
            lambda **numbers: ta.dynamics.landscape(MODEL, nodes=GRID, **numbers),
            lambda p: (p.mean.semantic, p.mean.curvature_positional), right, wrong,
        )
        for name, right, wrong in (
            ("landscape", {"kappa": 0.005}, {"kappa": -0.1}), ("a sphere", {"size": 1.0}, {"size": -1.0})
        )
    },
    "small_start": (
        lambda **numbers: ta.dynamics.small_start(MODEL, nodes=GRID, **numbers),
        lambda p: (p.encodings, p.teacher, p.bulk), {"alpha": 2.0}, {"alpha": -2.0},
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", TRACED)
def test_traced_numbers_out_of_their_range(name):
    """Numbers that are refused give NaN, and a status that is not ok, where jax traces them."""
    ask, read, right, wrong = TRACED[name]
    traced = jax.jit(lambda numbers: ((found := ask(**numbers)).status, read(found)))
    status, values = traced(right)
    assert status in (0, 2) and np.all(np.isfinite(values[0])), values
    for argument, value in wrong.items():
        with pytest.raises(ta.InputError, match="must"):
            ask(**right | {argument: value})
        status, values = traced(right | {argument: value})
        assert status not in (0, 1), argument
        for a in values:
            assert np.all(np.isnan(a)), (argument, values)
