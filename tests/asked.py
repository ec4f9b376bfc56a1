"""The public functions and how they are asked of exact twins; those that no twin applies to, with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
from twins import COLUMNS, D, N, TWINS, UNITS, ALPHA, Case, Question, numbers

import tiedattn_jax as ta

POINTS, GRID, LINES = ta.Sobol(2**8, replicates=2), ta.GaussHermite(8, replicates=2), ta.Lines(5, replicates=2)
TIGHT = ta.Settings(tol=1e-10)
KEY = jax.random.key(1)


def state(point):
    """All numbers of a state in all replicates."""
    found = {name: (a, name) for name, a in point.replicates.numbers().items() if name != "residual"}
    partials, by_alpha = point.replicates.train_loss_partials
    return found | {
        "train_loss_by_alpha": (by_alpha, "by_alpha"),
        "by_lam": (partials.lam, "loss_by_lam"),
        "by_omega": (partials.omega, "by_omega"),
    }


def solved(branch, **options):
    def ask(c: Case):
        return state(ta.solve(c.model, ALPHA, branch, c.rule(POINTS), settings=TIGHT))

    return ask


START = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.15, 5.0, 0.15)), jnp.array([[0.1], [-0.05]]))


def evolution(c):
    path = ta.state_evolution(c.model, ALPHA, "semantic", 3, nodes=c.rule(POINTS))
    return numbers(path.replicates.overlaps, "q V theta m")


def states(c):
    found = ta.find_states(c.model, ALPHA, c.rule(POINTS), count=4, settings=ta.Settings(1e-10, 60, 0))
    names = "q", "V", "theta", "m", "train_loss", "gen_error"
    return {f"{k} {name}": state(point)[name] for k, point in enumerate(found) for name in names}


def quantity(result, dimension=""):
    """The value of a transition or threshold, its error bar and its slopes."""
    found = {"status": result.status_name, **numbers(result, f"value:{dimension or '1'} stderr:{dimension or '1'}")}
    if result.sensitivities is not None and not dimension:
        found |= {"by_omega": (result.sensitivities.omega, "1"), "by_lam": (result.sensitivities.lam, "alpha_by_lam")}
    return found


COLUMN_START = ta.Overlaps(START.q, START.V, 0.15 * jnp.stack([jnp.eye(1, 2)] * 2), START.m)
THEORY = {
    **{f"solve {branch}": Question(ta.solve, solved(branch)) for branch in ("semantic", "positional", None)},
    "solve, two columns": Question(
        ta.solve,
        lambda c: state(
            ta.solve(c.model, ALPHA, None, c.rule(POINTS), start=c.overlaps(COLUMN_START), settings=TIGHT)
        ),
        COLUMNS,
        mark="long",
    ),
    "solve, penalty": Question(
        ta.solve,
        lambda c: state(
            ta.solve(c.twin.model(penalty=ta.L1(c.unit(0.003, "gradient"))), ALPHA, nodes=c.rule(POINTS), settings=TIGHT)
        ),
        UNITS,
        mark="long",
    ),
    "state_evolution": Question(ta.state_evolution, evolution),
    "find_states": Question(ta.find_states, states, without=("classes", "a spectator")),
}

# --- dynamics


def population(branch):
    def ask(c):
        point = ta.population(c.model, c.unit(0.02, "kappa"), branch, nodes=c.rule(GRID))
        return {
            "status": point.status_name,
            "stable": str(point.stable),
            **numbers(point.mean, "R Theta m risk gen_error curvature"),
        }

    return ask


def landscape(c):
    found = ta.landscape(c.model, c.unit(0.02, "kappa"), nodes=c.rule(GRID))
    kinds = "curvature_semantic curvature_positional slope_semantic slope_positional"
    return {
        "status": found.status_name,
        "label": str(found.label),
        **numbers(found.mean, "semantic positional " + " ".join(f"{kind}:curvature" for kind in kinds.split())),
    }


def sgd(c, Theta=0.15):
    m = c.twin.mirror * np.array([[0.15], [-0.05], [0.0]])[list(c.twin.order)]
    start = (c.unit(0.5, "R"), c.unit(Theta, "Theta"), c.unit(m, "m"))
    path = ta.sgd(
        c.model,
        start,
        c.unit(1.0, "eta"),
        12.0,
        kappa=c.unit(0.005, "kappa"),
        nodes=c.rule(GRID),
        points=5,
        steps=2,
    )
    names = "R Theta m q theta along_teacher:R along_encodings:R gen_error risk"
    return {"status": path.status_name, **numbers(path.replicates.student, names)}


def emergence(c):
    path = ta.emergence(
        c.model,
        c.unit(0.5, "R"),
        c.unit(1.0, "eta"),
        12.0,
        kappa=c.unit(0.005, "kappa"),
        nodes=c.rule(GRID),
        points=3,
        steps=1,
    )
    names = "R encodings:R teacher:R growth_encodings growth_teacher"
    return {"status": path.status_name, "first": path.first, **numbers(path.mean, names)}


def small_start(c):
    start = ta.small_start(c.model, ALPHA, nodes=c.rule(GRID))
    return {"first": start.first, **numbers(start.replicates, "encodings:rate teacher:rate bulk:rate")}


def threshold(name, recipe=GRID):
    return lambda c: quantity(ta.threshold(c.model, name, nodes=c.rule(recipe)))


DYNAMICS = {
    **{f"population {b}": Question(ta.population, population(b)) for b in ("semantic", "positional", None)},
    "landscape": Question(ta.landscape, landscape),
    "sgd": Question(ta.sgd, sgd),
    "emergence": Question(ta.emergence, emergence),
    "small_start": Question(ta.small_start, small_start, without=("classes",)),
    "teacher separates": Question(ta.threshold, threshold("teacher separates"), without=("classes",)),
}

# --- bayes

BAYES = {
    "bayes": Question(
        ta.bayes,
        lambda c: numbers(ta.bayes(c.model, 0.4, nodes=c.rule(GRID)).replicates, "q gen_error free_entropy"),
        without=("a spectator",),
    ),
    "spectral_overlap": Question(
        ta.spectral_overlap,
        lambda c: {"overlap": (ta.spectral_overlap(c.model, 2.0, nodes=c.rule(GRID)).value, "1")},
        without=("a spectator",),
    ),
    "weak_recovery": Question(ta.threshold, threshold("weak_recovery"), without=("a spectator",)),
    "perfect_recovery": Question(ta.threshold, threshold("perfect_recovery"), without=("a spectator",)),
}
QUESTIONS = THEORY | DYNAMICS | BAYES
