"""The theory at one setting.

potentials         the two scalars that everything follows from
weights            the fields that one weight feels, and averages over them with a penalty
equations          the saddle-point equations as their gradients: a map of the overlaps, and its derivatives
newton             one step towards a fixed point of the map
pool               the engine: many root searches at once
observables        what a state predicts
states             states as results
solve              `solve`
multistart         all states that there are
"""
