"""Wide layers: query-key matrices whose rank grows with the dimension.

layer     the loss of symmetric scores, its numbers and scalings
spectrum  laws of the teacher's eigenvalues, the free convolution with a semicircle, the prior's potential
channel   averages over the scores: the proximal operator
solve     the equations and their fixed points; the spectrum of the trained matrix
optimum   the onset of content, thresholds, the optimal learner
finite    sentences of finite dimension, training, message passing
tables    sweeps and diagrams over numbers of the layer, runs beside the theory

The public functions `solve`, `critical_alpha`, `threshold`, `bayes`, `sweep`, `phase_diagram`, `sample_data`, `train`,
`gamp`, `heldout_error` and `run_instances` take a wide layer; their forms for it are registered here.
"""

from . import finite as finite, optimum as optimum, solve as solve, tables as tables
