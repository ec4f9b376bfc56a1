"""Runs on sentences of finite dimension of a wide layer, beside their theory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray

from ..base import VERSION
from ..base.errors import as_flag, require_keys, require_kind, require_takes
from ..base.files import Store, fingerprint, identity_of
from ..base.pieces import PIECES, computed, none_lost
from ..base.progress import Progress, counter, reporter
from ..base.report import Description, with_error
from ..base.results import Column, InTable, Status, error_bar
from ..phases.cells import beside_theory, numbers_beside_theory
from ..phases.table import Table
from .finite import WideData, WideTraining, heldout_error, sample_data
from .fixed_points import solve
from .layer import Layer
from .states import WideNumbers


class WideInstance(eqx.Module):
    """One run on sentences of a wide layer, with its theory: a cell of the table of `run_instances`.

    Attributes:
        simulation: numbers of the run.
        theory, theory_stderr: numbers of the theory with their error bars; NaN if it was not solved.
        branch: what the theory has learned, `WidePoint.region`; empty if it was not solved.
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
    USABLE: ClassVar[Status] = Status.converged  # at a critical point of its risk

    @property
    def has_result(self) -> bool:
        return not self.reason

    @property
    def in_table(self) -> InTable:
        return InTable("q", page=_instances_page)

    def numbers(self) -> dict[str, Column]:
        """Return the numbers of the run, and those of its theory with their error bars."""
        numbers = numbers_beside_theory(self)
        return {"branch": (self.branch, None), **numbers, "iterations": (self.iterations, None)}

    @property
    def reason(self) -> str:
        """Why the run counts in no mean; empty if it does. A run that is out of steps counts."""
        return "" if self.status <= Status.max_steps else f"the run failed: {Status.name_of(self.status)}"


def _instances_page(table: Table) -> Description:
    if any(cell.branch for cell in table.cells):
        rows = beside_theory(table.difference())
    else:
        columns = {name: table.values(name)[table.found] for name in vars(table.cells[0].simulation)}
        rows = [(name, with_error(np.mean(a), error_bar(a))) for name, a in columns.items()]
    return Description(f"{len(table.cells)} instances", Status.name_of(table.status.max()), tables=[("", rows)])


def at_dimension(model: Layer, d: int) -> Layer:
    """Return the layer whose teacher has the d numbers that `sample_data` gives it, in place of their law."""
    return eqx.tree_at(lambda layer: layer.teacher, model, model.LAW(model.teacher.eigenvalues(d)))


def run_instances(
    model: Layer,
    d: int,
    alpha: float,
    run: Callable[[WideData, PRNGKeyArray], WideTraining],
    keys: Key[Array, " K"],
    *,
    nodes: Any = None,
    theory: bool = True,
    sentences: int = 50_000,
    executor: Executor | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Progress = None,
) -> Table:
    """Train on instances of a wide layer, beside the theory.

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
        executor, out, resume: as in `sweep`; a piece is an instance. `out` knows `run` by its code.

    Raises:
        InputError: an argument is out of range, or `run` returns something else.
        RuntimeError: a worker of the executor was lost.
    """
    keys = require_keys(keys)
    require_takes(run, "run", ("data", "key"))
    predicted = bars = WideNumbers(*[jnp.array(jnp.nan)] * len(fields(WideNumbers)))
    branch, theory_status = "", int(Status.absent)
    numbers = (d, alpha, as_flag(theory, "theory"), sentences), jax.random.key_data(keys), VERSION
    digest = fingerprint(identity_of(run), model.identity_text(), model, nodes, *numbers)
    store = Store(out, {"fingerprint": digest}, "out", PIECES)
    store.open_folder(resume)
    if theory:
        state = solve(at_dimension(model, d), alpha, nodes=nodes)
        predicted, bars = WideNumbers.of(state.mean), WideNumbers.of(state.stderr)
        branch, theory_status = state.region, int(state.status)
    count = counter(reporter(progress, "instances"), len(keys))
    pieces = [(model, d, alpha, run, sentences, (predicted, bars, branch), theory_status, key) for key in keys]
    answers = computed(_wide_instance, pieces.__getitem__, len(keys), store, executor, lambda k: count(1))
    cells = none_lost(answers, store)
    return Table("wide instances", ("instance",), (np.arange(float(len(cells))),), tuple(cells))


def _wide_instance(
    model: Layer,
    d: int,
    alpha: float,
    run: Callable[[WideData, PRNGKeyArray], WideTraining],
    sentences: int,
    theory: tuple[WideNumbers, WideNumbers, str],
    theory_status: int,
    key: PRNGKeyArray,
) -> WideInstance:
    """Return one instance beside its theory."""
    key_data, key_run, key_test = jax.random.split(key, 3)
    data = sample_data(model, d, alpha, key_data)
    result = run(data, key_run)
    require_kind(result, "run", WideTraining, "a function that returns a result of train or gamp")
    error = heldout_error(model, data, result.S, key_test, sentences=sentences)
    simulation = WideNumbers.of(result, gen_error=error.value)
    return WideInstance(simulation, *theory, int(result.status), theory_status, int(result.iterations))
