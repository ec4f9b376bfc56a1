"""A state prints itself, with error bars and statuses, and keeps its replicates and lanes apart."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.theory.states import states_table

SCATTER = (-1e-4, 1e-4, -1e-4, 1e-4)


def test_a_fixed_point(capsys):
    point = made.fixed_point(scatter=SCATTER, replicon=[0.25] * 4, residual=[1e-6, 2e-6, 1e-6, 1e-6])
    line = repr(point)
    assert line.startswith("FixedPoint(semantic branch at alpha = 2; q=0.114817, V=12.6685, theta=0.158158(15), m=0, ")
    assert line.endswith("converged, residual 2.0e-06)") and "\n" not in line
    print(point)
    page, html = capsys.readouterr().out, point._repr_html_()
    assert page == point.summary() + "\n" and page.startswith("semantic branch at alpha = 2: converged")
    for words in ("0.158158(15)  ", "test error of the best linear", "below 1: stable\n", "response of the student"):
        assert words in page
    for words in ("jumps matter", "formally infinite", "unresolved", "six digits"):
        assert words not in page
    assert "<td style='text-align:left'>0.158158(15)</td>" in html and "FixedPoint" in html
    jumps = made.fixed_point(jump_mass=[0.5] * 4, unresolved=[1e-3] * 4).summary()
    for words in ("formally infinite", "jumps matter", "50.0%", "0.1%        of the nodes (Sobol"):
        assert words in jumps
    for share, mass in (([0.1, 0.2, 0.1, 0.2], "15.0(48)%"), ([-0.15] * 4, "15.0%"), ([1.0] * 4, "100.0%")):
        page = made.fixed_point(jump_mass=share).summary()
        assert mass in page and "of Vhat, the share of the jumps" in page
    assert "whose rest is negative" in made.fixed_point(jump_mass=[1.4] * 4).summary()
    assert "absent; the overlaps are those of the state in which" in made.fixed_point(status=[6] * 4).summary()
    single = eqx.tree_at(lambda p: p.model.lam, point, point.model.lam.astype(jnp.float32))
    assert "about six digits" in single.summary()


class WithoutTarget(ta.DotProduct):
    target = ta.Model.target


def test_a_state_of_a_model_without_a_target():
    point = dataclasses.replace(made.fixed_point(), model=WithoutTarget())
    assert "replicon" in str(point) and "linear attention" not in str(point)
    assert repr(point).startswith("FixedPoint(semantic branch at alpha = 2;")


def test_a_state_of_no_branch_says_what_it_is():
    """Its order parameters were all free, and it may follow some of the teacher's directions alone."""
    point = made.fixed_point()
    free = ta.results.FixedPoint(point.model, point.alpha, point.replicates, None)
    assert repr(free).startswith("FixedPoint(semantic state at alpha = 2; q=")
    model = ta.DotProduct(rank=2, teacher=np.eye(2))
    for theta in (np.diag([0.1, 0.0]), np.diag([0.1, 0.05])):
        pairs = [jnp.broadcast_to(a, (4, 2, 2, 2)) for a in (0.2 * np.eye(2), np.eye(2), theta)]
        replicates = eqx.tree_at(lambda s: s.overlaps, point.replicates, ta.Overlaps(*pairs, jnp.zeros((4, 2, 2))))
        several = ta.results.FixedPoint(model, point.alpha, replicates, None)
        directions = np.count_nonzero(theta)
        title = f"semantic state at alpha = 2, along {directions} of 2 directions of the teacher: converged"
        assert several.summary().startswith(title)


def test_an_absent_branch_has_no_losses():
    """Losses are NaN if no replicate has the branch; their derivatives are zero, so that other lanes keep theirs."""
    absent, partly = made.fixed_point(status=[6] * 4), made.fixed_point(status=[6, 0, 0, 0], scatter=SCATTER)
    for losses in (absent, absent.stderr):
        assert np.isnan(losses.train_loss) and np.isnan(losses.gen_error)
    assert absent.q == made.fixed_point().q and np.isfinite([partly.train_loss, partly.stderr.gen_error]).all()

    def total(factor):
        points = (eqx.tree_at(lambda p: p.replicates.train_loss, p, factor * p.replicates.train_loss) for p in both)
        return sum(jnp.where(p.ok, p.train_loss, 0.0) for p in points)

    both = absent, made.fixed_point()
    np.testing.assert_allclose(jax.grad(total)(1.0), CASES[0].train_loss)


def test_numbers_of_a_fixed_point_for_json():
    point = made.fixed_point(CASES[1], scatter=SCATTER, residual=[0.0, 2e-3, 0.0, 0.0], status=[0, 1, 0, 0])
    numbers = json.loads(json.dumps(point.to_dict()))
    assert (numbers["alpha"], numbers["omega"], numbers["lam"], numbers["branch"]) == (2.0, 0.3, 0.01, "positional")
    assert numbers["q"] == CASES[1].q and numbers["m"] == pytest.approx(CASES[1].m)  # m of the first token
    assert numbers["stderr"]["m"] == pytest.approx(float(point.stderr.overlaps.m[0, 0])) != 0
    # The report has the worst of the replicates, not their mean.
    assert numbers["residual"] == 2e-3 and numbers["status"] == "stalled at the accuracy of the averages"
    assert "residual" not in numbers["stderr"] and "status" not in numbers["stderr"]
    assert numbers["affected_by_jumps"] == []
    assert "replicon" in made.fixed_point(jump_mass=[0.5] * 4).to_dict()["affected_by_jumps"]


def test_scalars_of_two_tokens():
    point = made.fixed_point(CASES[1])
    assert (float(point.q), float(point.V), float(point.m)) == (CASES[1].q, CASES[1].V, CASES[1].m)
    assert point.theta == 0 and point.status_name == "converged"
    batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), point)
    np.testing.assert_allclose([batch.m, batch.q], np.outer([CASES[1].m, CASES[1].q], [1, 2]))
    three_tokens = jax.tree.map(lambda a: jnp.concatenate([a, a[:, :1]], 1), point.replicates.overlaps)
    three_tokens = eqx.tree_at(lambda p: p.replicates.overlaps, point, three_tokens)
    with pytest.raises(ta.InputError, match=r"two tokens and rank one for the number q, got q of shape \(3, 1, 1\)"):
        _ = three_tokens.q


def test_a_state_is_stable_if_what_is_zero_does_not_grow():
    """Only the growth of the order parameter that a state lacks counts; one that is not a number is no proof."""
    for case, own, other in ((CASES[0], "theta", "m"), (CASES[1], "m", "theta")):
        assert case.branch == {"theta": "semantic", "m": "positional"}[own]
        growth = {f"growth_{own}": [1.5] * 4, f"growth_{other}": [0.5] * 4}
        assert made.fixed_point(case, **growth).stable
        assert not made.fixed_point(case, **growth | {f"growth_{other}": [1.5] * 4}).stable
        assert not made.fixed_point(case, **growth | {f"growth_{other}": [np.nan] * 4}).stable
        assert not made.fixed_point(case, **growth, status=[6] * 4).stable
        batch = jax.tree.map(lambda a: jnp.stack([a, a]), made.fixed_point(case, **growth))
        assert batch.stable.tolist() == [True, True]
        for rate in (0.5, 1.5):  # without a branch the overlap that is zero counts
            found = made.fixed_point(case, **growth | {f"growth_{other}": [rate] * 4})
            assert ta.results.FixedPoint(found.model, found.alpha, found.replicates, None).stable == (rate < 1)


def test_weights_are_seen_by_other_models():
    """The overlaps of given weights with smaller tokens and a larger teacher, by their definitions."""
    rng, d, sigma, other, size = np.random.default_rng(0), 50, 0.5, 0.4, 1.5
    Q, Q_star = rng.standard_normal((2, d, 1))

    def overlaps(sigma, teacher):
        q, theta = (np.tile(sigma**2 * Q.T @ a / d, (2, 1, 1)) for a in (Q, teacher))
        return q, theta

    q, theta = overlaps(sigma, Q_star)
    x = ta.Overlaps(jnp.asarray(q), jnp.ones((2, 1, 1)), jnp.asarray(theta), jnp.ones((2, 1)))
    point = made.fixed_point()
    replicates = jax.tree.map(lambda a: jnp.stack([a] * 4), x)
    point = eqx.tree_at(lambda p: p.replicates.overlaps, point, replicates)
    seen = point.seen_by(ta.DotProduct(sigma=other, teacher=size))
    for found, expected in zip((seen.q, seen.theta), overlaps(other, size**0.5 * Q_star), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_array_equal(seen.m, x.m)
    assert point.seen_by(ta.DotProduct(rank=2)).q.shape == (2, 1, 1)  # not of the shape that `solve` needs


def test_a_batch_keeps_its_lanes_apart():
    first, second = made.fixed_point(scatter=SCATTER), made.fixed_point(CASES[1], status=[0, 0, 0, 1])
    renamed = ta.results.FixedPoint(second.model, second.alpha, second.replicates, first.branch)
    batch = jax.tree.map(lambda *a: jnp.stack(a), first, renamed)
    for lane, point in enumerate((first, second)):
        for name in ("mean", "stderr"):
            of_lane = jax.tree.map(lambda a, lane=lane: a[lane], getattr(batch, name))
            jax.tree.map(np.testing.assert_array_equal, of_lane, getattr(point, name))
        assert batch.status[lane] == point.status and batch.residual[lane] == point.residual
    assert batch.status_name == ["converged", "stalled at the accuracy of the averages"]
    assert batch.exists.tolist() == [True, True]


NUMBERS = {
    "replicon": [0.25, 0.35, 0.25, 0.35], "residual": [1e-6, 2e-6, 1e-6, 1e-6], "rs_error": [1e-7, 3e-7, 1e-7, 3e-7],
    "second_minimum": [0.0123] * 4, "unresolved": [6e-4] * 4, "jump_mass": [0.1, 0.12, 0.1, 0.12],
    "gen_error_linear": [0.25, 0.26, 0.25, 0.26], "growth_m": [1.5] * 4, "growth_theta": [0.5] * 4,
}  # fmt: skip
PAGE = """\
positional branch at alpha = 2: converged, residual 2.0e-06
  q                 0.0510709       overlap of the student with itself
  V                 11.3688         response of the student
  theta             0               semantic overlap, with the teacher
  m                 0.258229(25)    positional overlap, with the encodings
  train_loss        0.00451276(43)  training loss / d
  gen_error         0.00347304(33)  test error
  gen_error_linear  0.2550(48)      test error of the best linear attention
  replicon          0.300(48)       below 1: stable; formally infinite with the jumps
  jump mass         11.00(95)%      of Vhat, the share of the jumps of the proximal operator
  rs_error          2.00(95)e-7     estimated rise by replica symmetry breaking: add it to train_loss
  second minimum    1.23%           of the nodes have one
  jumps matter                      derivatives and spinodals contain them, the replicon does not
  unresolved        0.1%            of the nodes (Sobol points resolve more than lines)"""
CALM = """\
semantic branch at alpha = 2: converged, residual 0.0e+00
  q                 0.114817    overlap of the student with itself
  V                 12.6685     response of the student
  theta             0.158158    semantic overlap, with the teacher
  m                 0           positional overlap, with the encodings
  train_loss        0.00359062  training loss / d
  gen_error         0.00140421  test error
  gen_error_linear  0           test error of the best linear attention
  replicon          0           below 1: stable
  jump mass         0.0%        of Vhat, the share of the jumps of the proximal operator
  rs_error          0           estimated rise by replica symmetry breaking: add it to train_loss
  second minimum    0.00%       of the nodes have one"""


def test_the_page_of_a_state():
    point, calm = made.fixed_point(CASES[1], scatter=SCATTER, **NUMBERS), made.fixed_point(rs_error=[0.9e-12] * 4)
    assert point.summary() == PAGE and calm.summary() == CALM
    assert "rs_error" not in made.fixed_point(rs_error=[np.nan] * 4).summary()
    assert "unresolved" not in made.fixed_point(unresolved=[4.9e-4] * 4).summary()
    header = ("q", "V", "theta", "m", "train_loss", "gen_error", "replicon", "jump mass", "status")
    rows = states_table([point, calm], "branch")
    assert rows[0] == ("branch", *header) and len(rows) == 3
    assert rows[1][0] == "positional" and rows[1][4:] == (
        "0.258229(25)", "0.00451276(43)", "0.00347304(33)", "0.300(48)", "11.00(95)%", "converged",
    )  # fmt: skip
    placed = states_table([point, calm], "sigma", [0.5, 0.25])
    assert [row[0] for row in placed] == ["sigma", "0.5", "0.25"] and placed[2][1:] == rows[2][1:]
    free = ta.results.FixedPoint(calm.model, calm.alpha, calm.replicates, None)
    assert states_table([free], "branch")[1][0] == "semantic"


def test_replicates_print_their_shapes_and_one_replicate_its_numbers():
    """The arrays of several replicates are a batch."""
    point = made.fixed_point(CASES[1], **NUMBERS)
    first = jax.tree.map(lambda a: a[0], point.replicates)
    assert "train_loss=f64[4]" in str(point.replicates) == point.replicates.summary()
    assert point.replicates._repr_html_() and "train_loss=f64[4]" in repr(point.replicates)
    rows = {words[0]: words[1] for words in map(str.split, first.summary().splitlines()[1:])}
    assert (rows["m"], rows["status"], rows["replicon"], rows["residual"]) == ("0.258229", "0", "0.25", "1e-06")
    slopes = eqx.tree_at(lambda s: s.train_loss_partials[1], point.replicates, jnp.arange(4.0))
    np.testing.assert_array_equal(slopes.numbers()["train_loss_by_alpha"], np.arange(4.0))


@pytest.mark.parametrize(
    ("mass", "jumps"),
    [
        ([0.0011] * 4, True),
        ([0.0009] * 4, False),
        ([-0.0011] * 4, True),
        ([0.1, 0.3, 0.1, 0.3], False),  # 2.1 error bars
        ([0.11, 0.3, 0.2, 0.2], True),  # 3.1
        ([0.09, 0.31, 0.2, 0.2], False),  # 2.7
        ([0.01], True),  # one replicate has no error bar
    ],
)
def test_jumps_that_matter_exceed_three_error_bars(mass, jumps):
    point = made.fixed_point(scatter=(0.0,) * len(mass), jump_mass=mass)
    bar = float(point.stderr.diagnostics.jump_mass)
    assert bool(point.jumps) == jumps, float(point.diagnostics.jump_mass) / bar


@pytest.mark.parametrize(
    ("status", "residual", "settled", "worst", "exists"),
    [
        ([0, 0, 1, 0], 0.0, 1, 1, True),
        ([0, 0, 0, 6], 0.0, 1, 6, True),  # its nodes decide
        ([0, 2, 0, 6], 1e-3, 2, 6, True),
        ([0, 6, 6, 6], 0.0, 6, 6, False),
    ],
)
def test_the_status_of_what_a_state_defines(status, residual, settled, worst, exists):
    point = made.fixed_point(status=status, residual=[residual] * 4)
    found = int(point.settled_status), bool(point.exists)
    assert found == (settled, exists)
    batch = jax.tree.map(lambda a: jnp.stack([a, a]), point)
    assert batch.settled_status.tolist() == [settled] * 2 and batch.residual.tolist() == [residual] * 2


def test_a_state_is_not_stable_where_a_rate_is_one():
    for case, rate in ((CASES[0], "growth_m"), (CASES[1], "growth_theta")):
        assert [bool(made.fixed_point(case, **{rate: [r] * 4}).stable) for r in (1.0, 1.5, 0.99)] == [
            False,
            False,
            True,
        ]


def test_the_response_has_the_size_of_the_tokens(model):
    """V and q are of second order in the tokens, theta of first order in tokens and teacher."""
    point = made.fixed_point()
    seen = point.seen_by(ta.DotProduct(sigma=0.25, teacher=4.0))
    for name, factor in (("q", 0.25), ("V", 0.25), ("theta", 0.5 * 0.5 * 2.0), ("m", 1.0)):
        np.testing.assert_allclose(getattr(seen, name), factor * getattr(point.overlaps, name), rtol=1e-12)
