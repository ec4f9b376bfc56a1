"""One step of replica symmetry breaking (1RSB) at zero temperature.

Wherever the proximal operator jumps, the replicon of the replica-symmetric (RS) state is infinite. The minima of the
loss then fall into clusters. q1 is the overlap of two minima of one cluster, and q0 is that of two clusters. The Parisi
parameter s, an inverse energy, weighs the clusters. The loss, as a function of s, is largest at the ground state.

cluster_law     the law of the fields within a cluster, and the weight of a sheet of minimisers
clusters        the search for the jumps within a cluster, and the average over its minima
potentials      the two potentials that everything follows from, and the fields that they average over
newton          Newton's method for their equations
fixed_points    `solve`, and its result
transitions     `transition`: the shift of transitions by replica symmetry breaking
"""

from .fixed_points import solve as solve
from .transitions import transition as transition
