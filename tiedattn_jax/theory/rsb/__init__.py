"""One step of replica symmetry breaking (1RSB) at zero temperature.

Wherever the proximal operator jumps the replicon of the replica-symmetric (RS) state is infinite, and the minima fall
into
clusters: q1 is the overlap of two minima of one cluster, q0 that of two clusters, and the Parisi parameter s, an
    inverse
energy, weighs the clusters. The loss is largest, as a function of s, at the ground state.

potentials      the two scalars that everything follows from
nodes           the fields that they are averaged over
newton          Newton's method for their equations
fixed_points    `solve_1rsb`, and its result
"""
