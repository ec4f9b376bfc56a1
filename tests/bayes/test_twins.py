"""The Bayes-optimal learner does not depend on units, nor on how a law is written."""

import pytest
import twins


@pytest.mark.parametrize("twin", twins.TWINS)
def test_twins(twin):
    twins.check("bayes", twin)
