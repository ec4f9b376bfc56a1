"""The public functions and how they are asked of exact twins; those that no twin applies to, with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twins import ALPHA, COLUMNS, UNITS, WIDE, Case, D, N, Question, check, numbers

import tiedattn_jax as ta
from tiedattn_jax.model.layers import LAYERS

POINTS, GRID, SMALL, LINES = (
    ta.Sobol(2**8, replicates=2),
    ta.GaussHermite(8, replicates=2),
    ta.GaussHermite(5, replicates=2),
    ta.Lines(5, replicates=2),
)
TIGHT = ta.Settings(tol=1e-9)
KEY = jax.random.key(1)


def state(point):
    """All numbers of a state in all replicates, their means, and error bars."""
    found = {name: (a, name) for name, a in point.replicates.numbers().items() if name != "residual"}
    found |= {f"mean {name}": (getattr(point, name), name) for name in ("train_loss", "gen_error")}
    found |= {f"mean {name}": (getattr(point.overlaps, name), name) for name in ("q", "theta", "m")}
    found |= {f"stderr of {name}": (getattr(point.stderr, name), name) for name in ("train_loss", "gen_error")}
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
    **{
        f"solve {branch}": Question(ta.solve, solved(branch), long="recompiled")
        for branch in ("semantic", "positional", None)
    },
    "solve, two columns": Question(
        ta.solve,
        lambda c: state(ta.solve(c.model, ALPHA, None, c.rule(POINTS), start=c.overlaps(COLUMN_START), settings=TIGHT)),
        COLUMNS,
        long=True,
    ),
    "solve, penalty": Question(
        ta.solve,
        lambda c: state(
            ta.solve(
                c.twin.model(penalty=ta.L1(c.unit(0.003, "gradient"))), ALPHA, nodes=c.rule(POINTS), settings=TIGHT
            )
        ),
        UNITS,
        long=True,
    ),
    "state_evolution": Question(ta.state_evolution, evolution, long="recompiled"),
    "find_states": Question(ta.find_states, states, without=("classes", "a spectator"), long=True),
}

# --- dynamics


def population(branch):
    def ask(c):
        point = ta.dynamics.population(c.model, c.unit(0.02, "kappa"), branch, nodes=c.rule(SMALL, 2))
        return {
            "status": point.status_name,
            "stable": str(point.stable),
            **numbers(point.mean, "R Theta m risk gen_error curvature"),
        }

    return ask


def landscape(c):
    found = ta.dynamics.landscape(c.model, c.unit(0.02, "kappa"), nodes=c.rule(SMALL, 2))
    kinds = "curvature_semantic curvature_positional slope_semantic slope_positional"
    return {
        "status": found.status_name,
        "label": str(found.label),
        **numbers(found.mean, "semantic positional " + " ".join(f"{kind}:curvature" for kind in kinds.split())),
    }


def sgd(c, Theta=0.15):
    m = c.twin.mirror * np.array([[0.15], [-0.05], [0.0]])[list(c.twin.order)]
    m = np.pad(m, ((0, c.model.law().tau.shape[1] - len(m)), (0, 0)))  # the means of classes
    start = (c.unit(0.5, "R"), c.unit(Theta, "Theta"), c.unit(m, "m"))
    path = ta.dynamics.sgd(
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
    path = ta.dynamics.emergence(
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
    start = ta.dynamics.small_start(c.model, ALPHA, nodes=c.rule(GRID))
    return {"first": start.first, **numbers(start.replicates, "encodings:rate teacher:rate bulk:rate")}


def threshold(function, student=None, **options):
    return lambda c: quantity(function(c.model, nodes=c.rule(GRID, student), **options))


SPANNED = "classes", "exchanged tokens"  # the nodes are in directions that the order of the encodings decides
DYNAMICS = {
    **{
        f"population {b}": Question(ta.dynamics.population, population(b), without=SPANNED, long="recompiled")
        for b in ("semantic", "positional", None)
    },
    "landscape": Question(ta.dynamics.landscape, landscape, without=SPANNED, long="recompiled"),
    "sgd": Question(ta.dynamics.sgd, sgd, without=("classes",), long="recompiled"),
    "emergence": Question(ta.dynamics.emergence, emergence, without=("classes",), long="recompiled"),
    "small_start": Question(ta.dynamics.small_start, small_start, without=("classes",), long="recompiled"),
    "separation": Question(
        ta.dynamics.separation, threshold(ta.dynamics.separation, direction="teacher"), without=("classes",), long=True
    ),
}

# --- bayes


def optimal(c):
    states = ta.bayes.solve(c.model, 0.4, nodes=c.rule(GRID, "label")).replicates
    # Labels are densities in the teacher's fields, of which there are L alpha d.
    constant = 0.4 * len(c.twin.order) * np.log(c.twin.unit.fields)
    return numbers(states, "q gen_error:output") | {"free_entropy": (states.free_entropy + constant, "1")}


BAYES = {
    "bayes": Question(
        ta.bayes.solve,
        optimal,
        without=("a spectator", "classes"),
    ),
    "spectral_overlap": Question(
        ta.bayes.spectral_overlap,
        lambda c: {"overlap": (ta.bayes.spectral_overlap(c.model, 2.0, nodes=c.rule(GRID, "label")).value, "1")},
        without=("a spectator", "classes"),
    ),
    "weak_recovery": Question(
        ta.bayes.weak_recovery, threshold(ta.bayes.weak_recovery, "label"), without=("a spectator", "classes")
    ),
    "perfect_recovery": Question(
        ta.bayes.perfect_recovery, threshold(ta.bayes.perfect_recovery, "label"), without=("a spectator", "classes")
    ),
}

# --- phases

LINED = "exchanged tokens", "a spectator", "classes"  # lines have directions in the space of all tokens


def transition(c):
    return quantity(ta.critical_alpha(c.model, c.rule(LINES), bracket=(0.5, 8.0)))


def crossing(c):
    nodes = c.rule(LINES)
    critical = ta.critical_alpha(c.model, nodes, bracket=(0.5, 8.0))
    return quantity(ta.linear_crossing(c.model, critical, nodes, bracket=(0.5, 40.0)))


def pitchfork(c):
    nodes = c.rule(LINES)
    state = ta.solve(c.model, 1.0, "uninformed", nodes)
    return quantity(ta.find_event(c.model, "semantic pitchfork", nodes, start=state))


def ends(c):
    nodes = c.rule(LINES)
    found = ta.branch_ends(
        ta.sweep(ta.solve, c.model, branch="semantic", follow=True, alpha=[0.4, 1.0, 3.0], nodes=nodes), nodes
    )
    return {f"{k} {name}": a for k, end in enumerate(found) for name, a in quantity(end).items()} | {
        "kinds": str([(end.kind, end.direction, end.side) for end in found])
    }


def curve(c):
    # At alpha = 1 the branch has just begun, and the equations on so few points have several solutions.
    table = ta.sweep(
        ta.solve, c.model, branch="semantic", follow=True, alpha=[2.0, 3.0], nodes=c.rule(POINTS), settings=TIGHT
    )
    return {f"{k} {name}": a for k, point in enumerate(table.points) for name, a in state(point).items()}


def diagram(c):
    found = ta.phase_diagram(
        c.model, alpha=[2.0, 4.0], lam=c.unit(np.array([0.02, 0.03]), "lam"), nodes=c.rule(POINTS), settings=TIGHT
    )
    losses = {branch: (getattr(found, branch).train_loss, "risk") for branch in ("semantic", "positional")}
    regions = {"regions": str(found.region_names.tolist()), "alpha_c": (found.alpha_c().alpha, "1")}
    return losses | regions


def best(c):
    bracket = tuple(c.unit(np.array([0.002, 0.2]), "lam").tolist())
    found = ta.best_ridge(c.model, ALPHA, nodes=c.rule(LINES), bracket=bracket)
    return quantity(found, "lam") | {"gen_error": (found.gen_error.value, "risk"), "place": str(found.place)}


def path(c):
    nodes = c.rule(ta.Lines(3, replicates=2))
    found = ta.trace_branch(c.model, "alpha", (1.0, 2.0), nodes=nodes, alpha=1.5, step=0.2)
    return {
        f"{k} {name}": a
        for k, p in enumerate(found)
        for name, a in {"alpha": (p.values, "1"), "loss": (p.train_loss, "risk"), "labels": str(set(p.labels))}.items()
    }


PHASES = {
    "critical_alpha": Question(ta.critical_alpha, transition, without=LINED, long=True),
    "linear_crossing": Question(ta.linear_crossing, crossing, without=(*LINED, "unit of the loss"), long=True),
    "find_event": Question(ta.find_event, pitchfork, without=LINED, long=True),
    "branch_ends": Question(ta.branch_ends, ends, without=LINED, long=True),
    "sweep": Question(ta.sweep, curve, long=True),
    "phase_diagram": Question(ta.phase_diagram, diagram, long=True),
    "best_ridge": Question(ta.best_ridge, best, without=LINED, long=True),
    "trace_branch": Question(ta.trace_branch, path, without=LINED, long=True),
}

# --- replica symmetry breaking


def broken(c):
    point = ta.rsb.solve(c.model, 1.0, "positional", order=3, replicates=2)
    names = "s train_loss elevation gen_error energy"  # the complexity is zero in the ground state
    overlaps = numbers(point.replicates.overlaps, "q1 q0 V")
    return {"status": point.status_name, **overlaps, **numbers(point.replicates, names)}


def moved(c):
    rs = ta.critical_alpha(c.model, c.rule(LINES), bracket=(0.5, 8.0))
    return quantity(ta.rsb.transition(c.model, transition=rs, order=3, replicates=2))


TWO_UNITS = {name: UNITS[name] for name in ("", "small tokens")}  # they share their programs
RSB = {
    "transition_1rsb": Question(ta.rsb.transition, moved, TWO_UNITS, long=True),
    "solve_1rsb": Question(ta.rsb.solve, broken, TWO_UNITS, long=True),
}

# --- finite size

STUDENT = np.random.default_rng(2).standard_normal((D, 2))


def weights(c):
    return c.weights(STUDENT[:, : c.model.shape[1]])


def run(result, names="train_loss gradient_norm:gradient"):
    return {"status": result.status_name, **numbers(result, f"Q:weight iterations:1 {names}")}


def trained(*init, penalty=None, names="train_loss gradient_norm:gradient", **options):
    """Ask for a run of `train` from a name, or from given weights."""

    def ask(c):
        rates = {"adam": "weight"}.get(options.get("optimizer"), "eta")
        given = options | ({"rate": c.unit(options["rate"], rates)} if "rate" in options else {})
        if "value" in options:
            given["value"] = c.unit(options["value"], "output")
        kinds = {} if penalty is None else {"penalty": ta.L1(c.unit(penalty, "gradient"))}
        start = init[0] if init else weights(c)
        data = c.labelled() if options.get("exact") else c.data()
        return run(ta.train(c.twin.model(**kinds), data, start, **given), names)

    return ask


def passed(c):
    return run(ta.gamp(c.model, c.data(), weights(c), steps=15), "train_loss")


def with_penalty(c):
    model = c.twin.model(penalty=ta.L1(c.unit(0.003, "gradient")))
    return run(ta.gamp(model, c.data(), "positional", steps=30))


def held_out(c):
    model, data, Q = c.model, c.data(), weights(c)
    fresh = ta.finite.heldout_error(model, data, Q, KEY, sentences=256)
    exact = ta.finite.heldout_error(model, data, Q, KEY, sentences=256, exact=True)
    return {"value": (fresh.value, "risk"), "exact": (exact.value, "output"), "bar": (exact.stderr, "output")}


def instances(c):
    def step(data, key):
        return ta.gamp(c.model, data, "semantic", steps=20)

    table = ta.run_instances(c.model, D, N / D, step, jax.random.split(KEY, 2), theory=False, sentences=256)
    return {name: (table.values(name), name) for name in ("train_loss", "gen_error", "q", "theta", "m")}


def baseline(c):
    found = ta.finite.linear_baseline(c.labelled(), ridge=c.unit(4.0, "output"))
    return numbers(found, "W gen_error:output stderr:output") | {"train_error": (found.train_error, "output")}


# The largest entry of a gradient is no number of rotated tokens.
FINITE = {
    "train": Question(ta.train, trained(steps=20, names="train_loss"), without=("classes",)),
    "train, gradient descent": Question(ta.train, trained("random", steps=20, rate=0.1, optimizer="gd"), UNITS),
    "train, Adam": Question(ta.train, trained("spectral", steps=20, optimizer="adam", rate=0.1), UNITS),
    "train, penalty": Question(ta.train, trained("positional", steps=50, rate=0.5, penalty=0.003), UNITS),
    "train, exact labels": Question(ta.train, trained(steps=20, exact=True), UNITS, ("unit of the loss",)),
    "train, a value matrix": Question(ta.train, trained(steps=10, value=0.05), UNITS, ("unit of the loss",)),
    "gamp, penalty": Question(ta.gamp, with_penalty, UNITS),
    "gamp": Question(ta.gamp, passed, without=("classes",), long="recompiled"),
    "posterior_mean": Question(
        ta.bayes.posterior_mean, lambda c: run(ta.bayes.posterior_mean(c.model, c.data(), steps=10), ""), UNITS
    ),
    "spectral_direction": Question(
        ta.bayes.spectral_direction,
        lambda c: {"direction": (ta.bayes.spectral_direction(c.model, c.data()), "1")},
        UNITS,
    ),
    "risk": Question(
        ta.finite.risk,
        lambda c: {"risk": (ta.finite.risk(c.model, c.data(), weights(c)), "risk")},
        without=("classes",),
    ),
    "heldout_error": Question(ta.finite.heldout_error, held_out, UNITS),
    "run_instances": Question(ta.run_instances, instances, UNITS, long="recompiled"),
    "diagnose": Question(
        ta.finite.diagnose,
        lambda c: {name: (finding[:3], "1") for name, finding in vars(ta.finite.diagnose(c.model, c.data())).items()},
        without=("a spectator", "classes", "span of the encodings"),
    ),
    "linear_baseline": Question(ta.finite.linear_baseline, baseline, UNITS),
    "realised": Question(
        ta.finite.realised, lambda c: {"rho": (ta.finite.realised(c.model, c.data()).rho[:2], "theta")}
    ),
    "sample_data": Question(
        ta.sample_data,
        lambda c: numbers(ta.sample_data(c.model, D, N / D, KEY), "x:token y:field teacher:weight encodings:token"),
        UNITS,
    ),
}

# --- wide layers

# Wide layers have no unit of the fields beside that of the matrix.
WIDE_NUMBERS = "q m:q V trace:field train_loss gen_error energy distance:q share largest:field replicon"


def wide(c):
    point = ta.wide.solve(c.model, 1.0)
    return {"status": point.status_name, **numbers(point, WIDE_NUMBERS)}


def wide_optimum(c):
    point = ta.wide.bayes(c.model, 0.1)
    return {"status": point.status_name, **numbers(point, "q distance:q noise:q perfect_alpha")}


def untied(c):
    model = ta.wide.UntiedDotProduct(
        **{name: getattr(c.model, name) for name in ("beta", "tau")}, teacher=c.model.teacher.values
    )
    point = ta.wide.solve(model, 1.0)
    return {"status": point.status_name, **numbers(point, WIDE_NUMBERS)}


def onset(c):
    model = c.twin.model(encodings="long", mixing=[[0.8, 0.2], [0.2, 0.8]], omega=0.4)
    return {"alpha": (ta.wide.onset(model).alpha, "1")}


WIDE_LAYERS = {
    "wide solve": Question(ta.wide.solve, wide, WIDE, long="recompiled"),
    "wide solve, untied": Question(ta.wide.solve, untied, WIDE, long=True),
    "wide bayes": Question(ta.wide.bayes, wide_optimum, WIDE),
    "wide onset": Question(ta.wide.onset, onset, WIDE, long=True),
}
QUESTIONS = THEORY | DYNAMICS | BAYES | PHASES | RSB | FINITE | WIDE_LAYERS

# Public names that no twin applies to, by the reason.
WITHOUT = {
    "a part of every question": "GaussHermite Lines MonteCarlo Sobol Settings Overlaps Axis Data Model "
    "AttentionLayer DotProduct SpectralLaw TokenClassMixture bayes.Preimages bayes.orbit wide.Layer wide.DotProduct "
    "wide.UntiedLayer wide.UntiedDotProduct wide.GaussianFactors wide.Wishart wide.SpectrumLaw Penalty L1",
    "attention of another form, under the same functions": " ".join(
        layer.__name__ for layer in LAYERS.values() if layer is not ta.DotProduct
    ),
    "it computes no number from a model": "InputError Status cite join load use_compilation_cache",
    "a wide layer has no other unit, and the twins of its state show the rest": "wide.sample_data wide.train wide.gamp "
    "wide.heldout_error wide.run_instances wide.perfect_recovery wide.ridge_recovery wide.position wide.best_ridge "
    "wide.singular_values",
    "it computes no number, and every question calls it": "check",
}


def tests_of(room):
    """Return the test of the questions about the functions of a room."""
    cases = [
        pytest.param(name, twin, marks=[pytest.mark.full] * question.is_long(twin))
        for name, question in QUESTIONS.items()
        if question.room == room
        for twin in question.twins
        if twin and twin not in question.without
    ]

    @pytest.mark.parametrize(("name", "twin"), cases)
    def test_twins(name, twin):
        check(name, QUESTIONS[name], twin)

    return test_twins
