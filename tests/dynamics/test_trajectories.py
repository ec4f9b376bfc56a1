"""Parts of a trajectory by another route: its students, events, errors, and how it and other results are printed."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.report import with_error
from tiedattn_jax.dynamics import flow, sgd as module
from tiedattn_jax.dynamics.landscape import Heights, Landscape, words_of
from tiedattn_jax.dynamics.population import _null, _pseudo_inverse
from tiedattn_jax.dynamics.small_start import SmallRates, SmallStart

pytestmark = pytest.mark.usefixtures("fast_compilation")
D = 6


@pytest.fixture(scope="module")
def grid(model):
    return ta.GaussHermite(6, replicates=2).rule(model)


@pytest.fixture(scope="module")
def path(model, grid):
    return ta.sgd(model, (0.5, 0.15, 0.15), 1.0, 12.0, kappa=0.005, nodes=grid, points=5, steps=2)


def test_a_student_in_six_dimensions():
    """Its numbers are those of its weights, of which every coordinate is an atom."""
    rng = np.random.default_rng(0)
    Sigma, teacher = rng.uniform(0.1, 0.5, (2, D)), rng.standard_normal((D, 2))
    encodings, Q = rng.standard_normal((2, D)) / D**0.5, rng.standard_normal((D, 3))
    law = ta.SpectralLaw.from_matrices(Sigma, encodings, teacher)
    model = ta.DotProduct(spectrum=law, rank=3)
    order = np.argsort([int(np.argmin(np.abs(np.asarray(law.pi)[:, 0, 0] - q**2))) for q in teacher[:, 0]])
    arrays = (np.einsum("ia,ib->iab", Q, b)[order] for b in (Q, teacher, D**0.5 * encodings.T))
    student = module._student(model, flow.Moments(*map(jnp.asarray, arrays)), jnp.asarray(0.3), jnp.asarray(0.2))
    expected = {
        "R": Q.T @ Q / D,
        "Theta": Q.T @ teacher / D,
        "m": encodings @ Q / D**0.5,
        "q": np.einsum("ia,li,ib->lab", Q, Sigma, Q) / D,
        "theta": np.einsum("ia,li,ib->lab", Q, Sigma, teacher) / D,
        "gen_error": 0.3,
        "risk": 0.3 + 0.1 * np.trace(Q.T @ Q / D),
    }
    for name, vectors in (("along_teacher", teacher), ("along_encodings", encodings.T)):
        basis = np.linalg.qr(vectors)[0]
        expected[name] = np.sum((basis.T @ Q) ** 2) / D
    assert set(expected) == set(vars(student))
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(student, name), value, rtol=1e-10, err_msg=name)
    # A change of the moments counts relative to the lengths of student, teacher and encodings.
    moments = flow.Moments(*(jnp.asarray(a) for a in np.split(np.ones((D, 3, 7)), [3, 5], 2)))
    longest = [np.max(np.abs(a)) ** 0.5 for a in (4 * moments.R, law.pi, law.tau)]
    for k, size in enumerate(longest):
        change = [0 * a for a in jax.tree.leaves(moments)]
        change[k] = change[k].at[2, 1, 0].set(-0.7)
        found = module._relative(flow.Moments(*change), eqx.tree_at(lambda s: s.R, moments, 4 * moments.R), law)
        assert float(found) == pytest.approx(0.7 / (2 * size), rel=1e-12)


def test_the_error_of_the_steps_is_that_of_half_as_many(model, grid, path):
    """It is the difference to a run with half as many steps, over 15, relative to the lengths; most lengths are one."""

    def run(points, steps):
        return ta.sgd(model, (0.5, 0.15, 0.15), 1.0, 12.0, kappa=0.005, nodes=grid, points=points, steps=steps)

    def moments(path, stride=1):
        return [np.asarray(a[0, ::stride]) for a in jax.tree.leaves(path.replicates.moments)]

    single, few = run(5, 1), run(3, 1)
    for fine, rough, stride in ((path, single, 1), (single, few, 2)):
        size = np.max(np.abs(moments(rough)[0]), (1, 2, 3)) ** 0.5
        gaps = [np.max(np.abs(a - b), (1, 2, 3)) for a, b in zip(moments(fine, stride), moments(rough), strict=True)]
        expected = max(np.max(gap / (size * other)) for gap, other in zip(gaps, (size, 1.0, 1.0), strict=True)) / 15
        np.testing.assert_allclose(fine.replicates.step_error[0], expected, rtol=1e-6)


def test_rates_are_derivatives_in_time(model, grid, path):
    """The rate of every number of the student is its derivative; here that of a parabola through three times."""
    short = ta.sgd(model, path, 1.0, 0.02, kappa=0.005, nodes=grid, points=5, steps=2)
    values, rates = short.replicates.student, short.replicates.rate
    for name, a in vars(values).items():
        middle = (np.asarray(a)[:, 3] - np.asarray(a)[:, 1]) / 0.01
        np.testing.assert_allclose(np.asarray(getattr(rates, name))[:, 2], middle, rtol=1e-4, atol=1e-9, err_msg=name)


def test_the_root_of_a_cubic():
    """The time of an event is exact for a cubic, the first of several; what is rounding is not below zero."""
    t = jnp.linspace(1.0, 4.0, 7)
    roots = 2.2, 3.1, 3.7
    f = (t - roots[0]) * (t - roots[1]) * (t - roots[2])
    slope = sum((t - a) * (t - b) for a, b in ((roots[0], roots[1]), (roots[0], roots[2]), (roots[1], roots[2])))
    assert float(module._first_root(f, slope, t)) == pytest.approx(2.2, rel=1e-9)
    assert float(module._first_root(-f, -slope, t)) == pytest.approx(3.1, rel=1e-9)
    assert np.isnan(module._first_root(-jnp.ones(7), jnp.zeros(7), t))
    for start, happens in ((0.0, False), (-1e-14, False), (-4e-14, True), (1e-13, False)):
        for size in (1.0, 1e3):
            line = size * jnp.array([start, *jnp.arange(1.0, 7) / 6])
            assert bool(jnp.isfinite(module._first_root(line, size * jnp.full(7, 1 / 3), t))) == happens
    small = jnp.array([-0.5, 0.5, *[0.7] * 5])  # an end below one counts
    assert float(module._first_root(small, jnp.full(7, 2.0), t)) == pytest.approx(1.25, rel=1e-9)


def test_events_of_a_student(path):
    """The level of an event is what is to be crossed; by default there is none."""
    student = eqx.tree_at(
        lambda s: (s.along_teacher, s.along_encodings, s.risk, s.gen_error),
        jax.tree.map(lambda a: a[0, 0], path.replicates.student),
        (0.5, 0.2, 0.7, 0.6),
    )
    expected = {"theta overtakes m": 0.2, "m overtakes theta": -0.4, "risk below": -0.6, "gen_error below": -0.5}
    assert {name: round(float(f(student, 0.1)), 9) for name, f in module.CROSSINGS.items()} == expected
    level = float(path.risk[2] + path.risk[3]) / 2
    crossing = path.crossing("risk below", level)
    assert path.t[2] < crossing.t < path.t[3] and crossing.event == f"risk below {level:g}"

    def below(s):
        return level - s.risk

    own = path.crossing(below)
    assert own.event == "below" and float(own.t) == float(crossing.t)
    assert not path.crossing("risk below").ok and not path.crossing(lambda s: s.risk - 1e9).ok


def test_a_trajectory_as_text(path):
    """There is a line for every number of the end, with its meaning. Overlaps of a vanishing share are zero."""
    head, *rows = str(path).splitlines()
    assert head == "One-pass SGD, eta = 1, kappa = 0.005, at t = 12: time over"
    names = {
        "R": "size of the student",
        "Theta": "overlap with the teacher",
        "m": "overlap with the encodings",
        "gen_error": "test error",
        "risk": "objective",
    }
    for row, (name, words) in zip(rows, names.items(), strict=False):
        bar = path.reduced(path.stderr)[name][-1]
        assert row.split() == [name, with_error(getattr(path, name)[-1], bar), *words.split()]
    error = f"{np.max(path.replicates.step_error):.0e}"
    assert rows[5].split() == ["step", "error", error, "of", "the", "integration,", "relative"]
    student = path.replicates.student
    for share, shown in ((0.9e-18, True), (1.1e-18, False)):
        lost = eqx.tree_at(lambda s: s.replicates.student.along_teacher, path, share * student.R[..., 0, 0])
        assert (str(lost).splitlines()[2].split()[:2] == ["Theta", "0"]) == shown
    event = eqx.tree_at(
        lambda s: s.replicates.student.along_teacher, path, student.along_encodings * jnp.array([0.5] * 2 + [2.0] * 3)
    )
    crossing = event.crossing("theta overtakes m")
    assert 3 < crossing.t < 6 and not event.crossing("m overtakes theta").ok
    words = f"theta overtakes m at t = {with_error(crossing.t, crossing.stderr)}"
    assert str(event).splitlines()[-1].split() == words.split() and len(str(event).splitlines()) == 8


@pytest.mark.parametrize("status", ["converged", "max_steps", "nonfinite", "unresolved"])
def test_how_a_trajectory_ended(path, status):
    words = {"converged": "steady state", "max_steps": "time over", "nonfinite": "blown up"}
    other = eqx.tree_at(lambda s: s.replicates.status, path, jnp.full(2, int(ta.Status[status])))
    assert other.status_name == words.get(status, "the steps do not resolve it: pass more `steps`")
    assert other.ok == (status in ("converged", "max_steps"))


def test_a_start_of_other_shapes_is_refused(path):
    with pytest.raises(ta.InputError, match="start must be a trajectory of a model of the same shapes"):
        ta.sgd(ta.DotProduct(rank=2), path, 1.0, 1.0)


def test_full_arrays_where_there_are_several_numbers(path):
    """For two tokens and rank one the curves are numbers, those of the first token; else they are arrays."""
    student = path.replicates.student
    assert path.R.shape == path.m.shape == path.q.shape == (5,)
    np.testing.assert_array_equal(path.m, np.mean(student.m[..., 0, 0], 0))
    np.testing.assert_array_equal(path.theta, np.mean(student.theta[..., 0, 0, 0], 0))
    for m, theta in (((3, 1), 1), ((2, 2), 1), ((2, 1), 2)):
        wide = eqx.tree_at(lambda s: (s.m, s.Theta), student, (jnp.ones((5, *m)), jnp.ones((5, 1, theta))))
        assert path.reduced(wide)["m"].shape == (5, *m) and path.reduced(wide)["R"].shape == student.R.shape


def heights(**numbers):
    names = "semantic positional curvature_semantic curvature_positional slope_semantic slope_positional".split()
    given = dict.fromkeys(names, 0.0) | numbers
    return Heights(**{name: jnp.full(2, value) for name, value in given.items()}, status=jnp.zeros(2, int))


@pytest.mark.parametrize("label", range(8))
def test_labels_of_a_landscape(model, label):
    """It counts 1 for a global minimum that is positional, 2 for the steepest descent, 4 for two minima."""
    minimum, descent, two = label % 2, label // 2 % 2, label // 4
    numbers = heights(
        semantic=0.3 + 0.1 * minimum,
        positional=0.35,
        slope_semantic=-0.3 + 0.1 * descent,
        slope_positional=-0.25,
        curvature_semantic=0.5,
        curvature_positional=0.2 if two else -0.2,
    )
    landscape = Landscape(model, jnp.asarray(0.005), None, numbers)
    assert int(landscape.label) == label
    words = ("semantic", "positional")[minimum], ("semantic", "positional")[descent]
    text = f"{words[0]} minimum, {words[1]} descent, {'two minima' if two else 'one minimum'}"
    assert words_of(label) == text and landscape.title == f"Population risk at kappa = 0.005: {text}"
    differences = {name: round(float(a), 9) for name, a in landscape.differences.items()}
    expected = 0.1 * minimum - 0.05, 0.1 * descent - 0.05, 0.2 if two else -0.2
    assert differences == dict(zip(("global", "steepest", "several"), (round(a, 9) for a in expected), strict=True))
    assert int(Landscape(model, jnp.asarray(0.005), None, heights()).label) == 0


@pytest.mark.parametrize(
    ("semantic", "positional", "status"),
    [("converged", "absent", "converged"), ("max_steps", "converged", "max steps"), ("absent", "max_steps", "absent")],
)
def test_candidates_of_a_landscape(model, grid, monkeypatch, semantic, positional, status):
    """A candidate that is absent is the origin, and no failure."""
    landscape = importlib.import_module("tiedattn_jax.dynamics.landscape")
    statuses = {"semantic": ta.Status[semantic], "positional": ta.Status[positional]}
    point = {"semantic": (0.1, 0.3), "positional": (0.2, 0.4)}

    def states_of(model, kappa, rule, name):
        risk, curvature = (jnp.full(2, a) for a in point[name])
        zero = jnp.zeros(2)
        arrays = jnp.zeros((2, 1, 1)), jnp.zeros((2, 1, 1)), jnp.zeros((2, 2, 1)), risk, zero, curvature, zero
        return ta.dynamics.population.PopulationState(*arrays, jnp.full(2, int(statuses[name])))

    monkeypatch.setattr(landscape, "states_of", states_of)
    monkeypatch.setattr(landscape, "_slopes_at_zero", lambda *_: (jnp.full(2, -0.5), jnp.full(2, -0.6)))
    found = landscape._with_ridge(model, jnp.asarray(0.0), grid)
    numbers = {name: float(a[0]) for name, a in vars(found).items()}
    worst = max(statuses.values())
    assert numbers == {
        "semantic": 0.1, "positional": 0.2, "curvature_semantic": 0.3, "curvature_positional": 0.4,
        "slope_semantic": -0.5, "slope_positional": -0.6, "status": 0.0 if worst == ta.Status.absent else float(worst),
    }  # fmt: skip


def test_a_sphere_is_for_one_direction_each():
    mixing = np.full((3, 3), 1 / 3)
    for model in (
        ta.DotProduct(teacher=np.eye(2)),
        ta.DotProduct(rank=2),
        ta.DotProduct(encodings=[[1.0, 0.0], [0.0, 1.0]]),
        ta.DotProduct(mixing=mixing, encodings=[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]),
    ):
        with pytest.raises(ta.InputError, match="size must be None unless student, teacher and encodings have one dir"):
            ta.landscape(model, size=1.0)


def test_separation_is_that_of_most_replicates(model):
    """A direction separates if it does in more than half of the replicates."""
    rates = [jnp.full(4, a) for a in (0.3, 0.2, 0.1)]
    for flags, separates in (([1, 1, 1, 0], True), ([1, 1, 0, 0], False), ([1, 0, 0, 0], False)):
        both = jnp.stack([jnp.array(flags, bool), jnp.ones(4, bool)], 1)
        start = SmallStart(model, jnp.asarray(2.0), SmallRates(*rates, both))
        assert np.asarray(start.separates).tolist() == [separates, True]
        assert start.first == "encodings" and start.title == "small start at alpha = 2, encodings first"
        rows = [row.split() for row in str(start).splitlines()[1:4]]
        note = "growth rate of this overlap, lam subtracted" if separates else "does not separate from the bulk"
        assert rows[0] == ["encodings", "0.3", *note.split()]
        assert rows[1] == ["teacher", "0.2", *"growth rate of this overlap, lam subtracted".split()]
        assert rows[2] == ["bulk", "0.1", *"growth rate of a student without overlaps, lam subtracted".split()]


def test_pseudo_inverses_leave_out_what_does_not_change():
    """Eigenvalues below 1e-9 of the largest are zero, in single precision those below 100 roundings."""
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    values = np.array([2.0, -0.5, 3e-9, 1e-9])
    matrix = jnp.asarray((vectors * values) @ vectors.T)
    for positive, inverse in ((False, [0.5, -2.0, 1 / 3e-9, 0]), (True, [0.5, 2.0, 1 / 3e-9, 0])):
        found = vectors.T @ np.asarray(_pseudo_inverse(matrix, positive)) @ vectors
        np.testing.assert_allclose(np.diag(found), inverse, rtol=1e-5, atol=1e-3)
    assert _null(jnp.ones(2)) == 1e-9
    assert _null(jnp.ones(2, jnp.float32)) == pytest.approx(100 * 2.0**-23)
