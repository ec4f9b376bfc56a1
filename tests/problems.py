"""The models and the averaging rules that tests share, and states on them: each is solved once in a process.

A test takes them unless another model or rule is its subject, because every new one costs its own programs.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from twins import ENCODINGS, GRAM, LAM, MIXING, in_atoms

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Rule

RULES = {
    "lines": ta.Lines(5),  # broken where the proximal operator jumps; of two fields
    "points": ta.Sobol(2**10, replicates=2),
    "grid": ta.GaussHermite(8, replicates=2),  # nodes without errors of chance, where nothing jumps
}
THREE = np.array([[0.6, 0.3, 0.1], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6]])


class Problem(NamedTuple):
    """A model, and alphas at which its branches exist.

    Attributes:
        model: the model.
        alpha: a number of samples per dimension at which it has all its branches.
        rules: the names of its rules.
    """

    model: ta.Model
    alpha: float = 2.0
    rules: tuple[str, ...] = ("points",)


PROBLEMS = {
    "standard": Problem(ta.DotProduct(), rules=("lines", "points", "grid")),
    "tokens": Problem(ta.DotProduct(mixing=THREE, encodings=[[1.0, 0.0], [-0.8, 0.3], [0.1, -0.6]], lam=LAM)),
    "causal": Problem(ta.CausalDotProduct(), rules=("lines", "points")),
    "untied": Problem(ta.UntiedDotProduct()),
    "columns": Problem(ta.DotProduct(rank=2, teacher=GRAM, mixing=MIXING, encodings=ENCODINGS, lam=LAM), 4.0),
    "penalty": Problem(ta.DotProduct(penalty=ta.L1(jnp.array(0.01)))),
    "atoms": Problem(in_atoms(), 4.0, rules=("lines", "points")),
    "wide": Problem(ta.wide.DotProduct(tau=0.1, omega=0.4, mixing=MIXING), 1.0, rules=()),
}


@cache
def rule(name: str, problem: str = "standard") -> Rule:
    with jax.ensure_compile_time_eval():  # the first call of a test may be inside of jit
        return RULES[name].rule(PROBLEMS[problem].model)


@cache
def solved(problem: str, branch: str = "semantic", name: str = "points", alpha: float | None = None):
    """Solve a problem at its alpha, or at another one, on one of its rules."""
    model, standard, rules = PROBLEMS[problem]
    alpha = standard if alpha is None else alpha
    return ta.solve(model, alpha, branch, rule(name, problem)) if rules else ta.wide.solve(model, alpha)
