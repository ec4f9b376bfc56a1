"""Several instances of finite size, each compared with the theory at the teacher that was drawn for it.

# notation: K instances. Order parameters are compared by their invariants: the means over the tokens of tr q, tr V,
|theta| and |m|. These do not depend on the signs of a state or on a rotation of the student's columns.

A run may end in a local minimum that is on no branch; the theory then makes no prediction for it. A run is on a branch
if its loss, q, V, theta and m are all within `FAR` units of the theory's values. The unit of a quantity combines the
theory's error bar with the scatter from instance to instance, which falls like 1 / sqrt(d).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, Shaped

from ..averages.recipes import SIZES, AnyNodes, default_recipe, make_rule
from ..averages.rules import Rule
from ..base.arrays import AnyArray, unstacked
from ..base.errors import InputError, as_flag, require_count, require_keys, require_takes
from ..base.report import Description, Result, Row, Status, error_bar
from ..model.checks import check_provides
from ..model.model import Model
from ..model.overlaps import BRANCHES, PAIR, Overlaps, magnitudes
from ..theory.solve import solve
from ..theory.states import FixedPoint
from .data import Data
from .evaluation import heldout_error
from .message_passing import GAMP
from .sampling import realised, sample_data, sentence_count
from .training import Training, train
from .value import ValueTraining

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


class Instances(Result):
    """Results of K instances, with the theory at the teacher of each.

    Attributes:
        simulation: quantities of the instances. V is NaN after training, and after message passing without convergence.
        theory: quantities of the theory at each instance's realised rho, on the branch that the instance ended in; NaN
            if the instance ended on neither branch or is unsettled, if the theory has no such state, or if the theory
            was not solved.
        theory_stderr: error bars of `theory`, from its averages.
        branch: the branch that each instance ended in: "positional" or "semantic"; "neither", if the distance to
            both is above `FAR`; or "unsettled", if neither message passing nor L-BFGS after it converged, or training
            diverged. If the theory was not solved or failed, the larger of the two overlaps names the branch.
        distance: distance to the theory on both branches of `PAIR`, see `distance`. NaN for a branch that was
            not solved: the branch of the smaller overlap is solved only if the instance is not on the other one.
        rho: realised ``tr(Q*^T Sigma Q*) / d``, mean over the tokens.
        status: `Status` of every run; that of message passing if L-BFGS after it did not converge either.
        finished: whether L-BFGS after message passing was needed to reach a critical point.
        gradient_norm: largest entry of the gradient of the empirical risk.
        iterations: iterations of message passing or of the optimiser, without those of L-BFGS afterwards.
        theory_status: `Status` of the theory: the worse one of both branches for an instance on neither;
            `absent` if the theory was not solved.
        points: the K fixed points behind `theory`, None for an instance that is on neither branch or unsettled; empty
            if the theory was not solved.
    """

    simulation: Compared
    theory: Compared
    theory_stderr: Compared
    branch: Shaped[np.ndarray, " K"]
    distance: Float[np.ndarray, "K 2"]
    rho: Float[np.ndarray, " K"]
    status: Int[np.ndarray, " K"]
    finished: Bool[np.ndarray, " K"]
    gradient_norm: Float[np.ndarray, " K"]
    iterations: Int[np.ndarray, " K"]
    theory_status: Int[np.ndarray, " K"]
    points: list[FixedPoint | None]

    @property
    def ok(self) -> Bool[np.ndarray, " K"]:
        """Whether each instance ended at a critical point of its risk."""
        return self.status == Status.converged

    @property
    def usable(self) -> Bool[np.ndarray, " K"]:
        """Whether each instance counts in means: all but the unsettled. Training may have run out of steps."""
        return self.branch != UNSETTLED

    @property
    def groups(self) -> dict[str, int]:
        """Number of instances by the branch that they ended in."""
        return {str(name): int(count) for name, count in zip(*np.unique(self.branch, return_counts=True), strict=True)}

    def difference(self, branch: str) -> dict[str, tuple[float, ...]]:
        """Return simulation, theory, their difference and its error bar for every quantity, by name.

        All are means over the instances that ended in this branch and for which the theory has a state there. The error
        bar combines that of the mean difference over the instances with that of the theory.
        """
        selected = (self.branch == branch) & (self.theory_status <= Status.stalled)
        differences = {}
        for name in NAMES:
            rows = np.stack([getattr(n, name) for n in (self.simulation, self.theory, self.theory_stderr)])[:, selected]
            rows = rows[:, np.isfinite(rows[0])]
            scatter = error_bar(rows[0] - rows[1]) if rows.shape[1] > 1 else np.nan
            simulation, theory, bar = np.mean(rows, 1) if rows.size else [np.nan] * 3  # all instances share the nodes
            differences[name] = tuple(map(float, (simulation, theory, simulation - theory, np.hypot(scatter, bar))))
        return differences

    def to_dict(self) -> dict[str, Any]:
        """Return means over the usable instances with `stderr`, the mean of the theory, and every instance, as JSON.

        The means are null if the instances ended in different branches. `groups` has the number of instances in each
        branch and their means. Means of the theory are over the instances for which it has a state; its status is the
        worst of them.
        """
        points = [point.to_dict() if point else None for point in self.points]
        means = {name: self._means(name, points) for name in self.groups}
        branches = [name for name in means if name != UNSETTLED] or [UNSETTLED]
        blank = dict.fromkeys(NAMES)
        instances = [
            {
                **{name: float(getattr(self.simulation, name)[k]) for name in NAMES},
                **{name: getattr(self, name)[k].item() for name in ("branch", "rho", "gradient_norm", "iterations")},
                "finished_by_lbfgs": bool(self.finished[k]),
                "status": Status.name_of(self.status[k]),
                "distance": dict(zip(PAIR, self.distance[k].tolist(), strict=True)),
                **({"theory": points[k]} if points and points[k] else {}),
            }
            for k in range(len(self.status))
        ]
        return {
            "branch": branches[0] if len(branches) == 1 else "several",
            **(means[branches[0]] if len(branches) == 1 else {**blank, "stderr": blank}),
            "gradient_norm": float(self.gradient_norm.max()),
            "iterations": int(self.iterations.max()),
            "rho": float(np.mean(self.rho)),
            "status": Status.name_of(self.status.max()),
            "groups": {name: {"instances": count, **means[name]} for name, count in self.groups.items()},
            "instances": instances,
        }

    def _means(self, name: str, points: list[dict | None]) -> dict[str, Any]:
        """Return means and error bars over the usable instances of a group, and the mean of their theory."""
        in_group = self.branch == name
        numbers = {key: np.asarray(getattr(self.simulation, key))[in_group & self.usable] for key in NAMES}
        solved = in_group & (self.theory_status <= Status.stalled)
        theory = [p for k, p in enumerate(points) if p and in_group[k] and (solved[k] or not solved.any())]
        worst = Status.name_of(self.theory_status[in_group].max())
        return {
            **{key: float(np.mean(a)) if a.size else None for key, a in numbers.items()},
            "stderr": {key: float(error_bar(a)) if a.size > 1 else None for key, a in numbers.items()},
            **({"theory": {**_mean_record(theory), "status": worst}} if theory else {}),
        }

    def plot(self, ax: Any = None) -> Any:
        """Plot every instance against the theory; see `plotting.simulations.instances_figure`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "train_loss",
                "gen_error", "q", "theta" and "m", or a dict of some of them.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.simulations import instances_figure

        return instances_figure(self, ax=ax)

    def describe(self) -> Description:
        tables = []
        for branch, count in self.groups.items():
            in_group = self.branch == branch
            head = (
                f"{branch}: {count} of {in_group.size} instances, {(in_group & self.ok).sum()} at a critical point"
                f" ({(in_group & self.finished).sum()} finished by L-BFGS)"
            )
            has_theory = bool(self.points) and branch != NEITHER
            tables.append((head, self._rows(branch) if has_theory else self._rows_alone(branch)))
        status = f"{Status.name_of(self.status.max())}, largest gradient {self.gradient_norm.max():.1e}"
        return Description(f"{len(self.status)} instances", status, tables=tables)

    def _rows(self, branch: str) -> list[Row]:
        rows: list[Row] = [("", "simulation", "theory", "difference", "error bar", "in bars")]
        for name, (simulation, theory, gap, bar) in self.difference(branch).items():
            if np.isfinite(simulation):
                # An order parameter that vanishes for large d is not zero at finite d, so no deviation is shown.
                sigmas = f"{gap / bar:+.1f}" if np.isfinite(bar) and theory != 0 else ""
                rows.append((name, f"{simulation:.6g}", f"{theory:.6g}", f"{gap:+.2g}", f"{bar:.2g}", sigmas))
        return rows if len(rows) > 1 else []

    def _rows_alone(self, branch: str) -> list[Row]:
        """Return rows with the quantities of the instances without theory, and their distance to either branch."""
        in_group = self.usable & (self.branch == branch)
        rows: list[Row] = [("", "simulation", "lowest", "highest")]
        columns = {name: np.asarray(getattr(self.simulation, name)) for name in NAMES}
        columns |= {f"distance, {name}": distances for name, distances in zip(PAIR, self.distance.T, strict=True)}
        for name, values in columns.items():
            finite = values[in_group & ~np.isnan(values)]
            if finite.size:
                digits = ".2g" if name.startswith("distance") else ".6g"
                rows.append((name, *(f"{f(finite):{digits}}" for f in (np.mean, np.min, np.max))))
        return rows


def _mean_record(objects: list[Any]) -> Any:
    """Average the floats of (nested) dictionaries of the same structure; other entries are those of the first."""
    first = objects[0]
    if isinstance(first, dict):
        return {name: _mean_record([item[name] for item in objects]) for name in first}
    return float(np.mean(objects)) if isinstance(first, float) else first


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Instances:
    """Draw instances, run message passing or training on each, and solve the theory for each.

    The theory is solved anew at the realised rho of every instance, not corrected to it to first order. Its accuracy is
    that of `nodes`, which all instances share. It is solved on the branch of the larger overlap first, and on the other
    branch if the instance is not on the first. An instance that is on neither branch is compared with no theory. If a
    law of matrices lets the teacher overlap with the encodings, the state of a branch is solved again with theta and m
    both free.

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
        progress: called with the numbers of finished and of all instances, before the first and after each batch.

    Raises:
        InputError: if an argument is out of range (the error names it), the model has no `with_teacher`, or `theory` is
            True for a value matrix.
    """
    require_count(batch, "batch")
    require_keys(keys)
    theory, normalise = as_flag(theory, "theory"), as_flag(normalise, "normalise")
    check_provides(model, "with_teacher", "to be given the teacher that was drawn")
    sentence_count(model, d, alpha, min(batch, len(keys)))
    require_takes(run, "run", ("data", "key"))
    rule = make_rule(nodes, model, default_recipe(model, SIZES["instances"]))

    sample = partial(_outcome, model, d, alpha, run, sentences, normalise, theory)
    outcomes, endings = [], []
    progress(0, len(keys))
    for k in range(0, len(keys), batch):
        lanes = jax.vmap(sample)(keys[k : k + batch]) if batch > 1 else jax.tree.map(lambda a: a[None], sample(keys[k]))
        outcomes.append(jax.device_get(lanes))
        for outcome in unstacked(outcomes[-1], len(outcomes[-1]["rho"])):
            realised_model = model.with_teacher(jnp.asarray(outcome["gram"]))
            endings.append(_ending(outcome, d, partial(_solution, realised_model, alpha, rule) if theory else None))
        progress(min(k + batch, len(keys)), len(keys))
    return _gathered(jax.tree.map(lambda *a: np.concatenate(a), *outcomes), endings, theory)


def _outcome(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, PRNGKeyArray], GAMP | Training],
    sentences: int,
    normalise: bool,
    theory: bool,
    key: PRNGKeyArray,
) -> dict[str, Any]:
    """Draw, run, finish if needed and measure one instance: fields of `Instances`, and the inputs of the theory."""
    key_data, key_run, key_test = jax.random.split(key, 3)
    data = sample_data(model, d, alpha, key_data, normalise=normalise)
    result = run(data, key_run)
    W = result.W if isinstance(result, ValueTraining) else None
    if W is not None and theory:
        raise InputError("theory", "must be False for a value matrix, of which there is none, got theory=True")
    end, status, finished = _finished(model, data, result)
    V = jnp.where(result.ok, result.overlaps.V, jnp.nan)  # V means the response only at a fixed point
    x = eqx.tree_at(lambda o: o.V, end.overlaps, V)
    semantic, positional = magnitudes(realised(model, data), x)
    test = heldout_error(model, data, end.Q, key_test, sentences=sentences, W=W)
    return {
        "simulation": Compared.of(end.train_loss, jnp.asarray(test.value), x),
        "rho": jnp.mean(jnp.trace(data.rho, axis1=1, axis2=2)),
        "status": status,
        # Training that ran out of steps has come closer to a minimum and counts; message passing without a fixed point
        # need not be close to anything.
        "settled": end.ok | result.ok if isinstance(result, GAMP) else status <= Status.max_steps,
        "finished": finished,
        "gradient_norm": end.gradient_norm,
        "iterations": result.iterations,
        "gram": data.teacher_gram,
        "positional": positional > semantic,
    }


def _finished(
    model: Model, data: Data, result: GAMP | Training
) -> tuple[GAMP | Training, Int[Array, ""], Bool[Array, ""]]:
    """Finish message passing by L-BFGS. Return the end, its status, and whether L-BFGS reached a critical point."""
    if not isinstance(result, GAMP) or model.penalty is not None:
        return result, result.status, jnp.zeros((), bool)
    # L-BFGS takes no step if it starts at a critical point.
    tol = 1e-10 if data.x.dtype == jnp.float64 else 1e-5
    end = train(model, data, result.Q, optimizer="lbfgs", steps=_FINISH_STEPS, tol=tol)
    status = jnp.where(end.ok | result.ok, end.status, result.status)
    return end, status, end.ok & (end.iterations > 0)


def _solution(model: Model, alpha: float, nodes: Rule, branch: str) -> FixedPoint:
    """Solve a branch. If the teacher overlaps with the encodings no symmetry is exact, so theta and m are left free."""
    point = solve(model, alpha, branch, nodes)
    if not (point.ok and np.any(np.asarray(model.law().cross[:, : model.shape[0]]))):
        return point
    return replace(solve(model, alpha, None, nodes, start=point), branch=branch)


_Ending = tuple[str, list[float], FixedPoint | None, int]


def _ending(outcome: dict[str, Any], d: int, theory: Callable[[str], FixedPoint] | None) -> _Ending:
    """Name the branch that one instance ended in, by its distance to the theory on the branches if that is solved.

    Args:
        theory: function that solves a branch, by its name; None to solve no theory.

    Returns:
        `branch`, `distance`, the entry of `points` and `theory_status` of `Instances`.
    """
    first = "positional" if outcome["positional"] else "semantic"
    distances, status = dict.fromkeys(PAIR, np.nan), int(Status.converged)
    if theory is None or not outcome["settled"]:
        return first if outcome["settled"] else UNSETTLED, [*distances.values()], None, int(Status.absent)
    for branch in (first, *(b for b in PAIR if b != first)):
        point = theory(branch)
        distances[branch], status = distance(outcome["simulation"], d, point), max(status, int(point.status))
        if distances[branch] <= FAR or (branch == first and np.isnan(distances[branch])):
            return branch, [*distances.values()], point, int(point.status)
    return NEITHER, [*distances.values()], None, status


def _gathered(runs: dict[str, Any], endings: list[_Ending], theory: bool) -> Instances:
    """Collect the outcomes of K runs, arrays with a leading axis K, and the K results of `_ending` in `Instances`."""
    branch, distances, points, status = zip(*endings, strict=True)
    for key in ("positional", "gram", "settled"):
        del runs[key]
    blank = Compared(*[jnp.full((), jnp.nan)] * len(NAMES))
    pairs = [_compared(point) if point else (blank, blank) for point in points]
    predicted, bars = (jax.tree.map(lambda *a: np.array(a, float), *trees) for trees in zip(*pairs, strict=True))
    return Instances(
        theory=predicted,
        theory_stderr=bars,
        branch=np.array(branch),
        distance=np.array(distances),
        theory_status=np.array(status),
        points=list(points) if theory else [],
        **runs,
    )
