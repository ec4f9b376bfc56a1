"""Simulations at finite size.

data               sentences, and estimates on them
sampling           sentences drawn from a model
evaluation         losses, held-out errors, the linear baseline
message_passing    GAMP
training           gradient descent, Adam, L-BFGS
value              training with a value matrix
instances          several instances, compared with the theory
"""
