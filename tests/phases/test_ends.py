from types import SimpleNamespace

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import transitions as ends_module


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, [0.6, 0.7, 0.8, 1.1, 2.0], "semantic", lines)


@pytest.fixture(scope="module")
def ends(curve, lines):
    return {e.kind: e for e in ta.branch_ends(curve, lines)}


def test_how_the_semantic_branch_ends(ends):
    """The semantic branch is unstable towards m below .826469(4) and ends in a pitchfork at .719178(23).

    The values come from lines of order 15.
    """
    fork, loss = ends["pitchfork"], ends["instability"]
    assert (fork.direction, loss.direction) == ("theta", "m") and fork.side == loss.side == "lower"
    assert abs(fork.alpha - 0.719178) <= 3 * fork.stderr < 0.01
    assert abs(loss.alpha - 0.826469) <= 3 * loss.stderr < 0.01
    assert fork.transition.sensitivities is None


def synthetic(alphas, theta, growth_m):
    """A curve with given order parameters and stability; states exist only where theta is positive."""
    model = ta.dot_product()
    ones = jnp.ones((2, 2, 1, 1))

    def point(alpha, theta, growth):
        status = jnp.full(2, int(ta.Status.converged if theta > 0 else ta.Status.absent))
        diagnostics = SimpleNamespace(growth_m=jnp.full(2, growth), growth_theta=jnp.full(2, 1.0 + alpha - 0.7))
        state = SimpleNamespace(
            overlaps=ta.Overlaps(ones, ones, theta * ones, 0 * ones[..., 0]),
            diagnostics=diagnostics,
            has_state=status <= 1,
        )
        return SimpleNamespace(
            alpha=jnp.asarray(alpha),
            exists=theta > 0,
            ok=theta > 0,
            overlaps=jax.tree.map(lambda a: a[0], state.overlaps),
            diagnostics=SimpleNamespace(growth_m=growth, growth_theta=1.0 + alpha - 0.7),
            replicates=state,
            model=model,
        )

    return ta.Curve("semantic", tuple(map(point, alphas, theta, growth_m)))


def located(monkeypatch, lines, curve, growth_m, **places):
    """Return the ends of a curve whose events lie at given places, and the events requested, in order."""
    requests = []

    def find_event(event, search, guess, *, exact):
        assert search == (curve.points[0].model, lines, options, Parameter("alpha"), None) and exact is True
        requests.append((event.name.removeprefix("semantic "), guess))
        alpha = places[requests[-1][0]]
        return made.finished_path(guess.at if alpha == "near" else alpha)

    def uninformed(self, point, guess):
        assert guess.exists and float(point.alpha) in curve.alphas
        return made.finished_path(synthetic([float(point.alpha)], [1.0], [growth_m]).points[0])

    def transition(event, model, alpha):
        return made.transition(alpha, event=event.name) if alpha else made.transition(np.nan, status=6)

    options = ta.Settings(tol=3e-4)
    monkeypatch.setattr(ends_module, "event_path", find_event)
    monkeypatch.setattr(ends_module, "transition_of", transition)
    monkeypatch.setattr(ends_module._Ends, "uninformed", uninformed)
    return ta.branch_ends(curve, lines, settings=options, sensitivities=True), requests


@pytest.mark.parametrize(
    ("last", "fold", "kind"), [(0.6, 0.6, "pitchfork"), (0.8, 0.6, "fold"), (0.8, 0.72, "pitchfork")]
)
@pytest.mark.usefixtures("unchecked")
def test_a_fold_is_looked_for_next_to_a_large_order_parameter(monkeypatch, lines, last, fold, kind):
    """A fold is looked for if the order parameter next to the end is .8 of the largest along the curve, but not if .6.

    There is a fork at .7 in any case. A branch that turns back reaches further than the fork: else it is another one.
    """
    curve = synthetic([0.6, 0.8, 2.0], [0.0, last, 1.0], [0.5, 0.5, 0.5])
    (end,), requests = located(monkeypatch, lines, curve, 0.5, pitchfork=0.7, fold=fold)
    assert end.kind == kind and end.side == "lower" and end.direction == "theta"
    assert [name for name, _ in requests] == ["pitchfork"] + ["fold"] * (last == 0.8)
    if last == 0.8:
        assert (requests[1][1].low, requests[1][1].high) == pytest.approx((0.5, 0.9))


@pytest.mark.usefixtures("unchecked")
def test_a_fold_that_is_not_found_lies_in_the_bracket(monkeypatch, lines):
    """A fold that is not found is reported midway between two points, with half their distance as the error bar.

    The uninformed state is unstable on neither side, so there is no fork and a fold is looked for.
    """
    curve = synthetic([0.2, 0.6, 2.0], [0.0, 0.3, 1.0], [0.5, 0.5, 0.5])
    (end,), requests = located(monkeypatch, lines, curve, 0.5, fold=0.5)
    assert (end.kind, end.alpha, end.transition.status_name) == ("fold", 0.5, "converged")
    (end,), requests = located(monkeypatch, lines, curve, 0.5, fold=None)
    assert [name for name, _ in requests] == ["fold"] and (requests[0][1].low, requests[0][1].high) == pytest.approx(
        (0.1, 0.8)
    )
    assert requests[0][1].at == 0.6
    assert (end.kind, end.side, end.direction) == ("fold", "lower", "theta")
    assert (end.alpha, end.stderr, end.transition.status) == pytest.approx((0.4, 0.2, ta.Status.max_steps))


@pytest.mark.usefixtures("unchecked")
def test_a_branch_may_end_on_both_sides(monkeypatch, lines):
    """A branch may end on both sides: ends come in the order of alpha, and an upper fold counts above the fork."""
    curve = synthetic([0.2, 0.6, 1.0, 2.0], [0.0, 0.8, 1.0, 0.0], [0.5] * 4)
    ends, requests = located(monkeypatch, lines, curve, 0.5, fold="near")
    assert [(e.side, e.kind, e.alpha) for e in ends] == [("lower", "fold", 0.6), ("upper", "fold", 1.0)]
    assert [name for name, _ in requests] == ["fold", "fold"]
    np.testing.assert_allclose([(n.at, n.low, n.high) for _, n in requests], [(0.6, 0.1, 0.8), (1.0, 0.5, 2.5)])


@pytest.mark.usefixtures("unchecked")
def test_where_stability_is_lost(monkeypatch, lines):
    """Stability is lost between two points of the curve, or between the fork at .7 and the first point at .8.

    In the second case the uninformed state is unstable at the fork.
    """
    curve = synthetic([0.6, 0.8, 1.0, 2.0], [0.0, 0.3, 0.5, 1.0], [0.5, 1.5, 0.5, 0.5])
    ends, requests = located(monkeypatch, lines, curve, 0.5, pitchfork=0.7, instability=0.9)
    assert [(e.kind, e.side, e.direction) for e in ends] == [
        ("pitchfork", "lower", "theta"),
        ("instability", "lower", "m"),
    ]
    assert [name for name, _ in requests] == ["instability", "pitchfork"]
    curve = synthetic([0.6, 0.8, 2.0], [0.0, 0.3, 1.0], [0.5, 0.5, 0.5])
    ends, requests = located(monkeypatch, lines, curve, 1.75, pitchfork=0.7, instability=0.76)
    assert [e.kind for e in ends] == ["pitchfork", "instability"]
    guess = requests[1][1]
    assert (guess.at, guess.low, guess.high, guess.there) == pytest.approx((0.76, 0.7, 0.8, 0.8))
    assert guess.slope == pytest.approx(12.5)  # the number of the event rises from -.75 to .5


@pytest.mark.usefixtures("unchecked")
def test_other_ends_that_are_not_found_lie_in_the_bracket(monkeypatch, lines):
    """A loss of stability that is not found lies between its points; without a fork, the end is that of the fold."""
    curve = synthetic([0.6, 0.8, 1.0, 2.0], [0.0, 0.3, 0.5, 1.0], [0.5, 1.5, 0.5, 0.5])
    ends, requests = located(monkeypatch, lines, curve, 0.5, pitchfork=None, fold=0.65, instability=None)
    assert [name for name, _ in requests] == ["instability", "pitchfork", "fold"]
    assert [(e.kind, e.alpha) for e in ends] == [("fold", 0.65), ("instability", pytest.approx(0.9))]
    assert (ends[1].stderr, ends[1].transition.status) == pytest.approx((0.1, ta.Status.max_steps))
