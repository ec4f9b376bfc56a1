"""Theory of positional and semantic learning in tied attention, on JAX.

A model is a loss of the local fields and a law of the data. Fixed points of state evolution, phase diagrams, message
passing and training follow from it. The public functions by task:

    a model         dot_product, causal_dot_product, untied_dot_product, linear_attention, relu_attention;
                    a subclass of AttentionLayer with `attention`, or of Model with shape, loss and law
    its data        SpectralLaw; TokenClassMixture for correlated tokens
    its penalty     L1, or a subclass of Penalty with value and prox, besides the ridge
    one state       solve, find_states; results: FixedPoint, Overlaps, Conjugates, Diagnostics
    iterations      state_evolution: message passing in time
    transitions     critical_alpha, linear_crossing, branch_ends, find_event, EVENTS
    best ridge      best_ridge, and sweep(model, "best lam", alpha=values) for many settings
    many settings   sweep, Axis, Table, phase_diagram, trace_branch
    files           result.save(path), load; table(), to_csv, to_xarray of tables and diagrams
    averages        Lines, Sobol, GaussHermite, MonteCarlo
    replica symmetry breaking       solve_1rsb, transition_1rsb
    optimal learner                 bayes, threshold, posterior_mean
                                    Preimages, orbit
    learning dynamics               sgd, emergence, small_start, threshold, population, landscape
    spectral start  spectral_direction, spectral_overlap; init="spectral" in gamp, train, run_instances
    observables     fields of FixedPoint; error_bar
    finite size     sample_data, Data, diagnose, realised, gamp, train, risk, run_instances, heldout_error,
                    linear_baseline
    counting task   histogram
    housekeeping    Settings, Status, InputError, check, use_compilation_cache

Every result prints itself: `print(result)` shows a table with error bars. Most results have `to_dict()`, which is ready
for JSON. Results that have a picture draw it with `result.plot()`. Numbers follow the dtype of their arguments; for
double precision, call ``jax.config.update("jax_enable_x64", True)`` first.
"""

from . import counting as histogram
from .averages.former import (
    default_nodes as default_nodes,
    gauss_hermite_nodes as gauss_hermite_nodes,
    line_nodes as line_nodes,
    monte_carlo_nodes as monte_carlo_nodes,
    sobol_nodes as sobol_nodes,
)
from .averages.recipes import (
    SIZES as SIZES,
    GaussHermite as GaussHermite,
    Lines as Lines,
    MonteCarlo as MonteCarlo,
    Sobol as Sobol,
)
from .averages.rules import Replicate as Replicate, Rule as Rule
from .base import VERSION as VERSION
from .base.errors import InputError as InputError
from .base.files import load as load
from .base.programs import use_compilation_cache as use_compilation_cache
from .base.report import Average as Average, Settings as Settings, Status as Status, error_bar as error_bar
from .bayes.fixed_points import BayesPoint as BayesPoint, bayes as bayes
from .bayes.thresholds import Recovery as Recovery, spectral_overlap as spectral_overlap
from .dynamics.emergence import Emergence as Emergence, emergence as emergence
from .dynamics.landscape import Landscape as Landscape, landscape as landscape
from .dynamics.population import PopulationPoint as PopulationPoint, population as population
from .dynamics.sgd import Crossing as Crossing, Student as Student, Trajectory as Trajectory, sgd as sgd
from .dynamics.small_start import SmallStart as SmallStart, small_start as small_start
from .finite.data import Data as Data
from .finite.diagnosis import Diagnosis as Diagnosis, Finding as Finding, diagnose as diagnose
from .finite.evaluation import (
    LinearBaseline as LinearBaseline,
    heldout_error as heldout_error,
    linear_baseline as linear_baseline,
)
from .finite.instances import Instances as Instances, run_instances as run_instances
from .finite.message_passing import (
    GAMP as GAMP,
    PosteriorMean as PosteriorMean,
    gamp as gamp,
    posterior_mean as posterior_mean,
)
from .finite.sampling import (
    realised as realised,
    sample_data as sample_data,
    spectral_direction as spectral_direction,
)
from .finite.training import Training as Training, risk as risk, train as train
from .model.checks import check as check
from .model.law import SpectralLaw as SpectralLaw, TokenClassMixture as TokenClassMixture
from .model.layers import (
    AttentionLayer as AttentionLayer,
    CausalDotProduct as CausalDotProduct,
    DotProduct as DotProduct,
    LinearAttention as LinearAttention,
    ReLUAttention as ReLUAttention,
    UntiedDotProduct as UntiedDotProduct,
    causal_dot_product as causal_dot_product,
    dot_product as dot_product,
    linear_attention as linear_attention,
    relu_attention as relu_attention,
    untied_dot_product as untied_dot_product,
)
from .model.model import Model as Model, Preimages as Preimages, orbit as orbit
from .model.overlaps import Conjugates as Conjugates, Overlaps as Overlaps
from .model.parameters import Axis as Axis
from .model.penalties import L1 as L1, Penalty as Penalty
from .phases.arclength import BranchPath as BranchPath, trace_branch as trace_branch
from .phases.best import BestRidge as BestRidge, best_ridge as best_ridge
from .phases.diagram import REGIONS as REGIONS, PhaseDiagram as PhaseDiagram
from .phases.events import EVENTS as EVENTS, Event as Event, Transition as Transition
from .phases.grid import phase_diagram as phase_diagram
from .phases.sweep import sweep as sweep
from .phases.table import Table as Table
from .phases.thresholds import threshold as threshold
from .phases.transitions import (
    BranchEnd as BranchEnd,
    branch_ends as branch_ends,
    critical_alpha as critical_alpha,
    find_event as find_event,
    linear_crossing as linear_crossing,
)
from .rsb.fixed_points import OneRSBPoint as OneRSBPoint, solve_1rsb as solve_1rsb
from .rsb.potentials import OneRSBOverlaps as OneRSBOverlaps
from .rsb.transitions import OneRSBTransition as OneRSBTransition, transition_1rsb as transition_1rsb
from .theory.multistart import find_states as find_states
from .theory.observables import Diagnostics as Diagnostics
from .theory.quantities import Threshold as Threshold
from .theory.solve import solve as solve
from .theory.state_evolution import StateEvolution as StateEvolution, state_evolution as state_evolution
from .theory.states import FixedPoint as FixedPoint

__version__ = VERSION


def __dir__() -> list[str]:
    """Return the public names. The only public module is `histogram`."""
    rooms = {k for k, v in globals().items() if isinstance(v, type(histogram))} - {"histogram"}
    return [*sorted(k for k in globals() if k not in rooms and k[0] != "_"), "__doc__", "__version__"]
