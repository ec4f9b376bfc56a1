"""Numbers do not depend on units, nor on how a setting is written; see `asked`. Dear questions and twins are full."""

import asked
import pytest
import twins

DEAR = {"train, Adam", "train, a value matrix", "gamp, penalty", "run_instances"}
QUICK = {"spectral_direction", "risk", "diagnose", "linear_baseline", "realised"}  # also with other programs
CASES = [
    pytest.param(name, twin, marks=[pytest.mark.full] * (name in DEAR or (setting.recompiled and name not in QUICK)))
    for name, question in asked.FINITE.items()
    for twin, setting in question.twins.items()
    if twin and twin not in question.without
]


@pytest.mark.parametrize(("name", "twin"), CASES)
def test_twins(name, twin):
    twins.check(name, asked.FINITE[name], twin)
