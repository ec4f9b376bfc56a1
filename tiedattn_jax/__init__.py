"""Theory of positional and semantic learning in tied attention, on JAX.

A model is a loss of the local fields and a law of the data; fixed points of state evolution, phase diagrams, message
passing and training follow from it. The public functions, by task:

    a model         dot_product, tempered_dot_product, causal_dot_product, untied_dot_product, linear_attention,
                    relu_attention; a subclass of AttentionLayer with `attention`, or of Model with shape, loss and law
                    (SpectralLaw), also of correlated tokens (Sentences); L1, or a subclass of Penalty with
                    value and prox, besides the ridge
    one state       solve, find_states                 its numbers: FixedPoint, Overlaps, Conjugates, Diagnostics
    transitions     critical_alpha, linear_crossing, branch_ends, locate, EVENTS
    many settings   sweep, trace_branch, folds_of, trace_boundary, meetings, phase_diagram, PhaseDiagram.load
    averages        default_nodes, line_nodes, sobol_nodes, gauss_hermite_nodes, monte_carlo_nodes
    breaking of replica symmetry    solve_1rsb, critical_alpha_1rsb, linear_crossing_1rsb
    observables     gen_error, gen_error_linear, second_minimum_share
    finite size     sample_data, Data, realised, raw_labels, shard, gamp, train, risk, run_instances
                    train_value, heldout_error, linear_baseline
    counting task   histogram
    housekeeping    Settings, Status, InputError, check, use_compilation_cache

Every result prints itself: `print(result)` is a table with error bars, `result.to_dict()` is ready for JSON, and
`result.plot()` draws what has a picture. Numbers follow the dtype of their arguments: call
``jax.config.update("jax_enable_x64", True)`` first for double precision.
"""

from . import cli as cli
from . import histogram as histogram
from .averages.default import default_nodes as default_nodes
from .averages.lines import line_nodes as line_nodes
from .averages.nodes import gauss_hermite_nodes as gauss_hermite_nodes
from .averages.nodes import monte_carlo_nodes as monte_carlo_nodes
from .averages.nodes import sobol_nodes as sobol_nodes
from .averages.rule import Replicate as Replicate
from .averages.rule import Rule as Rule
from .averages.sizes import SIZES as SIZES
from .compiled import use_compilation_cache as use_compilation_cache
from .errors import InputError as InputError
from .finite.data import Data as Data
from .finite.data import shard as shard
from .finite.evaluation import LinearBaseline as LinearBaseline
from .finite.evaluation import heldout_error as heldout_error
from .finite.evaluation import linear_baseline as linear_baseline
from .finite.instances import Instances as Instances
from .finite.instances import run_instances as run_instances
from .finite.message_passing import GAMP as GAMP
from .finite.message_passing import gamp as gamp
from .finite.sampling import raw_labels as raw_labels
from .finite.sampling import realised as realised
from .finite.sampling import sample_data as sample_data
from .finite.training import Training as Training
from .finite.training import risk as risk
from .finite.training import train as train
from .finite.value import ValueTraining as ValueTraining
from .finite.value import train_value as train_value
from .layers import AttentionLayer as AttentionLayer
from .layers import CausalDotProduct as CausalDotProduct
from .layers import DotProduct as DotProduct
from .layers import LinearAttention as LinearAttention
from .layers import ReLUAttention as ReLUAttention
from .layers import TemperedDotProduct as TemperedDotProduct
from .layers import UntiedDotProduct as UntiedDotProduct
from .layers import causal_dot_product as causal_dot_product
from .layers import dot_product as dot_product
from .layers import linear_attention as linear_attention
from .layers import relu_attention as relu_attention
from .layers import tempered_dot_product as tempered_dot_product
from .layers import untied_dot_product as untied_dot_product
from .model import Model as Model
from .model import Sentences as Sentences
from .model import SpectralLaw as SpectralLaw
from .model import check as check
from .overlaps import Conjugates as Conjugates
from .overlaps import Overlaps as Overlaps
from .penalties import L1 as L1
from .penalties import Penalty as Penalty
from .phases.arclength import BranchPath as BranchPath
from .phases.arclength import folds_of as folds_of
from .phases.arclength import trace_branch as trace_branch
from .phases.boundaries import Boundary as Boundary
from .phases.boundaries import Meeting as Meeting
from .phases.boundaries import meetings as meetings
from .phases.boundaries import trace_boundary as trace_boundary
from .phases.breaking import BrokenTransition as BrokenTransition
from .phases.breaking import critical_alpha_1rsb as critical_alpha_1rsb
from .phases.breaking import linear_crossing_1rsb as linear_crossing_1rsb
from .phases.diagram import REGIONS as REGIONS
from .phases.diagram import PhaseDiagram as PhaseDiagram
from .phases.ends import BranchEnd as BranchEnd
from .phases.ends import branch_ends as branch_ends
from .phases.events import EVENTS as EVENTS
from .phases.events import Event as Event
from .phases.events import Near as Near
from .phases.events import Transition as Transition
from .phases.events import locate as locate
from .phases.follow import Curve as Curve
from .phases.follow import sweep as sweep
from .phases.grid import phase_diagram as phase_diagram
from .phases.transitions import critical_alpha as critical_alpha
from .phases.transitions import linear_crossing as linear_crossing
from .results import Average as Average
from .results import Settings as Settings
from .results import Status as Status
from .store import VERSION as VERSION
from .theory.fixed_points import FixedPoint as FixedPoint
from .theory.fixed_points import solve as solve
from .theory.multistart import find_states as find_states
from .theory.observables import Diagnostics as Diagnostics
from .theory.observables import gen_error as gen_error
from .theory.observables import gen_error_linear as gen_error_linear
from .theory.observables import second_minimum_share as second_minimum_share
from .theory.rsb.fixed_points import BrokenPoint as BrokenPoint
from .theory.rsb.fixed_points import solve_1rsb as solve_1rsb
from .theory.rsb.potentials import BrokenOverlaps as BrokenOverlaps

__version__ = VERSION


def __dir__() -> list[str]:
    """The public names; of the modules only the one that is used as such."""
    rooms = {k for k, v in globals().items() if isinstance(v, type(histogram))} - {"histogram"}
    return [*sorted(k for k in globals() if k not in rooms and k[0] != "_"), "__doc__", "__version__"]
