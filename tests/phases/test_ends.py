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


@pytest.mark.parametrize(("last", "kind"), [(0.6, "pitchfork"), (0.8, "fold")])
def test_a_fold_is_looked_for_next_to_a_large_order_parameter(monkeypatch, lines, last, kind):
    """The order parameter next to the end is .6 or .8 of the largest along the curve; a fork at .7 in either case."""
    curve = synthetic([0.6, 0.8, 2.0], [0.0, last, 1.0], [0.5, 0.5, 0.5])
    asked = []

    def located(model, event, nodes, *, start, settings, sensitivities):
        asked.append(event)
        alpha = {"semantic pitchfork": 0.7, "semantic fold": 0.65}[event]
        return SimpleNamespace(alpha=alpha, stderr=1e-3, ok=True)

    monkeypatch.setattr(how, "locate", located)
    monkeypatch.setattr(how, "solve_from", lambda model, alpha, *_: synthetic([alpha], [1.0], [0.5]).points[0])
    (end,) = ta.branch_ends(curve, lines)
    assert end.kind == kind and end.side == "lower" and end.direction == "theta"
    assert asked == ["semantic pitchfork"] + ["semantic fold"] * (kind == "fold")


def test_a_curve_of_another_branch(lines):
    with pytest.raises(ta.InputError, match="branch must be one of"):
        ta.branch_ends(ta.Curve("uninformed", ()), lines)
