"""The theory at one setting.

potentials         the two scalar potentials, from which all else follows
weights            the fields of one weight, and averages over them with a penalty
equations          the saddle-point equations as a map of the overlaps, and its derivatives
newton             one step towards a fixed point of the map
paths              paths, what they ask for, and the scheduler that hands it out
slots              many searches at once on accelerators
pool               the engine: runs paths, whose searches share one pool
observables        the predictions of a state
elevation          the energy of one step of replica symmetry breaking, estimated
states             the results `State` and `FixedPoint`
solve              `solve`
multistart         `find_states`: all states at one setting
state_evolution    order parameters of every iteration of message passing
quantities         a number with its error bar and derivatives, and thresholds
"""
