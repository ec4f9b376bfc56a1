"""Labels with noise: the theory against message passing and training."""

import numpy as np
import pytest
from channels import Noisy, Sampled, model_of
from simulated import assert_agrees

import tiedattn_jax as ta

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "alpha"), [(Noisy, {}, 3.0), (Sampled, {"omega": 0.1, "teacher": 4.0, "lam": 0.3}, 10.0)]
)
def test_theory_agrees_with_training_and_message_passing(kind, options, alpha):
    model = model_of(kind, **options)
    runs = None, lambda data, key: ta.gamp(model, data, "semantic", tol=1e-9)
    nodes = ta.Sobol(2**13).rule(model)
    results = [assert_agrees(model, 300, alpha, "semantic", nodes, run, bars=0.06, but=()) for run in runs]
    np.testing.assert_allclose(*(result.values("train_loss") for result in results), rtol=1e-3)
