"""Types that many signatures share. The shapes in a signature bind its names within one call; the tests check them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Array, Float, Real

AnyArray: TypeAlias = Array | np.ndarray  # on a device or on the host
# Arrays of results, and arrays that requests for results hand on: jax's, or numpy's where they are on the host. Both
# have the methods that the package uses. To mypy those of results are jax's, and it lets the others pass.
if TYPE_CHECKING:
    StateArray: TypeAlias = Array
    GivenArray: TypeAlias = Any
else:
    StateArray = GivenArray = AnyArray
Scalar: TypeAlias = float | Float[StateArray, ""]
# A real number of Python, numpy or jax.
Number: TypeAlias = float | Real[Array | np.ndarray | np.floating | np.integer, ""]
