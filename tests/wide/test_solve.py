"""The parts of a search for states of wide layers, the status of a state, and how states and spectra print.

The states here are made up: numbers of two replicates, so that no search is needed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status
from tiedattn_jax.wide import solve
from tiedattn_jax.wide.channel import Averages, wide_nodes

MIXING = [[0.8, 0.2], [0.3, 0.7]]
SHOWN = "q m V trace train_loss gen_error energy distance share largest replicon".split()

pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(**options):
    return ta.WideDotProduct(**{"teacher": ta.Wishart(0.5), "tau": 0.05, **options})


def point(model, offsets=((), ()), alpha=1.0, binds=(False, False)):
    """A state in which all numbers of the first replicate are 1.25 and those of the second one 0.75."""
    shape = np.shape(alpha)
    names = [name for name in solve.WideState.__dataclass_fields__ if name not in ("offset", "binds", "status")]
    numbers = dict.fromkeys(names, jnp.broadcast_to(jnp.array([1.25, 0.75]), (*shape, 2)))
    offset, binds = jnp.asarray(offsets, float).reshape(*shape, 2, -1), jnp.broadcast_to(jnp.array(binds), (*shape, 2))
    status = jnp.broadcast_to(jnp.array([0, 2]), (*shape, 2))
    return solve.WidePoint(
        model, jnp.asarray(alpha), solve.WideState(**numbers, offset=offset, binds=binds, status=status)
    )


@pytest.mark.parametrize(
    "options, offsets, binds, details",
    [
        (
            {},
            ((), ()),
            (False, True),
            ["rank  bounded by kappa  replica symmetry is weakly broken: the replicon is inf"],
        ),
        ({"encodings": "long"}, ((0.3, 0.1), (0.5, 0.1)), (False, False), ["offset [0.40(70), 0.1]"]),
        ({"encodings": 1.5}, ((0.3,), (0.5,)), (False, False), ["R 0.40(70)"]),
    ],
    ids=["bound", "long", "spike"],
)
def test_the_page_of_a_state(options, offsets, binds, details):
    title, *rows = str(point(layer(**options), offsets, 0.75, binds)).splitlines()
    assert title == "WideDotProduct at alpha = 0.75: max steps"
    rows = [row.split() for row in rows]
    assert [row[0] for row in rows[: len(SHOWN)]] == SHOWN
    assert rows[0] == ["q", "1.0(17)", *"Tr S^2 / d".split()] and rows[8][2:] == solve.WidePoint.SHOWN["share"].split()
    assert len(rows) == len(SHOWN) + len(details)
    assert " ".join(rows[-1]).startswith(" ".join(details[0].split()))


def test_the_spike_of_a_state():
    model = layer(encodings=1.5)
    np.testing.assert_allclose(point(model, ((0.3,), (0.5,))).R, 0.4)
    batch = point(model, (((0.3,), (0.5,)), ((0.1,), (0.2,))), (1.0, 2.0))
    np.testing.assert_allclose(batch.R, [0.4, 0.15])
    with pytest.raises(ta.InputError, match="encodings must be a number for a spike R, got 'long'"):
        _ = point(layer(encodings="long"), ((0.3, 0.1), (0.5, 0.1))).R


def test_a_batch_has_no_spectrum():
    with pytest.raises(ta.InputError) as error:
        point(layer(), ((), ()) * 2, (1.0, 2.0)).spectrum()
    assert str(error.value) == "alpha must be one number for a spectrum, got a batch: index it first"


def test_quantiles_and_the_page_of_a_spectrum():
    """A node stands for eigenvalues on both its sides."""
    values, weight = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.25, 0.25, 0.25])
    spectrum = solve.WideSpectrum(values, 0 * values, weight, jnp.asarray(0.25), jnp.asarray(5.0))
    levels = jnp.array([0.0, 0.25, 0.37, 0.375, 0.5, 0.625, 0.75, 0.875, 0.88, 1.0])
    np.testing.assert_allclose(spectrum.quantile(levels), [0, 0, 0, 1, 1.5, 2, 3, 4, 5, 5], rtol=1e-12)
    title, *rows = str(spectrum).splitlines()
    assert title == "spectrum of the trained matrix"
    assert [row.split() for row in rows] == [["zeros", "0.25"], ["edge", "5"]]


def averages(push, stiffness):
    zeros = dict.fromkeys(Averages._fields, jnp.zeros(()))
    return Averages(**zeros | {"push": jnp.asarray(push), "stiffness": jnp.asarray(stiffness)})


def test_the_distance_of_the_scores_from_the_cone():
    """T_11 + T_22 - 2 T_12 is at least zero; a spike is, too."""
    model = layer(encodings="long")
    heights = []
    for T in np.random.default_rng(0).standard_normal((3, 2, 2)):
        T += T.T
        t = model.coordinates(jnp.asarray(T))
        heights.append(solve._height(model, t) / (T[0, 0] + T[1, 1] - 2 * T[0, 1]))
    np.testing.assert_allclose(heights, heights[0], rtol=1e-9)
    assert float(heights[0]) > 0
    np.testing.assert_allclose(np.linalg.norm(solve._cone(model)), 1, rtol=1e-12)
    np.testing.assert_allclose(solve._height(layer(encodings=1.5), jnp.array([-0.3])), -0.3, rtol=1e-12)
    assert float(solve._height(layer(), jnp.zeros(0))) == 0


@pytest.mark.parametrize("on_boundary", [False, True])
@pytest.mark.parametrize("encodings", ["long", 1.5])
def test_a_step_of_the_offsets(encodings, on_boundary):
    """The push vanishes after the step; on the boundary of the cone only its part along the boundary does."""
    model = layer(encodings=encodings)
    n = model.shifts
    K = np.array([[2.0, 0.3], [0.3, 1.5]])[:n, :n]
    t, push = np.array([0.4, -0.7])[:n], np.array([0.9, 0.2])[:n]
    rules = solve._Rules(None, None, jnp.asarray(on_boundary))
    setting = solve._Setting(model, jnp.asarray(1.0), None, None, rules)
    A = averages(push, K)
    new = np.asarray(setting.offsets(jnp.asarray(t), A))
    cone = solve._cone(model)
    if on_boundary:
        np.testing.assert_allclose(cone @ new, 0, atol=1e-12)
        left = push - K @ (new - (t - cone * (cone @ t)))
        np.testing.assert_allclose(left - cone * (cone @ left), 0, atol=1e-12)
    else:
        np.testing.assert_allclose(push - K @ (new - t), 0, atol=1e-12)
    np.testing.assert_allclose(solve._unconstrained(jnp.asarray(t), A), t + np.linalg.solve(K, push), rtol=1e-12)


def test_a_layer_without_encodings_has_no_offsets():
    setting = solve._Setting(layer(), jnp.asarray(1.0), None, None, solve._Rules(None, None, jnp.asarray(False)))
    none, A = jnp.zeros(0), averages(np.zeros(0), np.zeros((0, 0)))
    assert setting.offsets(none, A).size == solve._unconstrained(none, A).size == 0


def test_unknowns_are_logarithms_and_offsets_in_the_unit_of_the_teacher():
    u, unit = jnp.array([0.3, 0.2, 0.01, 0.6, -0.4]), jnp.asarray(2.0)
    x = solve._unknowns(u, unit)
    np.testing.assert_allclose(x, [*np.log([0.3, 0.2, 0.01]), 0.3, -0.2], rtol=1e-12)
    np.testing.assert_allclose(solve._conjugates(x, unit), u, rtol=1e-12)
    assert np.all(np.isfinite(solve._unknowns(jnp.zeros(4), unit)))  # a target may push no content


class Bowl(ta.WideLayer):
    """A loss of one score with a constant second derivative, which may be negative."""

    bend: Float[Array, ""]

    def __init__(self, bend):
        self.bend = jnp.asarray(bend)
        super().__init__(teacher=ta.Wishart(0.5), tau=0.05, tokens=1)

    def loss(self, H, Y):
        return jnp.sum(0.5 * self.bend * H**2 + H * Y)


@jax.jit
def report(model, u, residual, jumps, has_content):
    """The state at the unknowns u, on eight nodes."""
    nodes = jax.tree.map(lambda a: a[0, ..., :8], wide_nodes(model, ta.Sobol(16, replicates=1)))
    rules = solve._Rules(has_content, None, jnp.asarray(False))
    setting = solve._Setting(model, jnp.asarray(0.7), nodes, jnp.zeros_like(nodes.student), rules)
    return solve._report(u, setting, residual, jumps)


def reported(bend=1.0, residual=0.0, jumps=0.0, scale=1.0, has_content=True):
    u = scale * jnp.array([0.3, 0.25, 0.01])
    return report(Bowl(bend), u, jnp.asarray(residual), jnp.asarray(jumps), jnp.asarray(has_content))


@pytest.mark.parametrize(
    "options, status",
    [
        ({"residual": 0.9e-9}, Status.converged),
        ({"residual": 1.2e-9}, Status.max_steps),
        ({"jumps": 0.8e-6}, Status.converged),
        ({"jumps": 1.2e-6}, Status.unresolved),
        ({"residual": 1.0, "jumps": 1.0}, Status.max_steps),
        ({"scale": np.nan}, Status.nonfinite),
        ({"scale": np.nan, "residual": 1.0, "jumps": 1.0}, Status.nonfinite),
        ({"bend": -0.1}, Status.converged),
        ({"bend": -5.0}, Status.unresolved),
    ],
)
def test_the_status_of_a_state(options, status):
    """Proximal points are no minima where the loss bends down by more than 1 / (2 V)."""
    state = reported(**options)
    assert int(state.status) == status
    if "bend" in options:
        np.testing.assert_allclose(state.margin, 1 + 2 * options["bend"] * state.V, rtol=1e-9)
        assert float(state.margin) < 1 and (status == Status.converged) == (float(state.margin) > 0)


def test_a_state_without_content_is_empty():
    state = reported(has_content=False)
    assert [float(getattr(state, name)) for name in ("q", "m", "V", "trace", "share", "largest")] == [0] * 6
    np.testing.assert_allclose(state.distance, 1.5, rtol=1e-12)
    assert np.isfinite(state.replicon) and not state.binds
