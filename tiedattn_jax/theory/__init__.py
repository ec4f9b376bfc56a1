"""The theory at one setting.

potentials         the two scalars that everything follows from
state_evolution    the saddle-point equations as their gradients, and derivatives of what they determine
newton             fixed points, with implicit derivatives
observables        what a state predicts
fixed_points       `solve`, and its result
multistart         all states that there are
"""
