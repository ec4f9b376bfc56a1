"""Double precision, a compilation cache, and the averages that most tests share."""

import os
import tempfile
from pathlib import Path

import jax
import pytest

import tiedattn_jax as ta

jax.config.update("jax_enable_x64", True)
_CACHE = os.environ.get("TIEDATTN_CACHE", str(Path(tempfile.gettempdir()) / "tiedattn_jax_tests"))
os.environ["TIEDATTN_CACHE"] = _CACHE  # the command line in the tests keeps its programs here too
if _CACHE != "0":
    jax.config.update("jax_compilation_cache_dir", _CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="session")
def model() -> ta.DotProduct:
    return ta.dot_product()


@pytest.fixture(scope="session")
def nodes(model) -> ta.Nodes:
    return ta.sobol_nodes(model, 2**13, replicates=4)


@pytest.fixture(scope="session")
def solved(model, nodes):
    """Fixed points on the shared averages, by (alpha, branch), each solved once."""
    found: dict = {}

    def get(alpha: float, branch: str) -> ta.FixedPoint:
        if (alpha, branch) not in found:
            found[alpha, branch] = ta.solve(model, alpha, branch, nodes)
        return found[alpha, branch]

    return get
