import numpy as np
import pytest

import tiedattn_jax as ta


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, [0.6, 0.7, 0.8, 1.1, 2.0], "semantic", lines)


def test_curve(curve, model, lines):
    np.testing.assert_allclose(curve.alphas, [0.7, 0.8, 1.1, 2.0])  # the end is met at .7, and nothing sought below
    np.testing.assert_array_equal(curve.exists, [False, True, True, True])
    assert int(curve.points[0].status) == ta.Status.absent
    assert np.all(np.diff(curve.values(lambda p: p.train_loss)[1:]) > 0)
    direct = ta.solve(model, 2.0, "semantic", lines)
    np.testing.assert_allclose(curve.points[-1].overlaps.q, direct.overlaps.q, rtol=1e-4)


def test_how_the_semantic_branch_ends(curve, lines):
    """Unstable towards m below about .827, pitchfork at .716(5)."""
    ends = {e.kind: e for e in ta.spinodals(curve, lines)}
    fork, loss = ends["pitchfork"], ends["instability"]
    assert (fork.direction, loss.direction) == ("theta", "m")
    assert abs(fork.alpha - 0.716) <= 3 * fork.stderr + 0.005 and fork.stderr < 0.05
    assert abs(loss.alpha - 0.827) <= 3 * loss.stderr + 0.005 and loss.stderr < 0.05


def test_bad_alphas(model, nodes):
    for bad in ([], [1.0, -1.0], [np.nan]):
        with pytest.raises(ValueError, match="alphas"):
            ta.sweep(model, bad, "semantic", nodes)
    with pytest.raises(ValueError, match="branch"):
        ta.sweep(model, [1.0], "lexical", nodes)
