"""A theory in closed form: the real searches, best values and traces run on it, and no state is solved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import tiedattn_jax as ta
from tiedattn_jax.averages import prox
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.rules import Rule, fields
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.theory.paths import Call, Failure, Scheduler
from tiedattn_jax.theory.states import blank_state

UNRESOLVED = 0.5  # residual of a search that ended without a state


class Toy:
    """Branches whose numbers are known functions of (model, alpha); those of a branch that is not listed are `absent`.

    Args:
        train_loss, gen_error: functions by the name of the branch.
        growth: functions that return the growth of theta and of m, by the name of the branch.
        theta: functions that return theta, by the name of the branch; by default it is that of the start.
        where: functions that say whether a branch has a state; by default it has one everywhere.
        scatter: what every replicate adds to all numbers.
        status: `Status` of a search where a branch has no state.
    """

    def __init__(self, train_loss=None, gen_error=None, *, growth=None, theta=None, where=None, scatter=0.0, status=2):
        self.numbers = {"train_loss": train_loss or {}, "gen_error": gen_error or {}}
        self.growth, self.theta, self.where = growth or {}, theta or {}, where or {}
        self.scatter, self.status = scatter, status
        self.settings = []  # (branch, model, alpha) of all states that were asked for

    def answer(self, request):
        """Answer a lane, or a call for an event's number with its derivatives."""
        if isinstance(request, Call):
            equations, _, observable = request.arguments
            branch = branch_of(equations.free)
            return self.observed(branch, observable, equations.model, equations.alpha)
        return self.state(request)

    def run(self, path):
        """Run a path with the real scheduler, which passes failures on to the paths that asked."""
        scheduler = Scheduler([path], lambda *_: None)
        while (job := scheduler.next()) is not None:
            scheduler.finish(job, self.answer(job.request))
        (result,) = scheduler.results
        if isinstance(result, Failure):
            raise result.error
        return result

    def result_of(self, request):
        """Answer as `paths.result_of` does: a test that puts it there lets the whole engine run on the toy."""
        try:
            return self.answer(request)
        except Exception as error:
            return Failure(error)

    def number(self, name, branch, model, alpha, replicate=0):
        """Return a number of a branch with its derivatives in the model and in alpha; NaN if it has none."""
        f = self.numbers[name].get(branch, lambda model, alpha: np.nan * alpha)
        value, *rates = differentiated(f, model, alpha)
        return np.asarray(value + self.scatter * replicate), *rates

    def observed(self, branch, observable, model, alpha):
        if not hasattr(observable, "weights"):
            value, *rates = self.number("gen_error", branch, model, alpha)
            if observable is EVENTS["semantic baseline"].observable:  # the linear baseline has the error one
                return 1 - value, *jax.tree.map(np.negative, rates)
            return value, *rates
        weights, own = observable.weights, self.growth[branch]
        return differentiated(lambda m, a: weights @ np.subtract(own(m, a), 1), model, alpha)

    def state(self, lane):
        (model, alpha, _, free, _), replicate = lane.setting, max(lane.replicate, 0)
        branch = branch_of(free)
        self.settings.append((branch, model, float(alpha)))
        known = branch in self.numbers["train_loss"] and self.where.get(branch, lambda m, a: True)(model, alpha)
        loss, *partials = self.number("train_loss", branch, model, alpha, replicate)
        error, *_ = self.number("gen_error", branch, model, alpha, replicate)
        blank = jax.tree.map(np.asarray, blank_state(model))
        theta, m = map(float, self.growth.get(branch, lambda model, alpha: (0.5, 0.5))(model, alpha))
        overlaps = jax.tree.map(np.asarray, lane.start)
        if known and branch in self.theta:
            size = float(self.theta[branch](model, alpha))
            overlaps = dataclasses.replace(overlaps, theta=np.full_like(overlaps.theta, size))
        return dataclasses.replace(
            blank,
            overlaps=overlaps,
            train_loss=loss,
            gen_error=error,
            gen_error_linear=np.asarray(1.0),
            train_loss_partials=tuple(partials),
            diagnostics=dataclasses.replace(blank.diagnostics, growth_theta=np.asarray(theta), growth_m=np.asarray(m)),
            status=np.asarray(0 if known else self.status),
            residual=np.asarray(0.0 if known else UNRESOLVED),
        )


def differentiated(f, model, alpha):
    """Return a function with its derivatives in the model and in alpha: central differences, on the host."""
    leaves, structure = jax.tree.flatten((model, alpha))
    leaves = [np.asarray(a, float) for a in leaves]

    def at(k, moved):
        return float(f(*jax.tree.unflatten(structure, [*leaves[:k], moved, *leaves[k + 1 :]])))

    rates = []
    for k, leaf in enumerate(leaves):
        steps = np.diag(1e-5 * np.where(leaf, abs(leaf), 1.0).ravel()).reshape(leaf.size, *leaf.shape)
        slopes = [(at(k, leaf + h) - at(k, leaf - h)) / (2 * h.sum()) for h in steps]
        rates.append(np.reshape(slopes, leaf.shape))
    return np.asarray(at(0, leaves[0])), *jax.tree.unflatten(structure, rates)


@functools.cache
def _masks():
    return {tuple(np.asarray(BRANCHES[name].free(ta.DotProduct())).tolist()): name for name in BRANCHES if name}


def branch_of(free):
    return _masks()[tuple(np.asarray(free).tolist())]


class OneToken(ta.Model):
    """A layer of one token with one field, so that programs are small."""

    shape = (1, 1, 1)
    width: jax.Array

    def loss(self, Z, Y):
        return 0.5 * jnp.sum((jnp.tanh(self.width * Z) - Y) ** 2)

    def law(self):
        unit = jnp.ones((1, 1, 1))
        return ta.SpectralLaw(unit[0, 0], unit[0], unit, unit, 0.3 * unit)


@functools.cache
def _descending(kind):
    class Descending(kind):
        def search(self, model, x, block):
            h, y = fields(model, x, block.student, block.teacher)
            z, _, done = prox.descend(ProxProblem(model, x.V, y), h, h, 1e-10)
            return prox.Prox(z, done, z, jnp.full(z.shape[-1], jnp.inf))

    return Descending


def descending(rule):
    """Return a rule of single nodes at the minimum that a descent from the field finds: it compiles quickly."""
    kind = _descending(type(rule.coarse))
    return Rule(kind(**vars(rule.stack)), kind(**vars(rule.coarse)))
