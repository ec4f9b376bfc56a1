"""Theory of positional and semantic learning in tied attention, on JAX.

A model is a loss of the local fields and a law of the data. Fixed points of state evolution, phase diagrams, message
passing and training follow from it. The public names by task:

    a model         DotProduct, CausalDotProduct, UntiedDotProduct, LinearAttention, ReLUAttention;
                    a subclass of AttentionLayer with `attention`, or of Model with shape, loss and law
    its data        SpectralLaw; TokenClassMixture for correlated tokens
    its penalty     L1, or a subclass of Penalty with value and prox, besides the ridge
    one state       solve, find_states; Overlaps as a start; state_evolution: message passing in time
    averages        nodes=Lines(9), Sobol(2**16), GaussHermite(12), MonteCarlo(2**16), or a number of nodes
    transitions     critical_alpha, linear_crossing, find_event, branch_ends
    best ridge      best_ridge, for the ridge or another number of the model
    many settings   sweep(question, model, alpha=values, ...), Axis, phase_diagram, trace_branch, join
    finite size     sample_data, Data, gamp, train, run_instances
    housekeeping    Settings, Status, InputError, check, load, use_compilation_cache
    citing          cite: BibTeX of what results rest on

    bayes           the optimal learner: solve, weak_recovery, perfect_recovery, posterior_mean, ...
    rsb             replica symmetry breaking: solve, transition
    dynamics        learning in time: sgd, emergence, small_start, separation, population, landscape
    wide            layers of any rank: DotProduct, Layer, Wishart; solve, onset, bayes, train, ...
    finite          more of runs on data: risk, heldout_error, linear_baseline, realised, diagnose
    counting        the counting task
    results         the classes of results

Every result prints itself: `print(result)` shows a table with error bars. Most results have `to_dict()`, which is ready
for JSON, `save(path)`, and, if there is a picture, `plot()`. Numbers follow the dtype of their arguments; for double
precision, call ``jax.config.update("jax_enable_x64", True)`` first.
"""

from . import (
    bayes as bayes,
    counting as counting,
    dynamics as dynamics,
    finite as finite,
    results as results,
    rsb as rsb,
    wide as wide,
)
from .averages.recipes import (
    GaussHermite as GaussHermite,
    Lines as Lines,
    MonteCarlo as MonteCarlo,
    Sobol as Sobol,
)
from .base import VERSION as _VERSION
from .base.citing import cite as cite
from .base.errors import InputError as InputError
from .base.programs import use_compilation_cache as use_compilation_cache
from .base.results import Settings as Settings, Status as Status
from .base.saved import load as load
from .finite.data import Data as Data
from .finite.instances import run_instances as run_instances
from .finite.message_passing import gamp as gamp
from .finite.sampling import sample_data as sample_data
from .finite.training import train as train
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
from .model.model import Model as Model
from .model.overlaps import Overlaps as Overlaps
from .model.parameters import Axis as Axis
from .model.penalties import L1 as L1, Penalty as Penalty
from .phases.arclength import trace_branch as trace_branch
from .phases.best import best_ridge as best_ridge
from .phases.grid import phase_diagram as phase_diagram
from .phases.join import join as join
from .phases.sweep import sweep as sweep
from .phases.transitions import (
    branch_ends as branch_ends,
    critical_alpha as critical_alpha,
    find_event as find_event,
    linear_crossing as linear_crossing,
)
from .theory.multistart import find_states as find_states
from .theory.solve import solve as solve
from .theory.state_evolution import state_evolution as state_evolution

__version__ = _VERSION
_ROOMS = "averages", "base", "cli", "model", "phases", "plotting", "theory"  # modules that are no part of the API


def __dir__() -> list[str]:
    """Return the public names."""
    return [*sorted(k for k in globals() if k[0] != "_" and k not in _ROOMS), "__doc__", "__version__"]
