"""Several instances of finite size, next to the theory at the teacher that each of them has drawn.

# notation: K instances. Order parameters are compared by their invariants, means over the tokens of tr q, tr V, |theta|
# and |m|: neither the signs of a state nor the rotation of a student's columns matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..averages.default import default_nodes
from ..averages.rule import Rule
from ..averages.sizes import SIZES
from ..errors import require_count, require_keys
from ..model import Model, check_provides
from ..overlaps import Overlaps, magnitudes
from ..printing import Description
from ..results import Result, Status, error_bar
from ..theory.fixed_points import FixedPoint, solve
from .data import Data
from .evaluation import heldout_error
from .message_passing import GAMP
from .sampling import realised, sample_data, sentence_count
from .training import Training, train

_FINISH_STEPS = 1000


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
            m=jnp.mean(jnp.linalg.norm(x.m, axis=-1)),
        )


NAMES = tuple(field.name for field in fields(Compared))


class Instances(Result):
    """What K instances gave.

    Attributes:
        found: on the instances. V is NaN after training, and after message passing that diverged.
        theory: at each instance's realised rho, on the branch that the instance ended in; NaN where theory has no such
            state, or was not asked.
        theory_stderr: error bars of the averages behind it.
        branch: "positional" or "semantic", the larger of the two overlaps, (K,).
        rho: realised ``tr(Q*^T Sigma Q*) / d``, mean over the tokens, (K,).
        status: `Status` of every run, (K,): that of message passing where finishing it did not help.
        finished: whether it took L-BFGS, after message passing, to reach a critical point, (K,).
        gradient_norm: largest entry of the gradient of the empirical risk, (K,).
        iterations: of message passing or of the optimiser, without those of finishing, (K,).
        theory_status: `Status` of the theory, (K,).
        points: the fixed points of the theory, K of them; none where the theory was not asked.
    """

    found: Compared
    theory: Compared
    theory_stderr: Compared
    branch: np.ndarray
    rho: np.ndarray
    status: np.ndarray
    finished: np.ndarray
    gradient_norm: np.ndarray
    iterations: np.ndarray
    theory_status: np.ndarray
    points: list[FixedPoint]

    @property
    def ok(self) -> np.ndarray:
        """Which instances are critical points of their risk, (K,)."""
        return self.status == Status.converged

    @property
    def usable(self) -> np.ndarray:
        """Which instances count in means: all but those that diverged. They may have run out of steps. (K,)."""
        return self.status <= Status.max_steps

    def difference(self, branch: str) -> dict[str, tuple[float, ...]]:
        """Simulation, theory, their difference and its error bar, of every quantity, by name.

        Means over the usable instances that ended in this branch and whose theory has a state there. The error bar is
        that of the difference, instance by instance, together with that of the theory.
        """
        use = self.usable & (self.branch == branch) & (self.theory_status <= Status.stalled)
        out = {}
        for name in NAMES:
            each = np.stack([getattr(n, name) for n in (self.found, self.theory, self.theory_stderr)])[:, use]
            found, theory, bar = each[:, np.isfinite(each[0])]
            mean = (np.mean(found), np.mean(theory)) if found.size else (np.nan, np.nan)
            scatter = error_bar(found - theory) if found.size > 1 else np.nan
            common = np.mean(bar) if found.size else np.nan  # the same nodes for all instances
            out[name] = (*map(float, mean), float(mean[0] - mean[1]), float(np.hypot(scatter, common)))
        return out

    def to_dict(self) -> dict[str, Any]:
        """Means over the usable instances with `stderr`, the mean of the theory, and every instance: JSON.

        The means of the theory are those of the instances for which it has a state; its status is the worst.
        """
        points = [point.to_dict() for point in self.points]
        settled = self.theory_status <= Status.stalled
        theory = [row for k, row in enumerate(points) if settled[k] or not settled.any()]
        numbers = {name: np.asarray(getattr(self.found, name))[self.usable] for name in NAMES}
        branches = sorted(set(self.branch.tolist()))
        each = [
            {
                **{name: float(getattr(self.found, name)[k]) for name in NAMES},
                **{name: getattr(self, name)[k].item() for name in ("branch", "rho", "gradient_norm", "iterations")},
                "finished_by_lbfgs": bool(self.finished[k]),
                "status": Status.name_of(self.status[k]),
                **({"theory": points[k]} if points else {}),
            }
            for k in range(len(self.status))
        ]
        return {
            "branch": branches[0] if len(branches) == 1 else "mixed",
            **{name: float(np.mean(a)) if a.size else None for name, a in numbers.items()},
            "stderr": {name: float(error_bar(a)) if a.size > 1 else None for name, a in numbers.items()},
            "gradient_norm": float(self.gradient_norm.max()),
            "iterations": int(self.iterations.max()),
            "rho": float(np.mean(self.rho)),
            "status": Status.name_of(self.status.max()),
            **({"theory": _mean_theory(theory, self.theory_status)} if points else {}),
            "instances": each,
        }

    def plot(self) -> Any:
        """Every instance against the theory; see `plotting.instances_figure`."""
        from ..plotting import instances_figure  # not at the top: only pictures need matplotlib

        return instances_figure(self)

    def describe(self) -> Description:
        tables = []
        for branch in np.unique(self.branch):
            here = self.branch == branch
            head = (
                f"{branch}: {here.sum()} of {here.size} instances, {(here & self.ok).sum()} at a critical point"
                f" ({(here & self.finished).sum()} finished by L-BFGS)"
            )
            rows = [("", "simulation", "theory", "difference", "error bar", "in bars")]
            for name, (found, theory, gap, bar) in self.difference(str(branch)).items():
                if np.isfinite(found):
                    # The size of what vanishes for large d is no deviation.
                    sigmas = f"{gap / bar:+.1f}" if np.isfinite(bar) and theory != 0 else ""
                    rows.append((name, f"{found:.6g}", f"{theory:.6g}", f"{gap:+.2g}", f"{bar:.2g}", sigmas))
            tables.append((head, rows))
        status = f"{Status.name_of(self.status.max())}, largest gradient {self.gradient_norm.max():.1e}"
        return Description(f"{len(self.status)} instances", status, tables=tables)


def _mean_theory(points: list[dict], status: np.ndarray) -> dict[str, Any]:
    """Means over fixed points, and the worst status."""
    bars = _mean([point["stderr"] for point in points])
    return {**_mean(points), "status": Status.name_of(status.max()), "stderr": bars}


def _mean(rows: list[dict]) -> dict[str, Any]:
    """Means of the numbers of several objects alike, with the other entries of the first."""
    return {k: float(np.mean([r[k] for r in rows])) if isinstance(v, float) else v for k, v in rows[0].items()}


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
    which all instances share.

    Args:
        model: attention layer and data, with a method `with_teacher`, see `tiedattn_jax.finite.sampling.realised`.
        d, alpha: as in `sample_data`.
        run: from one instance and a key to a result, for instance ``lambda data, key: gamp(model, data, "semantic")``.
            Message passing that does not settle is finished by L-BFGS on the risk, but for a model with a penalty.
        keys: one for each instance.
        nodes: averaging rule of the theory; by default `default_nodes` of 2^14, 4 replicates.
        theory: whether to solve the theory at all.
        normalise: as in `sample_data`.
        sentences: fresh ones for the test error of every instance.
        batch: instances that run together, by `vmap`; their data are in memory together, and all wait for the slowest.
        progress: called with the number of instances that are done and of all, before the first and after each batch.

    Raises:
        InputError: naming the argument that is out of range; a model without `with_teacher`.
    """
    require_count(batch, "batch")
    require_keys(keys)
    check_provides(model, "with_teacher", "to be given the teacher that was drawn")
    sentence_count(model, d, alpha, min(batch, len(keys)))
    nodes = default_nodes(model, SIZES["instances"]) if nodes is None else nodes

    def one(key: jax.Array) -> dict[str, Any]:
        return _outcome(model, d, alpha, run, key, sentences, normalise)

    outcomes, points = [], []
    progress(0, len(keys))
    for k in range(0, len(keys), batch):
        several = jax.vmap(one)(keys[k : k + batch]) if batch > 1 else jax.tree.map(lambda a: a[None], one(keys[k]))
        outcomes.append(jax.device_get(several))
        for gram, positional in zip(*map(outcomes[-1].get, ("gram", "positional")), strict=True) if theory else ():
            own = model.with_teacher(jnp.asarray(gram))
            points.append(solve(own, alpha, "positional" if positional else "semantic", nodes))
        progress(min(k + batch, len(keys)), len(keys))
    return _gathered(jax.tree.map(lambda *a: np.concatenate(a), *outcomes), points)


def _outcome(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, jax.Array], GAMP | Training],
    key: jax.Array,
    sentences: int,
    normalise: bool,
) -> dict[str, Any]:
    """One instance, drawn, run, finished if need be, and measured: fields of `Instances`, and what theory asks for."""
    key_data, key_run, key_test = jax.random.split(key, 3)
    data = sample_data(model, d, alpha, key_data, normalise=normalise)
    result = run(data, key_run)
    end, status, finished = _finished(model, data, result)
    V = jnp.where(result.status <= Status.max_steps, result.overlaps.V, jnp.nan)
    x = eqx.tree_at(lambda o: o.V, end.overlaps, V)
    semantic, positional = magnitudes(realised(model, data), x)
    test = heldout_error(model, data, end.Q, key_test, sentences=sentences)
    return {
        "found": Compared.of(end.train_loss, test.value, x),
        "rho": jnp.mean(jnp.trace(data.rho, axis1=1, axis2=2)),
        "status": status,
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


def _gathered(runs: dict[str, Any], points: list[FixedPoint]) -> Instances:
    """The outcomes of K runs, arrays (K, ...), next to K fixed points of the theory or none."""
    positional = runs.pop("positional")
    del runs["gram"]
    blank = jnp.full(positional.size, jnp.nan)
    predicted = bars = Compared(*[blank] * len(NAMES))
    theory_status = np.full(positional.size, int(Status.absent))
    if points:
        predicted, bars = (
            jax.tree.map(
                lambda *a: np.array(a, float), *(Compared.of(p.train_loss, p.gen_error, p.overlaps) for p in s)
            )
            for s in (points, [p.stderr for p in points])
        )
        theory_status = np.array([int(p.status) for p in points])
    return Instances(
        theory=predicted,
        theory_stderr=bars,
        branch=np.where(positional, "positional", "semantic"),
        theory_status=theory_status,
        points=points,
        **runs,
    )
