"""Figures of results made by hand; the tests of diagrams and transformers draw solved and trained ones."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace as Namespace

import made
import matplotlib
import matplotlib.colors
import numpy as np
import pytest
from made import SPREAD, point
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.dynamics.landscape import Landscape
from tiedattn_jax.finite.instances import Compared
from tiedattn_jax.phases.table import Table
from tiedattn_jax.plotting.diagrams import (
    diagram_figure,
    landscape_figure,
    map_figure,
    slice_figure,
    transition_figure,
)
from tiedattn_jax.plotting.simulations import (
    attention_figure,
    emergence_figure,
    gamp_figure,
    learning_figure,
    token_name,
    training_figure,
    trajectory_figure,
)
from tiedattn_jax.plotting.style import COLOURS, LABELS, REGION_STYLES, is_geometric, line as draw_line, panels
from tiedattn_jax.plotting.theory import (
    boundary_figure,
    branch_figure,
    optimal_figure,
    path_figure,
    spectrum_figure,
    table_figure,
)
from tiedattn_jax.theory.quantities import Quantity


def curve(branch, growths=(1.5, 1.2, 0.8, 0.7), alphas=None, model=None):
    """A table whose points have their alpha as `value`."""
    alphas = 1.0 + np.arange(len(growths)) if alphas is None else np.array(alphas)
    cells = tuple(point(*numbers, branch, model) for numbers in zip(alphas, growths, strict=True))
    return Table(branch, ("alpha",), (alphas,), cells)


def labels(axis):
    """The labels of an axis; dotted stretches, which come last, are left out."""
    names = axis.get_legend_handles_labels()[1]
    assert "unstable" not in names[:-1]
    return [name for name in names if name != "unstable"]


def legend_texts(figure):
    """The texts of a figure's legend, which stands outside its panels."""
    assert all(axis.get_legend() is None for axis in figure.axes)
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def drawn(axis):
    """Points of all lines of an axis by name, (n, 2) without NaN; solid and dotted stretches of a line together."""
    points = {}
    for artist in axis.lines:
        name, pairs = (artist.get_gid() or "").removesuffix(", unstable"), np.asarray(artist.get_xydata(), float)
        if len(pairs):  # not an entry for the legend alone
            assert name, "a line without a name"
            points[name] = np.concatenate([points.get(name, np.empty((0, 2))), pairs[np.isfinite(pairs).all(1)]])
    return {name: np.unique(pairs, axis=0) for name, pairs in points.items()}


def of_branch(branch):
    """The columns that the picture of a branch shows: of every panel by the name of the line."""
    orders = {"positional": ["m"], "semantic": ["theta"]}.get(branch, ["m", "theta"])
    symbols, branch = {"m": "$m$", "theta": r"$\theta$"}, branch or "any state"
    return [
        {branch if len(orders) == 1 else f"{symbols[order]}, {branch}": f"{order}_0" for order in orders},
        {branch: "train_loss"},
        {branch: "gen_error", "linear baseline, beside": "gen_error_linear"},
    ]


def named_models():
    """States of listed models, as of a list of models; the baseline is not the same for all of them."""
    cells = tuple(point(a, 0.5, model=ta.DotProduct(sigma=a)) for a in (0.4, 0.5, 0.8))
    return Table("semantic", ("model",), (np.arange(3.0),), cells)


def with_nothing():
    """A branch that is negative, unstable or absent at some settings."""
    absent = point(2.0, 0.5)
    status = np.full(2, int(ta.Status.absent))
    absent = dataclasses.replace(absent, replicates=dataclasses.replace(absent.replicates, status=status))
    cells = point(-1.0, 0.5), absent, point(3.0, 1.5), point(4.0, 0.5)
    return Table("semantic", ("sigma",), (np.array([0.4, 0.5, 0.6, 0.8]),), cells)


TABLES = {
    **{branch: (lambda branch=branch: curve(branch), of_branch(branch)) for branch in ("positional", "semantic")},
    "any state": (lambda: curve(None), of_branch(None)),
    "along sigma": (with_nothing, of_branch("semantic")),
    "listed models": (named_models, of_branch("semantic")),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_line_is_a_column_of_the_table(name):
    """Order parameters with their sign, losses, errors and baseline are at every setting those of the table."""
    make, panel_columns = TABLES[name]
    table = make()
    rows, parameter = table.table(), table.parameter
    for axis, columns in zip(table.plot().axes, panel_columns, strict=True):
        lines = drawn(axis)
        assert lines.keys() == columns.keys()
        for gid, column in columns.items():
            expected = np.array([(row[parameter], row[column]) for row in rows])
            np.testing.assert_array_equal(lines[gid], expected[np.isfinite(expected).all(1)], err_msg=gid)


def test_lines_of_other_tables_are_columns_too():
    """Best values, risks and any number by name."""
    best = best_values()
    values, errors = best.plot().axes
    for k, row in enumerate(best.table()):
        for axis, column in ((values, "lam"), (errors, "gen_error")):
            lines = drawn(axis)
            np.testing.assert_array_equal(lines[row["branch"]], [[row["alpha"], row[column]]], err_msg=str(k))
    np.testing.assert_array_equal(drawn(errors)["linear baseline, beside"], [[1, 0.5], [2, 0.5]])
    risk = Table("landscape", ("omega",), (np.arange(2.0),), risks())
    (axis,) = risk.plot().axes
    for name, pairs in drawn(axis).items():
        np.testing.assert_array_equal(pairs, [(row["omega"], row[name]) for row in risk.table()])


def test_curves_of_one_branch_are_distinct():
    """They have shades of one colour, and names that say in what their models differ, or numbers."""
    first, second = (curve("semantic", [0.5, 0.5], model=ta.DotProduct(sigma=sigma)) for sigma in (0.5, 0.25))
    _, losses, errors = branch_figure(first, second).axes
    assert labels(losses) == [r"semantic, $\sigma$ = 0.5", r"semantic, $\sigma$ = 0.25"]
    assert {r"linear baseline, $\sigma$ = 0.5", r"linear baseline, $\sigma$ = 0.25"} < set(labels(errors))
    solid = [line for line in losses.lines if line.get_label() in labels(losses)]
    assert solid[0].get_color() == COLOURS["semantic"] != solid[1].get_color()
    axis = Figure().subplots()
    for result in (first, second, first):
        result.plot(ax={"train_loss": axis})
    assert labels(axis) == ["semantic", "semantic (2)", "semantic (3)"]
    shades = {line.get_color() for line in axis.lines if line.get_label() in labels(axis)}
    assert len(shades) == 3


def test_options_of_lines_are_passed_on():
    """Label, colour and width hold for the lines of the result, and not for what is drawn beside them."""
    orders, _, errors = curve("semantic").plot(label="mine", color="m", lw=4).axes
    assert labels(orders) == ["mine"] and labels(errors) == ["mine", "linear baseline"]
    solid, dotted, baseline = errors.lines[:3]
    assert (solid.get_color(), solid.get_linewidth(), dotted.get_color()) == ("m", 4, "m")
    assert dotted.get_linestyle() == ":" and baseline.get_color() == COLOURS["baseline"]
    assert matplotlib.colors.same_color(errors.collections[0].get_facecolor()[0][:3], "m")
    orders = curve(None).plot(label="mine").axes[0]
    assert labels(orders) == ["mine, $m$, any state", r"mine, $\theta$, any state"]
    for name, options in {"colour": "m", "color": "no colour", "lw": "wide"}.items():
        with pytest.raises(ta.InputError, match=f"{name} must be an option of this picture or of a matplotlib line"):
            curve("semantic").plot(**{name: options})


def test_dark_ground():
    """A line that is black on light ground is white on dark ground."""
    with style.context("dark_background"):
        errors = branch_figure(curve("semantic"), alpha_c=Namespace(ok=True, alpha=1.5)).axes[2]
        (axis,) = boundary_figure(BOUNDARY).axes
    mark = next(line for line in errors.lines if line.get_gid() == "alpha_c, beside")
    boundary = next(line for line in axis.lines if line.get_gid() == "alpha_c")
    assert mark.get_color() == boundary.get_color() == "#ffffff"


def test_narrow_figures_have_several_rows():
    """Panels that would be too narrow stand below one another, in a figure that is high enough for them."""
    with matplotlib.rc_context({"figure.figsize": (3.4, 2.5)}):
        figure = branch_figure(curve("semantic"))
    orders, losses, errors = figure.axes
    assert figure.get_size_inches()[0] == 3.4 and figure.get_size_inches()[1] > 6
    assert orders.get_position().y0 > losses.get_position().y1 and losses.get_position().x0 == errors.get_position().x0
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", LABELS["alpha"]]
    assert orders.get_ylabel() == r"$m$, $\theta$"  # the words do not fit


def test_legend_is_one_and_outside():
    with panels(4, 3, ["", ""], xlabel="x", ylabels=["first", "second"]) as (figure, axes):
        for axis, label in zip(axes[0], ("both", "both"), strict=True):
            axis.plot([0, 1], [0, 1], label=label)
        axes[0, 1].plot([0, 1], [1, 0], label="alone")
    assert legend_texts(figure) == ["both", "alone"]
    assert [axis.get_ylabel() for axis in figure.axes] == ["first", "second"]
    with panels(4, 3, legends=False) as (figure, axes):
        axes[0, 0].plot([0, 1], [0, 1], label="one")
    assert not figure.legends


def test_colours_are_told_apart():
    """Every two colours differ clearly, and in part also as seen without red or green receptors."""
    # Vienot, Brettel and Mollon (1999): what protanopes and deuteranopes see, in linear RGB.
    sight = {
        "trichromacy": np.eye(3),
        "protanopia": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
        "deuteranopia": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    }
    rgb = {name: np.array(matplotlib.colors.to_rgb(colour)) ** 2.2 for name, colour in COLOURS.items()}
    for name, matrix in sight.items():
        least = 0.25 if name == "trichromacy" else 0.08
        perceived = {key: np.clip(np.array(matrix) @ value, 0, 1) ** (1 / 2.2) for key, value in rgb.items()}
        names = list(perceived)
        for k, first in enumerate(names):
            for second in names[k + 1 :]:
                assert np.linalg.norm(perceived[first] - perceived[second]) > least, (first, second)


def luminance(colour):
    """The relative luminance of a colour, from 0 for black to 1 for white."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.dot([0.2126, 0.7152, 0.0722], np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92))


def test_branches_are_told_apart_in_grey():
    """Their lightness L* differs by twenty; both are seen on white and on the dark ground of notebooks."""
    light, dark = (luminance(COLOURS[name]) for name in ("positional", "semantic"))
    assert 116 * (np.cbrt(light) - np.cbrt(dark)) > 20
    white, black = (luminance(ground) for ground in ("white", "#111111"))
    for colour in (light, dark):  # contrast as in the accessibility guidelines: 3 for graphics
        assert (white + 0.05) / (colour + 0.05) > 2.9 and (colour + 0.05) / (black + 0.05) > 2.9


BAR = float(error_bar(SPREAD))  # relative error bar of every number of a point


def test_branches():
    critical, crossing = Namespace(ok=True, alpha=1.5), Namespace(ok=False, alpha=2.5)
    figure = branch_figure(curve("positional"), curve("semantic"), alpha_c=critical, alpha_l=crossing)
    orders, losses, errors = figure.axes
    assert legend_texts(figure)[-1] == "unstable" and len(set(legend_texts(figure))) == len(legend_texts(figure))
    assert losses.get_ylabel() == LABELS["train_loss"] and losses.get_xlabel() == LABELS["alpha"]
    assert labels(orders) == ["positional", "semantic", r"$\alpha_c$"]  # alpha_l was not found
    assert labels(errors) == ["positional", "semantic", "linear baseline", r"$\alpha_c$"]
    assert orders.lines[0].get_color() == COLOURS["positional"] and orders.lines[2].get_color() == COLOURS["semantic"]
    np.testing.assert_array_equal(errors.lines[0].get_ydata(), [np.nan, np.nan, 6, 8])  # test errors, not losses
    np.testing.assert_array_equal(errors.lines[4].get_xydata(), [[a, a / 2] for a in range(1, 5)])  # point by point
    assert errors.lines[5].get_xdata()[0] == 1.5
    solid, dotted, *_ = losses.lines
    assert solid.get_color() == COLOURS["positional"]
    np.testing.assert_array_equal(solid.get_ydata(), [np.nan, np.nan, 3, 4])
    np.testing.assert_array_equal(dotted.get_ydata(), [1, 2, 3, np.nan])  # up to the first stable point
    band = errors.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(8 + 2 * 8 * BAR)


def test_branches_that_lack_both_order_parameters_or_none():
    orders, losses, _ = branch_figure(curve("uninformed"), curve(None, [2.0, 2.0])).axes
    assert labels(orders) == ["$m$, any state", r"$\theta$, any state"] and labels(losses) == [
        "uninformed",
        "any state",
    ]
    assert [line.get_color() for line in orders.lines] == [COLOURS["positional"], COLOURS["semantic"]]
    np.testing.assert_array_equal(losses.lines[2].get_ydata(), [1, 2])  # growth says nothing where nothing is imposed


def optimal_points():
    """The optimal learner at three alphas, with another state at the last two."""
    q, rho = np.array([0.0, 0.25, 0.5]), np.full((3, 2, 1, 1, 1), 0.5)
    state, other = (
        Namespace(q=rho * a[:, None, None, None, None], V=rho * (1 - a[:, None, None, None, None])) for a in (2 * q, q)
    )
    return Namespace(
        alpha=np.array([0.5, 1.0, 1.5]),
        gen_error=np.array([0.3, 0.2, 0.0]),
        stderr=Namespace(gen_error=np.full(3, 0.01)),
        replicates=state,
        other=other,
        hard=np.array([False, True, True]),
    )


def test_optimal_learner():
    """The error beside the branches; overlap and thresholds, and the other state where there is a hard phase."""
    points, q = optimal_points(), np.array([0.0, 0.25, 0.5])
    weak = Namespace(event="weak_recovery", alpha=0.5)
    overlap, error = optimal_figure(points, [weak], spectral=np.array([0.0, 0.5, 0.8])).axes
    other_start = "hard phase: state from the other start"
    assert labels(overlap) == ["optimal learner", other_start, "spectral start", "weak recovery"]
    drawn = [2 * q, [np.nan, 0.25, 0.5], [0.0, 0.25, 0.64]]
    np.testing.assert_allclose([line.get_ydata() for line in overlap.lines[:3]], drawn)
    np.testing.assert_allclose(error.lines[0].get_ydata(), points.gen_error)
    errors = branch_figure(curve("semantic"), optimal=points, recoveries=[weak]).axes[2]
    assert {"optimal learner", "weak recovery"} < set(labels(errors))
    points.alpha = np.array(0.5)
    with pytest.raises(ta.InputError, match="vmap"):
        optimal_figure(points)


def test_boundaries():
    omegas = np.array([0.1, 0.2, 0.3])
    events = {
        "alpha_c": "#000000",
        "semantic baseline": COLOURS["semantic"],
        "positional pitchfork": COLOURS["positional"],
    }
    alphas, bars = np.array([1.0, 2.0, np.nan]), np.array([0.1, np.inf, np.nan])
    (axis,) = boundary_figure(*(made.events(e, "omega", omegas, alphas, bars) for e in events)).axes
    assert labels(axis) == [r"$\alpha_c$", *list(events)[1:]] and axis.get_xlabel() == LABELS["omega"]
    for container, colour in zip(axis.containers, events.values(), strict=True):
        line, _caps, (whiskers,) = container
        assert line.get_color() == colour
        np.testing.assert_allclose(whiskers.get_segments()[0][:, 1], [0.8, 1.2])  # two error bars to either side
    lines = [line for line in axis.lines if line.get_label() in labels(axis)]
    assert [line.get_color() for line in lines] == list(events.values())
    assert len({line.get_linestyle() for line in lines}) == 3


def test_boundaries_are_smooth_between_points_that_were_found():
    values = np.arange(6.0)
    bars, gap = 0.1 * np.ones(6), np.where(values == 3, np.nan, 1.0)
    exact = made.events("alpha_c", "omega", values, values**3, bars, 3 * values**2)
    rough = made.events("semantic baseline", "omega", values, gap * np.where(values < 2, 1.0, 9.0), bars)
    (axis,) = boundary_figure(exact, rough).axes
    cubic, steps = (line.get_xydata() for line in axis.lines if line.get_label() in labels(axis))
    np.testing.assert_allclose(cubic[:-1, 1], cubic[:-1, 0] ** 3, atol=1e-9)
    assert len(cubic) > 50
    x, y = steps[np.isfinite(steps[:, 1])].T
    assert not np.any((x > 2) & (x < 4)) and set(values) - {3.0} <= set(x)  # no line across the missing point
    assert y.min() == 1 and y.max() == 9  # no extremum between points


def path(theta, values, turn, fork=False):
    """A path in alpha, unstable in its second half, with one turn, at alpha = .99."""
    count = len(values)
    state = Namespace(overlaps=Namespace(theta=np.full((1, 2, 1, 1), turn)), train_loss=np.array([0.09]))
    return Namespace(
        parameter="alpha",
        values=values,
        states=Namespace(
            overlaps=Namespace(
                theta=np.tile(np.reshape(theta, (count, 1, 1, 1)), (1, 2, 1, 1)), m=np.zeros((count, 2, 1))
            ),
            train_loss=values / 10,
        ),
        eigenvalues=np.linspace(0.5, 1.5, count + 1)[:-1, None] + 0j,  # one of the eigenvalues is one
        folds=() if fork else (0.99,),
        fold_states=() if fork else (state,),
        pitchforks=(0.99,) if fork else (),
        pitchfork_states=(state,) if fork else (),
    )


def test_path():
    values = np.array([2.0, 1.5, 1.0, 1.2])
    single = path([0.4, 0.3, 0.2, 0.1], values, 0.19)
    orders, losses = path_figure([single, single]).axes
    assert labels(orders) == [r"$\theta$", "fold"] and losses.get_xlabel() == LABELS["alpha"]
    solid, dotted, fold, *unlabelled = orders.lines
    assert len(unlabelled) == 4 and fold.get_marker() == "o"
    np.testing.assert_array_equal(solid.get_xdata(), values)
    np.testing.assert_allclose(solid.get_ydata(), [0.4, 0.3, 0.2, np.nan])  # up to rounding one is stable
    np.testing.assert_allclose(dotted.get_ydata(), [np.nan, np.nan, 0.2, 0.1])
    np.testing.assert_allclose([*fold.get_xdata(), *fold.get_ydata()], [0.99, 0.19])
    np.testing.assert_allclose(losses.lines[2].get_ydata(), [0.09])


@pytest.mark.parametrize("kind", ["fold", "pitchfork"])
def test_a_path_that_turns(kind):
    single = path([0.2, 0.1, -0.1, -0.2], np.array([2.0, 1.0, 1.0, 2.0]), 0.0, kind == "pitchfork")
    orders, losses = path_figure([single]).axes
    assert labels(orders) == [r"$\theta$", kind] and labels(losses) == [kind]
    assert orders.lines[-2].get_marker() == {"fold": "o", "pitchfork": "D"}[kind]


def test_there_is_room_between_lines_and_frame():
    """There is room between lines and frame, also if a narrow range of alphas or numbers lies far from zero."""
    states = tuple(
        dataclasses.replace(point(value, 0.5), alpha=np.asarray(alpha)) for value, alpha in ((5.0, 10.0), (5.01, 10.1))
    )
    branch = Table("semantic", ("alpha",), (np.array([10.0, 10.1]),), states)
    for axis in branch_figure(branch).axes:
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        assert 9.9 < left < 9.999 and 10.101 < right < 10.2
        assert bottom == 0 and top > 1.04 * axis.dataLim.y1
    negative = Table("semantic", ("alpha",), (np.array([1.0, 2.0]),), (point(-10.0, 0.5), point(5.0, 0.5)))
    assert branch_figure(negative).axes[0].get_ylim()[0] < -10  # a negative number is in the frame, too


@pytest.mark.parametrize("name", ["Table of best values", "Table of states", "Trajectory"])
def test_what_the_caller_draws_later_is_in_the_frame(name):
    """Lines of the caller's beyond those of the library are shown, and a logarithmic scale shows positive numbers."""
    make, panel_names = PICTURES[name]
    panel = "loss" if name == "Trajectory" else "gen_error"
    assert panel in panel_names
    axis = Figure().subplots()
    pictured()[name.split()[0]].plot(make(), ax={panel: axis})
    top = axis.get_ylim()[1]
    axis.plot([0.0, 9.0], [0.001, 5 * top], "k.")
    (left, right), (bottom, top_then) = axis.get_xlim(), axis.get_ylim()
    assert left == bottom == 0 and right > 9 and top_then > 5 * top
    axis.set_yscale("log")
    assert 1e-4 < axis.get_ylim()[0] < 0.001


def test_limits_of_the_caller_hold():
    axis = Figure().subplots()
    axis.set(xlim=(-1.0, 7.0), ylim=(0.1, 9.0))
    Table.plot(curve("semantic"), ax={"gen_error": axis})
    assert axis.get_xlim() == (-1, 7) and axis.get_ylim() == (0.1, 9)


def test_a_pole_of_error_bars_leaves_the_line():
    """An infinite error bar, as of a single replicate, leaves the line without a band."""
    axis, number = Figure().subplots(), np.arange(3.0)
    draw_line(axis, number, number, "k", "one", bar=np.array([0.1, np.inf, 0.1]))
    draw_line(axis, number, 2 * number, "k", "other", bar=0.1 * number)
    assert len(axis.lines) == 2 and len(axis.collections) == 1


def diagram():
    """A diagram of three alphas and two omegas, in which every kind of region occurs once."""
    region = np.array([[0, 2, 3], [4, 5, 1]])
    values = np.arange(6.0).reshape(2, 3)
    boundary = made.events("alpha_c", "omega", np.array([0.1, 0.3]), np.array([1.0, 2.0]), np.array([0.1, np.inf]))
    bars = Namespace(train_loss=np.full((2, 3), 0.5), gen_error=np.full((2, 3), 0.5))

    def states(loss, error, linear):
        return Namespace(mean=Namespace(train_loss=loss, gen_error=error), stderr=bars, gen_error_linear=linear)

    return Namespace(
        x=("alpha", np.array([1.0, 2.0, 4.0])),
        y=("omega", np.array([0.1, 0.3])),
        region=region,
        loss_difference=(values - 3.5, None),
        gen_difference=(values - 1, None),
        trusted=region != 4,
        winner=np.array([[0, 0, -1], [1, 1, 2]]),
        global_minimum=states(values + 20, values + 20, None),
        positional=states(values, values, np.full((2, 3), 9.0)),
        semantic=states(values + 10, -values, np.full((2, 3), np.nan)),
        exists=np.array([[[True, True, False], [True, True, True]]] * 2),
        stable=np.array([[[True, True, False], [True, True, True]], [[True, True, False], [False, True, True]]]),
        alpha_c=lambda: boundary,
        alpha_l=lambda: boundary,
    )


def marked(axis, name):
    """Lower left corners of the cells that an artist of this name marks."""
    cells = next(artist for artist in axis.collections if artist.get_gid() == name)
    return [tuple(map(float, path.vertices.min(0).round(9))) for path in cells.get_paths()]


CELLS = [(0.5, 0.0), (1.5, 0.0), (3.0, 0.0), (0.5, 0.2), (1.5, 0.2), (3.0, 0.2)]  # their lower left corners


def test_diagram():
    known = diagram()
    figure = diagram_figure(known)
    left, right = figure.axes[:2]
    for code, (name, colour) in REGION_STYLES.items():
        assert marked(left, name) == [c for c, r in zip(CELLS, known.region.ravel(), strict=True) if r == code], name
        (cells,) = (artist for artist in left.collections if artist.get_gid() == name)
        assert len(cells.get_facecolor()) == 0 or matplotlib.colors.same_color(cells.get_facecolor()[0], colour)
    excess = next(a for a in right.collections if a.get_gid() == "error minus baseline")
    assert excess.get_array().mask.tolist() == [[True, False, False], [False, False, True]]
    np.testing.assert_array_equal(excess.get_array().compressed(), [0, 1, 2, 3])
    # Blue means better than the baseline; white means no difference.
    assert excess.get_cmap().name == "RdBu_r" and excess.get_clim() == (-3, 3)
    assert marked(right, "no global minimum") == [CELLS[0], CELLS[5]]
    assert left.get_xlim() == (0.5, 5.0) and left.get_ylim() == (0.0, pytest.approx(0.4))
    assert marked(left, "not trusted") == marked(right, "not trusted") == [CELLS[3]]
    for axis in (left, right):
        drawn = next(line for line in axis.lines if line.get_gid() == "alpha_c")
        np.testing.assert_allclose(drawn.get_xydata(), [[1, 0.1], [2, 0.3]])
        bars = next(a for a in axis.collections if a.get_gid() == "alpha_c, error bars").get_segments()
        np.testing.assert_allclose(
            bars, [[[0.8, 0.1], [1.2, 0.1]], [[2, 0.3], [2, 0.3]]]
        )  # an infinite one is left out
    texts = legend_texts(figure)
    inside = [text.get_text().replace("\n", " ") for text in left.texts]
    names = {name.replace("\n", " ") for code, (name, _) in REGION_STYLES.items() if code != 6}
    assert {*texts[:-3], *inside} == names and len(texts) + len(inside) == 9  # every region is named once
    assert texts[-3:] == ["not trusted", r"$\alpha_c$", "no global minimum"]


def test_labels_of_a_diagram_stand_in_their_regions():
    """A label is inside the cells of its region, or in the legend if it does not fit there."""
    known = diagram()
    known.x, known.y = ("alpha", np.arange(1.0, 13.0)), ("omega", np.arange(1.0, 13.0))
    known.region = np.full((12, 12), 2)
    known.region[:5, 4:], known.region[7:9, 7] = 5, 3  # a corner, and a place too small for a word
    known.trusted, known.exists = np.full((12, 12), True), np.full((2, 12, 12), True)
    known.loss_difference = known.gen_difference = np.ones((12, 12)), None
    figure = diagram_figure(known)
    left, inverted = figure.axes[0], figure.axes[0].transData.inverted()
    figure.canvas.draw()
    assert [text.get_text() for text in left.texts] == ["positional", "semantic,\npositional"]
    for text, code in zip(left.texts, (2, 5), strict=True):
        box = inverted.transform(text.get_window_extent())
        low, high = np.round(box - 1).astype(int)  # the cells of its corners
        assert np.all(known.region[low[1] : high[1] + 1, low[0] : high[0] + 1] == code)
    assert "semantic" in legend_texts(figure) and "positional" not in legend_texts(figure)


def test_difference_of_the_losses_on_a_diagram():
    figure = diagram_figure(diagram(), losses=True)
    left = figure.axes[0]
    difference = next(a for a in left.collections if a.get_gid() == "positional minus semantic loss")
    assert difference.get_array().mask.tolist() == [[True, True, True], [False, False, True]]
    assert difference.get_cmap().name == "RdBu" and difference.get_clim() == (-0.5, 0.5)
    assert not left.texts and {"positional", "semantic", "neither is stable"} < set(legend_texts(figure))
    single = Figure().subplots()
    assert diagram_figure(diagram(), ax={"train_loss": single}, losses=True) == {"train_loss": single}


def test_uninformed_cells_of_a_diagram():
    """They are a region, and their test error is that of a global minimum."""
    known = diagram()
    known.region[1, 2] = 6
    left, right = diagram_figure(known).axes[:2]
    assert marked(left, "uninformed") == [CELLS[5]] and marked(left, "neither is stable") == []
    excess = next(a for a in right.collections if a.get_gid() == "error minus baseline")
    assert excess.get_array().mask.tolist() == [[True, False, False], [False, False, False]]


def test_further_boundaries_on_a_diagram():
    weak = made.events("weak_recovery", "omega", np.array([0.1, 0.3]), np.array([1.5, 1.5]), np.zeros(2))
    figure = diagram_figure(diagram(), [weak])
    assert "weak recovery" in legend_texts(figure)
    np.testing.assert_allclose(figure.axes[1].lines[-1].get_xdata(), [1.5, 1.5])
    other = made.events("weak_recovery", "sigma", np.array([0.3, 0.5]), *np.ones((2, 2)))
    with pytest.raises(ta.InputError, match="boundaries must be in axes alpha and omega"):
        diagram_figure(diagram(), [other])


def test_legend_of_a_diagram_says_only_what_is_there():
    plain = diagram()
    plain.region, plain.trusted = np.full((2, 3), 5), np.full((2, 3), True)
    assert legend_texts(diagram_figure(plain)) == [r"$\alpha_c$"]
    empty = made.events("alpha_l", "omega", *np.full((3, 2), np.nan))
    plain.alpha_l = lambda: empty
    assert legend_texts(diagram_figure(plain)) == [r"$\alpha_c$"]
    plain.alpha_c = plain.alpha_l
    assert not diagram_figure(plain).legends


def test_diagram_with_alpha_upwards():
    transposed = diagram()
    transposed.x, transposed.y = ("omega", np.array([0.1, 0.2, 0.3])), ("alpha", np.array([1.0]))
    for name in ("region", "trusted"):
        setattr(transposed, name, getattr(transposed, name)[:1])
    transposed.loss_difference, transposed.gen_difference = (np.zeros((1, 3)), None), (np.zeros((1, 3)), None)
    left = diagram_figure(transposed).axes[0]
    np.testing.assert_allclose(left.lines[-1].get_ydata(), [1, 2])
    assert left.get_ylim() == (0.5, 1.5)


def test_slices():
    figure = slice_figure(diagram(), [0, 1])
    upper, upper_right, lower, lower_right = figure.axes
    dotted = [line for line in upper_right.lines if (line.get_gid() or "").endswith("unstable")]
    np.testing.assert_array_equal(dotted[0].get_ydata(), [13, 14, np.nan])  # up to the first stable point
    assert len(dotted) == 1 and legend_texts(figure)[-1] == "unstable"
    positional, semantic = upper.lines
    (uninformed,) = (line for line in upper_right.lines if line.get_gid() == "uninformed")
    np.testing.assert_array_equal(uninformed.get_ydata(), [np.nan, np.nan, 25])  # where neither branch exists
    assert uninformed.get_color() == COLOURS["uninformed"]
    np.testing.assert_array_equal(positional.get_ydata(), [0, 1, np.nan])  # no state in the third cell
    np.testing.assert_array_equal(semantic.get_ydata(), [10, 11, np.nan])
    assert upper.collections[0].get_paths()[0].vertices[:, 1].min() == -1  # two error bars
    np.testing.assert_array_equal(lower.lines[2].get_ydata(), [9, 9, 9])
    np.testing.assert_array_equal(lower_right.lines[1].get_ydata(), [np.nan, -4, -5])
    assert "uninformed" in legend_texts(figure)
    assert labels(lower) == ["positional", "semantic", "linear baseline"] and labels(upper_right)[-1] == "uninformed"
    assert (positional.get_color(), semantic.get_color()) == (COLOURS["positional"], COLOURS["semantic"])
    assert lower_right.get_title() == "" and upper.get_title(loc="left") == r"$\omega$ = 0.1"


@pytest.mark.parametrize("height", [2.4, 6.0])
def test_labels_of_slices_do_not_overlap(height):
    """Low rows have the symbols alone, in a figure as wide as a column of a paper."""
    with matplotlib.rc_context({"figure.figsize": (3.4, height)}):
        figure = slice_figure(diagram(), [0, 1])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    shown = [axis.yaxis.label for axis in figure.axes if axis.get_ylabel()]
    upper, lower = (label.get_window_extent(canvas.get_renderer()) for label in shown)
    assert upper.y0 > lower.y1 and upper.y1 <= figure.bbox.y1
    assert [label.get_text() for label in shown] == [
        text if height > 4 else text[text.index("$") :] for text in (LABELS["train_loss"], LABELS["gen_error"])
    ]


def test_models_of_a_list_are_places():
    """Nothing is drawn between the models of a list, and their places are integers."""
    by_model, places = diagram(), np.arange(3.0)
    by_model.x, by_model.y = ("model", places), ("alpha", np.array([1.0, 2.0]))
    for name in ("alpha_c", "alpha_l"):
        events = made.events(name, "model", places, places + 1, 0.1 * places)
        setattr(by_model, name, lambda events=events: events)
    left = diagram_figure(by_model).axes[0]
    drawn = [line for line in left.lines if line.get_gid() in ("alpha_c", "alpha_l")]
    assert [(line.get_linestyle(), line.get_marker()) for line in drawn] == [("None", "o"), ("None", "D")]
    assert all(tick == round(tick) for tick in left.get_xticks())


def test_attention():
    S = np.array([[[0.5, 0.5], [0.25, 0.75]], [[1.0, 0.0], [0.0, 1.0]]])
    first, second, _ = attention_figure({"frozen": S}, np.array([[0, 1], [2, 2]])).axes
    assert len(first.patches) == 2 and len(second.patches) == 4  # equal tokens are framed
    assert [text.get_text() for text in first.texts] == [".50", ".50", ".25", ".75"]
    assert [text.get_color() for text in first.texts] == ["0.15", "0.15", "0.15", "white"]
    assert [t.get_text() for t in first.get_xticklabels()] == ["A", "B"] and first.images[0].get_clim() == (0, 1)
    faint, _, _ = attention_figure({"frozen": S / 4}, np.array([[0, 1], [2, 2]])).axes
    assert faint.images[0].get_clim() == (0, 0.25)  # the scale fits the values
    assert [text.get_color() for text in faint.texts] == ["0.15", "0.15", "0.15", "white"]
    assert [token_name(k) for k in (0, 25, 26)] == ["A", "Z", "26"]


def stage(*values):
    """A stage of the training of two transformers."""
    numbers = np.array([values, values])
    shares = {"positional_share": numbers / 20, "semantic_share": numbers / 30}
    return Namespace(history=Namespace(train_loss=numbers, test_accuracy=numbers / 10, **shares))


def test_learning():
    loss, error, share = learning_figure({"semantic": [stage(1.0, 2.0, 3.0), stage(4.0)]}).axes
    np.testing.assert_array_equal(loss.lines[0].get_xdata(), [1, 2, 3, 4])
    np.testing.assert_array_equal(loss.lines[1].get_ydata(), [1, 2, 3, 4])
    np.testing.assert_allclose(error.lines[0].get_ydata(), [0.9, 0.8, 0.7, 0.6])
    np.testing.assert_allclose(share.lines[0].get_ydata(), np.arange(1, 5) / 20)
    np.testing.assert_allclose(share.lines[2].get_ydata(), np.arange(1, 5) / 30)
    assert labels(share) == ["positional share, semantic", "semantic share, semantic", "next stage"]
    assert labels(loss) == ["semantic", "next stage"]
    assert loss.lines[-1].get_xdata() == [3.5, 3.5] and loss.lines[0].get_color() == COLOURS["semantic"]
    assert loss.lines[0].get_marker() == "None"
    axes = learning_figure({"semantic": [stage(1.0)]}).axes  # one epoch is a point
    assert all(line.get_marker() == "o" for axis in axes for line in axis.lines)
    ticks = axes[0].xaxis.get_major_locator().tick_values(*axes[0].get_xlim())
    np.testing.assert_array_equal(ticks, np.round(ticks))  # ticks lie at whole epochs


def transition():
    point_of = lambda branch, slopes: Namespace(  # noqa: E731
        branch=branch,
        train_loss=0.5,
        replicates=Namespace(train_loss_partials=(None, np.array(slopes))),
        model=Namespace(sigma=np.array(0.5), mixing=np.array([[0.6, 0.4]]), zero=np.array(0.0), rank=1),
    )
    points = point_of("positional", [1.0, 3.0]), point_of("semantic", [1.0, 1.0])
    slopes = Namespace(sigma=np.array(-8.0), mixing=np.array([[0.0, 5.0]]), zero=np.array(7.0), rank=1)
    bars = Namespace(sigma=np.array(0.4), mixing=np.array([[0.1, np.inf]]), zero=np.array(0.1), rank=1)
    sensitivities = {"sensitivities": slopes, "sensitivities_stderr": bars}
    return Namespace(event="alpha_c", value=2.0, stderr=0.1, branches=points, **sensitivities)


def test_transition():
    figure = transition_figure(transition())
    losses, moves = figure.axes
    positional, semantic, mark = losses.lines
    x, y = positional.get_data()
    np.testing.assert_allclose(np.diff(y) / np.diff(x), 2)  # the mean slope of the replicates
    np.testing.assert_allclose(np.diff(semantic.get_ydata()) / np.diff(x), 1)
    assert mark.get_xdata()[0] == 2.0 and legend_texts(figure) == ["positional", "semantic", r"$\alpha_c$"]
    assert [text.get_text() for text in moves.get_yticklabels()] == [r"$\sigma$", "mixing[0,1]"]  # the larger first
    np.testing.assert_allclose([bar.get_width() for bar in moves.patches], [-2.0, 1.0])
    assert losses.get_title(loc="left") == r"$\alpha_c$ = 2 $\pm$ 0.1"
    single = transition()
    single.event, single.branches = "semantic pitchfork", single.branches[:1]
    (axis,) = transition_figure(single).axes
    assert "relative sensitivity" in axis.get_xlabel() and "pitchfork" in axis.get_title(loc="left")
    single.sensitivities = None
    (empty,) = transition_figure(single).axes
    assert not empty.lines


def training_runs():
    return {
        "positional": Namespace(losses=np.array([3.0, 2.0, np.nan]), gradient_norms=np.array([0.1, 0.01, np.nan])),
        "mine": Namespace(losses=np.array([3.0, 2.0, 1.0]), gradient_norms=np.array([0.2, 0.1, 0.05])),
    }


def test_training():
    figure = training_figure(training_runs())
    loss, gradient = figure.axes
    assert legend_texts(figure) == ["positional", "mine"]
    # Steps that were not taken are left out.
    np.testing.assert_array_equal(loss.lines[0].get_xydata(), [[0, 3], [1, 2]])
    np.testing.assert_array_equal(gradient.lines[1].get_ydata(), [0.2, 0.1, 0.05])
    assert loss.lines[0].get_color() == COLOURS["positional"] and gradient.get_yscale() == "log"


def message_passing():
    blank = np.full((2, 1, 1), np.nan)
    first = np.array([2.0, 4.0]).reshape(2, 1, 1)
    history = Namespace(q=np.stack([first, 2 * first, blank]), theta=np.stack([-first, first, blank]))
    history.m = history.theta[..., 0] / 2
    return Namespace(history=history, residuals=np.array([0.1, np.nan]))


def test_message_passing():
    q, theta, m, residual = gamp_figure({"semantic": message_passing()}).axes
    np.testing.assert_array_equal(q.lines[0].get_xydata(), [[0, 3], [1, 6]])  # means over the tokens
    np.testing.assert_array_equal(theta.lines[0].get_ydata(), [-3, 3])  # with their sign
    np.testing.assert_array_equal(m.lines[0].get_ydata(), [-1, 1])  # that of the first token
    assert (theta.get_ylabel(), m.get_ylabel()) == (LABELS["theta"], LABELS["m"])
    wide = message_passing()
    wide.history = Namespace(**{name: np.tile(a, 2) for name, a in vars(wide.history).items()})
    _, theta, m, _ = gamp_figure({"semantic": wide}).axes  # two columns have norms
    np.testing.assert_allclose(theta.lines[0].get_ydata(), np.sqrt(2) * np.array([3, 3]))
    np.testing.assert_allclose(m.lines[0].get_ydata(), np.sqrt(2) * np.array([1.5, 1.5]))
    assert theta.get_ylabel() == f"norm of the {LABELS['theta']}"
    np.testing.assert_array_equal(residual.lines[0].get_xydata(), [[1, 0.1]])
    assert residual.lines[0].get_color() == COLOURS["semantic"]


def drawn_instances(**columns):

    def numbers(*values):
        return Compared(*[np.array(values)] * 6)

    zeros = np.zeros(5)
    defaults = {
        "simulation": numbers(1.0, 2.0, 3.0, 99.0, 98.0),
        "theory": numbers(1.1, 2.1, 3.1, np.nan, np.nan),
        "theory_stderr": numbers(0.1, np.inf, 0.1, np.nan, np.nan),
        "branch": np.array(["semantic", "semantic", "positional", "unsettled", "neither"]),
        "status": np.array([0, 2, 0, 3, 0]),
        **{"distance": np.zeros((5, 2)), "rho": zeros, "gradient_norm": zeros, "finished": zeros.astype(bool)},
        **{"iterations": zeros.astype(int), "theory_status": zeros.astype(int)},
    }
    return made.instances(**{**defaults, **columns})


def test_instances():
    figure = drawn_instances().plot()
    assert legend_texts(figure) == ["positional", "semantic", "semantic, out of steps"]
    axis = figure.axes[0]
    positional, semantic, hollow = axis.containers
    np.testing.assert_array_equal(positional[0].get_xydata(), [[3.1, 3.0]])  # without instances that have no theory
    np.testing.assert_array_equal(hollow[0].get_xydata(), [[2.1, 2.0]])
    assert hollow[0].get_markerfacecolor() == "#ffffff" and semantic[0].get_color() == COLOURS["semantic"]
    ((whisker,),) = (bars.get_segments() for bars in semantic[2])
    np.testing.assert_allclose(whisker[:, 0], [0.9, 1.3])  # two error bars
    assert axis.get_xlim()[1] < 4
    assert not drawn_instances(branch=np.full(5, "neither")).plot().axes[0].containers
    (line,) = drawn_instances().plot("theory.q").axes[0].lines[:1]
    np.testing.assert_array_equal(line.get_xydata()[:2], [[0, 1.1], [1, 2.1]])


def trajectory():
    t = np.array([0.0, 1.0, 2.0])
    overlaps = {"Theta": np.zeros((3, 2, 2)), "m": np.zeros((3, 2, 2))}
    numbers = Namespace(
        R=np.full((3, 2, 2), 2.0), **overlaps, along_teacher=t, along_encodings=4 * t, risk=3 + t, gen_error=1 + t
    )
    bars = Namespace(risk=0.1 * t, gen_error=0.2 * t)
    return Namespace(t=t, mean=numbers, stderr=bars)


def test_trajectory():
    """Sizes are roots of the parts of tr R, and both losses have their own line."""
    drawn_path, t = trajectory(), np.array([0.0, 1.0, 2.0])
    figure = trajectory_figure(drawn_path)
    sizes, losses = figure.axes
    drawn = {line.get_label(): line.get_ydata() for line in sizes.lines}
    np.testing.assert_allclose(drawn["along the teacher"], np.sqrt(t))
    np.testing.assert_allclose(drawn["along the encodings"], 2 * np.sqrt(t))
    np.testing.assert_allclose(next(iter(drawn.values())), 2.0)
    drawn_path.mean.Theta, drawn_path.mean.m = np.ones((3, 1, 1)), np.array([[[1.0], [-1.0]]] * 2 + [[[-1.0], [1.0]]])
    signed = trajectory_figure(drawn_path).axes[0].lines
    np.testing.assert_allclose(signed[1].get_ydata(), np.sqrt(t))
    np.testing.assert_allclose(signed[2].get_ydata(), [0, 2, -2 * np.sqrt(2)])  # a change of sign is no kink
    assert {line.get_label() for line in losses.lines} == {"risk", LABELS["gen_error"]} and len(losses.collections) == 2
    for curve, band, name in zip(losses.lines, losses.collections, ("risk", "gen_error"), strict=True):
        mean, bar = getattr(drawn_path.mean, name), getattr(drawn_path.stderr, name)
        np.testing.assert_allclose(curve.get_ydata(), mean)
        heights = band.get_paths()[0].vertices[:, 1]
        np.testing.assert_allclose([heights.min(), heights.max()], [np.min(mean - 2 * bar), np.max(mean + 2 * bar)])
    with pytest.raises(ta.InputError, match="one trajectory"):
        trajectory_figure(Namespace(t=t[None], mean=drawn_path.mean, stderr=drawn_path.stderr))


def growing():
    """A student whose overlaps grow a thousandfold."""
    t = np.array([0.0, 1.0, 2.0])
    mean = Namespace(teacher=10.0**t, encodings=1 + t, growth_teacher=t - 1, growth_encodings=0 * t)
    bars = Namespace(teacher=0.1 * t, encodings=0.2 * t, growth_teacher=0.3 * t, growth_encodings=0.4 * t)
    return Namespace(t=t, mean=mean, stderr=bars)


def test_emergence():
    """Mean squares stand on a logarithmic axis, rates on a linear one; both in the colours of their branch."""
    path = growing()
    square, growth = emergence_figure(path).axes
    assert square.get_yscale() == "log" and growth.get_yscale() == "linear" and growth.get_ylim()[0] < -1
    for axis, prefix in ((square, ""), (growth, "growth_")):
        for line, band, name in zip(axis.lines, axis.collections, ("teacher", "encodings"), strict=True):
            mean, bar = getattr(path.mean, prefix + name), getattr(path.stderr, prefix + name)
            assert line.get_label() == f"along the {name}"
            assert line.get_color() == COLOURS["semantic" if name == "teacher" else "positional"]
            np.testing.assert_allclose(line.get_ydata(), mean)
            heights = band.get_paths()[0].vertices[:, 1]
            np.testing.assert_allclose([heights.min(), heights.max()], [np.min(mean - 2 * bar), np.max(mean + 2 * bar)])
    with pytest.raises(ta.InputError, match="those of one run"):
        emergence_figure(Namespace(t=path.t[None], mean=path.mean, stderr=path.stderr))


def landscapes():
    """Labels 0 and 3 of four cells, between which the global minimum and the steepest descent change."""
    values, cells = np.array([0.1, 0.2]), []
    for label in (0, 0, 3, 3):
        sign = 1.0 if label else -1.0
        cells.append(Namespace(status=0, ok=True, label=label, mean=Namespace(semantic=0.1 * label, positional=0.2),
                               differences={"global": sign, "steepest": sign, "several": -1.0}))  # fmt: skip
    return Table("landscape", ("omega", "sigma"), (values, values), tuple(cells))


def test_landscape():
    figure = landscape_figure(landscapes())
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == (LABELS["omega"], LABELS["sigma"])
    np.testing.assert_allclose(sorted(axis.lines[0].get_xydata().tolist()), [[0.15, 0.1], [0.15, 0.2]])
    expected = "semantic minimum, semantic descent, one minimum", "positional minimum, positional descent, one minimum"
    assert legend_texts(figure) == [*expected, "global minimum changes", "steepest descent changes"]


def events(alpha=None, bar=0.009):
    """alpha_c = 1 + x + y over 3 x 2 cells: one is without the event, and another has an error bar above 1 %."""
    x, y = np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5])
    values = (1 + x[:, None] + y).ravel() if alpha is None else np.full(6, alpha)
    bars = bar * values
    if alpha is None:
        values[4], bars[1] = np.nan, 0.011 * values[1]
    cells = made.events("alpha_c", "omega", np.arange(6.0), values, bars, np.zeros(6)).cells
    return Table("alpha_c", ("omega", "b"), (x, y), cells)


def test_map_of_a_number():
    figure = map_figure(events())
    axis, bar = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel(), bar.get_ylabel()) == (LABELS["omega"], "b", r"$\alpha_c$")
    assert legend_texts(figure) == [r"$\alpha_c$ not found", "error bar above 1 %"]
    named = {artist.get_gid(): artist for artist in axis.collections}
    assert named["alpha_c alpha"].get_array().mask.tolist() == [[False, False, True], [False, False, False]]
    assert marked(axis, r"$\alpha_c$ not found") == [(0.25, 0.35)]
    assert marked(axis, "error bar above 1 %") == [(0.05, 0.45)]
    (lines,) = (artist for artist in axis.collections if hasattr(artist, "levels"))
    assert len(lines.levels) > 2 and np.all((lines.levels > 1.5) & (lines.levels < 1.8))
    for level, contour in zip(lines.levels, lines.get_paths(), strict=True):
        np.testing.assert_allclose(1 + contour.vertices.sum(1), level)
    assert not map_figure(events(1.0, 0.0)).legends  # nothing is missing, and no contour line is there
    assert legend_texts(map_figure(events(np.nan))) == [r"$\alpha_c$ not found"]


def test_number_along_an_axis():
    """A number by name, over one axis or two; a table without an axis has no picture."""
    (axis,) = curve("semantic").plot("gen_error").axes
    np.testing.assert_array_equal(axis.lines[0].get_xydata(), [[a, 2 * a] for a in range(1, 5)])
    assert axis.get_ylabel() == LABELS["gen_error"] and axis.lines[0].get_color() == COLOURS["semantic"]
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(8 + 2 * 8 * BAR)
    assert events().plot("stderr").axes[0].collections[0].get_gid() == "alpha_c stderr"
    (axis,) = table_figure(Table("landscape", ("omega",), (np.arange(2.0),), risks())).axes
    np.testing.assert_array_equal([line.get_ydata() for line in axis.lines[::-1]], [[0.1, 0.2], [0.1 + 0.2, 0.2 + 0.2]])
    with pytest.raises(ta.InputError, match="axes must be one or two"):
        Table("semantic", (), (), (point(1.0, 0.5),)).plot()


def risks():
    """Two landscapes with different risks of both candidates."""
    zero = dict.fromkeys(Landscape.SHOWN, 0.0)
    numbers = [Namespace(**{**zero, "semantic": a, "positional": a + 0.2}) for a in (0.1, 0.2)]
    return tuple(
        Namespace(status=0, ok=True, label=0, mean=a, stderr=Namespace(**zero), numbers=lambda a=a: (vars(a), zero))
        for a in numbers
    )


def test_theory_beside_message_passing():
    run = message_passing()
    theory, doubled = run.history, {name: 2 * values for name, values in vars(run.history).items()}
    run.history = Namespace(**doubled)
    q = gamp_figure({"message passing": run}, Namespace(history=theory)).axes[0]
    assert [line.get_label() for line in q.lines] == ["message passing", "theory"]
    np.testing.assert_allclose(q.lines[0].get_ydata(), 2 * q.lines[1].get_ydata())
    assert q.lines[1].get_linestyle() == "--" and q.lines[0].get_linestyle() == "-"
    grey = [np.dot([0.299, 0.587, 0.114], matplotlib.colors.to_rgb(line.get_color())) for line in q.lines]
    assert grey[0] > grey[1] + 0.4  # they are told apart in print without colours
    (q, *_) = ta.results.StateEvolution.plot(Namespace(history=theory), run, color="r").axes
    assert [line.get_color() for line in q.lines] == [COLOURS["simulation"], "r"]  # the picture is that of the theory


def best_values():
    """The best ridge at two alphas, on either branch."""
    cells = []
    for k, branch in enumerate(("positional", "semantic")):
        state, rate = Namespace(branch=branch, gen_error_linear=0.5), ta.Average(np.array(0.1), np.array(0.0))
        error = Quantity(np.array(0.3 + 0.1 * k), np.array(0.01), np.array(0), by_alpha=rate)
        cells.append(Namespace(branches=(1,), state=state, place="inside", value=0.1 + 0.1 * k, stderr=np.array(0.01),
                               name="lam", branch=None, gen_error=error, status=0, reason=""))  # fmt: skip
    return Table("best lam", ("alpha",), (np.array([1.0, 2.0]),), tuple(cells))


BOUNDARY = made.events("alpha_c", "omega", np.array([0.1, 0.2]), np.array([1.0, 2.0]), np.array([0.1, 0.1]))


# What every class with a picture draws, from a result made by hand, and the names of its panels.
def wide_spectrum():
    """The spectrum of a wide layer whose eigenvalues are zero in a quarter of the cases, with a bump above zero."""
    values = np.linspace(0.0, 2.0, 5)
    density = 0.375 * values * (2 - values) / 0.5
    return Namespace(values=values, density=density, weight=np.full(5, 0.15), zeros=np.array(0.25), edge=values[-1])


def wide_states(question="state", two=False):
    """States of a wide layer along alpha, or over alpha and tau, with and without content."""
    cells = []
    for k, alpha in enumerate((0.1, 1.0) if not two else (0.1, 0.1, 1.0, 1.0)):
        numbers = dict.fromkeys(("q", "m", "share", "trace", "distance", "gen_error"), 0.1 + alpha)
        bars = {name: 0.1 * value for name, value in numbers.items()}
        model = Namespace(teacher=Namespace(rho=2.0), tokens=2)
        cells.append(Namespace(
            ok=True, alpha=alpha, model=model, status=0, offset=np.zeros(0), stderr=Namespace(**bars),
            numbers=lambda n=numbers, b=bars: (n, b), **numbers | {"q": np.array(float(k % 2 + (not two)))},
        ))  # fmt: skip
    axes = (np.array([0.1, 1.0]), np.array([0.3, 0.4]))
    return Table(question, ("alpha", "tau")[: 1 + two], axes[: 1 + two], tuple(cells))


def test_no_two_lines_of_wide_states_look_the_same():
    figure = wide_states().plot()
    lines = [drawn for axis in figure.axes for drawn in axis.lines if len(drawn.get_xdata()) > 1]
    looks = {(drawn.get_color(), drawn.get_linestyle()) for drawn in lines}
    assert len(looks) == len({drawn.get_label() for drawn in lines}) == 6


PICTURES = {
    "BayesPoint": (optimal_points, "overlap gen_error"),
    "Table of best values": (best_values, "best gen_error"),
    "BranchPath": (lambda: path([0.4, 0.3, 0.2, 0.1], np.array([2.0, 1.5, 1.0, 1.2]), 0.19), "order train_loss"),
    "Emergence": (growing, "square growth"),
    "Table of an event": (lambda: BOUNDARY, "alpha"),
    "GAMP": (message_passing, "q theta m residual"),
    "Table of landscapes": (landscapes, "label"),
    "Table of instances": (drawn_instances, "train_loss gen_error q theta m"),
    "PhaseDiagram": (diagram, "region gen_error"),
    "Table of states": (lambda: curve("semantic"), "order train_loss gen_error"),
    "StateEvolution": (message_passing, "q theta m residual"),
    "Table over two axes or with the name of a number": (events, "number"),
    "Trajectory": (trajectory, "order loss"),
    "Quantity": (transition, "losses sensitivities"),
    "WideSpectrum": (wide_spectrum, "density"),
    "Table of wide states": (wide_states, "overlaps spectrum errors"),
    "Table of regions": (lambda: wide_states("regions", two=True), "region"),
    "counting.Training": (lambda: stage(1.0, 2.0, 3.0), "train_loss test_error share"),
    "finite.Training": (lambda: training_runs()["mine"], "train_loss gradient_norm"),
}


def pictured():
    """All classes of the package with a method `plot`, by name, with the wing where a name occurs twice."""
    classes = {}
    for module in pkgutil.walk_packages(ta.__path__, "tiedattn_jax."):
        if "__main__" not in module.name:
            for name, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if "plot" in vars(member) and member.__module__.startswith("tiedattn_jax."):
                    wing = f"{member.__module__.split('.')[1]}." * (name == "Training")
                    classes[f"{wing}{name}"] = member
    return classes


def test_numbers_of_wide_states_are_drawn_in_their_units():
    overlaps, spectrum, errors = wide_states().plot().axes
    np.testing.assert_allclose(overlaps.lines[1].get_ydata(), [0.1, 0.55])  # m over rho
    np.testing.assert_allclose(spectrum.lines[0].get_ydata(), [0.2, 1.1])
    assert [line.get_gid() for line in errors.lines] == ["distance to the teacher $/ \\rho$", LABELS["gen_error"]]
    (region,) = wide_states("regions", two=True).plot().axes
    assert {c.get_gid(): len(c.get_paths()) for c in region.collections}["content"] == 2


def test_every_class_with_a_picture_is_tested():
    assert pictured().keys() == {name.split()[0] for name in PICTURES}


def test_the_page_names_all_panels():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "figures.md").read_text()
    named = {}
    for results, panel_names in re.findall(r"^\| (`\w.*?) \| (`.*) \|$", page, re.M):
        for result in results.replace("`", "").split(", "):
            named[result] = [name for name in re.findall(r"`(\w+)`", panel_names) if name != "Axes"]
    public = {"counting.Training": "histogram.Training", "finite.Training": "Training"}
    assert named == {public.get(name, name): panel_names.split() for name, (_, panel_names) in PICTURES.items()}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_on_axes_of_the_callers(name):
    """On all of its panels, on one of them by name, beside lines of the caller's, and without a legend or a title."""
    make, panel_names = PICTURES[name]
    plot, panel_names = pictured()[name.split()[0]].plot, panel_names.split()
    own = plot(make())
    assert isinstance(own, Figure)
    figure = Figure()
    axes = list(figure.subplots(1, len(panel_names), squeeze=False).flat)
    for axis in axes:
        axis.plot([1.0, 2.0], [0.1, 0.2], label="measured")
        axis.set_title("(a)", loc="right")
    assert plot(make(), ax=axes) is axes and not figure.legends
    for axis, reference in zip(axes, own.axes, strict=False):  # colour bars come after the panels
        names = axis.get_legend_handles_labels()[1]
        assert names[0] == "measured" and len(set(names)) == len(names) and axis.get_title(loc="right") == "(a)"
        assert axis.get_xlabel() == reference.get_xlabel() and len(axis.get_children()) > len(
            Figure().subplots().get_children()
        )
        assert axis.get_legend() is None
    drawn = len(axes[0].get_children()), [axis.get_legend_handles_labels()[1] for axis in axes]
    plot(make(), ax=axes)  # drawn twice, lines have another shade and a number; the rest is explained once
    assert len(axes[0].get_children()) > drawn[0]
    for axis, names in zip(axes, drawn[1], strict=True):
        twice, _ = axis.get_legend_handles_labels()[1], None
        assert twice[: len(names)] == names and {name.removesuffix(" (2)") for name in twice} == set(names)
        assert len(set(twice)) == len(twice)
    single = Figure().subplots()
    assert plot(make(), ax={panel_names[-1]: single}) == {panel_names[-1]: single}
    assert single.get_xlabel() == own.axes[len(panel_names) - 1].get_xlabel()
    if len(panel_names) == 1:
        assert plot(make(), ax=single) is single
    wrong = [single] * (len(panel_names) + 1), {"volume": single}, "axes", [None] * len(panel_names)
    for ax in wrong:
        with pytest.raises(ta.InputError, match=f"ax must be .*panels {', '.join(panel_names)}"):
            plot(make(), ax=ax)


NO_LINES = (
    "Table of landscapes",
    "Table of regions",
    "PhaseDiagram",
    "Table over two axes or with the name of a number",
)


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in NO_LINES])
def test_options_hold_in_every_picture(name):
    make, _ = PICTURES[name]
    plot, axis_count = pictured()[name.split()[0]].plot, len(PICTURES[name][1].split())
    before, after = plot(make()), plot(make(), color="#123456", label="mine")
    texts = [text for axis in after.axes[:axis_count] for text in axis.get_legend_handles_labels()[1]]
    assert any(text.startswith("mine") for text in texts)
    colours = {line.get_color() for axis in after.axes for line in axis.lines if line.get_label().startswith("mine")}
    containers = {bar[0].get_color() for axis in after.axes for bar in axis.containers if "mine" in bar.get_label()}
    assert colours | containers == {"#123456"}
    assert len(before.axes) == len(after.axes)


def test_atom_of_a_wide_spectrum():
    (axis,) = spectrum_figure(wide_spectrum()).axes
    atom = next(line for line in axis.lines if line.get_gid() == "zeros")
    np.testing.assert_allclose(atom.get_xydata(), [[0, 0], [0, 0.25]])  # the height is in units of the panel
    assert legend_texts(axis.figure) == ["density of 0.75 of all eigenvalues", "0.25 of all are zero"]


def test_names_of_artists():
    """A line, its dotted stretch and its band are found by their names."""
    _, losses, _ = branch_figure(curve("semantic"), alpha_c=Namespace(ok=True, alpha=1.5)).axes
    names = {artist.get_gid() for artist in losses.get_children()}
    assert {"semantic", "semantic, unstable", "semantic, error bars", "alpha_c, beside"} <= names
    left = diagram_figure(diagram()).axes[0]
    names = {artist.get_gid() for artist in left.get_children()}
    assert {"alpha_c", "alpha_c, error bars", "positional", "neither is stable"} <= names


def test_settings_of_the_user_hold():
    """The library's style fills in what the user has left alone, and changes no setting."""
    before = dict(matplotlib.rcParams)
    plain = branch_figure(curve("semantic"))
    assert dict(matplotlib.rcParams) == before
    assert tuple(plain.get_size_inches()) == (11, 3.6) and plain.axes[0].xaxis.label.get_size() == 9
    user = {"figure.figsize": (7.0, 2.0), "font.size": 7.0, "axes.spines.top": True, "lines.linewidth": 0.7}
    with matplotlib.rc_context({**user, "legend.fontsize": 5.0}):
        figure = branch_figure(curve("semantic"))
        assert matplotlib.rcParams["font.size"] == 7
    axis, (legend,) = figure.axes[0], figure.legends
    assert tuple(figure.get_size_inches()) == (7, 2) and axis.xaxis.label.get_size() == 7
    assert axis.lines[0].get_linewidth() == 0.7 and legend.get_texts()[0].get_size() == 5
    assert not axis.spines["right"].get_visible()  # the user has not changed this one
    # `rc_context` cannot tell a default from a choice of the same value: the top spine keeps the library's style.
    assert not axis.spines["top"].get_visible()


def test_geometric_axes_are_logarithmic():
    assert is_geometric(np.geomspace(1e-4, 0.1, 7)) and is_geometric(np.geomspace(1e-4, 0.1, 7, dtype=np.float32))
    for values in ([1.0, 2.0, 4.0], np.linspace(0.4, 2.4, 6), [0.0, 1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 9.0], [1.0] * 5):
        assert not is_geometric(np.array(values)), values
    branch = curve("semantic", alphas=np.geomspace(1.0, 8.0, 4))
    assert {axis.get_xscale() for axis in branch_figure(branch).axes} == {"log"}
    assert {axis.get_xscale() for axis in branch_figure(curve("semantic")).axes} == {"linear"}
    lams = np.geomspace(1e-3, 1.0, 4)
    (axis,) = boundary_figure(made.events("alpha_c", "lam", lams, np.ones(4), np.zeros(4))).axes
    assert axis.get_xscale() == "log"
    plane = diagram()
    plane.y = ("lam", np.geomspace(1e-3, 1e-2, 2))
    plane.x = ("sigma", lams)
    for name in ("region", "trusted"):
        setattr(plane, name, np.pad(getattr(plane, name), [(0, 0), (0, 1)]))
    plane.loss_difference = plane.gen_difference = (np.ones((2, 4)), None)
    left = diagram_figure(plane).axes[0]
    assert (left.get_xscale(), left.get_yscale()) == ("log", "linear")
    np.testing.assert_allclose(left.get_xlim(), [1e-3 / 10**0.5, 10**0.5])  # edges lie at geometric means
