"""Several instances of finite size, next to the theory at the teacher that each of them has drawn.

# notation: K instances. Order parameters are compared by their invariants, means over the tokens of tr q, tr V, |theta|
# and |m|: neither the signs of a state nor the rotation of a student's columns matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .data import Data, heldout_error, realised, sample_data
from .gamp import GAMP
from .lines import default_nodes
from .model import Model, require
from .nodes import Rule
from .overlaps import Overlaps, magnitudes
from .solve import FixedPoint, solve
from .state_evolution import Status
from .training import Training, train

NAMES = ("train_loss", "gen_error", "q", "V", "theta", "m")
_FINISH_STEPS = 1000


class Numbers(eqx.Module):
    """Losses and invariants of order parameters, (K,) each."""

    train_loss: jax.Array
    gen_error: jax.Array
    q: jax.Array
    V: jax.Array
    theta: jax.Array
    m: jax.Array


class Instances(eqx.Module):
    """What K instances gave.

    Attributes:
        found: on the instances. V is NaN after training, which has none.
        theory: at each instance's realised rho, on the branch that the instance ended in; NaN where theory has no such
            state, or was not asked.
        theory_stderr: error bars of the averages behind it.
        branch: "positional" or "semantic", the larger of the two overlaps, (K,).
        rho: realised ``tr(Q*^T Sigma Q*) / d``, mean over the tokens, (K,).
        status: `Status` of every run, (K,).
        finished: whether message passing had to be finished by L-BFGS, (K,).
        gradient_norm: largest entry of the gradient of the empirical risk, (K,).
        iterations: of message passing or of the optimiser, without those of finishing, (K,).
        theory_status: `Status` of the theory, (K,).
        points: the fixed points of the theory, K of them or None.
    """

    found: Numbers
    theory: Numbers
    theory_stderr: Numbers
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
        """Which instances have an end to speak of: a critical point, or where the steps ran out, (K,)."""
        return self.status <= Status.max_steps

    def difference(self, branch: str) -> dict[str, tuple[float, ...]]:
        """Mean over the usable instances of a branch of every number: simulation, theory, difference, its error bar.

        The error bar is the standard error of the difference, instance by instance, together with that of the theory.
        """
        use = self.usable & (self.branch == branch) & (self.theory_status <= Status.stalled)
        out = {}
        for name in NAMES:
            found, theory, bar = (
                np.asarray(getattr(n, name))[use] for n in (self.found, self.theory, self.theory_stderr)
            )
            count = found.size
            scatter = np.std(found - theory, ddof=1) / count**0.5 if count > 1 else np.nan
            common = np.mean(bar) if count else np.nan  # the same nodes for all instances
            mean = (np.mean(found), np.mean(theory)) if count else (np.nan, np.nan)
            out[name] = (*map(float, mean), float(mean[0] - mean[1]), float(np.hypot(scatter, common)))
        return out

    def table(self) -> str:
        """Mean, standard error and the theory's number, branch by branch."""
        lines = []
        for branch in np.unique(self.branch):
            here = self.branch == branch
            lines.append(
                f"{branch}: {here.sum()} of {here.size} instances, {(here & self.ok).sum()} at a critical point"
                f" ({(here & self.finished).sum()} finished by L-BFGS)"
            )
            lines.append(f"  {'':<14}{'simulation':>14}{'theory':>14}{'difference':>14}{'error bar':>12}{'in bars':>9}")
            for name, (found, theory, gap, bar) in self.difference(str(branch)).items():
                if np.isfinite(found):
                    # The size of what vanishes for large d is no deviation.
                    sigmas = f"{gap / bar:+.1f}" if np.isfinite(bar) and theory != 0 else ""
                    lines.append(
                        f"  {name:<14}{found:>14.6g}{theory:>14.6g}{gap:>+14.2g}{bar:>12.2g}{sigmas:>9}".rstrip()
                    )
        return "\n".join(lines)


class _Outcome(eqx.Module):
    found: Numbers
    gram: jax.Array
    positional: jax.Array
    rho: jax.Array
    status: jax.Array
    finished: jax.Array
    gradient_norm: jax.Array
    iterations: jax.Array


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
    progress: Callable[[Iterable], Iterable] = lambda items: items,
) -> Instances:
    """Draw instances, run message passing or training on each, and solve the theory for each.

    The theory is solved at the realised rho of every instance, not corrected to it: its accuracy is that of `nodes`,
    which all instances share.

    Args:
        model: attention layer and data; the theory asks for a field `teacher`, see `tiedattn_jax.data.realised`.
        d, alpha: as in `sample_data`.
        run: from one instance and a key to a result, for instance ``lambda data, key: gamp(model, data, "semantic")``.
            Message passing that does not settle is finished by L-BFGS on the risk.
        keys: one for each instance.
        nodes: averaging rule of the theory; by default `default_nodes` of 2^14, 4 replicates.
        theory: whether to solve the theory at all.
        normalise: as in `sample_data`.
        sentences: fresh ones for the test error of every instance.
        batch: instances that run together, by `vmap`; their data are in memory together, and all wait for the slowest.
        progress: of the instances, in the manner of `tqdm`.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    require(isinstance(batch, (int, np.integer)) and batch >= 1, "batch", batch, "an integer of at least 1")
    require(np.ndim(keys) == 1 and np.size(keys) >= 1, "keys", np.shape(keys), "an array of one key or more")
    nodes = default_nodes(model, 2**14) if nodes is None else nodes

    def one(key: jax.Array) -> _Outcome:
        return _outcome(model, d, alpha, run, key, sentences, normalise)

    outcomes, points = [], []
    for k in progress(range(0, len(keys), batch)):
        several = jax.vmap(one)(keys[k : k + batch]) if batch > 1 else jax.tree.map(lambda a: a[None], one(keys[k]))
        outcomes.append(jax.device_get(several))
        for gram, positional in zip(outcomes[-1].gram, outcomes[-1].positional, strict=True) if theory else ():
            own = eqx.tree_at(lambda m: m.teacher, model, jnp.asarray(gram))
            points.append(solve(own, alpha, "positional" if positional else "semantic", nodes))
    all_ = jax.tree.map(lambda *a: np.concatenate(a), *outcomes)
    blank = jnp.full(len(keys), jnp.nan)
    empty = Numbers(*[blank] * len(NAMES))
    if theory:
        predicted, bars = (
            jax.tree.map(lambda *a: np.array(a, float), *[_numbers(p.train_loss, p.gen_error, p.overlaps) for p in s])
            for s in (points, [p.stderr for p in points])
        )
        theory_status = np.array([int(p.status) for p in points])
    else:
        predicted, bars, theory_status = empty, empty, np.full(len(keys), int(Status.absent))
    return Instances(
        found=all_.found,
        theory=predicted,
        theory_stderr=bars,
        branch=np.where(all_.positional, "positional", "semantic"),
        rho=all_.rho,
        status=all_.status,
        finished=all_.finished,
        gradient_norm=all_.gradient_norm,
        iterations=all_.iterations,
        theory_status=theory_status,
        points=points,
    )


def _outcome(
    model: Model,
    d: int,
    alpha: float,
    run: Callable[[Data, jax.Array], GAMP | Training],
    key: jax.Array,
    sentences: int,
    normalise: bool,
) -> _Outcome:
    key_data, key_run, key_test = jax.random.split(key, 3)
    data = sample_data(model, d, alpha, key_data, normalise=normalise)
    result = run(data, key_run)
    if isinstance(result, GAMP):
        # From a critical point this takes no step.
        tol = 1e-10 if data.x.dtype == jnp.float64 else 1e-5
        end = train(model, data, "lbfgs", result.w, steps=_FINISH_STEPS, tol=tol)
        finished = ~result.ok & end.ok
    else:
        end, finished = result, jnp.zeros((), bool)
    x = eqx.tree_at(lambda o: o.V, end.overlaps, result.overlaps.V)
    own = realised(model, data)
    positional, semantic = magnitudes(own, x)
    test = heldout_error(model, data, end.Q, key_test, sentences=sentences)
    return _Outcome(
        found=_numbers(end.train_loss, test.value, x),
        gram=data.teacher_gram,
        positional=positional > semantic,
        rho=jnp.mean(jnp.trace(data.rho, axis1=1, axis2=2)),
        status=end.status,
        finished=finished,
        gradient_norm=end.gradient_norm,
        iterations=result.iterations,
    )


def _numbers(train_loss: Any, gen_error: Any, x: Overlaps) -> Numbers:
    return Numbers(
        train_loss=train_loss,
        gen_error=gen_error,
        q=jnp.mean(jnp.trace(x.q, axis1=-2, axis2=-1)),
        V=jnp.mean(jnp.trace(x.V, axis1=-2, axis2=-1)),
        theta=jnp.mean(jnp.linalg.norm(x.theta, axis=(-2, -1))),
        m=jnp.mean(jnp.linalg.norm(x.m, axis=-1)),
    )
