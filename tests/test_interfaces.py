"""The interfaces of jax that may change without notice: all that the library uses, so that a new version names them.

jax promises nothing about these modules. `averages/program.py` and `base/derivatives.py` define primitives by them,
`base/nodewise.py` interprets a jaxpr, `base/kernels.py` writes one as a kernel of Pallas, and `base/programs.py` stores
programs, removes damaged files of jax and reads how long a compilation took. Apart from names, these details count: the
name and the format of such a file, the parameters of primitives in `base/nodewise.py`, the order of a module's static
fields in `node_data` of a tree, and the text of lowered programs, by which a run that resumes knows its model.
"""

import ast
import functools
import importlib
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import tiedattn_jax as ta

UNSTABLE = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jax.experimental", "jax.export", "jaxlib")
INTERFACES = {
    "jax.core": ["ShapedArray", "Tracer"],
    "jax.experimental.compilation_cache.compilation_cache": ["reset_cache"],
    "jax.experimental.multihost_utils": ["live_devices", "process_allgather"],
    "jax.experimental.pallas": ["cdiv", "pallas_call", "program_id"],
    "jax.experimental.pallas.triton": ["CompilerParams", "load", "store"],
    "jax.experimental.sparse.linalg": ["lobpcg_standard"],
    "jax.export": ["DisabledSafetyCheck", "deserialize", "export"],
    "jax.extend.core": ["ClosedJaxpr", "Jaxpr", "Literal", "Primitive"],
    "jax.interpreters.ad": ["Zero", "primitive_jvps"],
    "jax.interpreters.batching": ["primitive_batchers"],
    "jax.interpreters.mlir": ["lower_fun", "register_lowering"],
}


def dotted(node):
    """The parts of a name such as jax.core.Tracer; None for any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return [*base, node.attr]
    return None


def used_in(text):
    """The full names of unstable modules and of what a file takes from them."""
    tree, aliases = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else "jax" for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = set(aliases.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (parts := dotted(node)) and parts[0] in aliases:
            names.add(".".join([aliases[parts[0]], *parts[1:]]))
    return {name for name in names if name.startswith(UNSTABLE)}


def test_the_list_is_complete():
    root = Path(ta.__file__).parent
    used = set().union(*(used_in(path.read_text()) for path in root.rglob("*.py")))
    listed = {f"{module}.{name}" for module, names in INTERFACES.items() for name in names}
    # A listed name is used as it is, or an attribute of it is; a module that is imported counts by its names.
    inside = {name for name in used if any(name.startswith(known + ".") for known in listed)}
    assert used - inside - set(INTERFACES) - {"jax.extend.core.JaxprEqn"} == listed


@pytest.mark.parametrize("module", INTERFACES)
def test_jax_has_them(module):
    missing = [name for name in INTERFACES[module] if not hasattr(importlib.import_module(module), name)]
    assert not missing, f"{module} of jax {jax.__version__} lacks {missing}, which this library uses"


class Node(eqx.Module):
    array: jax.Array
    size: int = eqx.field(static=True, default=3)


def test_details_that_the_library_relies_on():
    kind, (wraps, *static) = jax.tree.structure(Node(jnp.ones(2))).node_data()
    assert kind is Node and not wraps and static == [3]
    lowered = functools.partial(jax.jit(jnp.sin).trace(1.0).lower, lowering_platforms=("cpu",))
    assert "stablehlo.sine" in lowered().as_text()
    equations = jax.make_jaxpr(jax.jit(jax.jit(lambda x: x * 2)))(1.0).eqns
    assert [(e.primitive.name, type(e.params["jaxpr"]).__name__) for e in equations] == [("jit", "ClosedJaxpr")]
