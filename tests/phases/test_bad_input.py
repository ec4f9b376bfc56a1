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
from tiedattn_jax.theory.solve import Problem


@pytest.fixture(scope="module")
def defaults(model, lines, semantic_states):
    """Arguments that every function accepts, by the function's name."""
    x, alpha = BRANCHES["semantic"].start(model), jnp.asarray(1.0)
    start = ta.Guess(1.0, (x,))
    states = [ta.FixedPoint(model, alpha, semantic_states, b) for b in ("positional", "semantic")]
    transition = ta.Transition(alpha, alpha, None, None, jnp.array(0), tuple(states), "alpha_c")
    return {
        "sweep": {"model": model, "along": [1.0], "branch": "semantic", "nodes": lines},
        "phase_diagram": {"model": model, "x": [1.0, 2.0], "y": [0.3], "nodes": lines},
        "trace_branch": {"model": model, "parameter": "alpha", "limits": (1.0, 3.0), "nodes": lines},
        "trace_boundary": {
            "model": model,
            "event": "semantic baseline",
            "parameter": "omega",
            "values": [0.3, 0.4],
            "nodes": lines,
        },
        "find_event": {"model": model, "event": "semantic baseline", "nodes": lines, "start": start},
        "critical_alpha": {"model": model, "nodes": lines, "bracket": (0.1, 4.0)},
        "linear_crossing": {"model": model, "transition": transition, "nodes": lines},
        "branch_ends": {"curve": ta.Curve("semantic", tuple(states[1:])), "nodes": lines},
        "folds_of": {"paths": []},
        "event_map": {"model": with_omega, "x": [0.3, 0.4], "y": [0.5, 0.6], "nodes": lines},
    }


def with_omega(omega, sigma):
    return ta.dot_product(omega=omega, sigma=sigma)


class WithoutTarget(ta.DotProduct):
    target = ta.Model.target

    def loss(self, Z, Y):
        return jnp.sum(Z**2) + jnp.sum(Y**2)


BAD = [
    # alpha
    ("sweep", {"along": []}, "alphas"),
    ("sweep", {"along": [1.0, -1.0]}, "alphas"),
    ("sweep", {"along": [np.nan]}, "alphas"),
    ("sweep", {"along": [[1.0], [2.0]]}, "alphas"),
    ("sweep", {"along": ["one"]}, "alphas"),
    ("sweep", {"along": ["1", "2"]}, "alphas"),
    ("sweep", {"along": [True]}, "alphas"),
    ("sweep", {"along": np.array([1.0 + 1.0j])}, "alphas"),
    ("sweep", {"along": np.ma.array([1.0, 2.0], mask=[False, True])}, "alphas"),
    ("phase_diagram", {"x": np.ma.array([1.0, 2.0], mask=[False, True])}, "x"),
    ("phase_diagram", {"y": ["0.3"]}, "y"),
    ("critical_alpha", {"bracket": ("1", "2")}, "bracket"),
    ("critical_alpha", {"bracket": (True, 2)}, "bracket"),
    ("trace_boundary", {"values": np.array([1, 2], "m8[s]")}, "values"),
    ("phase_diagram", {"alpha": np.nan, "x": ("sigma", [0.5])}, "alpha"),
    ("phase_diagram", {"alpha": -1.0, "x": ("sigma", [0.5])}, "alpha"),
    ("phase_diagram", {"alpha": [1.0, 2.0], "x": ("sigma", [0.5])}, "alpha"),
    ("phase_diagram", {"alpha": "one", "x": ("sigma", [0.5])}, "alpha"),
    ("phase_diagram", {"alpha": 1.0}, "alpha"),
    ("phase_diagram", {"x": ("sigma", [0.5])}, "alpha"),
    ("trace_branch", {"alpha": np.nan}, "alpha"),
    ("trace_branch", {"alpha": 0.0}, "alpha"),
    ("trace_branch", {"alpha": [2.0, 2.0]}, "alpha"),
    ("critical_alpha", {"bracket": (2.0, 1.0)}, "bracket"),
    ("critical_alpha", {"bracket": (0.0, 1.0)}, "bracket"),
    ("critical_alpha", {"bracket": (1.0, np.inf)}, "bracket"),
    ("critical_alpha", {"bracket": (1.0, np.nan)}, "bracket"),
    ("critical_alpha", {"bracket": 2.0}, "bracket"),
    ("critical_alpha", {"bracket": (1.0, 2.0, 3.0)}, "bracket"),
    ("critical_alpha", {"bracket": "ab"}, "bracket"),
    ("linear_crossing", {"bracket": (-1.0, 1.0)}, "bracket"),
    # axes and values
    ("phase_diagram", {"x": []}, "x"),
    ("phase_diagram", {"x": [1.0, 0.5]}, "x"),
    ("phase_diagram", {"x": [1.0, np.nan]}, "x"),
    ("phase_diagram", {"x": [0.0, 1.0]}, "x"),
    ("phase_diagram", {"x": [[1.0, 2.0]]}, "x"),
    ("phase_diagram", {"y": [0.3, 1.2]}, "omega"),
    ("phase_diagram", {"y": ("omegas", [0.3])}, "y"),
    ("phase_diagram", {"y": ("mixing", [0.3])}, "y"),
    ("phase_diagram", {"y": ("rank", [1.0])}, "y"),
    ("phase_diagram", {"y": ("alpha", [0.3])}, "y"),
    ("trace_boundary", {"values": [0.3, 0.3]}, "values"),
    ("trace_boundary", {"values": [0.3, 0.2, 0.4]}, "values"),
    ("trace_boundary", {"values": [0.3, np.inf]}, "values"),
    ("trace_boundary", {"values": []}, "values"),
    ("trace_boundary", {"values": "many"}, "values"),
    ("trace_boundary", {"values": [[0.3]]}, "values"),
    ("trace_boundary", {"values": [0.3, 1.3]}, "omega"),
    ("trace_boundary", {"parameter": "alpha"}, "parameter"),
    ("trace_boundary", {"parameter": "mixing"}, "parameter"),
    ("trace_boundary", {"parameter": "mixing[0,2]"}, "parameter"),
    ("trace_boundary", {"parameter": "rank"}, "parameter"),
    ("trace_boundary", {"parameter": 0}, "parameter"),
    ("trace_branch", {"parameter": "mixing"}, "parameter"),
    ("trace_branch", {"parameter": "rank"}, "parameter"),
    ("trace_branch", {"parameter": None}, "parameter"),
    ("trace_branch", {"limits": (0.1, 1.0)}, "limits"),
    ("trace_branch", {"limits": (3.0, 1.0)}, "limits"),
    ("trace_branch", {"limits": (1.0, np.nan)}, "limits"),
    ("trace_branch", {"limits": 3.0}, "limits"),
    # names
    ("sweep", {"event": "weak_recovery"}, "event"),
    ("sweep", {"branch": "lexical"}, "branch"),
    ("sweep", {"branch": ["semantic"]}, "branch"),
    ("trace_branch", {"branch": "x"}, "branch"),
    ("branch_ends", {"curve": ta.Curve("uninformed", ())}, "curve.branch"),
    ("branch_ends", {"curve": ta.Curve("semantic", ())}, "curve.points"),
    ("branch_ends", {"curve": "semantic"}, "curve"),
    ("find_event", {"event": "alpha"}, "event"),
    ("find_event", {"event": ["alpha_c"]}, "event"),
    ("trace_boundary", {"event": "alpha"}, "event"),
    ("trace_boundary", {"event": "semantic fold"}, "event"),
    # where to start
    ("find_event", {"start": 1.25}, "start"),
    ("find_event", {"start": []}, "start"),
    ("find_event", {"event": "alpha_c"}, "start"),  # alpha_c needs two states
    ("find_event", {"start": "curves"}, "start"),
    ("critical_alpha", {"start": 1.25}, "start"),
    ("critical_alpha", {"start": {"semantic": 1.25}}, "start"),
    ("linear_crossing", {"start": 1.5}, "start"),
    ("linear_crossing", {"transition": 1.25}, "transition"),
    ("trace_boundary", {"start": (1.0, 2.0)}, "start"),
    ("trace_branch", {"start": 2.0}, "start"),
    # counts and files
    ("trace_branch", {"points": 0}, "points"),
    ("trace_branch", {"points": 2.5}, "points"),
    ("trace_branch", {"step": 0.0}, "step"),
    ("trace_branch", {"step": "small"}, "step"),
    ("phase_diagram", {"devices": 99}, "devices"),
    ("phase_diagram", {"devices": 0}, "devices"),
    ("phase_diagram", {"devices": "all"}, "devices"),
    ("phase_diagram", {"width": 0}, "width"),
    ("phase_diagram", {"width": 1.5}, "width"),
    ("phase_diagram", {"out": "/dev/null/here"}, "out"),
    ("phase_diagram", {"out": 5}, "out"),
    ("phase_diagram", {"resume": True}, "out"),
    ("folds_of", {}, "paths"),
    ("phase_diagram", {"resume": "no"}, "resume"),
    ("find_event", {"sensitivities": "no"}, "sensitivities"),
    ("trace_boundary", {"sensitivities": 0}, "sensitivities"),
    ("branch_ends", {"sensitivities": None}, "sensitivities"),
    # planes
    ("event_map", {"x": [0.3]}, "x"),
    ("event_map", {"y": [0.6, 0.5]}, "y"),
    ("event_map", {"y": [0.5, np.nan]}, "y"),
    ("event_map", {"x": [0.3, 1.3]}, "omega"),
    ("event_map", {"event": "alpha"}, "event"),
    ("event_map", {"event": None}, "event"),
    ("event_map", {"names": ("a", "a")}, "names"),
    ("event_map", {"names": ("a", 1)}, "names"),
    ("event_map", {"names": "ab"}, "names"),
    ("event_map", {"model": lambda a: with_omega(a, 0.5)}, "model"),
    ("event_map", {"model": lambda a, b: a + b}, "model"),
    ("event_map", {"model": lambda a, b: ta.dot_product(rank=1 if a < 0.35 else 2)}, "model"),
]
FUNCTIONS = [
    "sweep", "phase_diagram", "trace_branch", "trace_boundary",
    "find_event", "critical_alpha", "linear_crossing",
]  # fmt: skip
BAD += [(f, {"nodes": 4096.0}, "nodes") for f in (*FUNCTIONS, "branch_ends", "event_map")]
BAD += [(f, {"settings": 1e-4}, "settings") for f in (*FUNCTIONS, "branch_ends", "event_map")]
BAD += [(f, {"model": 0.3}, "model") for f in (*FUNCTIONS, "event_map")]


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
    call = getattr(ta, function)
    assert set(defaults[function]) | set(change) <= set(inspect.signature(call).parameters)
    with pytest.raises(ta.InputError) as caught:
        call(**{**defaults[function], **change})
    assert caught.value.argument == argument and str(caught.value).startswith(f"{argument} must ")
    assert "\n" not in str(caught.value)


def test_a_baseline_needs_a_target(defaults, model, nothing_is_compiled):
    fields = {k: getattr(model, k) for k in ("omega", "sigma", "lam", "mixing", "encodings", "teacher")}
    for function in ("find_event", "trace_boundary", "linear_crossing"):
        with pytest.raises(ta.InputError, match="model must have a method `target"):
            getattr(ta, function)(**{**defaults[function], "model": WithoutTarget(**fields)})


class Odd(ta.DotProduct):
    def loss(self, Z, Y):
        return jnp.sum(Z * Y)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_model_is_checked(defaults, model, nothing_is_compiled, function):
    """The model is checked; where a branch has a name the loss must be even, too."""
    refused = eqx.tree_at(lambda m: m.lam, model, -model.lam), Odd(**vars(model))
    for bad_model, message in zip(refused, ("lam must be one positive number", "loss must be even"), strict=True):
        with pytest.raises(ta.InputError, match=message):
            getattr(ta, function)(**{**defaults[function], "model": bad_model})


@pytest.mark.parametrize("function", ["sweep", "trace_branch"])
def test_any_state_asks_for_no_even_loss(defaults, model, nothing_is_compiled, function):
    with pytest.raises(AssertionError, match="a program was compiled"):
        getattr(ta, function)(**{**defaults[function], "branch": None, "model": Odd(**vars(model))})


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
        return getattr(ta, function)(m, **options)

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


def test_models_of_a_plane_are_checked(defaults, model, nothing_is_compiled):
    options = {k: v for k, v in defaults["event_map"].items() if k != "model"}
    bad_model = eqx.tree_at(lambda m: m.lam, model, -model.lam)
    for first in (model, bad_model):  # the first model is checked in full, the others by their numbers
        with pytest.raises(ta.InputError, match=r"lam must be .*positive"):
            ta.event_map(lambda a, b, first=first: first if a < 0.35 else bad_model, **options)
    with pytest.raises(ta.InputError, match="loss must be even"):
        ta.event_map(lambda a, b: Odd(**vars(model)), **options)
    with pytest.raises(ta.InputError) as caught:
        jax.jit(lambda lam: ta.event_map(lambda a, b: ta.dot_product(omega=a, sigma=b, lam=lam), **options).alpha)(0.01)
    assert str(caught.value) == ONE_SENTENCE


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


def test_boundaries_meet_in_one_parameter_only():
    first, second = (ta.Boundary.of("alpha_c", p, np.arange(3.0), np.ones(3), np.ones(3)) for p in ("omega", "sigma"))
    with pytest.raises(ta.InputError, match="parameter must be omega"):
        ta.intersections([first, second])


def test_a_file_that_is_no_diagram(tmp_path):
    Store(tmp_path / "grid", "mark", resume=False).put("track-00000", {"q": np.ones(2)})
    track = (tmp_path / "grid" / "track-00000.npz").read_bytes()
    for name, content in (("missing.npz", None), ("text.npz", b"alpha"), ("empty.npz", b""), ("track.npz", track)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ta.InputError, match=f"path must be a whole file .*{name}"):
            ta.PhaseDiagram.load(tmp_path / name)
