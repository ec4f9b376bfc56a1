"""The Bayes-optimal learner: the smallest error that any learner can reach.

The structure is that of `theory`: two scalar potentials, whose gradients are the equations. Minus the log evidence of a
label takes the place of the Moreau envelope, and the Gaussian prior of the teacher that of the ridge.

channel        what one label tells of the teacher, and the two scalars that everything follows from
fixed_points   `solve`, and its result
thresholds     weak and perfect recovery, and the theory of the spectral start

The learner on data, `posterior_mean` and `spectral_direction`, is in the room `finite`, which imports this one.
"""

from ..finite.message_passing import posterior_mean as posterior_mean
from ..finite.sampling import spectral_direction as spectral_direction
from ..model.model import Preimages as Preimages, orbit as orbit
from .fixed_points import solve as solve
from .thresholds import (
    perfect_recovery as perfect_recovery,
    spectral_overlap as spectral_overlap,
    weak_recovery as weak_recovery,
)
