"""The dynamics do not depend on units, nor on how a law is written."""

import pytest
import twins

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.mark.parametrize("twin", twins.TWINS)
@pytest.mark.parametrize("question", [name for name in twins.QUESTIONS if name != "bayes"])
def test_twins(question, twin):
    twins.check(question, twin)
