"""Figures of results made by hand, as readers see them; the tests of diagrams and transformers draw solved ones."""

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
import matplotlib.style
import numpy as np
import pytest
from made import SPREAD, point
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.dynamics.landscape import Landscape
from tiedattn_jax.finite.instances import Compared
from tiedattn_jax.phases.table import Table
from tiedattn_jax.plotting import diagrams, simulations, theory
from tiedattn_jax.plotting.style import COLOURS, LABELS, REGION_STYLES, is_geometric, line as draw_line, panels
from tiedattn_jax.theory.quantities import Quantity

NAN = np.nan
BAR = float(error_bar(SPREAD))  # relative error bar of every number of a point
A, T = np.arange(1.0, 5.0), np.arange(3.0)


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


def named(axis, name):
    """The artist of a name."""
    return next(artist for artist in axis.get_children() if artist.get_gid() == name)


def marked(axis, name):
    """Lower left corners of the cells that an artist of this name marks."""
    return [tuple(map(float, path.vertices.min(0).round(9))) for path in named(axis, name).get_paths()]


def labelled(axis, label):
    return next(line for line in axis.lines if line.get_label() == label)


def drawn(axis, label):
    """Points of the lines of a label, (n, 2) without NaN; solid and dotted stretches together."""
    name = labelled(axis, label).get_gid()
    lines = [line for line in axis.lines if line.get_gid() in (name, f"{name}, unstable") and len(line.get_xdata())]
    pairs = np.concatenate([np.asarray(line.get_xydata(), float) for line in lines])
    return np.unique(pairs[np.isfinite(pairs).all(1)], axis=0)


# Results made by hand


def curve(branch, growths=(1.5, 1.2, 0.8, 0.7), alphas=None, model=None):
    """A table whose points have their alpha as `value`."""
    alphas = 1.0 + np.arange(len(growths)) if alphas is None else np.array(alphas)
    cells = tuple(point(*numbers, branch, model) for numbers in zip(alphas, growths, strict=True))
    return Table(branch, ("alpha",), (alphas,), cells)


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


def risks():
    """Two landscapes with different risks of both candidates."""
    zero = dict.fromkeys(Landscape.SHOWN, 0.0)
    cells = [
        Namespace(
            status=0, label=0, in_table=Landscape.in_table.fget(None),
            numbers=lambda a=a: {name: (b, 0.0) for name, b in {**zero, "semantic": a, "positional": a + 0.2}.items()},
        )
        for a in (0.1, 0.2)
    ]  # fmt: skip
    return Table("landscape", ("omega",), (np.arange(2.0),), tuple(cells))


def best_values():
    """The best ridge at two alphas, on either branch."""
    cells = []
    for k, branch in enumerate(("positional", "semantic")):
        state, rate = Namespace(branch=branch, gen_error_linear=0.5), ta.results.Average(np.array(0.1), np.array(0.0))
        error = Quantity(np.array(0.3 + 0.1 * k), np.array(0.01), np.array(0), by_alpha=rate)
        numbers = np.array(0.1 + 0.1 * k), np.array(0.01), np.array(0)
        words = {"name": "lam", "event": "best lam", "labels": (("branch", None), ("place", "inside"))}
        cells.append(Quantity(*numbers, branches=(state,), further={"gen_error": error}, **words))
    return Table("best lam", ("alpha",), (np.array([1.0, 2.0]),), tuple(cells))


def optimal_points():
    """The optimal learner at three alphas, with another state at the last two."""
    q, rho = np.array([0.0, 0.25, 0.5]), np.full((3, 2, 1, 1, 1), 0.5)
    state, other = (
        Namespace(q=rho * a[:, None, None, None, None], V=rho * (1 - a[:, None, None, None, None])) for a in (2 * q, q)
    )
    error, bars = np.array([0.3, 0.2, 0.0]), Namespace(gen_error=np.full(3, 0.01))
    hard = np.array([False, True, True])
    return Namespace(
        alpha=np.array([0.5, 1.0, 1.5]), gen_error=error, stderr=bars, replicates=state, other=other, hard=hard
    )


def path(theta=(0.4, 0.3, 0.2, 0.1), values=(2.0, 1.5, 1.0, 1.2), turn=0.19, fork=False):
    """A path in alpha, unstable in its second half, with one turn, at alpha = .99."""
    values, count = np.array(values), len(values)
    state = Namespace(overlaps=Namespace(theta=np.full((1, 2, 1, 1), turn)), train_loss=np.array([0.09]))
    x = Namespace(theta=np.tile(np.reshape(theta, (count, 1, 1, 1)), (1, 2, 1, 1)), m=np.zeros((count, 2, 1)))
    eigenvalues = np.linspace(0.5, 1.5, count + 1)[:-1, None] + 0j  # one of the eigenvalues is one
    turns = {f"{kind}{part}": (a,) * (fork == (kind == "pitchfork")) for kind in ("fold", "pitchfork")
             for part, a in (("s", 0.99), ("_states", state))}  # fmt: skip
    states = Namespace(overlaps=x, train_loss=values / 10)
    return Namespace(parameter="alpha", values=values, states=states, eigenvalues=eigenvalues, **turns)


X, Y = ("alpha", np.array([1.0, 2.0, 4.0])), ("omega", np.array([0.1, 0.3]))


def diagram(x=X, y=Y, region=((0, 2, 3), (4, 5, 1)), **changes):
    """A diagram, by default of three alphas and two omegas, in which every kind of region occurs once."""
    region = np.array(region)
    values = np.arange(1.0 * region.size).reshape(region.shape)
    boundary = made.events("alpha_c", "omega", np.array([0.1, 0.3]), np.array([1.0, 2.0]), np.array([0.1, np.inf]))
    bars = Namespace(train_loss=np.full((2, 3), 0.5), gen_error=np.full((2, 3), 0.5))

    def states(loss, error, linear):
        return Namespace(mean=Namespace(train_loss=loss, gen_error=error), stderr=bars, gen_error_linear=linear)

    return Namespace(**{
        "x": x,
        "y": y,
        "region": region,
        "loss_difference": (values - 3.5, None),
        "gen_difference": (values - 1, None),
        "trusted": region != 4,
        "winner": np.array([[0, 0, -1], [1, 1, 2]]),
        "global_minimum": states(values + 20, values + 20, None),
        "positional": states(values, values, np.full((2, 3), 9.0)),
        "semantic": states(values + 10, -values, np.full((2, 3), NAN)),
        "exists": np.array([[[True, True, False], [True, True, True]]] * 2),
        "stable": np.array([[[True, True, False], [True, True, True]], [[True, True, False], [False, True, True]]]),
        "alpha_c": lambda: boundary,
        "alpha_l": lambda: boundary,
    } | changes)  # fmt: skip


def landscapes():
    """Labels 0 and 3 of four cells, between which the global minimum and the steepest descent change."""
    values, cells = np.array([0.1, 0.2]), []
    for label in (0, 0, 3, 3):
        sign = 1.0 if label else -1.0
        pairs = {"label": (label, None), "semantic": (0.1 * label, 0.0), "positional": (0.2, 0.0)}
        cells.append(Namespace(status=0, differences={"global": sign, "steepest": sign, "several": -1.0},
                               numbers=lambda pairs=pairs: pairs,
                               in_table=Landscape.in_table.fget(None)))  # fmt: skip
    return Table("landscape", ("omega", "sigma"), (values, values), tuple(cells))


def events(alpha=None, bar=0.009):
    """alpha_c = 1 + x + y over 3 x 2 cells: one is without the event, and another has an error bar above 1 %."""
    x, y = np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5])
    values = (1 + x[:, None] + y).ravel() if alpha is None else np.full(6, alpha)
    bars = bar * values
    if alpha is None:
        values[4], bars[1] = NAN, 0.011 * values[1]
    cells = made.events("alpha_c", "omega", np.arange(6.0), values, bars, np.zeros(6)).cells
    return Table("alpha_c", ("omega", "b"), (x, y), cells)


def transition(**changes):
    def at(branch, slopes):
        partials = Namespace(train_loss_partials=(None, np.array(slopes)))
        model = Namespace(sigma=np.array(0.5), mixing=np.array([[0.6, 0.4]]), zero=np.array(0.0), rank=1)
        return Namespace(branch=branch, train_loss=0.5, replicates=partials, model=model)

    points = at("positional", [1.0, 3.0]), at("semantic", [1.0, 1.0])
    slopes = Namespace(sigma=np.array(-8.0), mixing=np.array([[0.0, 5.0]]), zero=np.array(7.0), rank=1)
    bars = Namespace(sigma=np.array(0.4), mixing=np.array([[0.1, np.inf]]), zero=np.array(0.1), rank=1)
    sensitivities = {"sensitivities": slopes, "sensitivities_stderr": bars}
    numbers = {"event": "alpha_c", "value": 2.0, "stderr": 0.1, "branches": points, **sensitivities}
    return Namespace(**numbers | changes)


def stage(*values):
    """A stage of the training of two transformers."""
    numbers = np.array([values, values])
    shares = {"positional_share": numbers / 20, "semantic_share": numbers / 30}
    return Namespace(history=Namespace(train_loss=numbers, test_accuracy=numbers / 10, **shares))


def training_runs():
    return {
        "positional": Namespace(losses=np.array([3.0, 2.0, NAN]), gradient_norms=np.array([0.1, 0.01, NAN])),
        "mine": Namespace(losses=np.array([3.0, 2.0, 1.0]), gradient_norms=np.array([0.2, 0.1, 0.05])),
    }


def message_passing(columns=1, factor=1.0):
    blank = np.full((2, 1, 1), NAN)
    first = factor * np.array([2.0, 4.0]).reshape(2, 1, 1)
    history = {"q": np.stack([first, 2 * first, blank]), "theta": np.stack([-first, first, blank])}
    history["m"] = history["theta"][..., 0] / 2
    history = Namespace(**{name: np.tile(a, columns) for name, a in history.items()})
    return Namespace(history=history, residuals=np.array([0.1, NAN]))


def trajectory(t=T, **changes):
    overlaps = {"R": np.full((3, 2, 2), 2.0), "Theta": np.zeros((3, 2, 2)), "m": np.zeros((3, 2, 2))} | changes
    numbers = Namespace(**overlaps, along_teacher=T, along_encodings=4 * T, risk=3 + T, gen_error=1 + T)
    return Namespace(t=t, mean=numbers, stderr=Namespace(risk=0.1 * T, gen_error=0.2 * T))


def growing(t=T):
    """A student whose overlaps grow a thousandfold."""
    mean = Namespace(teacher=10.0**T, encodings=1 + T, growth_teacher=T - 1, growth_encodings=0 * T)
    bars = Namespace(teacher=0.1 * T, encodings=0.2 * T, growth_teacher=0.3 * T, growth_encodings=0.4 * T)
    return Namespace(t=t, mean=mean, stderr=bars)


def drawn_instances(**columns):
    def numbers(*values):
        return Compared(*[np.array(values)] * 6)

    zeros = np.zeros(5)
    defaults = {
        "simulation": numbers(1.0, 2.0, 3.0, 99.0, 98.0),
        "theory": numbers(1.1, 2.1, 3.1, NAN, NAN),
        "theory_stderr": numbers(0.1, np.inf, 0.1, NAN, NAN),
        "branch": np.array(["semantic", "semantic", "positional", "unsettled", "neither"]),
        "status": np.array([0, 2, 0, 3, 0]),
        **{"distance": np.zeros((5, 2)), "rho": zeros, "gradient_norm": zeros, "finished": zeros.astype(bool)},
        **{"iterations": zeros.astype(int), "theory_status": zeros.astype(int)},
    }
    return made.instances(**{**defaults, **columns})


def wide_spectrum():
    """The spectrum of a wide layer whose eigenvalues are zero in a quarter of the cases, with a bump above zero."""
    values = np.linspace(0.0, 2.0, 5)
    density = 0.375 * values * (2 - values) / 0.5
    shares = {"weight": np.full(5, 0.15), "zeros": np.array(0.25)}
    return Namespace(values=values, density=density, edge=values[-1], noun="eigenvalues", **shares)


def wide_states(two=False):
    """States of a wide layer along alpha, or over alpha and tau, with and without content."""
    cells = []
    for k, alpha in enumerate((0.1, 1.0) if not two else (0.1, 0.1, 1.0, 1.0)):
        numbers = dict.fromkeys(("q", "m", "share", "trace", "distance", "gen_error"), 0.1 + alpha)
        numbers["q"] = float(k % 2 + (not two))
        region = "content" if numbers["q"] else "no attention to content"
        pairs = {"region": (region, None)} | {name: (value, 0.1 * value) for name, value in numbers.items()}
        cells.append(Namespace(
            alpha=alpha, model=Namespace(teacher=Namespace(rho=2.0)), status=0, numbers=lambda pairs=pairs: pairs,
            in_table=ta.results.WidePoint.in_table.fget(None),
        ))  # fmt: skip
    axes = (np.array([0.1, 1.0]), np.array([0.3, 0.4]))
    return Table("wide.solve", ("alpha", "tau")[: 1 + two], axes[: 1 + two], tuple(cells))


BOUNDARY = made.events("alpha_c", "omega", np.array([0.1, 0.2]), np.array([1.0, 2.0]), np.array([0.1, 0.1]))
WEAK = Namespace(event="weak_recovery", alpha=0.5)


# What readers see

ORDERS, LOSS, ERROR = r"order parameters $m$, $\theta$", LABELS["train_loss"], LABELS["gen_error"]
TIME, SIZE = "time $t$ = steps / $d$", r"size $\sqrt{\mathrm{tr}\,R}$"
LOSSES = {"risk": (T, 3 + T, 0.1 * T), ERROR: (T, 1 + T, 0.2 * T)}
COLOUR_OF = COLOURS | {
    "along the teacher": COLOURS["semantic"], "along the encodings": COLOURS["positional"], "theory": "black",
    "linear baseline": COLOURS["baseline"], "optimal learner": COLOURS["optimal"], "$q$": "0.5",
    "spectral start": COLOURS["spectral"], "message passing": COLOURS["simulation"],
}  # fmt: skip
LOGARITHMIC = (
    "largest entry of the gradient", "residual of the step", "mean square overlap times $d$", "errors",
    "training loss, cross-entropy", "test error, 1 - accuracy", f"best {LABELS['lam']}",
)  # fmt: skip


def upright(x):
    """A vertical line that marks an event."""
    return [x, x], [0, 1]


def of_branch(name, x, y, orders=None, linear=None):
    """The panels of a branch whose numbers are those of `point`."""
    y = np.array(y)
    return {
        ORDERS: {label: (x, y, BAR * abs(y)) for label in orders or [name]},
        LOSS: {name: (x, y, BAR * abs(y))},
        ERROR: {name: (x, 2 * y, 2 * BAR * abs(y)), "linear baseline": linear or (x, y / 2)},
    }


# By result: the picture, its x label, and of every panel by its y label what stands in the legend, each with the x and
# y of its line, and an error bar if it has a band. Steps that were not taken are left out.
SEEN = {
    "any state": (
        lambda: curve(None).plot(), "alpha",
        of_branch("any state", A, A, ["$m$, any state", r"$\theta$, any state"]),
    ),
    "along sigma": (  # the baseline needs no state
        lambda: with_nothing().plot(), r"$\sigma$",
        of_branch("semantic", [0.4, 0.6, 0.8], [-1.0, 3, 4], linear=([0.4, 0.5, 0.6, 0.8], [-0.5, 1, 1.5, 2])),
    ),
    "listed models": (lambda: named_models().plot(), "model", of_branch("semantic", T, [0.4, 0.5, 0.8])),
    "branches": (
        lambda: theory.branch_figure(
            curve("positional"), curve("semantic"), optimal=optimal_points(), recoveries=[WEAK],
            alpha_c=Namespace(ok=True, alpha=1.5), alpha_l=Namespace(ok=False, alpha=2.5),
        ), "alpha",
        {
            ORDERS: {"positional": (A, A), "semantic": (A, A), r"$\alpha_c$": upright(1.5)},
            LOSS: {"positional": (A, A), "semantic": (A, A), r"$\alpha_c$": upright(1.5)},
            ERROR: {"positional": (A, 2 * A, 2 * BAR * A), "semantic": (A, 2 * A), "linear baseline": (A, A / 2),
                    "optimal learner": ([0.5, 1.0, 1.5], [0.3, 0.2, 0.0]), "weak recovery": upright(0.5),
                    r"$\alpha_c$": upright(1.5)},
        },
    ),
    "a number by name": (
        lambda: curve("semantic").plot("gen_error"), "alpha", {ERROR: {"gen_error": (A, 2 * A, 2 * BAR * A)}},
    ),
    "best values": (
        lambda: best_values().plot(), "alpha",
        {f"best {LABELS['lam']}": {"positional": ([1], [0.1]), "semantic": ([2], [0.2]),
                                   r"$\lambda$ jumps in between": None, "minimum": None},
         f"smallest {ERROR}": {"positional": ([1], [0.3]), "semantic": ([2], [0.4]),
                               r"$\lambda$ jumps in between": None, "linear baseline": ([1, 2], [0.5, 0.5])}},
    ),
    "risks": (
        lambda: risks().plot(), "omega",
        {"population risk": {"positional": ([0, 1], [0.3, 0.4]), "semantic": ([0, 1], [0.1, 0.2])}},
    ),
    "a path that turns": (
        lambda: theory.path_figure([path(), path()]), "alpha",
        {ORDERS: {r"$\theta$": ([2, 1.5, 1, 1.2], [0.4, 0.3, 0.2, 0.1]), "fold": ([0.99], [0.19])},
         LOSS: {"fold": ([0.99], [0.09])}},
    ),
    "a path into its mirror": (
        lambda: theory.path_figure([path([0.2, 0.1, -0.1, -0.2], [2.0, 1.0, 1.0, 2.0], 0.0, True)]), "alpha",
        {ORDERS: {r"$\theta$": ([2, 1, 1, 2], [0.2, 0.1, -0.1, -0.2]), "pitchfork": ([0.99], [0])},
         LOSS: {"pitchfork": ([0.99], [0.09])}},
    ),
    # The other state is drawn where there is a hard phase.
    "optimal learner": (
        lambda: theory.optimal_figure(optimal_points(), [WEAK], spectral=np.array([0.0, 0.5, 0.8])), "alpha",
        {r"overlap $q / \rho$": {
            "optimal learner": ([0.5, 1, 1.5], [0, 0.5, 1]),
            "hard phase: state from the other start": ([1, 1.5], [0.25, 0.5]),
            "spectral start": ([0.5, 1, 1.5], [0, 0.25, 0.64]), "weak recovery": upright(0.5),
         },
         ERROR: {"optimal learner": ([0.5, 1, 1.5], np.array([0.3, 0.2, 0]), 0.01), "weak recovery": upright(0.5)}},
    ),
    "training": (
        lambda: simulations.training_figure(training_runs()), "step",
        {LOSS: {"positional": ([0, 1], [3, 2]), "mine": (T, [3, 2, 1])},
         "largest entry of the gradient": {"positional": ([0, 1], [0.1, 0.01]), "mine": (T, [0.2, 0.1, 0.05])}},
    ),
    "learning": (
        lambda: simulations.learning_figure({"semantic": [stage(1.0, 2.0, 3.0), stage(4.0)]}), "epoch",
        {"training loss, cross-entropy": {"semantic": (A, A), "next stage": upright(3.5)},
         "test error, 1 - accuracy": {"semantic": (A, 1 - A / 10), "next stage": upright(3.5)},
         "share of attention's variance": {"positional share, semantic": (A, A / 20),
                                           "semantic share, semantic": (A, A / 30), "next stage": upright(3.5)}},
    ),
    # Means over the tokens of q and theta, with their sign; m of the first token. Several columns have norms.
    "message passing and theory": (
        lambda: simulations.gamp_figure({"message passing": message_passing(factor=2.0)}, message_passing()),
        "iteration",
        {LABELS["q"]: {"message passing": ([0, 1], [6, 12]), "theory": ([0, 1], [3, 6])},
         LABELS["theta"]: {"message passing": ([0, 1], [-6, 6]), "theory": ([0, 1], [-3, 3])},
         LABELS["m"]: {"message passing": ([0, 1], [-2, 2]), "theory": ([0, 1], [-1, 1])},
         "residual of the step": {"message passing": ([1], [0.1])}},
    ),
    "two columns": (
        lambda: simulations.gamp_figure({"semantic": message_passing(2)}), "iteration",
        {LABELS["q"]: {"semantic": ([0, 1], [3, 6])},
         f"norm of the {LABELS['theta']}": {"semantic": ([0, 1], [3 * 2**0.5] * 2)},
         f"norm of the {LABELS['m']}": {"semantic": ([0, 1], [1.5 * 2**0.5] * 2)},
         "residual of the step": {"semantic": ([1], [0.1])}},
    ),
    # Sizes are roots of the parts of tr R. A change of sign is no kink.
    "trajectory": (
        lambda: simulations.trajectory_figure(trajectory()), TIME,
        {"size of the student": {SIZE: (T, 2.0), "along the teacher": (T, np.sqrt(T)),
                                 "along the encodings": (T, 2 * np.sqrt(T))}, "loss": LOSSES},
    ),
    "signed trajectory": (
        lambda: simulations.trajectory_figure(
            trajectory(Theta=np.ones((3, 1, 1)), m=np.array([[[1.0], [-1.0]]] * 2 + [[[-1.0], [1.0]]]))
        ), TIME,
        {"size of the student": {SIZE: (T, 2.0), "along the teacher": (T, np.sqrt(T)),
                                 "along the encodings": (T, [0, 2, -2 * 2**0.5])}, "loss": LOSSES},
    ),
    "emergence": (
        lambda: simulations.emergence_figure(growing()), TIME,
        {"mean square overlap times $d$":
             {"along the teacher": (T, 10.0**T, 0.1 * T), "along the encodings": (T, 1 + T, 0.2 * T)},
         "growth rate of the overlap":
             {"along the teacher": (T, T - 1, 0.3 * T), "along the encodings": (T, 0 * T, 0.4 * T)}},
    ),
    # Overlaps and the distance are in units of rho = 2.
    "wide states": (
        lambda: wide_states().plot(), "alpha",
        {r"overlaps over $\rho$": {"$q$": ([0.1, 1], [0.5, 1]), "$m$": ([0.1, 1], [0.1, 0.55])},
         "spectrum of $S$": {"rank of $S$ over $d$": ([0.1, 1], [0.2, 1.1]),
                             "trace norm of $S$ over $d$": ([0.1, 1], [0.2, 1.1])},
         "errors": {r"distance to the teacher $/ \rho$": ([0.1, 1], [0.1, 0.55]), ERROR: ([0.1, 1], [0.2, 1.1])}},
    ),
    # The height of the atom at zero is in units of the panel.
    "wide spectrum": (
        lambda: theory.spectrum_figure(wide_spectrum()), "eigenvalues of $S$",
        {"density": {"density of 0.75 of all eigenvalues": (wide_spectrum().values, wide_spectrum().density),
                     "0.25 of all are zero": ([0, 0], [0, 0.25])}},
    ),
}  # fmt: skip


def assert_seen(axis, lines):
    assert labels(axis) == list(lines)
    for label, (x, y, *bars) in ((label, points) for label, points in lines.items() if points is not None):
        expected = np.unique(np.stack(np.broadcast_arrays(x, y), 1).astype(float), axis=0)
        np.testing.assert_allclose(drawn(axis, label), expected, rtol=1e-12, err_msg=label)
        colour = labelled(axis, label).get_color()
        assert matplotlib.colors.same_color(colour, COLOUR_OF.get(label, colour)), label
        for bar in bars:  # two error bars to either side
            ends = np.concatenate([path.vertices[:, 1] for path in named(axis, f"{label}, error bars").get_paths()])
            np.testing.assert_allclose([ends.min(), ends.max()], [np.min(y - 2 * bar), np.max(y + 2 * bar)])


@pytest.mark.parametrize("name", SEEN)
def test_what_readers_see(name):
    make, xlabel, expected = SEEN[name]
    for axis, (ylabel, lines) in zip(make().axes, expected.items(), strict=True):
        assert (axis.get_xlabel(), axis.get_ylabel()) == (LABELS.get(xlabel, xlabel), ylabel)
        assert axis.get_yscale() == ("log" if ylabel in LOGARITHMIC else "linear")
        assert_seen(axis, lines)


REFUSED = {
    "ax must be 2 matplotlib Axes.* got ax='axes'": lambda: theory.path_figure([path()], ax="axes"),
    "ax must be .*, for the panels order, train_loss, got ax={'volume'": lambda: theory.path_figure(
        [path()], ax={"volume": Figure().subplots()}
    ),
    r"ax must be .*, got ax=\[None, None\]": lambda: theory.path_figure([path()], ax=[None, None]),
    "vmap": lambda: theory.optimal_figure(Namespace(alpha=np.array(0.5))),
    "t must be one trajectory": lambda: simulations.trajectory_figure(trajectory(T[None])),
    "t must be those of one run": lambda: simulations.emergence_figure(growing(T[None])),
    "axes must be one or two": lambda: Table("semantic", (), (), (point(1.0, 0.5),)).plot(),
    "boundaries must be in axes alpha and omega": lambda: diagrams.diagram_figure(
        diagram(), [made.events("weak_recovery", "sigma", np.array([0.3, 0.5]), *np.ones((2, 2)))]
    ),
    "colour must be an option of this picture or of a matplotlib line": lambda: curve("semantic").plot(colour="m"),
    "color must be an option of this picture": lambda: curve("semantic").plot(color="no colour"),
    "lw must be an option of this picture": lambda: curve("semantic").plot(lw="wide"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence):
    with pytest.raises(ta.InputError, match=sentence):
        REFUSED[sentence]()


# Style


def test_unstable_stretches_are_dotted():
    """They are dotted up to the first stable point, and the legend says so once."""
    figure = theory.branch_figure(curve("positional"), curve("semantic"))
    assert legend_texts(figure) == ["positional", "semantic", "linear baseline", "unstable"]
    solid, dotted, *_ = figure.axes[1].lines
    np.testing.assert_array_equal(solid.get_ydata(), [NAN, NAN, 3, 4])
    np.testing.assert_array_equal(dotted.get_ydata(), [1, 2, 3, NAN])


def test_curves_of_one_branch_are_distinct():
    """They have shades of one colour, and names that say in what their models differ, or numbers."""
    first, second = (curve("semantic", [0.5, 0.5], model=ta.DotProduct(sigma=sigma)) for sigma in (0.5, 0.25))
    _, losses, errors = theory.branch_figure(first, second).axes
    assert labels(losses) == [r"semantic, $\sigma$ = 0.5", r"semantic, $\sigma$ = 0.25"]
    assert {r"linear baseline, $\sigma$ = 0.5", r"linear baseline, $\sigma$ = 0.25"} < set(labels(errors))
    assert labelled(losses, labels(losses)[0]).get_color() == COLOURS["semantic"]
    axis = Figure().subplots()
    for result in (first, second, first):
        result.plot(ax={"train_loss": axis})
    assert labels(axis) == ["semantic", "semantic (2)", "semantic (3)"]
    for panel in (losses, axis):
        assert len({labelled(panel, label).get_color() for label in labels(panel)}) == len(labels(panel))


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


def test_dark_ground():
    """A line that is black on light ground is white on dark ground."""
    with matplotlib.style.context("dark_background"):
        errors = theory.branch_figure(curve("semantic"), alpha_c=Namespace(ok=True, alpha=1.5)).axes[2]
        (axis,) = theory.boundary_figure(BOUNDARY).axes
    assert named(errors, "alpha_c, beside").get_color() == named(axis, "alpha_c").get_color() == "#ffffff"


def test_narrow_figures_have_several_rows():
    """Panels that would be too narrow stand below one another, in a figure that is high enough for them."""
    with matplotlib.rc_context({"figure.figsize": (3.4, 2.5)}):
        figure = theory.branch_figure(curve("semantic"))
    orders, losses, errors = figure.axes
    assert figure.get_size_inches()[0] == 3.4 and figure.get_size_inches()[1] > 6
    assert orders.get_position().y0 > losses.get_position().y1 and losses.get_position().x0 == errors.get_position().x0
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", LABELS["alpha"]]
    assert orders.get_ylabel() == r"$m$, $\theta$"  # the words do not fit


def test_legend_is_one_and_outside():
    for legends, texts in ((True, ["both", "alone"]), (False, None)):
        with panels(4, 3, ["", ""], legends=legends) as (figure, axes):
            for k, axis in enumerate(axes[0]):
                axis.plot([0, 1], [0, 1], label="both")
                axis.plot([0, 1], [1, 0], label="alone" if k else None)
        assert legend_texts(figure) == texts if legends else not figure.legends


def luminance(colour):
    """The relative luminance of a colour, from 0 for black to 1 for white."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.dot([0.2126, 0.7152, 0.0722], np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92))


def test_colours_are_told_apart():
    """Every two colours differ clearly, and in part also as seen without red or green receptors.

    The branches differ by twenty in lightness L*; both are seen on white and on the dark ground of notebooks.
    """
    # Vienot, Brettel and Mollon (1999): what protanopes and deuteranopes see, in linear RGB.
    sight = {
        "trichromacy": np.eye(3),
        "protanopia": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
        "deuteranopia": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    }
    rgb = np.array([matplotlib.colors.to_rgb(colour) for colour in COLOURS.values()]) ** 2.2
    for name, matrix in sight.items():
        perceived = np.clip(rgb @ np.transpose(matrix), 0, 1) ** (1 / 2.2)
        distances = np.linalg.norm(perceived[:, None] - perceived, axis=-1) + np.eye(len(rgb))
        assert distances.min() > (0.25 if name == "trichromacy" else 0.08)
    light, dark = (luminance(COLOURS[name]) for name in ("positional", "semantic"))
    assert 116 * (np.cbrt(light) - np.cbrt(dark)) > 20
    white, black = (luminance(ground) for ground in ("white", "#111111"))
    for colour in (light, dark):  # contrast as in the accessibility guidelines: 3 for graphics
        assert (white + 0.05) / (colour + 0.05) > 2.9 and (colour + 0.05) / (black + 0.05) > 2.9


def test_settings_of_the_user_hold():
    """The library's style fills in what the user has left alone, and changes no setting."""
    before = dict(matplotlib.rcParams)
    plain = theory.branch_figure(curve("semantic"))
    assert dict(matplotlib.rcParams) == before
    assert tuple(plain.get_size_inches()) == (11, 3.6) and plain.axes[0].xaxis.label.get_size() == 9
    user = {"figure.figsize": (7.0, 2.0), "font.size": 7.0, "axes.spines.top": True, "lines.linewidth": 0.7}
    with matplotlib.rc_context({**user, "legend.fontsize": 5.0}):
        figure = theory.branch_figure(curve("semantic"))
        assert matplotlib.rcParams["font.size"] == 7
    axis, (legend,) = figure.axes[0], figure.legends
    assert tuple(figure.get_size_inches()) == (7, 2) and axis.xaxis.label.get_size() == 7
    assert axis.lines[0].get_linewidth() == 0.7 and legend.get_texts()[0].get_size() == 5
    # `rc_context` cannot tell a default from a choice of the same value: the top spine keeps the library's style.
    assert not axis.spines["right"].get_visible() and not axis.spines["top"].get_visible()


def test_geometric_axes_are_logarithmic():
    assert is_geometric(np.geomspace(1e-4, 0.1, 7)) and is_geometric(np.geomspace(1e-4, 0.1, 7, dtype=np.float32))
    for values in ([1.0, 2.0, 4.0], np.linspace(0.4, 2.4, 6), [0.0, 1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 9.0], [1.0] * 5):
        assert not is_geometric(np.array(values)), values
    branch, lams = curve("semantic", alphas=np.geomspace(1.0, 8.0, 4)), np.geomspace(1e-3, 1.0, 4)
    assert {axis.get_xscale() for axis in branch.plot().axes} == {"log"}
    assert {axis.get_xscale() for axis in curve("semantic").plot().axes} == {"linear"}
    (axis,) = theory.boundary_figure(made.events("alpha_c", "lam", lams, np.ones(4), np.zeros(4))).axes
    assert axis.get_xscale() == "log"
    plane = diagram(("sigma", lams), ("lam", np.geomspace(1e-3, 1e-2, 2)), np.full((2, 4), 2))
    left = diagrams.diagram_figure(plane).axes[0]
    assert (left.get_xscale(), left.get_yscale()) == ("log", "linear")
    np.testing.assert_allclose(left.get_xlim(), [1e-3 / 10**0.5, 10**0.5])  # edges lie at geometric means


def test_there_is_room_between_lines_and_frame():
    """There is room between lines and frame, also if a narrow range of alphas or numbers lies far from zero."""
    for axis in curve("semantic", [0.5, 0.5], [10.0, 10.1]).plot().axes:
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        assert 9.9 < left < 9.999 and 10.101 < right < 10.2
        assert bottom == 0 and top > 1.04 * axis.dataLim.y1
    negative = Table("semantic", ("alpha",), (np.array([1.0, 2.0]),), (point(-10.0, 0.5), point(5.0, 0.5)))
    assert negative.plot().axes[0].get_ylim()[0] < -10  # a negative number is in the frame, too


@pytest.mark.parametrize("name", ["Table of best values", "Table of states", "Trajectory"])
def test_what_the_caller_draws_later_is_in_the_frame(name):
    """Lines of the caller's beyond those of the library are shown, and a logarithmic scale shows positive numbers."""
    make, _ = PICTURES[name]
    axis = Figure().subplots()
    pictured()[name.split()[0]].plot(make(), ax={"loss" if name == "Trajectory" else "gen_error": axis})
    top = axis.get_ylim()[1]
    axis.plot([0.0, 9.0], [0.001, 5 * top], "k.")
    (left, right), (bottom, top_then) = axis.get_xlim(), axis.get_ylim()
    assert left == bottom == 0 and right > 9 and top_then > 5 * top
    axis.set_yscale("log")
    assert 1e-4 < axis.get_ylim()[0] < 0.001


def test_a_pole_of_error_bars_leaves_the_line():
    """An infinite error bar, as of a single replicate, leaves the line without a band."""
    axis, number = Figure().subplots(), np.arange(3.0)
    draw_line(axis, number, number, "k", "one", bar=np.array([0.1, np.inf, 0.1]))
    draw_line(axis, number, 2 * number, "k", "other", bar=0.1 * number)
    assert len(axis.lines) == 2 and len(axis.collections) == 1


# Events and paths


def test_boundaries():
    colours = COLOURS["semantic"], COLOURS["positional"]
    kinds = dict(zip(("alpha_c", "semantic baseline", "positional pitchfork"), ("#000000", *colours), strict=True))
    omegas, alphas, bars = np.array([0.1, 0.2, 0.3]), np.array([1.0, 2.0, NAN]), np.array([0.1, np.inf, NAN])
    (axis,) = theory.boundary_figure(*(made.events(e, "omega", omegas, alphas, bars) for e in kinds)).axes
    assert labels(axis) == [r"$\alpha_c$", *list(kinds)[1:]] and axis.get_xlabel() == LABELS["omega"]
    for _, _, (whiskers,) in axis.containers:
        np.testing.assert_allclose(whiskers.get_segments()[0][:, 1], [0.8, 1.2])  # two error bars to either side
    lines = [labelled(axis, label) for label in labels(axis)]
    assert [line.get_color() for line in lines] == list(kinds.values())
    assert len({line.get_linestyle() for line in lines}) == 3


def test_boundaries_are_smooth_between_points_that_were_found():
    values = np.arange(6.0)
    bars, gap = 0.1 * np.ones(6), np.where(values == 3, NAN, 1.0)
    exact = made.events("alpha_c", "omega", values, values**3, bars, 3 * values**2)
    rough = made.events("semantic baseline", "omega", values, gap * np.where(values < 2, 1.0, 9.0), bars)
    (axis,) = theory.boundary_figure(exact, rough).axes
    cubic, (x, y) = drawn(axis, r"$\alpha_c$"), drawn(axis, "semantic baseline").T
    np.testing.assert_allclose(cubic[:, 1], cubic[:, 0] ** 3, atol=1e-9)
    assert len(cubic) > 50
    assert not np.any((x > 2) & (x < 4)) and set(values) - {3.0} <= set(x)  # no line across the missing point
    assert y.min() == 1 and y.max() == 9  # no extremum between points


def test_a_path_is_stable_up_to_rounding():
    """There is a line for every replicate; an eigenvalue of one is that of a rotation."""
    solid, dotted, fold, *others = theory.path_figure([path(), path()]).axes[0].lines
    assert len(others) == 4 and fold.get_marker() == "o"
    np.testing.assert_allclose(solid.get_ydata(), [0.4, 0.3, 0.2, NAN])
    np.testing.assert_allclose(dotted.get_ydata(), [NAN, NAN, 0.2, 0.1])


# Pictures over two axes

CELLS = [(0.5, 0.0), (1.5, 0.0), (3.0, 0.0), (0.5, 0.2), (1.5, 0.2), (3.0, 0.2)]  # their lower left corners


def test_diagram():
    figure = diagrams.diagram_figure(diagram())
    left, right = figure.axes[:2]
    for code, (name, colour) in REGION_STYLES.items():
        assert marked(left, name) == [c for c, r in zip(CELLS, (0, 2, 3, 4, 5, 1), strict=True) if r == code], name
        colours = named(left, name).get_facecolor()
        assert len(colours) == 0 or matplotlib.colors.same_color(colours[0], colour)
    excess = named(right, "error minus baseline")
    assert excess.get_array().mask.tolist() == [[True, False, False], [False, False, True]]
    np.testing.assert_array_equal(excess.get_array().compressed(), [0, 1, 2, 3])
    # Blue means better than the baseline; white means no difference.
    assert excess.get_cmap().name == "RdBu_r" and excess.get_clim() == (-3, 3)
    assert marked(right, "no global minimum") == [CELLS[0], CELLS[5]]
    assert left.get_xlim() == (0.5, 5.0) and left.get_ylim() == (0.0, pytest.approx(0.4))
    assert marked(left, "not trusted") == marked(right, "not trusted") == [CELLS[3]]
    for axis in (left, right):
        np.testing.assert_allclose(named(axis, "alpha_c").get_xydata(), [[1, 0.1], [2, 0.3]])
        bars = named(axis, "alpha_c, error bars").get_segments()  # an infinite one is left out
        np.testing.assert_allclose(bars, [[[0.8, 0.1], [1.2, 0.1]], [[2, 0.3], [2, 0.3]]])
    texts = legend_texts(figure)
    inside = [text.get_text().replace("\n", " ") for text in left.texts]
    names = {name.replace("\n", " ") for code, (name, _) in REGION_STYLES.items() if code != 6}
    assert {*texts[:-3], *inside} == names and len(texts) + len(inside) == 9  # every region is named once
    assert texts[-3:] == ["not trusted", r"$\alpha_c$", "no global minimum"]


def test_labels_of_a_diagram_stand_in_their_regions():
    """A label is inside the cells of its region, or in the legend if it does not fit there."""
    places, region = np.arange(1.0, 13.0), np.full((12, 12), 2)
    region[:5, 4:], region[7:9, 7] = 5, 3  # a corner, and a place too small for a word
    figure = diagrams.diagram_figure(diagram(("alpha", places), ("omega", places), region))
    left, inverted = figure.axes[0], figure.axes[0].transData.inverted()
    figure.canvas.draw()
    assert [text.get_text() for text in left.texts] == ["positional", "semantic,\npositional"]
    for text, code in zip(left.texts, (2, 5), strict=True):
        box = inverted.transform(text.get_window_extent())
        low, high = np.round(box - 1).astype(int)  # the cells of its corners
        assert np.all(region[low[1] : high[1] + 1, low[0] : high[0] + 1] == code)
    assert "semantic" in legend_texts(figure) and "positional" not in legend_texts(figure)


def test_difference_of_the_losses_on_a_diagram():
    figure = diagrams.diagram_figure(diagram(), losses=True)
    left = figure.axes[0]
    difference = named(left, "positional minus semantic loss")
    assert difference.get_array().mask.tolist() == [[True, True, True], [False, False, True]]
    assert difference.get_cmap().name == "RdBu" and difference.get_clim() == (-0.5, 0.5)
    assert not left.texts and {"positional", "semantic", "neither is stable"} < set(legend_texts(figure))
    single = Figure().subplots()
    assert diagrams.diagram_figure(diagram(), ax={"train_loss": single}, losses=True) == {"train_loss": single}


def test_legend_of_a_diagram_says_only_what_is_there():
    weak = made.events("weak_recovery", "omega", np.array([0.1, 0.3]), np.array([1.5, 1.5]), np.zeros(2))
    figure = diagrams.diagram_figure(diagram(), [weak])
    assert "weak recovery" in legend_texts(figure)
    np.testing.assert_allclose(figure.axes[1].lines[-1].get_xdata(), [1.5, 1.5])
    region, nowhere = np.full((2, 3), 5), lambda: made.events("alpha_l", "omega", *np.full((3, 2), NAN))
    for absent in ({}, {"alpha_l": nowhere}):
        assert legend_texts(diagrams.diagram_figure(diagram(region=region, **absent))) == [r"$\alpha_c$"]
    assert not diagrams.diagram_figure(diagram(region=region, alpha_l=nowhere, alpha_c=nowhere)).legends


def test_other_axes_of_a_diagram():
    """Alpha may point upwards. Nothing is drawn between the models of a list, and their places are integers."""
    transposed = diagram(("omega", np.array([0.1, 0.2, 0.3])), ("alpha", np.array([1.0])), [[0, 2, 3]])
    left = diagrams.diagram_figure(transposed).axes[0]
    np.testing.assert_allclose(left.lines[-1].get_ydata(), [1, 2])
    assert left.get_ylim() == (0.5, 1.5)
    kinds = {
        name: lambda name=name: made.events(name, "model", np.arange(3.0), np.arange(3.0) + 1, 0.1 * np.arange(3.0))
        for name in ("alpha_c", "alpha_l")
    }
    left = diagrams.diagram_figure(diagram(("model", np.arange(3.0)), ("alpha", np.array([1.0, 2.0])), **kinds)).axes[0]
    lines = [named(left, name) for name in kinds]
    assert [(line.get_linestyle(), line.get_marker()) for line in lines] == [("None", "o"), ("None", "D")]
    assert all(tick == round(tick) for tick in left.get_xticks())


def test_slices():
    """Lines end where a branch has no state. Where neither exists, they are those of the uninformed state."""
    figure, x = diagrams.slice_figure(diagram(), [0, 1]), X[1]
    upper, upper_right, lower, lower_right = figure.axes
    uninformed, bar = {"uninformed": ([4], [25])}, 0.5
    assert_seen(upper, {"positional": (x[:2], np.array([0, 1]), bar), "semantic": (x[:2], np.array([10, 11]), bar)})
    assert_seen(upper_right, {"positional": (x, [3, 4, 5]), "semantic": (x, [13, 14, 15]), **uninformed})
    linear = {"linear baseline": (x, 9)}
    assert_seen(lower, {"positional": (x[:2], [0, 1]), "semantic": (x[:2], [0, -1]), **linear})
    assert_seen(lower_right, {"positional": (x, [3, 4, 5]), "semantic": (x, [-3, -4, -5]), **uninformed, **linear})
    dotted = [line for line in upper_right.lines if (line.get_gid() or "").endswith("unstable")]
    np.testing.assert_array_equal(dotted[0].get_ydata(), [13, 14, NAN])  # up to the first stable point
    assert len(dotted) == 1 and legend_texts(figure)[-1] == "unstable"
    assert [axis.get_ylabel() for axis in figure.axes] == [LOSS, "", ERROR, ""]
    assert lower_right.get_title() == "" and upper.get_title(loc="left") == r"$\omega$ = 0.1"


def test_landscape():
    figure = landscapes().plot()
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == (LABELS["omega"], LABELS["sigma"])
    np.testing.assert_allclose(sorted(axis.lines[0].get_xydata().tolist()), [[0.15, 0.1], [0.15, 0.2]])
    descent = "steepest descent towards the encodings"
    assert legend_texts(figure) == ["semantic minimum", "positional minimum", descent]
    assert len(named(axis, descent).get_paths()) == 2  # the two cells of label 3


def test_map_of_a_number():
    figure = events().plot()
    axis, bar = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel(), bar.get_ylabel()) == (LABELS["omega"], "b", r"$\alpha_c$")
    assert legend_texts(figure) == [r"no $\alpha_c$", "error bar above 1 %"]
    mask = named(axis, "alpha_c alpha").get_array().mask
    assert mask.tolist() == [[False, False, True], [False, False, False]]
    assert marked(axis, r"no $\alpha_c$") == [(0.25, 0.35)]
    assert marked(axis, "error bar above 1 %") == [(0.05, 0.45)]
    (lines,) = (artist for artist in axis.collections if hasattr(artist, "levels"))
    assert len(lines.levels) > 2 and np.all((lines.levels > 1.5) & (lines.levels < 1.8))
    for level, contour in zip(lines.levels, lines.get_paths(), strict=True):
        np.testing.assert_allclose(1 + contour.vertices.sum(1), level)
    assert not events(1.0, 0.0).plot().legends  # nothing is missing, and no contour line is there
    assert legend_texts(events(NAN).plot()) == [r"no $\alpha_c$"]
    assert events().plot("stderr").axes[0].collections[0].get_gid() == "alpha_c stderr"


# Others


def test_transition():
    figure = diagrams.transition_figure(transition())
    losses, moves = figure.axes
    positional, semantic, mark = losses.lines
    x, y = positional.get_data()
    np.testing.assert_allclose(np.diff(y) / np.diff(x), 2)  # the mean slope of the replicates
    np.testing.assert_allclose(np.diff(semantic.get_ydata()) / np.diff(x), 1)
    assert mark.get_xdata()[0] == 2.0 and legend_texts(figure) == ["positional", "semantic", r"$\alpha_c$"]
    assert [text.get_text() for text in moves.get_yticklabels()] == [r"$\sigma$", "mixing[0,1]"]  # the larger first
    np.testing.assert_allclose([bar.get_width() for bar in moves.patches], [-2.0, 1.0])
    assert losses.get_title(loc="left") == r"$\alpha_c$ = 2 $\pm$ 0.1"
    single = transition(event="semantic pitchfork", branches=transition().branches[:1])
    (axis,) = diagrams.transition_figure(single).axes
    assert "relative sensitivity" in axis.get_xlabel() and "pitchfork" in axis.get_title(loc="left")
    single.sensitivities = None
    (empty,) = diagrams.transition_figure(single).axes
    assert not empty.lines


def test_markers_and_dashes_of_runs():
    """One epoch is a point, and what the theory says is dashed."""
    axes = simulations.learning_figure({"semantic": [stage(1.0)]}).axes
    assert {line.get_marker() for axis in axes for line in axis.lines} == {"o"}
    q = simulations.gamp_figure({"message passing": message_passing()}, message_passing()).axes[0]
    assert [line.get_linestyle() for line in q.lines] == ["-", "--"]


def test_attention():
    S, tokens = np.array([[[0.5, 0.5], [0.25, 0.75]], [[1.0, 0.0], [0.0, 1.0]]]), np.array([[0, 1], [2, 2]])
    for factor, texts in ((1, [".50", ".50", ".25", ".75"]), (0.25, [".12", ".12", ".06", ".19"])):
        first, second, _ = simulations.attention_figure({"frozen": factor * S}, tokens).axes
        assert len(first.patches) == 2 and len(second.patches) == 4  # equal tokens are framed
        assert [text.get_text() for text in first.texts] == texts
        assert [text.get_color() for text in first.texts] == ["0.15", "0.15", "0.15", "white"]
        assert [t.get_text() for t in first.get_xticklabels()] == ["A", "B"]
        assert first.images[0].get_clim() == (0, factor)  # the scale fits the values
    assert [simulations.token_name(k) for k in (0, 25, 26)] == ["A", "Z", "26"]


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


def test_wide_layers():
    """No two lines look the same, and every cell with content is in its region."""
    lines = [line for axis in wide_states().plot().axes for line in axis.lines if len(line.get_xdata()) > 1]
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == len({line.get_label() for line in lines}) == 6
    (region,) = wide_states(two=True).plot().axes
    assert len(named(region, "content").get_paths()) == 2


def test_a_spike_near_zero_leaves_the_spectrum_its_axis():
    spectrum = wide_spectrum()
    (axis,) = theory.spectrum_figure(spectrum).axes
    top = axis.get_ylim()[1]
    spectrum.density[0] = 30.0
    (axis,) = theory.spectrum_figure(spectrum).axes
    assert axis.get_ylim() == (0, top) and legend_texts(axis.figure)[0].split()[-3:] == ["up", "to", "30"]
    axis.clear()
    axis.set_ylim(0, 40)
    assert theory.spectrum_figure(spectrum, ax=axis).get_ylim() == (0, 40)  # the limits of the caller hold


# Every class with a picture


# What every class with a picture draws, from a result made by hand, and the names of its panels.
PICTURES = {
    "BayesPoint": (optimal_points, "overlap gen_error"),
    "Table of best values": (best_values, "best gen_error"),
    "BranchPath": (path, "order train_loss"),
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
    "Table of regions": (lambda: wide_states(two=True), "region"),
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


def test_every_class_with_a_picture_is_tested_and_the_page_names_its_panels():
    assert pictured().keys() == {name.split()[0] for name in PICTURES}
    page = (Path(__file__).parents[2] / "docs" / "howto" / "figures.md").read_text()
    named = {}
    for results, panel_names in re.findall(r"^\| (`\w.*?) \| (`.*) \|$", page, re.M):
        for result in results.replace("`", "").split(", "):
            named[result] = [name for name in re.findall(r"`(\w+)`", panel_names) if name != "Axes"]
    public = {"finite.Training": "Training"}
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
    blank = len(Figure().subplots().get_children())
    assert plot(make(), ax=axes) is axes and not figure.legends
    for axis, reference in zip(axes, own.axes, strict=False):  # colour bars come after the panels
        names = axis.get_legend_handles_labels()[1]
        assert names[0] == "measured" and len(set(names)) == len(names) and axis.get_title(loc="right") == "(a)"
        assert axis.get_xlabel() == reference.get_xlabel() and len(axis.get_children()) > blank
        assert axis.get_legend() is None
    children, before = len(axes[0].get_children()), [axis.get_legend_handles_labels()[1] for axis in axes]
    plot(make(), ax=axes)  # drawn twice, lines have another shade and a number; the rest is explained once
    assert len(axes[0].get_children()) > children
    for axis, names in zip(axes, before, strict=True):
        twice = axis.get_legend_handles_labels()[1]
        assert twice[: len(names)] == names and {name.removesuffix(" (2)") for name in twice} == set(names)
        assert len(set(twice)) == len(twice)
    single = Figure().subplots()
    assert plot(make(), ax={panel_names[-1]: single}) == {panel_names[-1]: single}
    assert single.get_xlabel() == own.axes[len(panel_names) - 1].get_xlabel()
    with pytest.raises(ta.InputError, match=f"ax must be .*panels {', '.join(panel_names)}"):
        plot(make(), ax=[single] * (len(panel_names) + 1))


NO_LINES = "landscapes", "regions", "PhaseDiagram", "two axes"


@pytest.mark.parametrize("name", [name for name in PICTURES if not any(words in name for words in NO_LINES)])
def test_options_hold_in_every_picture(name):
    make, panel_names = PICTURES[name]
    plot, axis_count = pictured()[name.split()[0]].plot, len(panel_names.split())
    after = plot(make(), color="#123456", label="mine")
    texts = [text for axis in after.axes[:axis_count] for text in axis.get_legend_handles_labels()[1]]
    assert any(text.startswith("mine") for text in texts)
    colours = {line.get_color() for axis in after.axes for line in axis.lines if line.get_label().startswith("mine")}
    containers = {bar[0].get_color() for axis in after.axes for bar in axis.containers if "mine" in bar.get_label()}
    assert colours | containers == {"#123456"}
