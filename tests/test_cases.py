"""The reference states obey relations that hold at any fixed point of this model."""

import pytest
from cases import CASES

S2, LAM = 0.25, 0.01


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.branch} {c.alpha}")
def test_isotropic_relations(case):
    # V = s2 / (lam + s2 Vhat) gives Vhat; then q = s2 (qhat s2 + m-part + theta-part), in which all parts are positive.
    lam_total = S2 / case.V
    assert lam_total > 0.9 * LAM
    remainder = case.q - case.theta**2 / S2 - S2 * case.m**2
    assert remainder > 0
    assert case.m == 0 or case.theta == 0
    assert 0 < case.train_loss < 0.01 and 0 < case.gen_error < 0.01
