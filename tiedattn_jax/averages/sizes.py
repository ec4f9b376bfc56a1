"""How large averages are unless told otherwise, in nodes of a replicate, each with its reason."""

from __future__ import annotations

import jax

REPLICATES = 4  # the fewest whose error bars are of use: by Student's law 1.65 standard errors wide
# Nodes in memory together. On a CPU what its caches hold: twice as many take 20 % longer. Elsewhere a guess, to be
# measured by the time of one `image_and_jacobian` per node, of `sobol_nodes(model, 2**20)`, for blocks of 2^15 to 2^20:
# the smallest block that is within 10 % of the fastest.
BLOCK, ACCELERATOR_BLOCK = 2**13, 2**17
WIDE_BLOCK = 2**10  # beyond two fields, over their number: Hessians have to stay in the caches
# Nodes of the coarse replicate. Beyond two fields its 25 evaluations, far from the state, cost more than all the
# others.
COARSE, WIDE_COARSE = 2**13, 2**10
NODES = 2**16  # of a rule of single nodes: 5e-4 in q and 3e-3 in V where the proximal operator jumps

# Of the default rule, by what it is for. Its relative errors at the standard setting, of order parameters: 5e-4 with
# 6,300 nodes (order 5, its smallest), 2e-4 with 16,632 (7), 4e-5 with 35,640 (9).
SIZES = {
    "solve": 2**15,  # one state, and alpha_c to 8e-6
    "transition": 2**14,  # the command's alpha_c, to 6e-5 in half the time
    "instances": 2**14,  # beside instances of finite size, whose scatter is larger
    "path": 2**13,  # a path in arclength, whose Newton steps are dense
    "curve": 2**12,  # curves to look at
    "grid": 2**11,  # hundreds of cells: losses, being stationary, are good to the square of that
}


def block_size(fields: int = 2) -> int:
    """Nodes in a block unless told otherwise, for so many fields of the student, on the devices that there are."""
    if jax.default_backend() != "cpu":
        return ACCELERATOR_BLOCK
    return BLOCK if fields <= 2 else WIDE_BLOCK // fields


def coarse_size(fields: int) -> int:
    """Nodes of the coarse replicate at most, for so many fields of the student."""
    return COARSE if fields <= 2 else WIDE_COARSE
