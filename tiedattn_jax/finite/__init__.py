"""Simulations at finite size.

data               sentences of finite dimension, stored
products           products of stored sentences with matrices of few columns
on_demand          sentences that are never stored: a run draws the products that it asks for
diagnosis          whether sentences fit a model: errors, and `diagnose`
sampling           sentences drawn from a model, and the starts of runs on them
evaluation         estimates of the student, their losses and test errors; the linear baseline
training           gradient descent, Adam, L-BFGS, with and without a value matrix
channels           the step of message passing, for the risk and for the Bayes-optimal learner
message_passing    the loop of message passing: `gamp` and `posterior_mean`
instances          several instances, compared with the theory
"""

from .diagnosis import diagnose as diagnose
from .evaluation import heldout_error as heldout_error, linear_baseline as linear_baseline
from .sampling import realised as realised
from .training import risk as risk
