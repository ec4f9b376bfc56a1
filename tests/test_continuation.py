import jax
import numpy as np
import pytest

import tiedattn_jax as ta


@pytest.fixture(scope="module")
def rule(model):
    return ta.sobol_nodes(model, 2**12, replicates=1)


@pytest.fixture(scope="module")
def path(model, rule):
    (found,) = ta.trace_branch(model, "alpha", (1.2, 2.1), "semantic", nodes=rule, points=12)
    return found


def test_points_are_fixed_points(path, model, rule):
    assert np.all(np.diff(path.values) > 0) and path.folds == () and set(path.labels) == {"semantic"}
    assert path.values[0] < 1.2 and path.values[-1] > 2.1 and set(path.ends) == {"limit of the parameter"}
    assert path.residual.max() < 1e-6
    x = jax.tree.map(lambda a: a[1], path.overlaps)
    fixed = ta.solve(model, path.values[1], "semantic", rule, start=x)
    np.testing.assert_allclose(fixed.overlaps.q, x.q, rtol=1e-4)
    np.testing.assert_allclose(fixed.train_loss, path.train_loss[1], rtol=1e-6)


def test_eigenvalues(path):
    """At alpha = 2 those of q, V and theta that keep the symmetry of the tokens are -.98, .35, .16 for many nodes."""
    k = np.argmin(np.abs(path.values - 2.0))
    real = path.eigenvalues[k].real
    for expected in (-0.98, 0.35, 0.16):
        assert np.min(np.abs(real - expected)) < 0.05


def test_random_starts_find_both_branches(model, rule):
    found = ta.find_states(model, 2.0, rule, count=12)
    assert {"semantic", "positional"} <= {f.label for f in found}
    losses = [float(f.train_loss) for f in found]
    assert losses == sorted(losses) and found[0].label == "semantic"


def test_bad_input(model, rule):
    for arguments, message in (
        (("mixing", (0.0, 1.0)), "parameter must name"),
        (("alpha", (0.1, 1.0)), "limits must be"),
    ):
        with pytest.raises(ValueError, match=message):
            ta.trace_branch(model, *arguments, nodes=rule)
