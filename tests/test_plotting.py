"""Figures of results made by hand. Those of diagrams and of trained transformers are tested with their results."""

from types import SimpleNamespace as Some

import numpy as np
import pytest

from tiedattn_jax.phases.boundaries import Boundary
from tiedattn_jax.plotting import COLOURS, boundary_figure, branch_figure, path_figure


def point(value, growth, *, bar=False):
    """A fixed point whose numbers are all `value`, and its error bars a tenth of that."""
    array = np.full((2, 1), value)
    numbers = Some(
        overlaps=Some(theta=array[..., None], m=array),
        train_loss=value,
        gen_error=2 * value,
        gen_error_linear=0.5,
        diagnostics=Some(growth_m=growth, growth_theta=growth),
    )
    if not bar:
        numbers.stderr = point(value / 10, growth, bar=True)
    return numbers


def curve(branch, growths=(1.5, 1.2, 0.8, 0.7)):
    """A curve along which the numbers are the alphas."""
    alphas = 1.0 + np.arange(len(growths))
    points = [point(a, g) for a, g in zip(alphas, growths, strict=True)]
    return Some(
        branch=branch, alphas=alphas, points=points, values=lambda get: np.array([float(get(p)) for p in points])
    )


def labels(axis):
    return axis.get_legend_handles_labels()[1]


def test_branches():
    critical, crossing = Some(ok=True, alpha=1.5), Some(ok=False, alpha=2.5)
    figure = branch_figure([curve("positional"), curve("semantic")], critical, crossing)
    orders, losses, errors = figure.axes
    assert labels(orders) == ["$m$, positional", r"$\theta$, semantic", r"$\alpha_c$"]  # alpha_l was not found
    assert labels(errors) == ["positional", "semantic", "linear baseline", r"$\alpha_c$"]
    solid, dotted, *_ = losses.lines
    assert solid.get_color() == COLOURS["positional"]
    np.testing.assert_array_equal(solid.get_ydata(), [np.nan, np.nan, 3, 4])
    np.testing.assert_array_equal(dotted.get_ydata(), [1, 2, 3, np.nan])  # up to the first stable point
    band = errors.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(8 + 2 * 0.8)


def test_branches_that_lack_both_order_parameters_or_none():
    orders, losses, _ = branch_figure([curve("uninformed"), curve(None, [2.0, 2.0])]).axes
    assert labels(orders) == ["$m$, any state", r"$\theta$, any state"] and labels(losses) == [
        "uninformed",
        "any state",
    ]
    np.testing.assert_array_equal(losses.lines[2].get_ydata(), [1, 2])  # growth says nothing where nothing is imposed


def test_boundaries():
    omegas = np.array([0.1, 0.2, 0.3])
    events = {"alpha_c": "k", "semantic baseline": COLOURS["semantic"], "positional pitchfork": COLOURS["positional"]}
    alphas, bars = np.array([1.0, 2.0, np.nan]), np.array([0.1, np.inf, np.nan])
    (axis,) = boundary_figure([Boundary.of(e, "omega", omegas, alphas, bars) for e in events]).axes
    assert labels(axis) == [r"$\alpha_c$", *list(events)[1:]] and axis.get_xlabel() == r"$\omega$"
    for container, colour in zip(axis.containers, events.values(), strict=True):
        line, _caps, (whiskers,) = container
        assert line.get_color() == colour
        np.testing.assert_allclose(whiskers.get_segments()[0][:, 1], [0.8, 1.2])  # two error bars to either side
    assert len({line.get_linestyle() for line, *_ in axis.containers}) == 3


def path(theta, values, turn):
    """A path in alpha, unstable in its second half, with one turn, at alpha = .99."""
    count = len(values)
    state = Some(overlaps=Some(theta=np.full((1, 2, 1, 1), turn)), train_loss=np.array([0.09]))
    return Some(
        parameter="alpha",
        values=values,
        states=Some(
            overlaps=Some(theta=np.tile(np.reshape(theta, (count, 1, 1, 1)), (1, 2, 1, 1)), m=np.zeros((count, 2, 1))),
            train_loss=values / 10,
        ),
        eigenvalues=np.linspace(0.5, 1.5, count + 1)[:-1, None] + 0j,  # one of them is one
        folds=(0.99,),
        fold_states=(state,),
    )


def test_path():
    values = np.array([2.0, 1.5, 1.0, 1.2])
    one = path([0.4, 0.3, 0.2, 0.1], values, 0.19)
    orders, losses = path_figure([one, one]).axes
    assert labels(orders) == [r"$\theta$", "fold"] and losses.get_xlabel() == r"sample complexity $\alpha = n/d$"
    solid, dotted, fold, *others = orders.lines
    assert len(others) == 3 and fold.get_marker() == "o"
    np.testing.assert_array_equal(solid.get_xdata(), values)
    np.testing.assert_allclose(solid.get_ydata(), [0.4, 0.3, 0.2, np.nan])  # up to rounding one is stable
    np.testing.assert_allclose(dotted.get_ydata(), [np.nan, np.nan, 0.2, 0.1])
    np.testing.assert_allclose([*fold.get_xdata(), *fold.get_ydata()], [0.99, 0.19])
    np.testing.assert_allclose(losses.lines[2].get_ydata(), [0.09])


@pytest.mark.parametrize(
    ("theta", "turn", "kind"),
    [
        ([0.2, 0.1, -0.1, -0.2], 0.0, "pitchfork"),  # into the mirror state
        ([-0.2, -0.1, 0.1, 0.2], 1e-4, "pitchfork"),
        ([0.2, 0.1, 0.05, 0.15], 0.04, "fold"),
        ([0.3, 0.2, 0.1, -0.1], 0.25, "fold"),  # the sign changes elsewhere
    ],
)
def test_a_path_that_turns(theta, turn, kind):
    orders, losses = path_figure([path(theta, np.array([2.0, 1.0, 1.0, 2.0]), turn)]).axes
    assert labels(orders) == [r"$\theta$", kind] and labels(losses) == [kind]
    assert orders.lines[-1].get_marker() == {"fold": "o", "pitchfork": "D"}[kind]
