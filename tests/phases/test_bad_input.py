"""Every function of `tiedattn_jax.phases` answers unusable input with one sentence, before anything is compiled."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.files import Store
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.phases import arclength, follow, grid, transitions
from tiedattn_jax.phases.locate import Guess
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.solve import Problem


@pytest.fixture(scope="module")
def defaults(model, lines, semantic_states):
    """Arguments that every function accepts, by the function's name."""
    x, alpha = BRANCHES["semantic"].start(model), jnp.asarray(1.0)
    start = Guess(1.0, (x,))
    states = [ta.results.FixedPoint(model, alpha, semantic_states, b) for b in ("positional", "semantic")]
    transition = ta.results.Quantity(alpha, alpha, jnp.array(0), name="alpha", event="alpha_c", branches=tuple(states))
    return {
        "sweep": {"model": model, "question": "semantic", "alpha": [1.0], "nodes": lines},
        "phase_diagram": {"model": model, "alpha": [1.0, 2.0], "omega": [0.3], "nodes": lines},
        "trace_branch": {"model": model, "parameter": "alpha", "limits": (1.0, 3.0), "nodes": lines},
        "traced": {
            "model": model,
            "question": "semantic baseline",
            "omega": [0.3, 0.4],
            "nodes": lines,
            "follow": True,
        },
        "find_event": {"model": model, "event": "semantic baseline", "nodes": lines, "start": start},
        "critical_alpha": {"model": model, "nodes": lines, "bracket": (0.1, 4.0)},
        "linear_crossing": {"model": model, "transition": transition, "nodes": lines},
        "branch_ends": {"curve": Table.of_states("semantic", states[1:]), "nodes": lines},
        "map": {"model": model, "question": "alpha_c", "omega": [0.3, 0.4], "sigma": [0.5, 0.6], "nodes": lines},
    }


def called(function):
    """The public function of a name; sweeps have several names."""
    return getattr(ta, {"traced": "sweep", "map": "sweep"}.get(function, function))


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
    ("phase_diagram", "omegas"): [[0.3]],
    ("phase_diagram", "mixing"): [[0.3]],
    ("phase_diagram", "rank"): [[1.0]],
    ("map", "omega"): [[0.4, 0.3], [0.3, 1.3]],
    ("map", "sigma"): [[0.5, np.nan]],
    ("map", "question"): ["alpha", ["alpha_c"]],
    ("trace_branch", "parameter"): ["mixing", "rank", None],
    ("trace_branch", "limits"): [(0.1, 1.0), (3.0, 1.0), (1.0, np.nan), 3.0],
    ("sweep", "question"): ["lexical", ["semantic"]],
    ("sweep", "follow"): ["no"],
    ("trace_branch", "branch"): ["x"],
    ("branch_ends", "curve"): ["semantic"],
    ("find_event", "event"): ["alpha", ["alpha_c"]],
    ("traced", "question"): ["alpha", "semantic fold"],
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
BAD = [(function, {argument: value}, argument) for (function, argument), values in REFUSED.items() for value in values]
BAD += [  # what is wrong depends on other arguments
    ("phase_diagram", {"alpha": np.nan, "sigma": [0.5]}, "alpha"),
    ("phase_diagram", {"alpha": -1.0, "sigma": [0.5]}, "alpha"),
    ("phase_diagram", {"alpha": [1.0, 2.0], "sigma": [0.5]}, "axes"),
    ("phase_diagram", {"alpha": "one", "sigma": [0.5]}, "alpha"),
    ("phase_diagram", {"alpha": 1.0}, "axes"),
    ("phase_diagram", {"alpha": None, "sigma": [0.5]}, "alpha"),
    ("sweep", {"question": "weak_recovery"}, "alpha"),
    ("branch_ends", {"curve": Table.of_states("uninformed", ())}, "curve.question"),
    ("branch_ends", {"curve": Table.of_states("semantic", ())}, "curve.points"),
    ("find_event", {"event": "alpha_c"}, "start"),  # alpha_c needs two states
    ("phase_diagram", {"resume": True}, "out"),
]
FUNCTIONS = [
    "sweep", "phase_diagram", "trace_branch", "traced", "map",
    "find_event", "critical_alpha", "linear_crossing",
]  # fmt: skip
BAD += [(f, {"nodes": 4096.0}, "nodes") for f in (*FUNCTIONS, "branch_ends")]
BAD += [(f, {"settings": 1e-4}, "settings") for f in (*FUNCTIONS, "branch_ends")]
BAD += [(f, {"model": 0.3}, "model") for f in FUNCTIONS]


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    """Make it an error to run any program of states."""

    def forbidden(*_):
        raise AssertionError("a program was compiled before the input was checked")

    monkeypatch.setattr(Problem, "lane", forbidden)
    for module in (arclength, follow, grid, transitions):
        for name in ("branch_start", "pair_start"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, forbidden)


@pytest.mark.parametrize(("function", "change", "argument"), BAD)
def test_one_sentence_about_the_argument(unchecked, defaults, nothing_is_compiled, function, change, argument):
    call = called(function)
    inspect.signature(call).bind(**{**defaults[function], **change})
    with pytest.raises(ta.InputError) as caught:
        call(**{**defaults[function], **change})
    assert caught.value.argument == argument and str(caught.value).startswith(f"{argument} must ")
    assert "\n" not in str(caught.value)


def test_a_baseline_needs_a_target(defaults, model, nothing_is_compiled):
    fields = {k: getattr(model, k) for k in ("omega", "sigma", "lam", "mixing", "encodings", "teacher")}
    for function in ("find_event", "traced", "linear_crossing"):
        with pytest.raises(ta.InputError, match="model must have a method `target"):
            called(function)(**{**defaults[function], "model": WithoutTarget(**fields)})


class Odd(ta.DotProduct):
    def loss(self, Z, Y):
        return jnp.sum(Z * Y)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_model_is_checked(defaults, model, nothing_is_compiled, function):
    """The model is checked; where a branch has a name the loss must be even, too."""
    refused = eqx.tree_at(lambda m: m.lam, model, -model.lam), Odd(**vars(model))
    for bad_model, message in zip(refused, ("lam must be .*positive", "loss must be even"), strict=True):
        with pytest.raises(ta.InputError, match=message):
            called(function)(**{**defaults[function], "model": bad_model})


@pytest.mark.parametrize("function", ["sweep", "trace_branch"])
def test_any_state_asks_for_no_even_loss(defaults, model, nothing_is_compiled, function):
    with pytest.raises(AssertionError, match="a program was compiled"):
        branch = "question" if function == "sweep" else "branch"
        called(function)(**{**defaults[function], branch: None, "model": Odd(**vars(model))})


ONE_SENTENCE = (
    "model must have concrete numbers here, got one under a jax transformation such as jit or vmap: "
    "call this function outside of it, or sweep for many models at once"
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_concrete_numbers_are_asked_for(defaults, nothing_is_compiled, function, transform):
    """Functions ask for concrete numbers in one sentence if jax traces numbers of the model or others."""
    model, options = defaults[function]["model"], {k: v for k, v in defaults[function].items() if k != "model"}

    def of_models(m):
        return called(function)(m, **options)

    batch = jax.tree.map(lambda a: jnp.stack([a, a]), model)
    with pytest.raises(ta.InputError) as caught:
        transform(of_models)(model if transform is jax.jit else batch)
    assert str(caught.value) == ONE_SENTENCE
    if transform is jax.jit:
        with pytest.raises(ta.InputError) as caught:
            jax.jit(lambda x: x * len(of_models(model)))(1.0)
        assert str(caught.value) == ONE_SENTENCE
        with pytest.raises(ta.InputError) as caught:  # derivatives work, but not those inside compiled functions
            jax.jit(jax.grad(lambda m: of_models(m).alpha))(model)
        assert str(caught.value) == ONE_SENTENCE


def test_models_of_a_callers_axis_are_checked(defaults, model, nothing_is_compiled):
    """The first model is checked in full, the others by their numbers."""
    nodes = defaults["map"]["nodes"]
    bad_model = eqx.tree_at(lambda m: m.lam, model, -model.lam)
    for first in (model, bad_model):
        axis = ta.Axis("kind", [0.0, 0.5, 1.0], lambda m, v, first=first: first if v in (0, 1) else bad_model)
        with pytest.raises(ta.InputError, match=r"lam must be .*positive"):
            ta.sweep(model, "alpha_c", axis, nodes=nodes)
    with pytest.raises(ta.InputError, match="loss must be even"):
        ta.sweep(model, "alpha_c", ta.Axis("kind", [0.0], lambda m, v: Odd(**vars(m))), nodes=nodes)


def test_ends_of_a_branch_ask_for_concrete_numbers(defaults, nothing_is_compiled):
    with pytest.raises(ta.InputError) as caught:
        jax.jit(lambda x: x * len(ta.branch_ends(**defaults["branch_ends"])))(1.0)
    assert str(caught.value) == ONE_SENTENCE


def test_states_to_start_from_belong_to_the_event(defaults, model, lines):
    positional, semantic = defaults["linear_crossing"]["transition"].branches
    moved = eqx.tree_at(lambda p: p.alpha, semantic, jnp.asarray(1.1))
    for start in ([positional], [positional, positional], [positional, moved], positional):
        with pytest.raises(ta.InputError, match="start must be a FixedPoint for each of"):
            ta.critical_alpha(model, lines, start=start)


def test_a_file_that_is_no_diagram(tmp_path):
    Store(tmp_path / "grid", {"fingerprint": "mark"}, "out", "hold other pieces").put("track-00000", {"q": np.ones(2)})
    track = (tmp_path / "grid" / "track-00000.npz").read_bytes()
    for name, content in (("missing.npz", None), ("text.npz", b"alpha"), ("empty.npz", b""), ("track.npz", track)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ta.InputError, match=f"path must be a whole file .*{name}"):
            ta.results.PhaseDiagram.load(tmp_path / name)
