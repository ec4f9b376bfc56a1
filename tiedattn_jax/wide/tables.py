"""Tables of wide layers: states, onset, thresholds, the optimal learner and regions over numbers of the layer, and runs
on sentences of finite dimension beside their theory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray, Real

from ..base.arrays import GivenArray
from ..base.errors import InputError, as_flag, require_choice, require_keys, require_kind, require_takes
from ..base.kinds import form_of
from ..base.progress import Progress, reporter
from ..base.report import Description, Row, with_error
from ..base.results import Status, error_bar
from ..model.parameters import Axis
from ..phases.questions import INSTANCES, QUESTIONS, Column, Question, beside_theory, kind_of
from ..phases.sweep import Grid
from ..phases.table import Table
from ..theory.quantities import Quantity
from .channel import wide_nodes
from .finite import WideData, WideTraining, heldout_wide, sample_wide
from .layer import WideLayer
from .optimum import THRESHOLDS, bayes_wide, onset, threshold_wide
from .solve import solve_wide
from .spectrum import Eigenvalues

STATE, REGIONS, OPTIMUM, RUNS = "state", "regions", "bayes", f"wide {INSTANCES}"
_LEARNED = 1e-6  # shift of the scores by the encodings, over that by the content, from which on it counts as learned

NOTHING, CONTENT, POSITION, BOTH = (
    "no attention to content",
    "content",
    "position, no attention to content",
    "content and position",
)


def position_of(state: Any) -> tuple[Array, Array]:
    """Return by how much the encodings raise the score of a token with itself over other scores, with its error bar."""
    L, shifts = state.model.tokens, state.model.shift_basis
    own = jnp.trace(shifts, axis1=1, axis2=2)
    weight = own / L - (jnp.sum(shifts, (1, 2)) - own) / (L * (L - 1))
    return state.offset @ weight, error_bar(state.replicates.offset @ weight)


def learned_positions(state: Any) -> int:
    """Return the number of directions, of L - 1, in which the encodings shift the scores of pairs of tokens.

    The shifts form a positive semidefinite matrix T (L, L), of which the loss does not see a common shift. A direction
    c with sum c_a = 0 is learned if c^T T c > 0. A layer whose target asks for less cannot learn it and has zero there.
    """
    if not state.offset.size:
        return 0
    L = state.model.tokens
    centre = np.eye(L) - 1 / L
    T = centre @ np.tensordot(state.offset, state.model.shift_basis, 1) @ centre
    return int(np.sum(np.linalg.eigvalsh(T) > _LEARNED * np.sqrt(float(state.model.teacher.rho))))


def region_of(state: Any) -> str:
    """Return what a state has learned, in words."""
    content, position = bool(state.q > 0), learned_positions(state) > 0
    return (NOTHING, CONTENT, POSITION, BOTH)[content + 2 * position]


def _state(cell: Any, question: str | None) -> dict[str, Column]:
    means, bars = cell.numbers()
    numbers: dict[str, Column] = {name: (float(a), float(bars[name])) for name, a in means.items()}
    if cell.offset.size:
        numbers["position"] = position_of(cell)
    if not cell.ok:
        numbers = {name: (np.nan * a, np.nan * bar) for name, (a, bar) in numbers.items()}
    region = region_of(cell) if cell.ok else ""
    return {"alpha": (float(cell.alpha), None), "region": (region, None), **numbers}


def _optimum(cell: Any, question: str | None) -> dict[str, Column]:
    names = "distance", "q", "noise", "perfect_alpha"
    return {name: (float(getattr(cell, name)), 0.0) for name in names}


def _count_regions(table: Table) -> list[Row]:
    names, counts = np.unique(table.values("region")[table.found], return_counts=True)
    return [(f"{count:6d}", str(name)) for name, count in zip(names, counts, strict=True)]


class WideNumbers(eqx.Module):
    """The numbers in which a run and its theory are compared; see `WideTraining`."""

    q: Float[Array, ""]
    m: Float[Array, ""]
    trace: Float[Array, ""]
    train_loss: Float[Array, ""]
    gen_error: Float[Array, ""]
    energy: Float[Array, ""]
    share: Float[Array, ""]
    largest: Float[Array, ""]

    @classmethod
    def of(cls, owner: Any, **changed: Any) -> WideNumbers:
        """Return the numbers that a state or a run has, with some of them changed."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(owner, name) for name in names} | changed)


class WideInstance(eqx.Module):
    """One run on sentences of a wide layer, with its theory: a cell of the table of `run_instances`.

    Attributes:
        simulation: numbers of the run.
        theory, theory_stderr: numbers of the theory with their error bars; NaN if it was not solved.
        branch: what the theory has learned: a region of `phase_diagram`; empty if it was not solved.
        status: `Status` of the run.
        theory_status: `Status` of the theory; `absent` if it was not solved.
        iterations: number of steps.
    """

    simulation: WideNumbers
    theory: WideNumbers
    theory_stderr: WideNumbers
    branch: str
    status: int
    theory_status: int
    iterations: int

    @property
    def reason(self) -> str:
        """Why the run counts in no mean; empty if it does. A run that is out of steps counts."""
        return "" if self.status <= Status.max_steps else f"the run failed: {Status.name_of(self.status)}"


def _run(cell: Any, question: str | None) -> dict[str, Column]:
    measured = {name: (float(a), None) for name, a in vars(cell.simulation).items()}
    bars = vars(cell.theory_stderr)
    theory = {f"theory.{name}": (float(a), float(bars[name])) for name, a in vars(cell.theory).items()}
    return {"branch": (cell.branch, None), **measured, **theory, "iterations": (cell.iterations, None)}


def _page_of_runs(table: Table) -> Description:
    if any(cell.branch for cell in table.cells):
        rows = beside_theory(table.difference())
    else:
        columns = {name: table.values(name)[table.found] for name in vars(table.cells[0].simulation)}
        rows = [(name, with_error(np.mean(a), error_bar(a))) for name, a in columns.items()]
    return Description(f"{len(table.cells)} instances", Status.name_of(table.status.max()), tables=[("", rows)])


_STATES = Question(
    "distance",
    _state,
    lambda cell: bool(cell.ok),
    ("theory.wide_figure", "diagrams.map_figure"),
    ("region", "q", "m", "trace", "train_loss", "gen_error", "share", "largest"),
    lambda table: "states of a wide layer",
    with_alpha=True,
    call=lambda layer, alpha, nodes: solve_wide(layer, alpha, nodes=nodes),
)
QUESTIONS |= {
    STATE: _STATES,
    REGIONS: _STATES._replace(
        main="region",
        figures=("theory.wide_figure", "diagrams.region_figure"),
        headline=lambda table: "what a wide layer learns",
        summary=_count_regions,
    ),
    OPTIMUM: Question(
        "distance",
        _optimum,
        lambda cell: bool(cell.ok),
        headline=lambda table: "the optimal learner of a wide layer",
        with_alpha=True,
        call=lambda layer, alpha, nodes: bayes_wide(layer, alpha),
    ),
    RUNS: Question("q", _run, lambda cell: not cell.reason, page=_page_of_runs, usable=Status.converged),
}


def _threshold(name: str, layer: WideLayer, alpha: None, nodes: None) -> Quantity:
    return threshold_wide(layer, name)


# Events by their name: functions of the layer, no alpha, and the nodes.
_EVENTS: dict[str, Callable[..., Quantity]] = {
    "alpha_c": lambda layer, alpha, nodes: onset(layer, nodes),
    **{name: partial(_threshold, name) for name in THRESHOLDS},
}
_AVERAGED = STATE, REGIONS, "alpha_c"  # questions that average over nodes


@form_of("sweep", WideLayer)
def sweep_wide(
    model: WideLayer | Sequence[WideLayer | tuple[WideLayer, Any]],
    question: str | None,
    *axes: Axis,
    nodes: Any = None,
    progress: Progress = None,
    **numbers: float | Sequence[float] | Real[GivenArray, "..."],
) -> Table:
    """Ask one question of many settings of wide layers; this is `sweep` for a `WideLayer`.

        sweep(layer, "state", alpha=[0.5, 1.0, 2.0])           states; also over two numbers
        sweep(layer, "alpha_c", omega=values, tau=values)       the onset of content
        sweep(layer, "bayes", alpha=values)                     the optimal learner
        sweep(layer, "ridge_recovery", **{"teacher.kappa": values})     a threshold, see `threshold`

    All cells share the averages, which are those of the cell that needs the finest.

    Args:
        model: a layer, or a list of layers or of pairs (layer, alpha).
        question: "state", "regions" (states, drawn by what they have learned), "bayes", "alpha_c", "perfect_recovery"
            or "ridge_recovery".
        axes, numbers, progress: as for other models. States and the optimal learner need alpha.
        nodes: as in `solve`.

    Raises:
        InputError: a question, number or layer cannot be used, or all settings failed.
    """
    question = str(require_choice(question, "question", (STATE, REGIONS, OPTIMUM, *_EVENTS)))
    grid = Grid.of(model, axes, numbers, with_alpha=kind_of(question).with_alpha, kind=WideLayer)
    return _table(grid, question, nodes, progress)


def _table(grid: Grid, question: str, nodes: Any, progress: Progress) -> Table:
    """Return the table of the answers to a question in all cells."""
    if question in _AVERAGED:
        rules = (wide_nodes(layer, nodes, whole=question in _EVENTS) for layer in grid.models)
        nodes = max(rules, key=lambda rule: rule.weight.shape[-1])
    elif nodes is not None:
        raise InputError("nodes", f"must be left out for {question!r}, got nodes={nodes!r}")
    answer = _EVENTS.get(question, kind_of(question).call)
    assert answer is not None
    cells = grid.call(partial(answer, nodes=nodes), reporter(progress, "settings"))
    if question in _EVENTS:
        return grid.table_of_event(question, cells)
    return Table(question, *grid.labels, cells)


@form_of("phase_diagram", WideLayer)
def diagram_wide(
    model: WideLayer | Sequence[WideLayer | tuple[WideLayer, Any]],
    *axes: Axis,
    nodes: Any = None,
    progress: Progress = None,
    **numbers: float | Sequence[float] | Real[GivenArray, "..."],
) -> Table:
    """Say over two numbers what a wide layer learns; this is `phase_diagram` for a `WideLayer`.

        phase_diagram(layer, alpha=alphas, tau=taus)

    A layer has attention to content or none; with encodings it has learned position or not, too. Every cell has its
    state: this is ``sweep(layer, "regions", ...)``.

    Raises:
        InputError: as `sweep`; or there are not two axes.
    """
    grid = Grid.of(model, axes, numbers, with_alpha=True, kind=WideLayer, planar=True)
    return _table(grid, REGIONS, nodes, progress)


def at_dimension(model: WideLayer, d: int) -> WideLayer:
    """Return the layer whose teacher has the d eigenvalues that `sample_data` gives it, in place of their law."""
    return eqx.tree_at(lambda layer: layer.teacher, model, Eigenvalues(model.teacher.eigenvalues(d)))


@form_of("run_instances", WideLayer)
def run_wide(
    model: WideLayer,
    d: int,
    alpha: float,
    run: Callable[[WideData, PRNGKeyArray], WideTraining],
    keys: Key[Array, " K"],
    *,
    nodes: Any = None,
    theory: bool = True,
    sentences: int = 50_000,
    progress: Progress = None,
) -> Table:
    """Train on instances of a wide layer, beside the theory; this is `run_instances` for a `WideLayer`.

    All teachers have the same eigenvalues, those that represent the law in dimension d. The theory is that of these
    eigenvalues, so that what remains is of order 1 / d without encodings, and of order 1 / sqrt(d) with them. The table
    has a row for each instance, such as "q" and "theory.q"; its `difference()` compares the means of both.

    Args:
        run: function of one instance and a key that returns a result, such as
            ``lambda data, key: train(model, data)``.
        keys: one key for each instance.
        nodes: as in `solve`.
        theory: whether to solve the theory.
        sentences: number of fresh sentences for the test error of every instance.

    Raises:
        InputError: an argument is out of range, or `run` returns something else.
    """
    require_keys(keys)
    require_takes(run, "run", ("data", "key"))
    predicted = bars = WideNumbers(*[jnp.array(jnp.nan)] * len(fields(WideNumbers)))
    branch, theory_status = "", int(Status.absent)
    if as_flag(theory, "theory"):
        state = solve_wide(at_dimension(model, d), alpha, nodes=nodes)
        predicted, bars = WideNumbers.of(state.mean), WideNumbers.of(state.stderr)
        branch, theory_status = region_of(state), int(state.status)
    cells, report = [], reporter(progress, "instances")
    report(0, len(keys))
    for key in keys:
        key_data, key_run, key_test = jax.random.split(key, 3)
        data = sample_wide(model, d, alpha, key_data)
        result = run(data, key_run)
        require_kind(result, "run", WideTraining, "a function that returns a result of train or gamp")
        error = heldout_wide(model, data, result.S, key_test, sentences=sentences)
        simulation = WideNumbers.of(result, gen_error=error.value)
        status, iterations = int(result.status), int(result.iterations)
        cells.append(WideInstance(simulation, predicted, bars, branch, status, theory_status, iterations))
        report(len(cells), len(keys))
    return Table(RUNS, ("instance",), (np.arange(float(len(cells))),), tuple(cells))
