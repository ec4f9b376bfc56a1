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
        "The left panel shows the difference of the training losses of both branches where both are stable. The right "
        "panel compares the test error of the branch of lower loss with that of the linear baseline. The first "
        "difference changes its sign at alpha_c, and the second one at alpha_l." + note,
        plane.theory,
        plane.diagram,
        lambda diagram: diagram.plot(losses=True),
        plane_module.rows_theory,
    )


def _plane_simulation(name: str) -> Entry:
    """Return the simulation part of Fig. 3 or 9."""
    plane = _PLANES[name]
    return Entry(
        f"{name}-simulation",
        f"Fig. {name} (centre, right): the same from training",
        "In every cell, instances are trained from both starts to zero gradient. If the branch of a start does not "
        "exist, training from there ends in another minimum. The difference of the losses then vanishes, or says "
        "nothing about the branches.",
        plane.simulate,
        plane.simulated,
        plane_module.draw_simulation,
        plane_module.rows_simulation,
        (plane_module.REDUCED, plane_module.SIMULATED),
    )


OTHER_TARGET = (
    " A tied layer with opposite encodings can attend by position only to the token itself, and this A does not ask "
    "for that. The positional state exists only in a corner of few samples and small omega. At large omega the "
    "student shrinks to zero, and there is no state at all."
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
        "The figure shows the attention matrices of both solutions of the counting task on one sequence. Pairs of "
        "equal tokens are framed.",
        _FROZEN,
        1,
    ),
    _module_figure(
        minimum,
        "2",
        "Fig. 2: the global minimum",
        "The figure shows training loss, order parameters and test error against the sample complexity. Lines are the "
        "theory, and each of them goes down to the end of its branch. They are dotted where the branch is unstable "
        "towards the order parameter of the other branch. Points are means over instances that are trained from both "
        "starts. Points are hollow where the start leads to the higher loss.",
    ),
    _module_figure(
        scaling,
        "3-left",
        "Fig. 3 (left): overlaps against the dimension",
        "The upper panels compare means over instances with the theory, at alpha = 1.5. The lower panels show the "
        "scatter over the instances and a power of d that is fitted to it, with small d included. There are more "
        "instances at smaller d, up to 200.",
        scaling.LEFT,
    ),
    _plane_theory("3"),
    _plane_simulation("3"),
    _attention(
        "4",
        "Fig. 4: attention of the counting task",
        "The figure shows three held-out sequences, with few, more and many repetitions. The positional solution has "
        "the same matrix for all of them. In the semantic solution equal tokens attend to each other.",
        _FROZEN,
    ),
    _attention(
        "5",
        "Fig. 5: the semantic solution before and after unfreezing",
        "All weights are set free, perturbed with noise of .001, and trained on by stochastic gradient descent.",
        _unfrozen("semantic"),
    ),
    _attention(
        "6",
        "Fig. 6: the positional solution before and after unfreezing",
        "This is Fig. 5 for the positional solution.",
        _unfrozen("positional"),
    ),
    Entry(
        "table1",
        "Table 1: accuracy, and distances in the space of weights",
        "A distance is the sum, over the arrays of weights, of the norm of the change.",
        counting.compute,
        counting.load,
        None,
        counting.rows,
    ),
    _module_figure(
        scaling,
        "7",
        "Fig. 7: losses against the dimension",
        "This is Fig. 3 (left) for the training loss and the test error.",
        scaling.LOSSES,
    ),
    Entry(
        "8",
        "Fig. 8: slices of the phase diagram",
        "The slices are rows of the diagram of Fig. 3.",
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
        "The tokens are of two classes with the means +mu and -mu, where |mu| = 1 and mu is orthogonal to the "
        "encodings. The teacher's fields have the means +.3 and -.3. Both tokens of a sentence are of one class with "
        "probability .9. (This is Result C.2; the text of the paper does not give its numbers.) A student that "
        "attends by position cannot see the class, and the target depends on the class. The minima therefore exchange "
        "at fewer samples, alpha_c = .7827(5), than with independent tokens, 1.2515. In the paper they exchange at "
        "more samples.",
        kind="correlated",
    ),
    _module_figure(
        layers,
        "11",
        "Fig. 11: a student of rank two",
        "The student has two columns. They start both positional, both semantic, or one of each. When trained to zero "
        "gradient, all starts end in the same minimum, which has one positional and one semantic direction. The line "
        "is the theory of this minimum. The published gradient descent stops before it.",
        kind="rank",
    ),
    _module_figure(
        layers,
        "12",
        "Fig. 12: query and key of their own",
        "The attention is S = softmax(z^Q (z^K)^T), and query and key start alike. The tied layer is shown beside it. "
        "Where the semantic branch is unstable towards m (dotted), training leaves it. The exchange of the minima is "
        "beyond alpha = 2 here, because both weights are penalised and the ridge is thus twice as strong.",
        kind="untied",
    ),
    _module_figure(
        layers,
        "13",
        "Fig. 13: a trained value matrix",
        "The layer is f = S(Z) (x + p) W, and W is trained on the exact labels together with the weights of attention. "
        "A ridge of strength lambda holds W at the identity; the paper does not give its ridge. There is no theory for "
        "this layer. Hollow points are the tied layer without W. The transition exists, as the paper finds, but at "
        "another place. W fits part of what attention leaves over, and the positional minimum leaves over more. The "
        "minima therefore exchange at more samples, and a weaker ridge of W means still more samples: alpha = 1.25(12) "
        "with W held at the identity, and 1.45(14), 1.74(10) and 1.87(9) with ridges of 1, .1 and .01 (d = 100, 12 "
        "instances, exact labels). The test error rises, because d^2 entries of W are fitted to L n d labels.",
        full=layers.SIZES_VALUE,
        kind="value",
    ),
    Entry(
        "14",
        "Fig. 14: the plane of Fig. 3 for other layers",
        "The panels show the difference of the training losses from both starts, with alpha_c of the theory where "
        "there is one. The layers are the tied layer (as in Fig. 3, at its size), a student of rank two, query and "
        "key of their own, a trained value matrix, and correlated tokens. With a trained value matrix, whose ridge is "
        "also lambda, the line has the same shape and lies at more samples. With the correlated tokens of Fig. 10 it "
        "lies at fewer samples. In white cells both starts end in one minimum. For a student of rank two these are "
        "five sixths of the cells, and there is no line. In its other cells, which mostly belong to one instance at "
        "alpha = 1.19, the positional start ends in a minimum with a loss higher by up to 12 %. The paper, too, calls "
        "its picture of that student not entirely clean.",
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
        "The figure shows the overlaps at the end of every run at alpha = 2, for one instance each. It counts the "
        "runs that end in the positional minimum, in the semantic minimum, or elsewhere, which means farther than 5 % "
        "in loss or .05 in an overlap from both. As in the paper, the semantic minimum becomes rarer as d grows. The "
        "text of the paper gives neither start nor rate. As in the published code, the entries of a start are .1 times "
        "standard normals, the rate is .01, and the number of steps stands below. From starts with entries of order "
        "one, the semantic minimum is the more frequent of the two (page of results).",
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
