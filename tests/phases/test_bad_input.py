"""Every function of `tiedattn_jax.phases` answers unusable input with one sentence, before anything is compiled."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.phases.locate import Guess
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.setting import branch_start


@pytest.fixture(scope="module")
def defaults(model, lines, semantic_states):
    """Arguments that every function accepts, by the function's name."""
    x, alpha = branch_start(model, "semantic"), jnp.asarray(1.0)
    start = Guess(1.0, (x,))
    states = [ta.results.FixedPoint(model, alpha, semantic_states, b) for b in ("positional", "semantic")]
    transition = ta.results.Quantity(alpha, alpha, jnp.array(0), name="alpha", event="alpha_c", branches=tuple(states))
    base = {"model": model, "nodes": lines}
    return {
        "sweep": base | {"question": ta.solve, "alpha": [1.0]},
        "phase_diagram": base | {"alpha": [1.0, 2.0], "omega": [0.3]},
        "trace_branch": base | {"parameter": "alpha", "limits": (1.0, 3.0)},
        "traced": base | {"question": ta.find_event, "event": "semantic baseline", "omega": [0.3, 0.4], "follow": True},
        "find_event": base | {"event": "semantic baseline", "start": start},
        "critical_alpha": base | {"bracket": (0.1, 4.0)},
        "linear_crossing": base | {"transition": transition},
        "branch_ends": {"curve": Table.of_states("semantic", states[1:]), "nodes": lines},
        "map": base | {"question": ta.critical_alpha, "omega": [0.3, 0.4], "sigma": [0.5, 0.6]},
        "table": base | {"question": ta.solve},
        "best_ridge": base | {"alpha": 1.0},
    }


def called(function):
    """The public function of a name; sweeps have several names."""
    return getattr(ta, {"traced": "sweep", "map": "sweep", "table": "sweep"}.get(function, function))


class WithoutTarget(ta.DotProduct):
    target = ta.Model.target

    def loss(self, Z, Y):
        return jnp.sum(Z**2) + jnp.sum(Y**2)


# Values that an argument of a function must not have.
REFUSED = {
    ("sweep", "alpha"): [
        [], [1.0, -1.0], [np.nan], [[1.0], [2.0]], ["one"], ["1", "2"], [True], np.array([1.0 + 1.0j]),
        np.ma.array([1.0, 2.0], mask=[False, True]),
    ],
    ("phase_diagram", "alpha"): [
        np.ma.array([1.0, 2.0], mask=[False, True]), [], [1.0, 0.5], [1.0, np.nan], [0.0, 1.0], [[1.0, 2.0]],
    ],
    ("phase_diagram", "omega"): [["0.3"], [0.3, 1.2]],
    ("critical_alpha", "bracket"): [
        ("1", "2"), (True, 2), (2.0, 1.0), (0.0, 1.0), (1.0, np.inf), (1.0, np.nan), 2.0, (1.0, 2.0, 3.0), "ab",
    ],
    ("traced", "omega"): [
        np.array([1, 2], "m8[s]"), [0.3, 0.3], [0.3, 0.2, 0.4], [0.3, np.inf], [], [[0.3]], [0.3, 1.3],
    ],
    ("trace_branch", "alpha"): [np.nan, 0.0, [2.0, 2.0]],
    ("linear_crossing", "bracket"): [(-1.0, 1.0)],
    ("map", "sigma"): [[0.5, np.nan]],
    ("trace_branch", "parameter"): ["mixing", "rank", None],
    ("trace_branch", "limits"): [(0.1, 1.0), (3.0, 1.0), (1.0, np.nan), 3.0],
    ("sweep", "question"): ["semantic", ["alpha_c"], None],
    ("sweep", "branch"): ["lexical", ["semantic"]],
    ("sweep", "follow"): ["no"],
    ("trace_branch", "branch"): ["x"],
    ("branch_ends", "curve"): ["semantic"],
    ("find_event", "event"): ["alpha", ["alpha_c"]],
    ("traced", "event"): ["alpha"],
    ("find_event", "start"): [1.25, [], "curves"],
    ("critical_alpha", "start"): [1.25, {"semantic": 1.25}],
    ("linear_crossing", "start"): [1.5],
    ("linear_crossing", "transition"): [1.25],
    ("traced", "start"): [(1.0, 2.0)],
    ("trace_branch", "start"): [2.0],
    ("trace_branch", "points"): [0, 2.5],
    ("trace_branch", "step"): [0.0, "small"],
    ("phase_diagram", "devices"): [99, 0, "all"],
    ("phase_diagram", "width"): [0, 1.5],
    ("phase_diagram", "out"): ["/dev/null/here", 5],
    ("phase_diagram", "resume"): ["no"],
    ("find_event", "sensitivities"): ["no"],
    ("traced", "sensitivities"): [0],
    ("branch_ends", "sensitivities"): [None],
}  # fmt: skip
BAD = [
    (function, {argument: value}, f"{argument} must ")
    for (function, argument), values in REFUSED.items()
    for value in values
]
FUNCTIONS = "sweep phase_diagram trace_branch traced map find_event critical_alpha linear_crossing best_ridge".split()
WRONG = {"nodes": 4096.0, "settings": 1e-4, "model": 0.3}
BAD += [(f, {name: value}, f"{name} must ") for name, value in WRONG.items() for f in FUNCTIONS]
BAD += [("branch_ends", {name: WRONG[name]}, f"{name} must ") for name in ("nodes", "settings")]
MODEL, OTHER, BEST = ta.DotProduct(), ta.DotProduct(sigma=0.5, rank=2), {"question": ta.best_ridge}
NEGATIVE = eqx.tree_at(lambda m: m.sigma, MODEL, -MODEL.sigma)
SWEPT = {"question": ta.critical_alpha, "sigma": [0.5]}
BAD += [  # what is wrong depends on other arguments
    ("phase_diagram", {"alpha": np.nan, "sigma": [0.5]}, "alpha must "),
    ("phase_diagram", {"alpha": [1.0, 2.0], "sigma": [0.5]}, "axes must "),
    ("phase_diagram", {"alpha": 1.0}, "axes must "),
    ("phase_diagram", {"alpha": None, "sigma": [0.5]}, "alpha must "),
    ("phase_diagram", {"resume": True}, "out must "),
    ("sweep", {"question": ta.bayes.weak_recovery}, "alpha must "),
    ("traced", {"event": "semantic fold"}, "question must be one that can be followed"),
    ("branch_ends", {"curve": Table.of_states("uninformed", ())}, "curve.question must "),
    ("branch_ends", {"curve": Table.of_states("semantic", ())}, "curve.points must "),
    ("find_event", {"event": "alpha_c"}, "start must "),  # alpha_c needs two states
    ("map", {"question": ta.linear_crossing, "sigma": 0.5, "follow": True, "start": []}, "start must "),
    ("trace_branch", {"limits": (-1.0, 2.5)}, "limits must "),
    ("table", {"sigma": [0.5]}, "alpha must be given for solve"),
    ("table", {**SWEPT, "alpha": 2.0}, "alpha must be left out for critical_alpha"),
    ("table", {**BEST, "number": "sigma", "alpha": 2.0}, "bracket must be given"),
    ("table", {**BEST, "sigma": [0.5]}, "alpha must be given for best_ridge"),
    ("table", {**BEST, "alpha": [-1.0]}, "alpha must be positive"),
    ("table", {"alpha": 2.0, "rank": [0.5]}, "rank must be a number of the setting (alpha, lam, omega, sigma) or an"),
    ("table", {"alpha": 2.0, "mixing": [0.5]}, "mixing must name one of"),
    ("table", {"alpha": 2.0, "brnch": None}, "brnch must be a number of the setting"),
    ("table", {"question": ta.find_event, "sigma": [0.5]}, "question must be a function of a model"),
    ("table", {"question": lambda model: model.lam, "sigma": [0.5]}, "nodes must be a number of the setting"),
    ("table", {"alpha": 2.0, "sigma": [0.5, 0.4]}, "sigma must be one or more finite, increasing values"),
    ("table", {"alpha": [1.0], "sigma": [0.5], "lam": [0.1]}, "axes must be none, one or two"),
    ("table", {"model": [], "alpha": 2.0}, "model must be one model or more"),
    ("table", {"model": [0.3], "alpha": 2.0}, "model must be a list of models"),
    ("table", {"model": "models", "alpha": 2.0}, "model must be a Model or a list"),
    ("table", {"alpha": 2.0, "bracket": (0.1, 0.2)}, "bracket must be a number of the setting"),
    ("table", {**SWEPT, "sensitivities": True}, "sensitivities must be a number of the setting"),
    ("table", {**BEST, "alpha": [1.0, 2.0], "follow": True}, "follow must be left out but for solve, critical_alpha"),
    ("table", {"alpha": 2.0, "follow": True}, "follow must be left out but for"),
    ("table", {**SWEPT, "omega": [0.3], "follow": True}, "follow must be left out but for"),
    ("table", {"question": ta.dynamics.landscape, "settings": ta.Settings()}, "settings must be a number of the"),
    ("table", {"model": [MODEL, OTHER], "alpha": 2.0}, "model must give models of one class"),
    ("table", {"model": [MODEL, ta.DotProduct(dtype=jnp.float32)], "alpha": 2.0}, "model must give models of one"),
    ("table", {"model": [MODEL, NEGATIVE], "alpha": 2.0}, "sigma must be"),
    ("best_ridge", {"alpha": -1.0}, "alpha must be positive and finite"),
    ("best_ridge", {"alpha": [1.0, 2.0]}, "alpha must be one number, got shape (2,): use sweep"),
    ("best_ridge", {"branch": "uninformed"}, "branch must be one of positional, semantic, None"),
    ("best_ridge", {"number": "rank"}, "number must name one of"),
    ("best_ridge", {"number": "alpha"}, "number must be a number of the model"),
    ("best_ridge", {"number": "omega"}, "bracket must be given for another number than lam"),
    ("best_ridge", {"number": "omega", "bracket": (0.1, 1.2)}, "omega must be"),
    ("best_ridge", {"bracket": (0.0, 0.1)}, "bracket must be two numbers 0 < low < high"),
]


@pytest.mark.parametrize(("function", "change", "sentence"), BAD)
def test_one_sentence_about_the_argument(unchecked, defaults, function, change, sentence):
    call, arguments = called(function), {**defaults[function], **change}
    inspect.signature(call).bind(**arguments)
    with pytest.raises(ta.InputError) as caught:
        call(**arguments)
    assert caught.value.argument == sentence.split()[0] and str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


TARGET = "model must have a method `target"


class Odd(ta.DotProduct):
    def loss(self, Z, Y):
        return jnp.sum(Z * Y)


@pytest.mark.parametrize(
    ("function", "kind", "options", "message"),
    [
        *((f, None, {}, "lam must be .*positive") for f in FUNCTIONS),
        *((f, Odd, {}, "loss must be even") for f in FUNCTIONS),
        ("find_event", WithoutTarget, {}, TARGET),
        ("traced", WithoutTarget, {}, TARGET),
        ("linear_crossing", WithoutTarget, {}, TARGET),
        ("table", WithoutTarget, {"question": ta.linear_crossing, "sigma": [0.5]}, TARGET),
        # A state of any branch asks for no even loss: the next argument that is wrong is the one that is named.
        ("sweep", Odd, {"branch": None, "follow": "no"}, "follow must"),
        ("trace_branch", Odd, {"branch": None, "step": 0}, "step must"),
    ],
)
def test_the_model_is_checked(unchecked, defaults, model, function, kind, options, message):
    bad_model = kind(**vars(model)) if kind else eqx.tree_at(lambda m: m.lam, model, -model.lam)
    with pytest.raises(ta.InputError, match=message):
        called(function)(**{**defaults[function], **options, "model": bad_model})


ONE_SENTENCE = (
    "model must have concrete numbers here, got one under a jax transformation such as jit or vmap: "
    "call this function outside of it, or sweep for many models at once"
)


@pytest.mark.parametrize("function", [*FUNCTIONS, "branch_ends"])
def test_concrete_numbers_are_asked_for(defaults, model, function):
    """They are asked for if jax traces numbers of the model or others, and in derivatives under jit."""
    options = {k: v for k, v in defaults[function].items() if k != "model"}

    def of_models(m):
        return called(function)(**options) if function == "branch_ends" else called(function)(model=m, **options)

    batch = jax.tree.map(lambda a: np.stack([a, a]), model)
    calls = [
        lambda: jax.jit(of_models)(model),
        lambda: jax.vmap(of_models)(batch),
        lambda: jax.jit(lambda x: x * len(of_models(model)))(1.0),
        lambda: jax.jit(jax.grad(lambda m: of_models(m).alpha))(model),
    ]
    for call in calls[2:3] if function == "branch_ends" else calls:
        with pytest.raises(ta.InputError) as caught:
            call()
        assert str(caught.value) == ONE_SENTENCE


def test_models_of_a_callers_axis_are_checked(defaults, model):
    """The first model is checked in full, the others by their numbers."""
    bad_model = eqx.tree_at(lambda m: m.lam, model, -model.lam)
    for values, models, message in (
        ([0.0, 0.5, 1.0], [model, bad_model, model], r"lam must be .*positive"),
        ([0.0, 0.5, 1.0], [bad_model] * 3, r"lam must be .*positive"),
        ([0.0], [Odd(**vars(model))], "loss must be even"),
        ([0.0, 0.5], [model, OTHER], "number 1 differs"),
    ):
        axis = ta.Axis("kind", values, lambda m, v, models=models: models[int(2 * v)])
        with pytest.raises(ta.InputError, match=message):
            ta.sweep(ta.critical_alpha, model, axis, nodes=defaults["map"]["nodes"])
    with pytest.raises(ta.InputError, match="sigma must be given once"):
        ta.sweep(ta.critical_alpha, model, ta.Axis("sigma", [0.5]), sigma=[0.6], nodes=defaults["map"]["nodes"])


def test_states_to_start_from_belong_to_the_event(defaults, model, lines):
    positional, semantic = defaults["linear_crossing"]["transition"].branches
    moved = eqx.tree_at(lambda p: p.alpha, semantic, jnp.asarray(1.1))
    for start in ([positional], [positional, positional], [positional, moved], positional):
        with pytest.raises(ta.InputError, match="start must be a FixedPoint for each of"):
            ta.critical_alpha(model, lines, start=start)
    for start in (None, semantic, [semantic], [semantic, moved], [semantic] * 3):
        with pytest.raises(ta.InputError, match="start must be two FixedPoints of any branches at one alpha"):
            ta.find_event(model, "crossing", lines, start=start)
