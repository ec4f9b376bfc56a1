"""Numbers that sentences of the pages and of docstrings state about the code are those of the code.

An entry is a piece of a page, or of the docstring of a public name, written with the numbers of the code. The text has
to contain it, whatever its line breaks. Numbers in the outputs of programs are the subject of `test_pages.py`.
"""

import inspect
import tomllib
from operator import attrgetter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages import lines, moreau, nodes, recipes, rules
from tiedattn_jax.averages.recipes import SIZES, default_recipe
from tiedattn_jax.averages.rules import Rule
from tiedattn_jax.base import results
from tiedattn_jax.dynamics.emergence import _MOST, _TOL
from tiedattn_jax.dynamics.sgd import _TOL as _STEP_TOL, _TRACED
from tiedattn_jax.dynamics.small_start import _ALPHA_RANGE
from tiedattn_jax.finite import channels, diagnosis, evaluation, instances, message_passing, sampling, training
from tiedattn_jax.model import overlaps
from tiedattn_jax.phases import best, locate, places, transitions
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.pair import REGIONS
from tiedattn_jax.plotting import diagrams
from tiedattn_jax.rsb import clusters, fixed_points as rsb
from tiedattn_jax.theory import engine, newton, potentials

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = PROJECT["requires-python"].removeprefix(">=")
JAX = next(text for text in PROJECT["dependencies"] if text.startswith("jax>")).removeprefix("jax>=")
WORDS = {3: "three", 4: "four", 6: "six", 8: "eight", 20: "twenty", 100: "a hundred"}


def short(number: float) -> str:
    """A number without the zero before its point."""
    return f"{number:g}".removeprefix("0") if number else "0"


def power(number: float, base: int) -> int:
    """The exponent of a power."""
    exponent = round(np.log(number) / np.log(base))
    assert np.isclose(number, float(base) ** exponent)
    return exponent


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def default(function: str, argument: str):
    return inspect.signature(attrgetter(function)(ta)).parameters[argument].default


def single(rule: Rule) -> int:
    """Nodes of a replicate."""
    assert rule.replicates == rules.REPLICATES
    return rule.size


def line_row(order: int) -> str:
    """The row of a table of rules: order, lines, nodes."""
    size, mark = ta.Lines(order).rule(MODEL).size, " (default)" * (order == recipes.DEFAULT_ORDER)
    return f"| {order}{mark} | {size // (order + 15):,} | {size:,} |"


MODEL = ta.DotProduct()
BARS = float(ta.results.error_bar(jnp.array([-1.0, -1.0, 1.0, 1.0]))) / (np.std([-1.0, -1.0, 1.0, 1.0], ddof=1) / 2)
FOUR = WORDS[rules.REPLICATES]
UNRESOLVED = percent(results._UNRESOLVED_SHARE)
SMALLEST_RTOL = 100 * np.finfo(np.float32).eps
GRID = default_recipe(MODEL, SIZES["grid"]).rule(MODEL)
TRAINED, FREED = (default(f"counting.{name}", "epochs") for name in ("train", "unfreeze"))

PAGES: dict[str, list[str]] = {
    "README.md": [f"needs Python {PYTHON} and JAX {JAX}, or newer"],
    "docs/start.md": [
        f"You need Python {PYTHON} or newer; JAX {JAX} or newer",
        f"the default of {FOUR} replicates one error bar is {BARS:.2f} standard errors",
    ],
    "docs/faq.md": [
        "search at $\\alpha$ from {} to {}.".format(*map(short, transitions.RANGE)),
        f"searches for its first point at $\\alpha$ from {short(locate.SEARCH[-1])} to {short(locate.SEARCH[0])}",
        f"More than {UNRESOLVED} of the nodes",
        f"Below {percent(overlaps.ZERO)} of its largest possible size it counts as zero",
        f"({short(float(ta.Settings().damping))} is the default",
        f"and {default('train', 'steps')} steps are not enough",
        "fills half of the memory",
    ],
    "docs/howto/own_data.md": [
        f"takes twice that on an accelerator and {WORDS[sampling._COPIES['cpu']]} times that on a CPU",
        {1.5: "off by more than half"}[diagnosis._WARN_RATIO],
    ],
    "docs/howto/precision.md": [
        f"below `Settings.tol`, $10^{{{power(float(ta.Settings().tol), 10)}}}$",
        f"the solver's tolerance is at least {WORDS[20]} roundings",
        f"above ${SMALLEST_RTOL * 1e5:.1f} \\times 10^{{-5}}$",
        f"Use at least {FOUR}",
    ],
    "docs/howto/grids.md": [
        f"lines of order 5 in {FOUR} replicates" if single(GRID) == ta.Lines(5).rule(MODEL).size else "another rule",
        f"as many as fill them, {engine.WIDTHS[-1]} at most. A single state is {FOUR} searches",
        f"whose error bar is above {percent(diagrams._PRECISE)}",
    ],
    "docs/howto/simulation.md": [
        f"lie within {WORDS[instances.FAR]} units of its theory",
        f"${instances._SCATTER:g} / \\sqrt d$ of the size of the loss",
        f"${instances._SCATTER_OF_OTHER:g} / \\sqrt d$ for the one that the branch lacks",
        f"is not at a minimum after its {default('train', 'steps')} steps",
        f"needs the memory of {WORDS[training._ARRAYS]} arrays $(n, L, d)$ and {WORDS[training._ARRAYS]} $(d, d)$",
        f"to show the calls (the paper has {TRAINED})",
    ],
    "docs/howto/best_ridge.md": [
        f"from \\(10^{{{power(best.RIDGES[0], 10)}}}\\) to {best.RIDGES[1]:g}",
        f"takes {WORDS[places._PER_DECADE]} values in a factor of ten",
        f"e^{{\\pm {best._OFFSET}}}",
    ],
    "docs/howto/penalties.md": [f"students of up to {WORDS[len(potentials._ORDERS)]} columns"],
    "docs/howto/report.md": [f"At its default, $10^{{{power(float(ta.Settings().tol), 10)}}}$"],
    "docs/theory/potentials.md": [
        f"Each piece has {potentials._ORDERS[0]} Gauss-Legendre nodes",
        f"with {potentials._ORDERS[1]} nodes on each piece of either axis",
        f"by {short(potentials._SPACING[3])} and {short(potentials._SPACING[4])},",
        f"Each piece then has {potentials._ORDERS[2]} nodes",
        f"with $a = {float(ta.Settings().damping)}$",
        f"is below {percent(newton._ROUGH_RESIDUAL)}",
    ],
    "docs/theory/observables.md": [
        f"independent replicates ({rules.REPLICATES} by default)",
        f"it is {BARS:.2f} standard errors",
    ],
    "docs/theory/jumps.md": [
        *map(line_row, (5, 7, 9, 15)),
        f"sum to one within {percent(lines._WEIGHT_TOLERANCE)}",
        f"If it is above {UNRESOLVED}",
        f"1 / (1 + ({nodes._JUMPS:g}\\, p / b^2)^2)",
    ],
    "docs/theory/finite_size.md": [
        f"During the first {channels._BURN_IN} steps",
        f"This share starts at {message_passing._FIRST_DAMPING}",
        f"the paper's rate {training.RATES['gd']}",
        f"after the published {default('train', 'steps')} steps",
    ],
    "docs/theory/dynamics.md": [
        {0.1: "is a tenth of"}[inspect.signature(ta.results.Emergence.time).parameters["share"].default]
    ],
    "docs/results.md": [
        f"{FOUR.replace('four', '4')} replicates of {ta.Lines().rule(MODEL).size:,} nodes on",
        f"of {TRAINED} epochs of Adam followed by {FREED} epochs of SGD",
    ],
    "docs/benchmarks.md": [f"Hessians of more than {WORDS[moreau._MAX_COLUMNS]} fields column by column"],
    "docs/symbols.md": [
        *(f"| {int(status)} | {ta.Status.name_of(status).partition(' at ')[0]} |" for status in ta.Status),
        f"more than {UNRESOLVED} of the nodes",
    ],
    "docs/api.md": [", ".join(f"`{name}`" for name in REGIONS)],
}
DOCSTRINGS: dict[str, list[str]] = {
    "bayes.solve": [f"else 2^{power(recipes.SOBOL_SIZES['labels'], 2)} Sobol points"],
    "dynamics.landscape": [f"by default 2^{power(recipes.SOBOL_SIZES['sphere'], 2)} Sobol points"],
    "dynamics.population": [f"else 2^{power(recipes.SMOOTH['population'][1].n, 2)} Sobol points"],
    "dynamics.small_start": [f"else 2^{power(recipes.SMOOTH['population'][1].n, 2)} Sobol points"],
    "dynamics.separation": ["between {:g} and {:,.0f}".format(*_ALPHA_RANGE)],
    "dynamics.sgd": [
        f"else 2^{power(recipes.SMOOTH['sgd'][1].n, 2)} Sobol points",
        f"If it exceeds 1e{power(_STEP_TOL, 10)} there are four times as many steps",
        f"there are {WORDS[_TRACED]} between two points",
    ],
    "dynamics.emergence": [
        f"else 2^{power(recipes.SMOOTH['sgd'][1].n, 2)} Sobol points",
        f"resolve the variances to 1e{power(_TOL, 10)}, at most {_MOST}",
    ],
    "finite.heldout_error": [
        f"above {evaluation._TEST_BLOCK} it is rounded up to a multiple of {evaluation._TEST_BLOCK}"
    ],
    "run_instances": [f"by default 2^{power(SIZES['instances'], 2)}, {rules.REPLICATES} replicates"],
    "rsb.solve": [
        f"the jump mass is below {percent(rsb._MIN_JUMP_MASS)}",
        f"{2 * clusters._ALONG} * {clusters._ACROSS}^(L r - 1) nodes",
    ],
    "Lines": [f"a line more than {recipes._MAX_POINTS}", f"at most 2^{power(recipes.MAX_NODES, 2)} nodes"],
    "Diagnostics": [f"Above {UNRESOLVED} the status is `unresolved`"],
    "gamp": [f"It starts at {short(message_passing._FIRST_DAMPING)}"],
    "train": [
        f"the paper's {short(training.RATES['gd'])} for gradient descent, {short(training.RATES['adam'])} for Adam, "
        f"and {training.RATES['lbfgs']:g} for L-BFGS",
        f"not at a minimum after the published {default('train', 'steps')} steps",
    ],
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_pages(page):
    text = words((ROOT / page).read_text())
    assert [piece for piece in PAGES[page] if words(piece) not in text] == []


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_docstrings(name):
    text = words((attrgetter(name)(ta) if name.partition(".")[0] in dir(ta) else attrgetter(name)(ta.results)).__doc__)
    assert [piece for piece in DOCSTRINGS[name] if words(piece) not in text] == []


def test_extras():
    """The first page has a row for each extra but `test`, which `dev` contains."""
    start = (ROOT / "docs" / "start.md").read_text()
    assert {name for name in PROJECT["optional-dependencies"] if f"| `.[{name}]` |" not in start} == {"test"}


def test_events():
    page, doc = (ROOT / "docs" / "theory" / "observables.md").read_text(), words(ta.find_event.__doc__)
    assert [name for name in EVENTS if f'`"{name}"`' not in page or f'"{name}"' not in doc] == []
