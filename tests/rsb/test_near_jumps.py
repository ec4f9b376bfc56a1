"""Quadrature nodes on a line that are dense near the jumps."""

import numpy as np
import pytest
from cases import CASES, state
from scipy.stats import norm

from tiedattn_jax.rsb.potentials import lay_nodes, nodes_on_line


@pytest.mark.parametrize("jumps", [[], [0.4], [-1.0, 0.2], [5.9], [8.0]])
def test_a_line_integrates_the_gaussian(jumps):
    nodes, weights = nodes_on_line(np.asarray(jumps), -6.0, 6.5, 0.1)
    density = np.exp(-0.5 * nodes**2) / (2 * np.pi) ** 0.5
    moments = [np.sum(weights * density * nodes**k) for k in range(5)]
    np.testing.assert_allclose(moments, [1, 0, 1, 0, 3], atol=2e-6)
    inside = [j for j in jumps if j < 6.5]
    assert all(np.sum(np.abs(nodes - j) < 0.6) >= 18 for j in inside if j < 5)
    broken = np.sum(weights * density * np.abs(nodes - 0.4))  # exact, because the kink is an end of pieces
    if jumps == [0.4]:
        np.testing.assert_allclose(broken, 2 * norm.pdf(0.4) + 0.4 * (2 * norm.cdf(0.4) - 1), atol=1e-6)


@pytest.mark.parametrize("place", [-1.9, -0.3, 0.9, 2.2])
def test_what_changes_within_a_third_of_a_deviation_is_resolved_everywhere(place):
    """Nodes resolve a width of .33 on lines without jumps: beyond the end of a jump the minimiser is still steep."""
    nodes, weights = nodes_on_line(np.empty(0), -6.0, 6.5, 0.1)
    np.testing.assert_allclose(weights @ norm.pdf(nodes, place, 0.33), 1.0, atol=1e-3)


@pytest.mark.long
def test_laid_nodes_have_the_law(model, lines):
    nodes = lay_nodes(model, state(CASES[1]), lines.replicate(0), 0.17)
    fields = np.concatenate([nodes.student, nodes.teacher])[:, 0]
    np.testing.assert_allclose(nodes.weight.sum(), 1.0, atol=1e-12)
    np.testing.assert_allclose(fields @ nodes.weight, 0, atol=0.02)
    np.testing.assert_allclose((fields * nodes.weight) @ fields.T, np.eye(4), atol=0.02)
