"""Wide layers: query-key matrices whose rank grows with the dimension.

resolvents     resolvents of Gaussian factors
laws           laws of the teacher's eigenvalues and singular values
directions     what the loss sees of the scores
layer          the loss of scores, its numbers and scalings
attention      dot-product attention, tied and untied
spectrum       the free convolution of a law with a semicircle, the prior's potential
channel        averages over the scores: the proximal operator
states         a state and how it prints; the spectrum of the trained matrix
fixed_points   the equations and their fixed points
optimum        the onset of content, thresholds, the optimal learner
finite         sentences of finite dimension, training, message passing
best           the best ridge, the best width
instances      runs on such sentences beside the theory
"""

from .attention import DotProduct as DotProduct, UntiedDotProduct as UntiedDotProduct
from .best import best_ridge as best_ridge
from .finite import (
    gamp as gamp,
    heldout_error as heldout_error,
    sample_data as sample_data,
    train as train,
)
from .fixed_points import solve as solve
from .instances import run_instances as run_instances
from .laws import (
    GaussianFactors as GaussianFactors,
    SpectrumLaw as SpectrumLaw,
    Wishart as Wishart,
    singular_values as singular_values,
)
from .layer import Layer as Layer, UntiedLayer as UntiedLayer
from .optimum import (
    bayes as bayes,
    onset as onset,
    perfect_recovery as perfect_recovery,
    position as position,
    ridge_recovery as ridge_recovery,
)
