"""The theory at one setting.

potentials         the two scalar potentials, from which all else follows, and averages over the fields of one weight
equations          the saddle-point equations as a map of the overlaps, its searches, and its derivatives
newton             one step towards a fixed point of the map
setting            a branch at one setting, and the lanes of its root searches
paths              paths, what they ask for, and the scheduler that hands it out
engine             the pool that runs paths: in threads on a CPU, in slots on accelerators
observables        the predictions of a state, and the elevation by replica symmetry breaking
states             the results `State` and `FixedPoint`
solve              `solve`
multistart         `find_states`: all states at one setting
state_evolution    order parameters of every iteration of message passing
quantities         a number with its error bar and derivatives, and thresholds

Words of this room:

- A replicate is an independent copy of the averages; the scatter of the replicates gives the error bars.
- The coarse replicate has the fewest nodes. A search from a far start begins on it, the others start where it ends.
- A lane is one root search: one setting, one branch, one replicate, one start. It ends with a `State` of it.
- A path is a generator that yields lanes and other paths, and is sent their results; `solve` runs one, `sweep` many.
- The pool runs the lanes of many paths at once, so that no lane waits for the slowest.
- A slot is the place of a lane in one batched call on an accelerator; a waiting lane takes the slot of one that ended.
- An answer is what Newton's method asks for at one place: the map, its Jacobian, and the sums of an evaluation.
- A look is an answer together with the steps that follow from it; a search remembers its current and its best look.
"""
