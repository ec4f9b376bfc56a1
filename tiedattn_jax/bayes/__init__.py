"""The Bayes-optimal learner: the smallest error that any learner can reach.

The structure is that of `theory`: two scalar potentials, whose gradients are the equations. Minus the log evidence of a
label takes the place of the Moreau envelope, and the Gaussian prior of the teacher that of the ridge.

channel        what one label tells of the teacher, and the two scalars that everything follows from
fixed_points   `bayes`, and its result
thresholds     weak and perfect recovery, and the theory of the spectral start
"""
