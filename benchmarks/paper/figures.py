"""Table of the paper's figures: what each shows, and the functions that compute, read, draw and tabulate it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from . import adam, counting, layers, minimum, plane as plane_module, scaling
from .data import Task
from .page import Row


class Entry(NamedTuple):
    """A figure, or a part of one.

    Attributes:
        name: name of the paper's figure; parts have a suffix, such as "3-left".
        title, text: title and text of its section on the page.
        compute: function that writes its files.
        load: function that reads them.
        draw, rows: functions that make the picture and the table from what `load` returns.
        sizes: sizes of its simulations, reduced and full.
    """

    name: str
    title: str
    text: str
    compute: Callable[[Task], None]
    load: Callable[[Path], Any]
    draw: Callable[[Any], Figure] | None
    rows: Callable[[Any], Sequence[Row]] = lambda data: ()
    sizes: tuple[dict[str, Any], dict[str, Any]] | None = None

    def caption(self, full: bool) -> str:
        """Return the text with the size of the simulations."""
        if self.sizes is None:
            return self.text
        reduced, published = (", ".join(f"{k} = {v}" for k, v in sizes.items()) for sizes in self.sizes)
        size = f"full size: {published}" if full else f"reduced size: {reduced} (with `--full`: {published})"
        return f"{self.text}\n\nSimulations at {size}."


def _module_figure(
    module: Any,
    name: str,
    title: str,
    text: str,
    names: Sequence[str] | None = None,
    full: dict[str, Any] | None = None,
    **options: str,
) -> Entry:
    """Return a figure from a module with functions `compute`, `load`, `draw` and `rows`, and both sizes.

    Args:
        full: full size, if it is not the module's.
        names: quantities to draw and to tabulate, if `draw` and `rows` take them.
        options: further arguments of `compute` and `load`.
    """
    compute, load = (partial(f, **options) for f in (module.compute, module.load))
    draw, rows = (f if names is None else partial(f, names=names) for f in (module.draw, module.rows))
    return Entry(name, title, text, compute, load, draw, rows, (module.REDUCED, full or module.SIZES))


_PLANES = {"3": plane_module.STANDARD, "9": plane_module.OTHER}


def _plane_theory(name: str) -> Entry:
    """Return the theory part of Fig. 3 or 9."""
    plane = _PLANES[name]
    suffix = "" if name == "3" else " for A = [[.3, .7], [.8, .2]]"
    note = "" if name == "3" else OTHER_TARGET
    return Entry(
        f"{name}-theory",
        f"Fig. {name} (centre, right): phase diagram{suffix}",
        "Left, the difference of the training losses of both branches where both are stable; right, the test error of "
        "the lower one against that of the linear baseline. alpha_c, alpha_l: where either changes its sign." + note,
        plane.theory,
        plane.diagram,
        lambda diagram: diagram.plot(),
        plane_module.rows_theory,
    )


def _plane_simulation(name: str) -> Entry:
    """Return the simulation part of Fig. 3 or 9."""
    plane = _PLANES[name]
    return Entry(
        f"{name}-simulation",
        f"Fig. {name} (centre, right): the same from training",
        "Instances trained from both starts in every cell, to zero gradient. From a start whose branch does not exist "
        "training ends in another minimum, and the difference vanishes or says nothing about branches.",
        plane.simulate,
        plane.simulated,
        plane_module.draw_simulation,
        plane_module.rows_simulation,
        (plane_module.REDUCED, plane_module.SIMULATED),
    )


OTHER_TARGET = (
    " A tied layer with opposite encodings can attend by position only to the token itself, which this A does not ask "
    "for: the positional state exists in a corner of few samples and small omega only, and at large omega, where the "
    "student shrinks to zero, there is no state at all."
)
_FROZEN = {name: (name, "frozen") for name in counting.MECHANISMS}


def _attention(name: str, title: str, text: str, parts: dict[str, tuple[str, str]], count: int = 3) -> Entry:
    """Return a figure of attention matrices of the counting task."""
    return Entry(name, title, text, counting.compute, counting.load, partial(counting.draw, parts=parts, count=count))


def _unfrozen(mechanism: str) -> dict[str, tuple[str, str]]:
    return {stage: (mechanism, stage) for stage in ("frozen", "free")}


_LAYERS = {
    "tied": plane_module.STANDARD,
    "a student of rank two": plane_module.RANK,
    "query and key of their own": plane_module.UNTIED,
    "a value matrix": plane_module.VALUE,
    "correlated tokens": plane_module.CORRELATED,
}


def _compute_layers(task: Task) -> None:
    for plane in _LAYERS.values():
        plane.simulate(task)
        if plane.layer in plane_module.EXCHANGES:
            plane.exchange(task)


FIGURES = (
    _attention(
        "1",
        "Fig. 1: two mechanisms of one transformer",
        "Attention matrices of both solutions of the counting task on one sequence; pairs of equal tokens are framed.",
        _FROZEN,
        1,
    ),
    _module_figure(
        minimum,
        "2",
        "Fig. 2: the global minimum",
        "Training loss, order parameters and test error against the sample complexity. Lines are theory, down to where "
        "each branch ends; dotted where it is unstable towards the order parameter of the other. Points are means over "
        "instances trained from both starts, hollow where the start leads to the higher loss.",
    ),
    _module_figure(
        scaling,
        "3-left",
        "Fig. 3 (left): overlaps against the dimension",
        "Above, means over instances against theory; below, their scatter and a power of d fitted to it, small "
        "d included; alpha = 1.5. There are more instances the smaller d is, up to 200.",
        scaling.LEFT,
    ),
    _plane_theory("3"),
    _plane_simulation("3"),
    _attention(
        "4",
        "Fig. 4: attention of the counting task",
        "Three held-out sequences, with few, more and many repetitions. The positional solution has the same matrix "
        "for all of them; in the semantic one equal tokens attend to each other.",
        _FROZEN,
    ),
    _attention(
        "5",
        "Fig. 5: the semantic solution before and after unfreezing",
        "All weights set free, shaken with noise of .001 and trained on by stochastic gradient descent.",
        _unfrozen("semantic"),
    ),
    _attention(
        "6",
        "Fig. 6: the positional solution before and after unfreezing",
        "As Fig. 5.",
        _unfrozen("positional"),
    ),
    Entry(
        "table1",
        "Table 1: accuracy, and distances in the space of weights",
        "Distances are sums over the arrays of the norm of the change.",
        counting.compute,
        counting.load,
        None,
        counting.rows,
    ),
    _module_figure(
        scaling,
        "7",
        "Fig. 7: losses against the dimension",
        "As Fig. 3 (left), for the training loss and the test error.",
        scaling.LOSSES,
    ),
    Entry(
        "8",
        "Fig. 8: slices of the phase diagram",
        "Rows of the diagram of Fig. 3.",
        plane_module.STANDARD.theory,
        plane_module.STANDARD.diagram,
        plane_module.draw_slices,
    ),
    _plane_theory("9"),
    _plane_simulation("9"),
    _module_figure(
        layers,
        "10",
        "Fig. 10: correlated tokens",
        "Two classes of tokens with the means +mu and -mu, |mu| = 1, orthogonal to the encodings, so that the "
        "teacher's fields have the means +.3 and -.3; both tokens of a sentence are of one class with probability .9 "
        "(Result C.2; the paper's choice is not in its text). A student that attends by position cannot see the "
        "class, on which the target depends: the minima exchange at fewer samples, alpha_c = .7827(5), than with "
        "independent tokens, 1.2515. The paper's do at more.",
        kind="correlated",
    ),
    _module_figure(
        layers,
        "11",
        "Fig. 11: a student of rank two",
        "Two columns, started both positional, both semantic, or one of each. To zero gradient all starts end in the "
        "same minimum, with one positional and one semantic direction, which is the line; the published gradient "
        "descent stops before.",
        kind="rank",
    ),
    _module_figure(
        layers,
        "12",
        "Fig. 12: query and key of their own",
        "S = softmax(z^Q (z^K)^T), started with query and key alike, beside the tied layer. Where the semantic branch "
        "is unstable towards m (dotted) training leaves it. The exchange of the minima is beyond alpha = 2 here: both "
        "weights are penalised, so that the ridge is twice as strong.",
        kind="untied",
    ),
    _module_figure(
        layers,
        "13",
        "Fig. 13: a trained value matrix",
        "f = S(Z) (x + p) W, trained on the exact labels along with the weights. A ridge of strength lambda holds W "
        "at the identity; the paper does not say what it takes. There is no theory of it. Hollow points are the "
        "tied layer without. The transition is there, as the paper finds, but not in the same place: W fits part of "
        "what attention leaves over, which is more in the positional minimum, so that the minima exchange at more "
        "samples, the more so the weaker its ridge: at alpha = 1.25(12) with W held at the identity, 1.45(14), "
        "1.74(10) and 1.87(9) at ridges of 1, .1 and .01 (d = 100, 12 instances, exact labels). The test error rises, "
        "as the d^2 entries of W see L n d labels.",
        full=layers.SIZES_VALUE,
        kind="value",
    ),
    Entry(
        "14",
        "Fig. 14: the plane of Fig. 3 for other layers",
        "The difference of the training losses from both starts, for the tied layer (as in Fig. 3, of its size), for "
        "a student of rank two, for query and key of their own, for a trained value matrix, and for correlated "
        "tokens, with alpha_c of the theory where it has one. With a trained value matrix, whose ridge is lambda too, "
        "the line has the same shape and lies at more samples; with the correlated tokens of Fig. 10 at fewer. White: "
        "both starts end in one minimum. So they do in five sixths of the cells for a student of rank two, which has "
        "no line: in the others, mostly of one instance at alpha = 1.19, the positional start ends in a minimum "
        "above, by up to 12 % of the loss. The paper, too, calls its picture of that student not entirely clean.",
        _compute_layers,
        lambda folder: {name: (plane.simulated(folder), plane.exchanged(folder)) for name, plane in _LAYERS.items()},
        plane_module.draw_layers,
        lambda data: [row for pair in data.values() for row in plane_module.rows_simulation(*pair)],
        (plane_module.REDUCED, plane_module.SIMULATED_LAYERS),
    ),
    _module_figure(
        adam,
        "15",
        "Fig. 15: Adam from random starts",
        "Overlaps at the end of every run at alpha = 2, one instance each, and how many end in the positional "
        "minimum, in the semantic one, or elsewhere: farther than 5 % in loss, or .05 in an overlap, from both. The "
        "paper, too, finds both minima and many runs that end in neither; there the semantic one becomes the rarer of "
        "the two, here the positional one. Its rate and its number of steps are not in its text: here .03, and as "
        "said below.",
    ),
)


def chosen(names: Sequence[str]) -> list[Entry]:
    """Return the entries of the named figures, or of all if no name is given; "3" stands for all parts of Fig. 3.

    Raises:
        KeyError: no figure has one of the names.
    """
    for name in names:
        if not any(_matches(entry, name) for entry in FIGURES):
            raise KeyError(name)
    return [entry for entry in FIGURES if not names or any(_matches(entry, name) for name in names)]


def _matches(entry: Entry, name: str) -> bool:
    return name in (entry.name, entry.name.partition("-")[0])
