"""Sweeps of many settings in one pool, through alpha, another number, or a list of models: states and events."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import POOL_ROUNDING
from toy import Toy

import tiedattn_jax as ta

SIGMAS = [0.5, 0.55]


def with_sigma(model, sigma):
    return eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(sigma))


def test_through_alpha(model, two_lines):
    """A branch is followed from the largest alpha down to where it ends, at .7: nothing below is tried."""
    calls = []
    alphas = [0.6, 0.8, 0.7, 1.1, 2.0]
    curve = ta.sweep(
        ta.solve,
        model,
        branch="semantic",
        follow=True,
        alpha=alphas,
        nodes=two_lines,
        progress=lambda *c: calls.append(c),
    )
    np.testing.assert_allclose(curve.alpha, [0.7, 0.8, 1.1, 2.0])
    np.testing.assert_array_equal(curve.found, [False, True, True, True])
    np.testing.assert_array_equal(curve.at, curve.alpha)
    assert int(curve.points[0].status) == ta.Status.absent and curve.parameter == "alpha"
    assert np.all(np.diff(curve.values(lambda p: p.train_loss)[1:]) > 0) and np.isnan(curve.values("q")[0]).all()
    assert calls == [(k, 5) for k in range(6)]
    direct = ta.solve(model, 2.0, "semantic", two_lines)
    np.testing.assert_allclose(curve.points[-1].overlaps.q, direct.overlaps.q, rtol=1e-4)


def test_states_are_those_of_single_solves(model, two_lines):
    """Through a number, and of a list of models and pairs."""
    calls, models = [], [with_sigma(model, SIGMAS[0]), (with_sigma(model, SIGMAS[1]), 2.0)]
    options = {"nodes": two_lines, "settings": ta.Settings()}
    states = ta.sweep(
        ta.solve,
        model,
        branch="semantic",
        sigma=SIGMAS,
        alpha=2.0,
        nodes=two_lines,
        progress=lambda *c: calls.append(c),
    )
    listed = ta.sweep(ta.solve, models, branch="semantic", alpha=2.0, **options)
    assert calls == [(0, 2), (1, 2), (2, 2)]
    for sigma, point, same in zip(SIGMAS, states.points, listed.points, strict=True):
        direct = ta.solve(with_sigma(model, sigma), 2.0, "semantic", two_lines)
        for a, b in zip(jax.tree.leaves(point), jax.tree.leaves(direct), strict=True):
            np.testing.assert_allclose(a, b, POOL_ROUNDING)  # the same searches were done
        np.testing.assert_array_equal(same.overlaps.q, point.overlaps.q)
    report = states.to_dict()
    assert (report["question"], report["axes"]) == ("semantic", {"sigma": SIGMAS}) and len(report["train_loss"]) == 2
    assert states.summary().startswith("semantic branch at 2 values of sigma from 0.5 to 0.55: found at 2")
    assert states.describe().tables[0][1][0][:2] == ("sigma", "branch")


@pytest.mark.full
def test_events_are_those_of_single_searches(model, lines):
    models = [with_sigma(model, sigma) for sigma in SIGMAS]
    critical, linear = (
        ta.sweep(ta.critical_alpha, model, sigma=SIGMAS, nodes=lines),
        ta.sweep(ta.linear_crossing, models, nodes=lines),
    )
    assert critical.exact.all() and not linear.exact.any() and linear.parameter == "model"
    for k, variant in enumerate(models):
        single = ta.critical_alpha(variant, lines)
        assert critical.alpha[k] == single.alpha and critical.stderr()[k] == single.stderr
        np.testing.assert_allclose(critical.slope[k], single.sensitivities.sigma, rtol=1e-12)
        assert critical.status[k] == single.status and critical.reason[k] == ""
        np.testing.assert_allclose(linear.alpha[k], ta.linear_crossing(variant, single, lines).alpha, rtol=1e-12)


@pytest.mark.full
def test_a_threshold_over_two_numbers():
    """Thresholds need no search: they are those of the single models."""
    options = {"direction": "encodings", "omega": [0.3, 0.4], "sigma": [0.5, 0.6]}
    result = ta.sweep(ta.dynamics.separation, ta.DotProduct(), **options)
    single = ta.dynamics.separation(ta.DotProduct(omega=0.3, sigma=0.6), "encodings")
    np.testing.assert_allclose(result.alpha[0, 1], single.alpha, rtol=1e-12)
    assert result.names == ("omega", "sigma") and result.question == "encodings separate"


# On theories in closed form


def place(m):
    """Where m begins to grow on the semantic state, by the numbers of a model."""
    return 2 * m.sigma + m.omega


def toy(kind=Toy):
    """Losses alpha + place; the semantic instability is at `place`, and there is none for sigma above .58."""
    growth = {"semantic": lambda m, a: (0.5, 1 + jnp.where(m.sigma < 0.58, place(m) - a, 1.0))}
    return kind({"semantic": lambda m, a: a + place(m), "uninformed": lambda m, a: a}, growth=growth)


A, S = np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.55])
PAIRS = [(ta.DotProduct(sigma=s), a) for s, a in zip(S, A[:2], strict=True)]
ROOT = ta.Axis("root", [0.5, 0.6], lambda m, v: eqx.tree_at(lambda m: m.omega, m, jnp.asarray(v) ** 2))
# Model, question, axes and numbers; the axes of the table; alpha and the place in its cells.
LAYOUTS = {
    "one setting": ((PAIRS[0][0], ta.solve, {"alpha": 2.0}), "", 2.0, 1.3),
    "a number": ((PAIRS[0][0], ta.solve, {"alpha": 2.0, "sigma": S}), "sigma", 2.0, 2 * S + 0.3),
    "pairs": ((PAIRS, ta.solve, {}), "model", A[:2], 2 * S + 0.3),
    "models": (([m for m, _ in PAIRS], ta.solve, {"alpha": A}), "model alpha", A, 2 * S[:, None] + 0.3),
    "a number of the caller's before alpha": (
        (PAIRS[0][0], ta.solve, ROOT, {"alpha": A, "sigma": 0.4}), "root alpha", A, 0.8 + np.array([[0.25], [0.36]])
    ),
    "not followed": ((PAIRS[0][0], ta.solve, {"alpha": A}), "alpha", A, 1.3),
    "an event": (
        (PAIRS[0][0], ta.find_event, {"sigma": S, "event": "semantic instability"}), "sigma", *[2 * S + 0.3] * 2
    ),
    "an event over two numbers": (
        (PAIRS[0][0], ta.find_event, {"omega": [0.2, 0.3], "sigma": S, "event": "semantic instability"}), "omega sigma",
        *[2 * S + [[0.2], [0.3]]] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_cell_has_its_setting(theory, rule, name):
    """The last axis runs fastest, and keywords come after axes."""
    (models, question, *axes, numbers), names, alpha, where = LAYOUTS[name]
    theory(toy())
    table = ta.sweep(question, models, *axes, nodes=rule, **numbers)
    assert table.names == tuple(names.split()) and np.all(table.found)
    assert table.question == numbers.get("event", "semantic")
    np.testing.assert_allclose(table.alpha, np.broadcast_to(alpha, table.shape), rtol=1e-6)
    if question is ta.solve:
        np.testing.assert_allclose(table.values("train_loss"), np.broadcast_to(alpha + where, table.shape), rtol=1e-12)
        models_of = table.values(lambda point: point.model.sigma), table.values(lambda point: point.model.omega)
        np.testing.assert_allclose(2 * models_of[0] + models_of[1], np.broadcast_to(where, table.shape), rtol=1e-12)
    elif len(table.names) == 1:
        np.testing.assert_allclose(table.slope, 2.0, rtol=1e-6)
        assert table.exact.all()


class Broken(Toy):
    def state(self, lane):
        if round(float(lane.setting.model.sigma), 6) in self.bad:
            raise ZeroDivisionError("of the loss")
        return super().state(lane)


def test_a_setting_that_fails_leaves_the_others(theory, model, rule):
    """It says why. If all of them fail, the first exception is raised, with the name of its setting."""
    known, sigmas, calls = toy(Broken), [0.3, 0.4, 0.5], []
    theory(known)
    known.bad = {0.4}
    options = {"alpha": 2.0, "nodes": rule, "progress": lambda *c: calls.append(c)}
    result = ta.sweep(ta.solve, model, branch="semantic", sigma=sigmas, **options)
    assert calls == [(k, 3) for k in range(4)]
    assert result.failures == ("sigma = 0.4: ZeroDivisionError: of the loss",)
    assert result.found.tolist() == [True, False, True] and result.at.tolist() == sigmas
    np.testing.assert_allclose([float(p.model.sigma) for p in result.points], [0.3, 0.5])
    assert result.status_name == ["converged", "failed", "converged"]
    for name in ("train_loss", "q", "replicon", lambda p: p.residual):
        np.testing.assert_array_equal(np.isnan(result.values(name)), [False, True, False])
    assert np.isnan(result.stderr("q")).tolist() == [False, True, False]
    row = result.table()[1]
    assert row["reason"] == "ZeroDivisionError: of the loss" and row["exists"] is False and np.isnan(row["q_1"])
    assert len(result.plot().axes) == 3
    assert "failed at 1, the first: sigma = 0.4: ZeroDivisionError: of the loss" in result.summary()
    event = ta.sweep(ta.find_event, model, event="semantic instability", sigma=[*sigmas, 0.6], nodes=rule)
    np.testing.assert_allclose(event.alpha, [0.9, np.nan, 1.3, np.nan], rtol=1e-6)
    np.testing.assert_allclose(event.exact, np.isfinite(event.alpha))
    reasons = "ZeroDivisionError: of the loss", "event must happen, there is none for alpha from 0.05 to 3"
    assert event.reason.tolist() == ["", reasons[0], "", reasons[1]]
    assert event.status_name == ["converged", "failed", "converged", "absent"]
    known.bad |= {0.3, 0.5}
    with pytest.raises(ZeroDivisionError, match="of the loss") as raised:
        ta.sweep(ta.solve, model, branch="semantic", sigma=sigmas, alpha=2.0, nodes=rule)
    assert raised.value.__notes__ == ["This happened at sigma = 0.3."]


def test_a_question_of_the_callers_own():
    """A function of a model, or also of alpha, that returns a number or a result with `numbers()`."""

    def own(model, alpha, shift=0.0):
        return alpha + model.sigma + shift

    table = ta.sweep(own, ta.DotProduct(), alpha=[1.0, 2.0], sigma=[0.4, 0.5], shift=10.0)
    np.testing.assert_allclose(table.values(), [[11.4, 11.5], [12.4, 12.5]])
    assert table.question == "value" and np.isnan(table.stderr()).all() and table.found.all()
    row = table.table()[0]
    assert (row["alpha"], row["sigma"], row["status"]) == (1.0, 0.4, "converged") and row["value"] == 11.4

    class Numbers:
        def __init__(self, sigma):
            self.sigma = sigma

        def numbers(self):
            return {"double": (2 * self.sigma, 0.1), "word": ("small" if self.sigma < 0.45 else "large", None)}

    table = ta.sweep(lambda model: Numbers(float(model.sigma)), ta.DotProduct(), sigma=[0.4, 0.5])
    np.testing.assert_allclose(table.values(), [0.8, 1.0])
    assert table.stderr().tolist() == [0.1, 0.1] and table.values("word").tolist() == ["small", "large"]
    assert table.question == "<lambda>" and table.ok.all()
    half = ta.sweep(lambda model: 1.0 if model.sigma < 0.45 else np.nan, ta.DotProduct(), sigma=[0.4, 0.5])
    assert half.found.tolist() == [True, False] and half.status_name == ["converged", "nonfinite"]
    with pytest.raises(ta.InputError, match="question must return one number, or a result with a method"):
        ta.sweep(lambda model: "text", ta.DotProduct(), sigma=[0.4])


def test_a_branch_is_followed_through_another_number(theory, model, rule):
    """Every state is that of a solve, and a branch that is lost on the way is looked for again."""
    theory(toy())
    options = {"sigma": [0.5, 0.55, 0.57], "alpha": 2.0, "nodes": rule}
    followed = ta.sweep(ta.solve, model, follow=True, **options)
    np.testing.assert_allclose(followed.values("train_loss"), ta.sweep(ta.solve, model, **options).values("train_loss"))
    assert followed.question == "semantic" and followed.at.tolist() == options["sigma"] and followed.found.all()


@pytest.mark.full
def test_states_of_a_sweep_have_the_derivatives_of_solve():
    nodes = ta.Sobol(2**6, replicates=1)

    def swept(sigma):
        return ta.sweep(ta.solve, ta.DotProduct(sigma=sigma), alpha=[2.0], nodes=nodes).cells[0].train_loss

    slope = jax.grad(lambda sigma: ta.solve(ta.DotProduct(sigma=sigma), 2.0, "semantic", nodes).train_loss)(0.5)
    np.testing.assert_allclose(jax.grad(swept)(0.5), slope, rtol=1e-12)
