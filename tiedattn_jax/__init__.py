"""Theory of positional and semantic learning in dot-product attention, on JAX."""

from .branches import Curve as Curve
from .branches import Spinodal as Spinodal
from .branches import spinodals as spinodals
from .branches import sweep as sweep
from .diagram import PhaseDiagram as PhaseDiagram
from .grid import phase_diagram as phase_diagram
from .model import DotProduct as DotProduct
from .model import Model as Model
from .model import SpectralLaw as SpectralLaw
from .model import dot_product as dot_product
from .nodes import Nodes as Nodes
from .nodes import Rule as Rule
from .nodes import gauss_hermite_nodes as gauss_hermite_nodes
from .nodes import monte_carlo_nodes as monte_carlo_nodes
from .nodes import sobol_nodes as sobol_nodes
from .observables import gen_error_linear as gen_error_linear
from .observables import test_error as test_error
from .overlaps import Conjugates as Conjugates
from .overlaps import Overlaps as Overlaps
from .solve import FixedPoint as FixedPoint
from .solve import solve as solve
from .state_evolution import Settings as Settings
from .state_evolution import Status as Status
from .transitions import Transition as Transition
from .transitions import critical_alpha as critical_alpha
from .transitions import linear_crossing as linear_crossing
