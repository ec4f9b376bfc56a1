"""Every room of the package says which modules it contains."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tiedattn_jax"
ROOMS = [path.parent for path in sorted(PACKAGE.glob("*/__init__.py"))]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_lists_its_modules(room):
    listed = re.findall(r"^(\w+)  +\S", ast.get_docstring(ast.parse((room / "__init__.py").read_text())), re.M)
    assert sorted(listed) == sorted(path.stem for path in room.glob("*.py") if path.stem != "__init__")


CORE = "base", "model", "averages", "theory", "phases"  # each may import those before it
# The other rooms import these rooms beside the core, for the reason that is given.
BESIDE = {
    "finite": {"bayes"},  # the spectral start, and message passing of the optimal learner
    "plotting": set(),
    "cli": {"bayes", "counting", "finite", "plotting"},
}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_imports_point_down(room):
    """The core imports no wing, and a wing the core; modules that a function imports when it draws do not count."""
    allowed = {*CORE[: CORE.index(room.name)]} if room.name in CORE else {*CORE, *BESIDE.get(room.name, ())}
    for path in room.glob("*.py"):
        if path.stem != "__init__":
            imports = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom) and n.level == 2]
            found = {(n.module or n.names[0].name).partition(".")[0] for n in imports}
            assert found <= allowed, f"{path.name} imports {found - allowed}"


def test_importing_the_library_starts_no_device():
    """`jax.distributed.initialize`, and settings of the devices, are then still possible."""
    code = "import jax, tiedattn_jax; jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
