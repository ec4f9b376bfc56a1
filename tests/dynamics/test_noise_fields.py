"""Noise on the labels that changes nothing, with rules that are made for it; `test_kinds` asks other questions."""

import jax
import numpy as np
import pytest
from channels import Unheard

import tiedattn_jax as ta

GRID = ta.GaussHermite(5, replicates=1)  # a product rule: averages over the noise change nothing
COLUMNS = {"teacher": [[1.0, 0.3], [0.3, 0.6]], "encodings": [[1.0, 0.0], [-0.8, 0.3]]}


def fluctuations(model):
    nodes = ta.GaussHermite(3, replicates=1)
    return ta.dynamics.emergence(model, 0.5, 1.0, 1.0, nodes=nodes, points=2, steps=1).replicates


@pytest.mark.full
@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (lambda m: ta.bayes.perfect_recovery(m).algorithmic, {}),
        (lambda m: ta.dynamics.landscape(m, size=1.0, nodes=GRID).replicates, {}),
        (fluctuations, COLUMNS),
    ],
    ids=["perfect_recovery", "landscape on a sphere", "emergence, two columns"],
)
def test_noise_that_nobody_hears_changes_nothing(ask, options):
    values, expected = (jax.tree.leaves(ask(kind(**options))) for kind in (Unheard, ta.DotProduct))
    for a, b in zip(values, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
