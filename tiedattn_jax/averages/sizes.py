"""Default sizes of the averages, in nodes of a replicate, each with its reason."""

from __future__ import annotations

import jax

REPLICATES = 4  # the fewest that give a useful error bar: by Student's law it is 1.65 standard errors
# Nodes in memory together. A CPU takes as many as its caches hold; with twice as many it takes 20 % longer. The number
# for accelerators is a guess. To measure it, time one `image_and_jacobian` per node of `sobol_nodes(model, 2**20)` for
# blocks of 2^15 to 2^20, and take the smallest block within 10 % of the fastest.
BLOCK, ACCELERATOR_BLOCK = 2**13, 2**17
WIDE_BLOCK = 2**10  # beyond two fields, to be divided by their number, so that Hessians stay in the caches
# Nodes of the coarse replicate. It is smaller beyond two fields, where its 25 evaluations, far from the state, cost
# more than all the others.
COARSE, WIDE_COARSE = 2**13, 2**10
# Nodes of a rule of single nodes. Errors are 5e-4 in q and 3e-3 in V where the proximal operator jumps.
NODES = 2**16
# The same for a state that the default lines do not resolve: a quarter of the time of `NODES`.
FALLBACK_NODES = 2**14

# Sizes of the default rule by use. Relative errors of the order parameters at the standard setting are 5e-4 with 6,300
# nodes (order 5, the smallest), 2e-4 with 16,632 (order 7), and 4e-5 with 35,640 (order 9).
SIZES = {
    "solve": 2**15,  # one state, and alpha_c to 8e-6
    "transition": 2**14,  # alpha_c on the command line: to 6e-5, in half the time
    "instances": 2**14,  # comparison with instances of finite size, whose scatter is larger
    "path": 2**13,  # a path in arclength, whose Newton steps all need the full Jacobian
    "curve": 2**12,  # curves for plots
    "grid": 2**11,  # hundreds of cells; losses are stationary, so their error is of second order
}


def block_size(fields: int = 2) -> int:
    """Return the default number of nodes in a block for so many student fields, on the present devices."""
    if jax.default_backend() != "cpu":
        return ACCELERATOR_BLOCK
    return BLOCK if fields <= 2 else WIDE_BLOCK // fields


def coarse_size(fields: int) -> int:
    """Return the most nodes of a coarse replicate for so many student fields."""
    return COARSE if fields <= 2 else WIDE_COARSE
