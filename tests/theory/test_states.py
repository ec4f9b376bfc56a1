"""A state prints itself, with error bars and statuses, and keeps its replicates and the entries of a batch apart."""

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


def test_a_fixed_point_in_a_line_and_in_a_notebook(capsys):
    point = made.fixed_point(scatter=SCATTER, replicon=[0.25] * 4, residual=[1e-6, 2e-6, 1e-6, 1e-6])
    line = repr(point)
    assert line.startswith("FixedPoint(semantic branch at alpha = 2; q=0.114817, V=12.6685, theta=0.158158(15), m=0, ")
    assert line.endswith("converged, residual 2.0e-06)") and "\n" not in line
    print(point)
    assert capsys.readouterr().out == point.summary() + "\n"
    html = point._repr_html_()
    assert "<td style='text-align:left'>0.158158(15)</td>" in html and "FixedPoint" in html


PAGES = [
    ({"jump_mass": [0.5] * 4, "unresolved": [1e-3] * 4}, "formally infinite|jumps matter|50.0%|of the nodes (Sobol"),
    ({"jump_mass": [0.1, 0.2, 0.1, 0.2]}, "15.0(48)%|of Vhat, the share of the jumps"),
    ({"jump_mass": [-0.15] * 4}, "15.0%|of Vhat, the share of the jumps"),
    ({"jump_mass": [1.0] * 4}, "100.0%|of Vhat, the share of the jumps"),
    ({"jump_mass": [1.005] * 4}, "whose rest is negative"),
    ({"status": [6] * 4}, "absent; the overlaps are those of the state in which"),
]


@pytest.mark.parametrize(("numbers", "words"), PAGES)
def test_words_on_the_page(numbers, words):
    page = made.fixed_point(**numbers).summary()
    assert all(word in page for word in words.split("|")) and "six digits" not in page


def test_pages_of_other_models():
    """A state in single precision says so, and one of a model without a target has no linear attention beside it."""

    class WithoutTarget(ta.DotProduct):
        target = ta.Model.target

    point = made.fixed_point()
    single = eqx.tree_at(lambda p: p.model.lam, point, point.model.lam.astype(jnp.float32))
    assert "about six digits" in single.summary()
    other = dataclasses.replace(point, model=WithoutTarget())
    assert "replicon" in str(other) and "linear attention" not in str(other)


@pytest.mark.parametrize(("theta", "count"), [(np.diag([0.1, 0.0]), 1), (np.diag([0.1, 0.05]), 2)])
def test_a_state_of_no_branch_says_what_it_is(theta, count):
    """Its order parameters were all free, and it may follow some of the teacher's directions alone."""
    point = made.fixed_point()
    assert repr(dataclasses.replace(point, branch=None)).startswith("FixedPoint(semantic state at alpha = 2; q=")
    pairs = [np.broadcast_to(a, (4, 2, 2, 2)) for a in (0.2 * np.eye(2), np.eye(2), theta)]
    replicates = eqx.tree_at(lambda s: s.overlaps, point.replicates, ta.Overlaps(*pairs, np.zeros((4, 2, 2))))
    several = ta.results.FixedPoint(ta.DotProduct(rank=2, teacher=np.eye(2)), point.alpha, replicates, None)
    title = f"semantic state at alpha = 2, along {count} of 2 directions of the teacher: converged"
    assert several.summary().startswith(title)


def test_an_absent_branch_has_no_losses():
    """Losses are NaN if no replicate has the branch; their derivatives are zero, so that other entries keep theirs."""
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
    batch = jax.tree.map(lambda a: np.stack([a, 2 * a]), point)
    np.testing.assert_allclose([batch.m, batch.q], np.outer([CASES[1].m, CASES[1].q], [1, 2]))
    three_tokens = jax.tree.map(lambda a: jnp.concatenate([a, a[:, :1]], 1), point.replicates.overlaps)
    three_tokens = eqx.tree_at(lambda p: p.replicates.overlaps, point, three_tokens)
    with pytest.raises(ta.InputError, match=r"two tokens and rank one for the number q, got q of shape \(3, 1, 1\)"):
        _ = three_tokens.q


@pytest.mark.parametrize(
    ("case", "own", "other"), [(CASES[0], "growth_theta", "growth_m"), (CASES[1], "growth_m", "growth_theta")]
)
def test_a_state_is_stable_if_what_is_zero_does_not_grow(case, own, other):
    """Only the growth of the order parameter that a state lacks counts; one that is not a number is no proof."""
    for rate, stable in ((0.99, True), (1.0, False), (np.nan, False)):
        found = made.fixed_point(case, **{own: [1.5] * 4, other: [rate] * 4})
        free = dataclasses.replace(found, branch=None)  # the overlap that is zero counts
        batch = jax.tree.map(lambda a: np.stack([a, a]), found)
        assert found.stable == free.stable == stable and batch.stable.tolist() == [stable] * 2
    assert not made.fixed_point(case, **{own: [1.5] * 4, other: [0.5] * 4}, status=[6] * 4).stable


def test_weights_are_seen_by_other_models():
    """The overlaps of given weights with smaller tokens and a larger teacher, by definition; V is of q's order."""
    rng, d, sigma, other, size = np.random.default_rng(0), 50, 0.5, 0.4, 1.5
    Q, Q_star = rng.standard_normal((2, d, 1))

    def overlaps(sigma, teacher):
        return [np.tile(sigma**2 * Q.T @ a / d, (2, 1, 1)) for a in (Q, teacher)]

    q, theta = overlaps(sigma, Q_star)
    x = ta.Overlaps(*map(jnp.asarray, (q, np.ones((2, 1, 1)), theta, np.ones((2, 1)))))
    replicates = jax.tree.map(lambda a: np.stack([a] * 4), x)
    point = eqx.tree_at(lambda p: p.replicates.overlaps, made.fixed_point(), replicates)
    seen = point.seen_by(ta.DotProduct(sigma=other, teacher=size))
    for found, expected in zip((seen.q, seen.theta), overlaps(other, size**0.5 * Q_star), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(seen.V, (other / sigma) ** 2, rtol=1e-12)
    np.testing.assert_array_equal(seen.m, x.m)
    assert point.seen_by(ta.DotProduct(rank=2)).q.shape == (2, 1, 1)  # not of the shape that `solve` needs


def test_a_batch_keeps_its_entries_apart():
    first, second = made.fixed_point(scatter=SCATTER), made.fixed_point(CASES[1], status=[0, 0, 0, 1])
    batch = jax.tree.map(lambda *a: np.stack(a), first, dataclasses.replace(second, branch=first.branch))
    of_batch = batch.to_dict()
    for k, point in enumerate((first, second)):
        for name in ("mean", "stderr", "status", "residual"):
            of_entry = jax.tree.map(lambda a, k=k: a[k], getattr(batch, name))
            jax.tree.map(np.testing.assert_array_equal, of_entry, getattr(point, name))
        numbers = point.to_dict()
        assert of_batch["stderr"]["train_loss"][k] == numbers.pop("stderr")["train_loss"]
        assert {name: of_batch[name][k] for name in numbers} == numbers
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


def test_the_page_of_a_state():
    point, calm = made.fixed_point(CASES[1], scatter=SCATTER, **NUMBERS), made.fixed_point(rs_error=[0.9e-12] * 4)
    assert point.summary() == PAGE
    lines = [" ".join(line.split()) for line in calm.summary().splitlines()]
    assert lines[0] == "semantic branch at alpha = 2: converged, residual 0.0e+00" and len(lines) == 12
    for line in (
        "replicon 0 below 1: stable", "second minimum 0.00% of the nodes have one",
        "rs_error 0 estimated rise by replica symmetry breaking: add it to train_loss",
    ):  # fmt: skip
        assert line in lines
    assert "rs_error" not in made.fixed_point(rs_error=[np.nan] * 4).summary()
    assert "unresolved" not in made.fixed_point(unresolved=[4.9e-4] * 4).summary()


def test_tables_of_states():
    point, calm = made.fixed_point(CASES[1], scatter=SCATTER, **NUMBERS), made.fixed_point()
    header = ("q", "V", "theta", "m", "train_loss", "gen_error", "replicon", "jump mass", "status")
    rows, placed = states_table([point, calm], "branch"), states_table([point, calm], "sigma", [0.5, 0.25])
    assert rows[0] == ("branch", *header) and [row[0] for row in rows[1:]] == ["positional", "semantic"]
    numbers = "0.258229(25)", "0.00451276(43)", "0.00347304(33)", "0.300(48)", "11.00(95)%", "converged"
    assert rows[1][4:] == numbers
    assert [row[0] for row in placed] == ["sigma", "0.5", "0.25"] and placed[2][1:] == rows[2][1:]
    assert states_table([dataclasses.replace(calm, branch=None)], "branch")[1][0] == "semantic"


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


def test_jumps_that_matter():
    """They exceed a thousandth and three error bars, which one replicate does not have; see also `test_relations`."""
    masses = [0.0011] * 4, [0.0009] * 4, [-0.0011] * 4, [0.11, 0.3, 0.2, 0.2], [0.09, 0.31, 0.2, 0.2], [0.01]
    points = [made.fixed_point(scatter=(0.0,) * len(mass), jump_mass=mass) for mass in masses]
    assert [bool(point.jumps) for point in points] == [True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("status", "residual", "settled", "exists"),
    [
        ([0, 0, 1, 0], 0.0, 1, True),
        ([0, 0, 0, 6], 0.0, 1, True),
        ([0, 2, 0, 6], 1e-3, 2, True),
        ([6] * 4, 0.0, 6, False),
    ],
)
def test_the_status_of_what_a_state_defines(status, residual, settled, exists):
    """Replicates without the state do not count as long as some have it."""
    point = made.fixed_point(status=status, residual=[residual] * 4)
    assert (int(point.settled_status), bool(point.exists)) == (settled, exists)
    batch = jax.tree.map(lambda a: np.stack([a, a]), point)
    assert batch.settled_status.tolist() == [settled] * 2 and batch.residual.tolist() == [residual] * 2
