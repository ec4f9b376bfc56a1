"""Several instances of finite size, next to the theory at the teacher that each of them has drawn.

# notation: K instances. Order parameters are compared by their invariants, means over the tokens of tr q, tr V, |theta|
# and |m|: neither the signs of a state nor the rotation of a student's columns matters.

A run may end in a local minimum that is on no branch, and then there is no theory to hold it against. It is on a branch
if loss, q, V, theta and m are all within `FAR` units of what the theory says of it. The unit of a quantity is the
theory's error bar together with what it scatters by from instance to instance, which falls like 1 / sqrt(d).
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

from ..averages.default import default_nodes
from ..averages.rule import Rule
from ..averages.sizes import SIZES
from ..errors import InputError, require_count, require_keys
from ..model import Model, check_provides
from ..overlaps import BRANCHES, PAIR, Overlaps, magnitudes
from ..printing import Description, Row, pictures
from ..results import Result, Status, error_bar
from ..theory.solve import solve
from ..theory.states import FixedPoint
from .data import Data
from .evaluation import heldout_error
from .message_passing import GAMP
from .sampling import realised, sample_data, sentence_count
from .training import Training, train
from .value import ValueTraining

_FINISH_STEPS = 1000
NEITHER, UNSETTLED = "neither", "unsettled"  # what an end is called that is on no branch, or that is no end
FAR = 3.0
# Scatter of the instances times sqrt(d), relative: theta and m to sqrt(q rho) and sqrt(q). Of message passing and of
# L-BFGS on both branches, alpha = 1 and 2, d = 250 and 1000, it is .3 to 2.3, and .5 to 3.4 for theta on the positional
# branch and m on the semantic one.
_SCATTER, _SCATTER_OF_OTHER = 2.0, 3.0


class Compared(eqx.Module):
    """The quantities that simulation and theory are compared in, (K,) each."""

    train_loss: jax.Array
    gen_error: jax.Array
    q: jax.Array
    V: jax.Array
    theta: jax.Array
    m: jax.Array

    @classmethod
    def of(cls, train_loss: Any, gen_error: Any, x: Overlaps) -> Compared:
        """Of one state: its losses, and the invariants of its order parameters."""
        return cls(
            train_loss=train_loss,
            gen_error=gen_error,
            q=jnp.mean(jnp.trace(x.q, axis1=-2, axis2=-1)),
            V=jnp.mean(jnp.trace(x.V, axis1=-2, axis2=-1)),
            theta=jnp.mean(jnp.linalg.norm(x.theta, axis=(-2, -1))),
            m=jnp.mean(jnp.linalg.norm(x.encoded, axis=-1)),
        )


NAMES = tuple(field.name for field in fields(Compared))


def distance(found: Compared, d: int, point: FixedPoint) -> float:
    """How far the end of one instance is from a branch: the largest of the gaps, each in its own unit.

    Training loss, q, V where it is known, theta and m count; the test error follows from them.

    Args:
        found: of one instance, scalars.
        d: dimension.
        point: the theory on that branch, at the teacher of this instance.

    Returns:
        Infinity where theory has no such state; NaN where it was not solved.
    """
    if not point.ok:
        return np.inf if point.status == Status.absent else np.nan
    theory, bars = _compared(point)
    rho = jnp.mean(jnp.trace(point.model.rho, axis1=1, axis2=2))
    sizes = {**vars(theory), "theta": jnp.sqrt(theory.q * rho), "m": jnp.sqrt(theory.q)}
    far = []
    for name in ("train_loss", "q", "V", "theta", "m"):
        other = name in ("theta", "m") and name != BRANCHES[point.branch].order
        bar = jnp.nan_to_num(getattr(bars, name), posinf=0.0)  # infinite for one replicate
        unit = jnp.hypot((_SCATTER_OF_OTHER if other else _SCATTER) * sizes[name] / d**0.5, bar)
        far.append(abs(getattr(found, name) - getattr(theory, name)) / unit)
    return float(np.nanmax(far))


def _compared(point: FixedPoint) -> tuple[Compared, Compared]:
    """A state of the theory, and its error bars."""
    one, other = (Compared.of(p.train_loss, p.gen_error, p.overlaps) for p in (point.mean, point.stderr))
    return one, other


class Instances(Result):
    """What K instances gave.

    Attributes:
        found: on the instances. V is NaN after training, and after message passing that did not converge.
        theory: at each instance's realised rho, on the branch that the instance ended in; NaN where it ended in neither
            or is unsettled, where theory has no such state, or where it was not asked.
        theory_stderr: error bars of the averages behind it.
        branch: what each instance ended in, (K,): "positional" or "semantic"; "neither", where the distance to both is
            above `FAR`; or "unsettled", where message passing, or L-BFGS after it, came to no rest, or training
            diverged. Without the theory, and where it failed, only the larger of the two overlaps is known, and names
            the branch.
        distance: to the theory on both branches of `PAIR`, (K, 2), see `distance`; NaN where that was not asked for:
            the branch of the smaller overlap is where the end is not on the other one.
        rho: realised ``tr(Q*^T Sigma Q*) / d``, mean over the tokens, (K,).
        status: `Status` of every run, (K,): that of message passing where finishing it did not help.
        finished: whether it took L-BFGS, after message passing, to reach a critical point, (K,).
        gradient_norm: largest entry of the gradient of the empirical risk, (K,).
        iterations: of message passing or of the optimiser, without those of finishing, (K,).
        theory_status: `Status` of the theory, the worst of both branches where both were solved, (K,).
        points: the fixed points behind `theory`, K of them, None for an end that is on neither branch or unsettled;
            empty where the theory was not asked.
    """

    found: Compared
    theory: Compared
    theory_stderr: Compared
    branch: np.ndarray
    distance: np.ndarray
    rho: np.ndarray
    status: np.ndarray
    finished: np.ndarray
    gradient_norm: np.ndarray
    iterations: np.ndarray
    theory_status: np.ndarray
    points: list[FixedPoint | None]

    @property
    def ok(self) -> np.ndarray:
        """Which instances are critical points of their risk, (K,)."""
        return self.status == Status.converged

    @property
    def usable(self) -> np.ndarray:
        """Which instances count in means: all but the unsettled. Training may have run out of steps. (K,)."""
        return self.branch != UNSETTLED

    @property
    def groups(self) -> dict[str, int]:
        """How many instances ended in what."""
        return {str(name): int(count) for name, count in zip(*np.unique(self.branch, return_counts=True), strict=True)}

    def difference(self, branch: str) -> dict[str, tuple[float, ...]]:
        """Simulation, theory, their difference and its error bar, of every quantity, by name.

        Means over the instances that ended in this branch and whose theory has a state there. The error bar is
        that of the difference, instance by instance, together with that of the theory.
        """
        use = (self.branch == branch) & (self.theory_status <= Status.stalled)
        out = {}
        for name in NAMES:
            each = np.stack([getattr(n, name) for n in (self.found, self.theory, self.theory_stderr)])[:, use]
            each = each[:, np.isfinite(each[0])]
            scatter = error_bar(each[0] - each[1]) if each.shape[1] > 1 else np.nan
            found, theory, common = np.mean(each, 1) if each.size else [np.nan] * 3  # the same nodes for all instances
            out[name] = tuple(map(float, (found, theory, found - theory, np.hypot(scatter, common))))
        return out

    def to_dict(self) -> dict[str, Any]:
        """Means over the usable instances with `stderr`, the mean of the theory, and every instance: JSON.

        The means are null where the instances did not all end in the same: `groups` says how many in what, and has the
        means of each. Those of the theory are over the instances for which it has a state; its status is the worst.
        """
        points = [point.to_dict() if point else None for point in self.points]
        means = {name: self._means(name, points) for name in self.groups}
        known = [name for name in means if name != UNSETTLED] or [UNSETTLED]
        blank = dict.fromkeys(NAMES)
        each = [
            {
                **{name: float(getattr(self.found, name)[k]) for name in NAMES},
                **{name: getattr(self, name)[k].item() for name in ("branch", "rho", "gradient_norm", "iterations")},
                "finished_by_lbfgs": bool(self.finished[k]),
                "status": Status.name_of(self.status[k]),
                "distance": dict(zip(PAIR, self.distance[k].tolist(), strict=True)),
                **({"theory": points[k]} if points and points[k] else {}),
            }
            for k in range(len(self.status))
        ]
        return {
            "branch": known[0] if len(known) == 1 else "several",
            **(means[known[0]] if len(known) == 1 else {**blank, "stderr": blank}),
            "gradient_norm": float(self.gradient_norm.max()),
            "iterations": int(self.iterations.max()),
            "rho": float(np.mean(self.rho)),
            "status": Status.name_of(self.status.max()),
            "groups": {name: {"instances": count, **means[name]} for name, count in self.groups.items()},
            "instances": each,
        }

    def _means(self, name: str, points: list[dict | None]) -> dict[str, Any]:
        """Means over the usable instances of a group, their error bars, and the mean of the theory that they have."""
        here = self.branch == name
        numbers = {key: np.asarray(getattr(self.found, key))[here & self.usable] for key in NAMES}
        settled = here & (self.theory_status <= Status.stalled)
        theory = [p for k, p in enumerate(points) if p and here[k] and (settled[k] or not settled.any())]
        worst = Status.name_of(self.theory_status[here].max())
        return {
            **{key: float(np.mean(a)) if a.size else None for key, a in numbers.items()},
            "stderr": {key: float(error_bar(a)) if a.size > 1 else None for key, a in numbers.items()},
            **({"theory": {**_mean(theory), "status": worst}} if theory else {}),
        }

    def plot(self) -> Any:
        """Every instance against the theory; see `plotting.instances_figure`."""
        return pictures().instances_figure(self)

    def describe(self) -> Description:
        tables = []
        for branch, count in self.groups.items():
            here = self.branch == branch
            head = (
                f"{branch}: {count} of {here.size} instances, {(here & self.ok).sum()} at a critical point"
                f" ({(here & self.finished).sum()} finished by L-BFGS)"
            )
            beside = bool(self.points) and branch != NEITHER
            tables.append((head, self._rows(branch) if beside else self._rows_alone(branch)))
        status = f"{Status.name_of(self.status.max())}, largest gradient {self.gradient_norm.max():.1e}"
        return Description(f"{len(self.status)} instances", status, tables=tables)

    def _rows(self, branch: str) -> list[Row]:
        rows: list[Row] = [("", "simulation", "theory", "difference", "error bar", "in bars")]
        for name, (found, theory, gap, bar) in self.difference(branch).items():
            if np.isfinite(found):
                # The size of what vanishes for large d is no deviation.
                sigmas = f"{gap / bar:+.1f}" if np.isfinite(bar) and theory != 0 else ""
                rows.append((name, f"{found:.6g}", f"{theory:.6g}", f"{gap:+.2g}", f"{bar:.2g}", sigmas))
        return rows if len(rows) > 1 else []

    def _rows_alone(self, branch: str) -> list[Row]:
        """What was found, beside no theory, and how far that is from either branch."""
        here = self.usable & (self.branch == branch)
        rows: list[Row] = [("", "simulation", "lowest", "highest")]
        columns = {name: np.asarray(getattr(self.found, name)) for name in NAMES}
        columns |= {f"distance, {name}": far for name, far in zip(PAIR, self.distance.T, strict=True)}
        for name, values in columns.items():
            known = values[here & ~np.isnan(values)]
            if known.size:
                digits = ".2g" if name.startswith("distance") else ".6g"
                rows.append((name, *(f"{f(known):{digits}}" for f in (np.mean, np.min, np.max))))
        return rows


def _mean(objects: list[Any]) -> Any:
    """Means of the numbers of several objects alike, also of those within them, with the other entries of the first."""
    first = objects[0]
    if isinstance(first, dict):
        return {name: _mean([one[name] for one in objects]) for name in first}
    return float(np.mean(objects)) if isinstance(first, float) else first


def run_instances(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, jax.Array], GAMP | Training],
    keys: jax.Array,
    *,
    nodes: Rule | None = None,
    theory: bool = True,
    normalise: bool = False,
    sentences: int = 50_000,
    batch: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Instances:
    """Draw instances, run message passing or training on each, and solve the theory for each.

    The theory is solved at the realised rho of every instance, not corrected to it: its accuracy is that of `nodes`,
    which all instances share. It is solved on the branch of the larger overlap, and on the other one where the end is
    not on the first; an end that is on neither stands beside none. Where a law of matrices says that the teacher
    overlaps with the encodings, both order parameters are free from there.

    Args:
        model: attention layer and data, with a method `with_teacher`, see `tiedattn_jax.finite.sampling.realised`.
        d, alpha: as in `sample_data`.
        run: from one instance and a key to a result, for instance ``lambda data, key: gamp(model, data, "semantic")``.
            Message passing that does not settle is finished by L-BFGS on the risk, but for a model with a penalty.
        keys: one for each instance.
        nodes: averaging rule of the theory; by default `default_nodes` of 2^14, 4 replicates.
        theory: whether to solve the theory at all; not for a value matrix, of which there is none.
        normalise: as in `sample_data`.
        sentences: fresh ones for the test error of every instance.
        batch: instances that run together, by `vmap`; their data are in memory together, and all wait for the slowest.
        progress: called with the number of instances that are done and of all, before the first and after each batch.

    Raises:
        InputError: naming the argument that is out of range; a model without `with_teacher`; theory of a value matrix.
    """
    require_count(batch, "batch")
    require_keys(keys)
    check_provides(model, "with_teacher", "to be given the teacher that was drawn")
    sentence_count(model, d, alpha, min(batch, len(keys)))
    nodes = default_nodes(model, SIZES["instances"]) if nodes is None else nodes

    one = partial(_outcome, model, d, alpha, run, sentences, normalise, theory)
    outcomes, named = [], []
    progress(0, len(keys))
    for k in range(0, len(keys), batch):
        several = jax.vmap(one)(keys[k : k + batch]) if batch > 1 else jax.tree.map(lambda a: a[None], one(keys[k]))
        outcomes.append(jax.device_get(several))
        for outcome in (jax.tree.map(lambda a, i=i: a[i], outcomes[-1]) for i in range(len(outcomes[-1]["rho"]))):
            own = model.with_teacher(jnp.asarray(outcome["gram"]))
            named.append(_named(outcome, d, partial(_state, own, alpha, nodes) if theory else None))
        progress(min(k + batch, len(keys)), len(keys))
    return _gathered(jax.tree.map(lambda *a: np.concatenate(a), *outcomes), named, theory)


def _outcome(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, jax.Array], GAMP | Training],
    sentences: int,
    normalise: bool,
    theory: bool,
    key: jax.Array,
) -> dict[str, Any]:
    """One instance, drawn, run, finished if need be, and measured: fields of `Instances`, and what theory asks for."""
    key_data, key_run, key_test = jax.random.split(key, 3)
    data = sample_data(model, d, alpha, key_data, normalise=normalise)
    result = run(data, key_run)
    W = result.W if isinstance(result, ValueTraining) else None
    if W is not None and theory:
        raise InputError("theory", "must be False for a value matrix, of which there is none, got theory=True")
    end, status, finished = _finished(model, data, result)
    V = jnp.where(result.ok, result.overlaps.V, jnp.nan)  # of an algorithm that did not settle it is no response
    x = eqx.tree_at(lambda o: o.V, end.overlaps, V)
    semantic, positional = magnitudes(realised(model, data), x)
    test = heldout_error(model, data, end.Q, key_test, sentences=sentences, W=W)
    return {
        "found": Compared.of(end.train_loss, test.value, x),
        "rho": jnp.mean(jnp.trace(data.rho, axis1=1, axis2=2)),
        "status": status,
        # Training that is out of steps has gone so far; message passing has not gone anywhere.
        "settled": end.ok | result.ok if isinstance(result, GAMP) else status <= Status.max_steps,
        "finished": finished,
        "gradient_norm": end.gradient_norm,
        "iterations": result.iterations,
        "gram": data.teacher_gram,
        "positional": positional > semantic,
    }


def _finished(model: Model, data: Data, result: GAMP | Training) -> tuple[GAMP | Training, jax.Array, jax.Array]:
    """Where a run ended, with L-BFGS after message passing; its status, and whether L-BFGS made it a critical point."""
    if not isinstance(result, GAMP) or model.penalty is not None:
        return result, result.status, jnp.zeros((), bool)
    # From a critical point this takes no step.
    tol = 1e-10 if data.x.dtype == jnp.float64 else 1e-5
    end = train(model, data, result.Q, optimizer="lbfgs", steps=_FINISH_STEPS, tol=tol)
    status = jnp.where(end.ok | result.ok, end.status, result.status)
    return end, status, end.ok & (end.iterations > 0)


def _state(model: Model, alpha: float, nodes: Rule, branch: str) -> FixedPoint:
    """The state of a branch; where the teacher overlaps with the encodings,
    nothing that the branch leaves out is zero.
    """
    point = solve(model, alpha, branch, nodes)
    if not (point.ok and np.any(np.asarray(model.law().cross[:, : model.shape[0]]))):
        return point
    return replace(solve(model, alpha, None, nodes, start=point), branch=branch)


def _named(
    outcome: dict[str, Any], d: int, theory: Callable[[str], FixedPoint] | None
) -> tuple[str, list[float], FixedPoint | None, int]:
    """The name of one instance's end, by its distance to the theory on the branches, where that is asked.

    Returns:
        `branch`, `distance`, the one of `points` and `theory_status` of `Instances`.
    """
    first = "positional" if outcome["positional"] else "semantic"
    far, status = dict.fromkeys(PAIR, np.nan), int(Status.converged)
    if theory is None or not outcome["settled"]:
        return first if outcome["settled"] else UNSETTLED, [*far.values()], None, int(Status.absent)
    for branch in (first, *(b for b in PAIR if b != first)):
        point = theory(branch)
        far[branch], status = distance(outcome["found"], d, point), max(status, int(point.status))
        if far[branch] <= FAR or (branch == first and np.isnan(far[branch])):
            return branch, [*far.values()], point, int(point.status)
    return NEITHER, [*far.values()], None, status


def _gathered(runs: dict[str, Any], named: list[Any], theory: bool) -> Instances:
    """The outcomes of K runs, arrays (K, ...), with what `_named` says of each and next to the theory."""
    branch, far, points, status = zip(*named, strict=True)
    for key in ("positional", "gram", "settled"):
        del runs[key]
    blank = Compared(*[jnp.full((), jnp.nan)] * len(NAMES))
    pairs = [_compared(point) if point else (blank, blank) for point in points]
    predicted, bars = (jax.tree.map(lambda *a: np.array(a, float), *several) for several in zip(*pairs, strict=True))
    return Instances(
        theory=predicted,
        theory_stderr=bars,
        branch=np.array(branch),
        distance=np.array(far),
        theory_status=np.array(status),
        points=list(points) if theory else [],
        **runs,
    )
