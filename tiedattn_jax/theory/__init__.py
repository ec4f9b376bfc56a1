"""The theory at one setting.

potentials         the two scalars that everything follows from
weights            the fields that one weight feels, and averages over them with a penalty
state_evolution    the saddle-point equations as their gradients: a map of the overlaps, and its Jacobian
newton             fixed points of the map
implicit           their derivatives
observables        what a state predicts
fixed_points       `solve`, and its result
multistart         all states that there are
rsb/               states with one step of replica symmetry breaking
"""
