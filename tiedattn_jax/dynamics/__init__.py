"""Learning dynamics: how the overlaps of a student move while it learns, in the limit of high dimension.

flow    the equations: drift and noise of the overlaps, as gradients of the test error
sgd     one-pass stochastic gradient descent: integration, `sgd`, and its result
"""
