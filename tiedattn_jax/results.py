"""The classes of results, for annotations and `isinstance`; the functions of `tiedattn_jax` return them.

one state         FixedPoint, Overlaps, Conjugates, Diagnostics; StateEvolution
numbers           Quantity, Average; error_bar, the error bar of a mean over replicates
branches          BranchPath
many settings     Table, PhaseDiagram, Pair
breaking          OneRSBPoint, OneRSBOverlaps
optimal learner   BayesPoint
dynamics          Trajectory, Student, Emergence, SmallStart, PopulationPoint, Landscape
wide layers       WidePoint, WideSpectrum, WideOptimum, WideTraining
finite size       GAMP, Training, Diagnosis
"""

from .base.results import Average as Average, error_bar as error_bar
from .bayes.fixed_points import BayesPoint as BayesPoint
from .dynamics.emergence import Emergence as Emergence
from .dynamics.landscape import Landscape as Landscape
from .dynamics.population import PopulationPoint as PopulationPoint
from .dynamics.sgd import Student as Student, Trajectory as Trajectory
from .dynamics.small_start import SmallStart as SmallStart
from .finite.diagnosis import Diagnosis as Diagnosis
from .finite.message_passing import GAMP as GAMP
from .finite.training import Training as Training
from .model.overlaps import Conjugates as Conjugates, Overlaps as Overlaps
from .phases.branch_path import BranchPath as BranchPath
from .phases.diagram import PhaseDiagram as PhaseDiagram
from .phases.pair import Pair as Pair
from .phases.table import Table as Table
from .rsb.fixed_points import OneRSBPoint as OneRSBPoint
from .rsb.potentials import OneRSBOverlaps as OneRSBOverlaps
from .theory.observables import Diagnostics as Diagnostics
from .theory.quantities import Quantity as Quantity
from .theory.state_evolution import StateEvolution as StateEvolution
from .theory.states import FixedPoint as FixedPoint
from .wide.finite import WideTraining as WideTraining
from .wide.optimum import WideOptimum as WideOptimum
from .wide.states import WidePoint as WidePoint, WideSpectrum as WideSpectrum
