"""Learning dynamics in closed form, in the limit of high dimension.

flow          the equations of stochastic gradient descent: drift and noise, as gradients of the test error
crossings     times of events in an integrated flow
sgd           one-pass stochastic gradient descent: a student in time, and the times of events
emergence     fluctuations of a start without overlaps, and which mechanism emerges from them
small_start   full-batch gradient descent from a small start: which mechanism grows first, and from which alpha on
population    minima of the population risk, where training ends with endless data
landscape     the population risk as a whole: the global minimum, and where descent begins
"""

from .emergence import emergence as emergence
from .landscape import landscape as landscape
from .population import population as population
from .sgd import sgd as sgd
from .small_start import separation as separation, small_start as small_start
