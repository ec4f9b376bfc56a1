"""Simulations at finite size.

data               sentences of finite dimension
products           products of the data with matrices of few columns
dice               products with Gaussian matrices that are never stored
on_demand          sentences drawn while a run asks for their products
diagnosis          what of the law of a model sentences fulfil
estimate           estimates of the student, and whether data fit a model
starts             starts of message passing and training
sampling           sentences drawn from a model
evaluation         losses, held-out errors, the linear baseline
message_passing    GAMP
posterior_mean     message passing of the Bayes-optimal learner
training           gradient descent, Adam, L-BFGS
value              training with a value matrix
instances          several instances, compared with the theory
"""
