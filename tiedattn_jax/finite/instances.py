"""Several instances of finite size, each compared with the theory at the teacher that was drawn for it.

# notation: K instances. Order parameters are compared by their invariants: the means over the tokens of tr q, tr V,
|theta| and |m|. These do not depend on the signs of a state or on a rotation of the student's columns.

A run may end in a local minimum that is on no branch; the theory then makes no prediction for it. A run is on a branch
if its loss, q, V, theta and m are all within `FAR` units of the theory's values. The unit of a quantity combines the
theory's error bar with the scatter from instance to instance, which falls like 1 / sqrt(d).

Near the end of a branch the order parameters change fast with the norm of the teacher, which differs from instance to
instance, and at some norms the branch does not exist. Minima of almost the same loss may then be on the branch or on
neither. With noise of size .3, .4 and .5 on the teacher's fields, at d = 300 and alpha = 2, the distances of semantic
runs are .8 to 1.5, 1.4 to 2.6, and infinite. ``normalise=True`` gives all instances one norm, and a larger d less
scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray

from ..averages.recipes import SIZES, AnyNodes, default_recipe, make_rule
from ..averages.rules import Rule
from ..base import VERSION
from ..base.arrays import AnyArray, unstacked
from ..base.errors import InputError, as_flag, require_count, require_keys, require_kind, require_takes
from ..base.files import Store, fingerprint, identity_of
from ..base.pieces import PIECES, computed, none_lost
from ..base.progress import Progress, counter, reporter
from ..base.report import Description, Row
from ..base.results import MAP_FIGURE, Average, Column, InTable, Status, error_bar
from ..model.checks import check_provides
from ..model.model import Model
from ..model.overlaps import BRANCHES, PAIR, Overlaps, magnitudes
from ..phases.cells import beside_theory, numbers_beside_theory
from ..phases.table import Table
from ..theory.solve import solve
from ..theory.states import FixedPoint
from .data import Data
from .evaluation import heldout_error
from .message_passing import GAMP
from .sampling import realised, sample_data, sentence_count
from .training import Training, train

_FINISH_STEPS = 1000
NEITHER, UNSETTLED = "neither", "unsettled"  # names for a run that ends on no branch, or that does not settle
FAR = 3.0  # largest distance, in units, at which a run counts as on a branch
# Assumed scatter between instances, times sqrt(d). It is relative to the quantity itself, but for theta relative to
# sqrt(q rho) and for m relative to sqrt(q). The second value is for theta on the positional branch and m on the
# semantic one. Measured for message passing and L-BFGS on both branches, at alpha = 1 and 2, d = 250 and 1000: .3 to
# 2.3, and .5 to 3.4 for the second value.
_SCATTER, _SCATTER_OF_OTHER = 2.0, 3.0


class Compared(eqx.Module):
    """The quantities in which simulation and theory are compared."""

    train_loss: Float[AnyArray, "*K"]
    gen_error: Float[AnyArray, "*K"]
    q: Float[AnyArray, "*K"]
    V: Float[AnyArray, "*K"]
    theta: Float[AnyArray, "*K"]
    m: Float[AnyArray, "*K"]

    @classmethod
    def of(cls, train_loss: Float[Array, ""], gen_error: Float[Array, ""], x: Overlaps) -> Compared:
        """Make the quantities from the losses of one state and the invariants of its order parameters."""
        return cls(
            train_loss=train_loss,
            gen_error=gen_error,
            q=jnp.mean(jnp.trace(x.q, axis1=-2, axis2=-1)),
            V=jnp.mean(jnp.trace(x.V, axis1=-2, axis2=-1)),
            theta=jnp.mean(jnp.linalg.norm(x.theta, axis=(-2, -1))),
            m=jnp.mean(jnp.linalg.norm(x.encoded, axis=-1)),
        )


NAMES = tuple(field.name for field in fields(Compared))


def distance(simulation: Compared, d: int, point: FixedPoint) -> float:
    """Return the distance of one instance from a branch: the largest gap between quantities, each in its own unit.

    The quantities are the training loss, q, V if it is known, theta and m. The test error follows from them and is left
    out.

    Args:
        simulation: quantities of the instance, scalars.
        d: dimension.
        point: state of the theory on the branch, at the teacher of the instance.

    Returns:
        The distance; infinity if the theory has no such state, NaN if its solve failed.
    """
    if not point.ok:
        return np.inf if point.status == Status.absent else np.nan
    theory, bars = _compared(point)
    rho = jnp.mean(jnp.trace(point.model.rho, axis1=1, axis2=2))
    sizes = {**vars(theory), "theta": jnp.sqrt(theory.q * rho), "m": jnp.sqrt(theory.q)}
    distances = []
    for name in ("train_loss", "q", "V", "theta", "m"):
        is_other = name in ("theta", "m") and name != BRANCHES[point.branch].order
        bar = jnp.nan_to_num(getattr(bars, name), posinf=0.0)  # infinite for one replicate
        unit = jnp.hypot((_SCATTER_OF_OTHER if is_other else _SCATTER) * sizes[name] / d**0.5, bar)
        distances.append(abs(getattr(simulation, name) - getattr(theory, name)) / unit)
    return float(np.nanmax(distances))


def _compared(point: FixedPoint) -> tuple[Compared, Compared]:
    """Return the quantities of a state of the theory, and their error bars."""
    values, bars = (Compared.of(p.train_loss, p.gen_error, p.overlaps) for p in (point.mean, point.stderr))
    return values, bars


class Instance(eqx.Module):
    """One run, with the theory at the teacher that was drawn for it: a cell of the table of `run_instances`.

    Attributes:
        simulation: quantities of the run. V is NaN after training, and after message passing without convergence.
        theory: quantities of the theory at the realised rho, on the branch that the run ended in; NaN if the run ended
            on neither branch or is unsettled, if the theory has no such state, or if the theory was not solved.
        theory_stderr: error bars of `theory`, from its averages.
        branch: the branch that the run ended in: "positional" or "semantic"; "neither", if the distance to both is
            above `FAR`; or "unsettled", if neither message passing nor L-BFGS after it converged, or training diverged.
            If the theory was not solved or failed, the larger of the two overlaps names the branch.
        distance: distance to the theory on both branches of `PAIR`, see `distance`. NaN for a branch that was not
            solved: the branch of the smaller overlap is solved only if the run is not on the other one.
        rho: realised ``tr(Q*^T Sigma Q*) / d``, mean over the tokens.
        status: `Status` of the run; that of message passing if L-BFGS after it did not converge either.
        finished: whether L-BFGS after message passing was needed to reach a critical point.
        gradient_norm: largest entry of the gradient of the empirical risk.
        iterations: iterations of message passing or of the optimiser, without those of L-BFGS afterwards.
        theory_status: `Status` of the theory: the worse one of both branches for a run on neither; `absent` if the
            theory was not solved.
        point: the fixed point behind `theory`, None for a run that is on neither branch or unsettled.
    """

    simulation: Compared
    theory: Compared
    theory_stderr: Compared
    branch: str
    distance: Float[np.ndarray, "2"]
    rho: float
    status: int
    finished: bool
    gradient_norm: float
    iterations: int
    theory_status: int
    point: FixedPoint | None
    USABLE: ClassVar[Status] = Status.converged  # at a critical point of its risk

    @property
    def has_result(self) -> bool:
        return not self.reason

    @property
    def in_table(self) -> InTable:
        return InTable("train_loss", figures=("simulations.instances_figure", MAP_FIGURE), page=_page)

    def numbers(self) -> dict[str, Column]:
        """Return the numbers of the run, those of its theory with their error bars, and its distances to both."""
        distances = {f"distance.{name}": (float(a), None) for name, a in zip(PAIR, self.distance, strict=True)}
        labels = {name: (getattr(self, name), None) for name in ("rho", "gradient_norm", "iterations", "finished")}
        return {"branch": (self.branch, None), **numbers_beside_theory(self), **distances, **labels}

    @property
    def reason(self) -> str:
        """Why the run counts in no mean; empty if it does. Training may have run out of steps."""
        return f"the run did not settle: {Status.name_of(self.status)}" if self.branch == UNSETTLED else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the quantities of the run and its theory, as JSON."""
        return {
            **{name: float(getattr(self.simulation, name)) for name in NAMES},
            **{name: getattr(self, name) for name in ("branch", "rho", "gradient_norm", "iterations")},
            "finished_by_lbfgs": self.finished,
            "status": Status.name_of(self.status),
            "distance": dict(zip(PAIR, self.distance.tolist(), strict=True)),
            **({"theory": self.point.to_dict()} if self.point else {}),
        }


def _page(table: Table) -> Description:
    tables = []
    for branch, count in table.groups.items():
        cells = [cell for cell in table.cells if cell.branch == branch]
        critical, finished = sum(cell.status == Status.converged for cell in cells), sum(c.finished for c in cells)
        head = f"{branch}: {count} of {len(table.cells)} instances, {critical} at a critical point"
        has_theory = any(cell.point for cell in cells)
        rows = beside_theory(table.difference(branch)) if has_theory else _alone([c for c in cells if not c.reason])
        tables.append((f"{head} ({finished} finished by L-BFGS)", rows if len(rows) > 1 else []))
    gradient = max(cell.gradient_norm for cell in table.cells)
    status = f"{Status.name_of(table.status.max())}, largest gradient {gradient:.1e}"
    return Description(f"{len(table.cells)} instance{'s' * (len(table.cells) > 1)}", status, tables=tables)


def _alone(cells: list[Instance]) -> list[Row]:
    """Return rows with the quantities of instances without theory, and their distance to either branch."""
    rows: list[Row] = [("", "simulation", "lowest", "highest")]
    columns = {name: [getattr(cell.simulation, name) for cell in cells] for name in NAMES}
    columns |= {f"distance, {name}": [cell.distance[k] for cell in cells] for k, name in enumerate(PAIR)}
    for name, column in columns.items():
        known = np.array(column, float)
        if (known := known[~np.isnan(known)]).size:
            digits = ".2g" if name.startswith("distance") else ".6g"
            rows.append((name, *(f"{f(known):{digits}}" for f in (np.mean, np.min, np.max))))
    return rows


def means_of(instances: Table) -> dict[str, Any]:
    """Return means over the instances that settled with `stderr`, the mean of the theory, and every instance, as JSON.

    The means are null if the instances ended in different branches. `groups` has the number of instances in each branch
    and their means. Means of the theory are over the instances for which it has a state; its status is the worst of
    them.
    """
    cells = instances.cells
    means = {name: _group_means([cell for cell in cells if cell.branch == name]) for name in instances.groups}
    branches = [name for name in means if name != UNSETTLED] or [UNSETTLED]
    blank = dict.fromkeys(NAMES)
    return {
        "branch": branches[0] if len(branches) == 1 else "several",
        **(means[branches[0]] if len(branches) == 1 else {**blank, "stderr": blank}),
        "gradient_norm": max(cell.gradient_norm for cell in cells),
        "iterations": max(cell.iterations for cell in cells),
        "rho": float(np.mean([cell.rho for cell in cells])),
        "status": Status.name_of(instances.status.max()),
        "groups": {name: {"instances": count, **means[name]} for name, count in instances.groups.items()},
        "instances": [cell.to_dict() for cell in cells],
    }


def _group_means(cells: list[Instance]) -> dict[str, Any]:
    """Return means and error bars over the instances of a group that settled, and the mean of their theory."""
    numbers = {name: np.array([getattr(cell.simulation, name) for cell in cells if not cell.reason]) for name in NAMES}
    solved = [cell for cell in cells if cell.theory_status <= Status.stalled]
    theory = [cell.point.to_dict() for cell in solved or cells if cell.point]
    worst = Status.name_of(max(cell.theory_status for cell in cells))
    return {
        **{name: float(np.mean(a)) if a.size else None for name, a in numbers.items()},
        "stderr": {name: float(error_bar(a)) if a.size > 1 else None for name, a in numbers.items()},
        **({"theory": {**_mean_record(theory), "status": worst}} if theory else {}),
    }


def _mean_record(objects: list[Any]) -> Any:
    """Average the numbers in (nested) dictionaries; of other lists return the longest, of other entries the first."""
    first = objects[0]
    if isinstance(first, dict):
        return {name: _mean_record([item[name] for item in objects]) for name in first}
    if {(np.asarray(item).dtype.kind, np.shape(item)) for item in objects} == {("f", np.shape(first))}:
        return np.mean(objects, 0).tolist()
    return max(objects, key=np.size) if any(isinstance(item, list) for item in objects) else first


def run_instances(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, PRNGKeyArray], GAMP | Training],
    keys: Key[Array, " K"],
    *,
    nodes: AnyNodes = None,
    theory: bool = True,
    normalise: bool = False,
    sentences: int = 50_000,
    batch: int = 1,
    executor: Executor | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Progress = None,
) -> Table:
    """Draw instances, run message passing or training on each, and solve the theory for each.

    The theory is solved anew at the realised rho of every instance, not corrected to it to first order. Its accuracy is
    that of `nodes`, which all instances share. It is solved on the branch of the larger overlap first, and on the other
    branch if the instance is not on the first. An instance that is on neither branch is compared with no theory. If a
    law of matrices lets the teacher overlap with the encodings, the state of a branch is solved again with theta and m
    both free.

    The table has a row for each instance: its numbers, the branch that it ended in, and those of its theory, such as
    "q" and "theory.q". Its `difference` compares the means of both.

    Args:
        model: attention layer and data, with a method `with_teacher`, see `tiedattn_jax.finite.sampling.realised`.
        d, alpha: as in `sample_data`.
        run: function of one instance and a key that returns a result, for instance
            ``lambda data, key: gamp(model, data, "semantic")``. L-BFGS on the risk continues from the result of message
            passing, unless the model has a penalty; from a critical point it takes no step.
        keys: one key for each instance.
        nodes: recipe of the averages of the theory, or number of nodes; by default 2^14, 4 replicates.
        theory: whether to solve the theory; must be False for a value matrix, which has no theory.
        normalise: as in `sample_data`.
        sentences: number of fresh sentences for the test error of every instance.
        batch: number of instances that run together, by `vmap`. Their data are in memory together, and all wait for the
            slowest.
        executor, out, resume: as in `sweep`; a piece is a batch. `out` knows `run` by its code.
        progress: None, True for a bar, or a function of the numbers of finished and of all instances.

    Raises:
        InputError: if an argument is out of range (the error names it), the model has no `with_teacher`, or `theory` is
            True for a value matrix.
        RuntimeError: a worker of the executor was lost.
    """
    require_count(batch, "batch")
    keys = require_keys(keys)
    theory, normalise = as_flag(theory, "theory"), as_flag(normalise, "normalise")
    check_provides(model, "with_teacher", "to be given the teacher that was drawn")
    sentence_count(model, d, alpha, min(batch, len(keys)))
    require_takes(run, "run", ("data", "key"))
    rule = make_rule(nodes, model, default_recipe(model, SIZES["instances"]))
    # A recipe is smaller than its nodes on the way to a worker.
    given = (model, d, float(alpha), run, rule if executor is None else nodes, theory, normalise, sentences)
    count = counter(reporter(progress, "instances"), len(keys))
    pieces = [(*given, keys[k : k + batch]) for k in range(0, len(keys), batch)]
    computation = {}
    if out is not None:
        numbers = (model, rule, jax.random.key_data(keys), (d, float(alpha), theory, normalise, sentences), VERSION)
        computation = {"fingerprint": fingerprint(model.identity_text(), identity_of(run), *numbers)}
    store = Store(out, computation, "out", PIECES)
    store.open_folder(resume)
    sizes = [len(piece[-1]) for piece in pieces]
    answers = computed(_instances, pieces.__getitem__, len(pieces), store, executor, lambda k: count(sizes[k]))
    rows = [row for piece in none_lost(answers, store) for row in piece]
    return Table("instances", ("instance",), (np.arange(float(len(rows))),), tuple(rows))


def _instances(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, PRNGKeyArray], GAMP | Training],
    nodes: AnyNodes,
    theory: bool,
    normalise: bool,
    sentences: int,
    keys: Key[Array, " K"],
) -> list[Instance]:
    """Return the instances of some keys, which run together; the arguments are those of `run_instances`."""

    def outcome_of(key: PRNGKeyArray) -> dict[str, Any]:
        """Draw, run, finish if needed and measure one instance."""
        key_data, key_run, key_test = jax.random.split(key, 3)
        data = sample_data(model, d, alpha, key_data, normalise=normalise)
        result = run(data, key_run)
        W = result.W if isinstance(result, Training) else None
        if W is not None and theory:
            raise InputError("theory", "must be False for a value matrix, of which there is none, got theory=True")
        return _outcome(model, data, result, partial(heldout_error, key=key_test, sentences=sentences, W=W))

    rule = make_rule(nodes, model, default_recipe(model, SIZES["instances"]))
    outcomes = jax.vmap(outcome_of)(keys) if len(keys) > 1 else jax.tree.map(lambda a: a[None], outcome_of(keys[0]))
    instances = []
    for outcome in unstacked(jax.device_get(outcomes), len(keys)):
        realised_model = model.with_teacher(jnp.asarray(outcome["gram"]))
        instances.append(_instance(outcome, d, partial(_solution, realised_model, alpha, rule) if theory else None))
    return instances


def _outcome(
    model: Model, data: Data, result: GAMP | Training, test_error: Callable[[Model, Data, Array], Average]
) -> dict[str, Any]:
    """Finish message passing by L-BFGS, and measure: fields of `Instance`, and the inputs of the theory."""
    require_kind(result, "run", (GAMP, Training), "a function that returns a result of gamp or train")
    if result.train_loss is None:
        raise InputError("run", "must return a result of `gamp` or `train`, got one of `posterior_mean`")
    end, status, finished = result, result.status, jnp.zeros((), bool)
    if isinstance(result, GAMP) and model.penalty is None:
        # L-BFGS takes no step if it starts at a critical point.
        tol = 1e-10 if data.x.dtype == jnp.float64 else 1e-5
        end = train(model, data, result.Q, optimizer="lbfgs", steps=_FINISH_STEPS, tol=tol)
        status = jnp.where(end.ok | result.ok, end.status, result.status)
        finished = end.ok & (end.iterations > 0)
    V = jnp.where(result.ok, result.overlaps.V, jnp.nan)  # V means the response only at a fixed point
    x = eqx.tree_at(lambda o: o.V, end.overlaps, V)
    semantic, positional = magnitudes(realised(model, data), x)
    measured = {
        "simulation": Compared.of(jnp.asarray(end.train_loss), jnp.asarray(test_error(model, data, end.Q).value), x),
        "rho": jnp.mean(jnp.trace(data.rho, axis1=1, axis2=2)),
        "status": status,
        "finished": finished,
        "gradient_norm": end.gradient_norm,
        "iterations": result.iterations,
    }
    # Training that ran out of steps has come closer to a minimum and counts; message passing without a fixed point need
    # not be close to anything.
    settled = end.ok | result.ok if isinstance(result, GAMP) else status <= Status.max_steps
    return {"measured": measured, "settled": settled, "gram": data.teacher_gram, "positional": positional > semantic}


def _solution(model: Model, alpha: float, nodes: Rule, branch: str) -> FixedPoint:
    """Solve a branch. If the teacher overlaps with the encodings no symmetry is exact, so theta and m are left free.

    The start is then the state of the branch without the overlaps.
    """
    overlaps = np.arange(model.shape[0])
    if not np.any(np.asarray(model.law().cross[:, overlaps])):
        return solve(model, alpha, branch, nodes)
    symmetric = eqx.tree_at(lambda m: m.spectrum.cross, model, replace_fn=lambda c: c.at[:, overlaps].set(0.0))
    point = solve(symmetric, alpha, branch, nodes)
    if not point.ok:
        return point
    return replace(solve(model, alpha, None, nodes, start=point), branch=branch)


def _instance(outcome: dict[str, Any], d: int, theory: Callable[[str], FixedPoint] | None) -> Instance:
    """Name the branch that one instance ended in, by its distance to the theory on the branches if that is solved.

    Args:
        theory: function that solves a branch, by its name; None to solve no theory.
    """
    measured, first = outcome["measured"], "positional" if outcome["positional"] else "semantic"
    distances, point = dict.fromkeys(PAIR, np.nan), None
    branch, status = first if outcome["settled"] else UNSETTLED, int(Status.absent)
    if theory is not None and outcome["settled"]:
        branch, status = NEITHER, int(Status.converged)
        for name in (first, *(b for b in PAIR if b != first)):
            state = theory(name)
            distances[name], status = distance(measured["simulation"], d, state), max(status, int(state.status))
            if distances[name] <= FAR or (name == first and np.isnan(distances[name])):
                branch, point, status = name, state, int(state.status)
                break
    blank = Compared(*[np.array(np.nan)] * len(NAMES))
    predicted, bars = jax.tree.map(np.asarray, _compared(point)) if point else (blank, blank)
    return Instance(
        theory=predicted,
        theory_stderr=bars,
        branch=branch,
        distance=np.array([*distances.values()]),
        theory_status=status,
        point=point,
        simulation=measured["simulation"],
        **{name: a.item() for name, a in measured.items() if name != "simulation"},
    )
