"""The theory at one setting.

potentials         the two scalars that everything follows from
state_evolution    the saddle-point equations as their gradients: a map of the overlaps, and its Jacobian
newton             fixed points of the map
implicit           their derivatives
observables        what a state predicts
fixed_points       `solve`, and its result
multistart         all states that there are
rsb/               states with one step of replica symmetry breaking
"""
