from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tiedattn_jax as ta
from tiedattn_jax.phases import ends as how


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, [0.6, 0.7, 0.8, 1.1, 2.0], "semantic", lines)


@pytest.fixture(scope="module")
def ends(curve, lines):
    return {e.kind: e for e in ta.branch_ends(curve, lines)}


def test_how_the_semantic_branch_ends(ends):
    """Unstable towards m below .826469(4), pitchfork at .719178(23): lines of order 15."""
    fork, loss = ends["pitchfork"], ends["instability"]
    assert (fork.direction, loss.direction) == ("theta", "m") and fork.side == loss.side == "lower"
    assert abs(fork.alpha - 0.719178) <= 3 * fork.stderr < 0.01
    assert abs(loss.alpha - 0.826469) <= 3 * loss.stderr < 0.01
    assert fork.transition.sensitivities is None


def synthetic(alphas, theta, growth_m):
    """A curve with given order parameters and stability; states only where theta is positive."""
    model = ta.dot_product()
    one = jnp.ones((2, 2, 1, 1))

    def point(alpha, theta, growth):
        status = jnp.full(2, int(ta.Status.converged if theta > 0 else ta.Status.absent))
        diagnostics = SimpleNamespace(growth_m=jnp.full(2, growth), growth_theta=jnp.full(2, 1.0 + alpha - 0.7))
        state = SimpleNamespace(
            overlaps=ta.Overlaps(one, one, theta * one, 0 * one[..., 0]),
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
    """The ends of a curve, events lying at given places, and which were asked for, in this order."""
    asked = []

    def locate(model, event, nodes, *, start, settings, sensitivities):
        asked.append((event.removeprefix("semantic "), start))
        alpha = places[asked[-1][0]]
        return SimpleNamespace(alpha=alpha, stderr=1e-3, ok=True)

    monkeypatch.setattr(how, "locate", locate)
    monkeypatch.setattr(how, "solve_from", lambda model, alpha, *_: synthetic([alpha], [1.0], [growth_m]).points[0])
    return ta.branch_ends(curve, lines), asked


@pytest.mark.parametrize(
    ("last", "fold", "kind"), [(0.6, 0.65, "pitchfork"), (0.8, 0.65, "fold"), (0.8, 0.72, "pitchfork")]
)
def test_a_fold_is_looked_for_next_to_a_large_order_parameter(monkeypatch, lines, last, fold, kind):
    """The order parameter next to the end is .6 or .8 of the largest along the curve; a fork at .7 in any case.

    A branch that turns back reaches further than the fork: else it is another one.
    """
    curve = synthetic([0.6, 0.8, 2.0], [0.0, last, 1.0], [0.5, 0.5, 0.5])
    (end,), asked = located(monkeypatch, lines, curve, 0.5, pitchfork=0.7, fold=fold)
    assert end.kind == kind and end.side == "lower" and end.direction == "theta"
    assert [name for name, _ in asked] == ["pitchfork"] + ["fold"] * (last == 0.8)
    if last == 0.8:
        assert (asked[1][1].low, asked[1][1].high) == pytest.approx((0.5, 0.9))


def test_where_stability_is_lost(monkeypatch, lines):
    """Between two points of the curve, or between the fork at .7, where the uninformed state is unstable, and .8."""
    curve = synthetic([0.6, 0.8, 1.0, 2.0], [0.0, 0.3, 0.5, 1.0], [0.5, 1.5, 0.5, 0.5])
    ends, asked = located(monkeypatch, lines, curve, 0.5, pitchfork=0.7, instability=0.9)
    assert [(e.kind, e.side, e.direction) for e in ends] == [
        ("pitchfork", "lower", "theta"),
        ("instability", "lower", "m"),
    ]
    assert [name for name, _ in asked] == ["instability", "pitchfork"]
    curve = synthetic([0.6, 0.8, 2.0], [0.0, 0.3, 1.0], [0.5, 0.5, 0.5])
    ends, asked = located(monkeypatch, lines, curve, 1.75, pitchfork=0.7, instability=0.76)
    assert [e.kind for e in ends] == ["pitchfork", "instability"]
    near = asked[1][1]
    assert (near.alpha, near.low, near.high, near.there) == pytest.approx((0.76, 0.7, 0.8, 0.8))
    assert near.slope == pytest.approx(12.5)  # from -.75 to .5
