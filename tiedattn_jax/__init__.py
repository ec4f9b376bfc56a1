"""Theory of positional and semantic learning in tied attention, on JAX.

A model is a loss of the local fields and a law of the data. Fixed points of state evolution, phase diagrams, message
passing and training follow from it. The public names by task:

    a model         DotProduct, CausalDotProduct, UntiedDotProduct, LinearAttention, ReLUAttention;
                    a subclass of AttentionLayer with `attention`, or of Model with shape, loss and law
    a wide model    WideDotProduct with a Wishart teacher; a subclass of WideLayer with `loss`
    its data        SpectralLaw; TokenClassMixture for correlated tokens; Preimages, orbit for the optimal learner
    its penalty     L1, or a subclass of Penalty with value and prox, besides the ridge
    one state       solve, find_states; Overlaps as a start; state_evolution: message passing in time
    averages        nodes=Lines(9), Sobol(2**16), GaussHermite(12), MonteCarlo(2**16), or a number of nodes
    transitions     critical_alpha, linear_crossing, branch_ends, find_event, EVENTS, threshold
    best ridge      best_ridge, for the ridge or another number of the model
    many settings   sweep(model, question, alpha=values, ...), Axis, phase_diagram, trace_branch
    replica symmetry breaking       solve_1rsb, transition_1rsb
    optimal learner                 bayes, posterior_mean, spectral_overlap, spectral_direction
    learning dynamics               sgd, emergence, small_start, population, landscape
    finite size     sample_data, Data, diagnose, realised, gamp, train, risk, run_instances, heldout_error,
                    linear_baseline
    counting task   histogram
    housekeeping    Settings, Status, InputError, Average, error_bar, check, load, use_compilation_cache;
                    the classes of results are in `tiedattn_jax.results`

Every result prints itself: `print(result)` shows a table with error bars. Most results have `to_dict()`, which is ready
for JSON, `save(path)`, and, if there is a picture, `plot()`. Numbers follow the dtype of their arguments; for double
precision, call ``jax.config.update("jax_enable_x64", True)`` first.
"""

from . import counting as histogram, results as results
from .averages.recipes import (
    GaussHermite as GaussHermite,
    Lines as Lines,
    MonteCarlo as MonteCarlo,
    Sobol as Sobol,
)
from .base import VERSION as _VERSION
from .base.errors import InputError as InputError
from .base.files import load as load
from .base.programs import use_compilation_cache as use_compilation_cache
from .base.results import Average as Average, Settings as Settings, Status as Status, error_bar as error_bar
from .bayes.fixed_points import bayes as bayes
from .bayes.thresholds import spectral_overlap as spectral_overlap
from .dynamics.emergence import emergence as emergence
from .dynamics.landscape import landscape as landscape
from .dynamics.population import population as population
from .dynamics.sgd import sgd as sgd
from .dynamics.small_start import small_start as small_start
from .finite.data import Data as Data
from .finite.diagnosis import diagnose as diagnose
from .finite.evaluation import heldout_error as heldout_error, linear_baseline as linear_baseline
from .finite.instances import run_instances as run_instances
from .finite.message_passing import gamp as gamp, posterior_mean as posterior_mean
from .finite.sampling import (
    realised as realised,
    sample_data as sample_data,
    spectral_direction as spectral_direction,
)
from .finite.training import risk as risk, train as train
from .model.checks import check as check
from .model.law import SpectralLaw as SpectralLaw, TokenClassMixture as TokenClassMixture
from .model.layers import (
    AttentionLayer as AttentionLayer,
    CausalDotProduct as CausalDotProduct,
    DotProduct as DotProduct,
    LinearAttention as LinearAttention,
    ReLUAttention as ReLUAttention,
    UntiedDotProduct as UntiedDotProduct,
)
from .model.model import Model as Model, Preimages as Preimages, orbit as orbit
from .model.overlaps import Overlaps as Overlaps
from .model.parameters import Axis as Axis
from .model.penalties import L1 as L1, Penalty as Penalty
from .phases.arclength import trace_branch as trace_branch
from .phases.best import best_ridge as best_ridge
from .phases.events import EVENTS as EVENTS
from .phases.grid import phase_diagram as phase_diagram
from .phases.sweep import sweep as sweep
from .phases.transitions import (
    branch_ends as branch_ends,
    critical_alpha as critical_alpha,
    find_event as find_event,
    linear_crossing as linear_crossing,
    threshold as threshold,
)
from .rsb.fixed_points import solve_1rsb as solve_1rsb
from .rsb.transitions import transition_1rsb as transition_1rsb
from .theory.multistart import find_states as find_states
from .theory.solve import solve as solve
from .theory.state_evolution import state_evolution as state_evolution
from .wide.layer import WideDotProduct as WideDotProduct, WideLayer as WideLayer
from .wide.spectrum import Wishart as Wishart

__version__ = _VERSION


def __dir__() -> list[str]:
    """Return the public names. The only public modules are `histogram` and `results`."""
    rooms = {k for k, v in globals().items() if isinstance(v, type(histogram))} - {"histogram", "results"}
    return [*sorted(k for k in globals() if k not in rooms and k[0] != "_"), "__doc__", "__version__"]
