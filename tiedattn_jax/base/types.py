"""Types that many signatures share. The shapes in a signature bind its names within one call; the tests check them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Real

AnyArray: TypeAlias = Array | np.ndarray  # on a device or on the host
# A real number of Python, numpy or jax.
Number: TypeAlias = float | Real[Array | np.ndarray | np.floating | np.integer, ""]
