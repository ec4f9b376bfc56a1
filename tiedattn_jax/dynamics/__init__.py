"""Learning dynamics in closed form, in the limit of high dimension.

flow          the equations of stochastic gradient descent: drift and noise, as gradients of the test error
sgd           one-pass stochastic gradient descent: a student in time, and the times of events
emergence     fluctuations of a start without overlaps, and which mechanism emerges from them
small_start   full-batch gradient descent from a small start: which mechanism grows first, and from which alpha on
population    minima of the population risk, where training ends with endless data
landscape     the population risk as a whole: the global minimum, and where descent begins
"""
