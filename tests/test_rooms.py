"""Every room of the package says which modules it contains."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tiedattn_jax"
ROOMS = [path.parent for path in sorted(PACKAGE.glob("*/__init__.py"))]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_lists_its_modules(room):
    listed = re.findall(r"^(\w+)  +\S", ast.get_docstring(ast.parse((room / "__init__.py").read_text())), re.M)
    assert sorted(listed) == sorted(path.stem for path in room.glob("*.py") if path.stem != "__init__")
