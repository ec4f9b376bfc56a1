"""Roots that a search found have the derivatives of the function whose zero they are, in every mode and loop."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tiedattn_jax.base import derivatives as d
from tiedattn_jax.base.derivatives import derivative_along, with_root, with_tangent
from tiedattn_jax.theory.equations import first_order
from tiedattn_jax.theory.quantities import with_sensitivities

A, B = np.array([0.5, 2.0]), np.array([3.0, 5.0])


def cubic(z, a, b):
    """Its root is b^(1/3) / a, element by element."""
    return (a * z) ** 3 - b


def solve(change, z, a, b):
    return change / (3 * a**3 * z**2)


def root(a, b, **options):
    return with_root(cubic, jnp.cbrt(b) / a, a, b, **options)


@pytest.mark.parametrize("options", [{}, {"solve": solve}], ids=["differentiated", "given"])
def test_a_root_has_implicit_derivatives(options):
    """In forward and reverse mode, of second order, and with one derivative an entry under `vmap`."""

    def fn(a, b):
        return root(a, b, **options)

    @jax.jit
    def derivatives(a, b):
        slopes = [(jax.jacfwd(fn, k)(a, b), jax.jacrev(fn, k)(a, b)) for k in (0, 1)]
        entries = [
            jax.vmap(jax.grad(fn, 1), axes)(*args)
            for axes, args in (((0, None), (a, 3.0)), ((None, 0), (0.5, b)), ((0, 0), (a, b)))
        ]
        behind = jax.vmap(lambda a: fn(a, b), 0, 1)(a)  # z has a batch axis behind
        return fn(a, b), slopes, jax.vmap(jax.grad(jax.grad(lambda b: fn(2.0, b))))(b), entries, behind

    value, slopes, bend, entries, behind = derivatives(A, B)
    np.testing.assert_allclose(value, np.cbrt(B) / A)
    for pair, expected in zip(slopes, (-np.cbrt(B) / A**2, B ** (-2 / 3) / (3 * A)), strict=True):
        np.testing.assert_allclose(pair, [np.diag(expected)] * 2, rtol=1e-12)
    np.testing.assert_allclose(bend, -(B ** (-5 / 3)) / 9, rtol=1e-12)
    for entry, (a, b) in zip(entries, ((A, 3.0), (0.5, B), (A, B)), strict=True):
        np.testing.assert_allclose(entry, b ** (-2 / 3) / (3 * a), rtol=1e-12)
    np.testing.assert_allclose(behind, np.cbrt(B)[:, None] / A)


def test_tangents_of_what_does_not_move():
    """A rule is told what moves: an argument that does not has no tangent, and no share of the derivative."""
    seen = []

    @with_tangent
    def attach(primals, tangents):
        seen.append([tangent is None for tangent in tangents])
        return 2 * derivative_along(lambda a, b: a * b, primals[1:], tangents[1:])

    value, tangent = jax.jvp(lambda a: attach(jnp.asarray(7.0), a, 3.0), (5.0,), (1.0,))
    assert (value, tangent) == (7.0, 6.0) and seen == [[True, False, True]]
    assert jax.grad(lambda a, b: attach(jnp.asarray(7.0), a, b), 1)(5.0, 3.0) == 10.0
    assert derivative_along(lambda a: a**2, (3.0,), (None,)) == 0.0


def searched(p):
    """The solution z of z + z^3 = p, without derivatives, and the number of steps to it."""
    z = lax.fori_loop(0, 40, lambda _, z: z - (z + z**3 - p) / (1 + 3 * z**2), p)
    return lax.stop_gradient(z), jnp.asarray(40)


@with_tangent
def tree_of_roots(primals, tangents):
    """Tangents of {z, z^2, steps} in p, the first argument; steps are integers, and so is the second argument."""
    roots = primals[0]
    z_dot = tangents[1] / (1 + 3 * roots["z"] ** 2)
    return {"z": z_dot, "square": 2 * roots["z"] * z_dot, "steps": None}


def from_tree(p):
    z, steps = searched(p)
    roots = tree_of_roots({"z": z, "square": z**2, "steps": steps}, p, steps)
    return roots["z"] + roots["square"] + 0 * roots["steps"]


def from_closure(p):
    z = d.implicit_root(d.Closure(lambda z: z + z**3 - p, p), searched(p)[0])
    return z + z**2


def from_vector(p):
    """The same from two equations for z and z^2."""
    z, _ = searched(p)
    pair = d.implicit_root(
        d.Closure(lambda v: jnp.stack([v[0] * (1 + v[1]) - p, v[1] - v[0] ** 2]), jnp.ones(2)), z ** jnp.array([1, 2])
    )
    return jnp.sum(pair)


def from_bisection(p):
    z = d.bisected_root(lambda z: z + z**3 - p, 0 * p, 1 + 0 * p)
    return z + z**2


def from_pseudo_inverse(p):
    """The same, as a matrix of two equal and two vanishing eigenvalues has them: jax's own rule gives NaN in loops."""
    z = from_closure(p)
    matrix = jnp.diag(jnp.array([1.0, 1.0, 0.0, 0.0])) / z
    return 0.5 * jnp.trace(d.pseudo_inverse(matrix, hermitian=True))


LOOPS = {
    "plain": lambda fn: fn,
    "scan": lambda fn: lambda p: lax.scan(lambda c, _: (c, fn(c)), p, None, 2)[1][1],
    "carried": lambda fn: lambda p: lax.scan(lambda c, _: (fn(p) + 0 * c, None), 0 * p, None, 2)[0],
    "vmap": lambda fn: lambda p: jax.vmap(fn)(jnp.stack([p, 2 * p]))[0],
    "map": lambda fn: lambda p: lax.map(jax.checkpoint(fn), p[None])[0],
}
MODES = jax.grad, jax.jacfwd
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # programs that run once


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "fn",
    [from_tree, from_closure, from_vector, from_bisection, pytest.param(from_pseudo_inverse, marks=pytest.mark.full)],
)
def test_derivatives_of_every_order_in_every_loop(fn, thorough):
    """In both modes; second ones in all pairs of modes, and third ones, where the test is thorough."""
    pairs = list(product(MODES, MODES)) if thorough else [MODES]

    def derivatives(p):
        loops = [loop(fn) for loop in LOOPS.values()]
        first = [a(loop)(p) for a in MODES for loop in loops]
        third = [a(jax.grad(jax.grad(LOOPS["map"](fn))))(p) for a in MODES if thorough]
        return first, [a(b(loop))(p) for a, b in pairs for loop in loops], third

    p = 0.7
    z = np.real(np.roots([1, 0, 1, -p])[-1])
    first = 1 / (1 + 3 * z**2)
    second = -6 * z * first**3
    third = (3 * (6 * z) ** 2 - 6 / first) * first**5
    expected = first * (1 + 2 * z), second * (1 + 2 * z) + 2 * first**2, third * (1 + 2 * z) + 6 * first * second
    for values, number in zip(jax.jit(derivatives, compiler_options=QUICK)(p), expected, strict=True):
        np.testing.assert_allclose(values, number, rtol=1e-9)


def test_a_number_without_second_derivatives_says_so():
    """s^2, whose rate 2 s is given: the first derivative is right, and every second one raises; 0.0 came from loops."""

    def square(s):
        return with_sensitivities(lax.stop_gradient(s**2)[None], lax.stop_gradient(2 * s)[None], s)[0]

    def marked(s):
        return first_order({"a": s**2, "b": 1}, s)["a"]

    first = [derive(loop(square)) for derive in MODES for loop in LOOPS.values()]
    np.testing.assert_array_equal(jax.jit(lambda s: [fn(s) for fn in first], compiler_options=QUICK)(1.5), 3.0)
    second = [outer(fn) for fn in first for outer in MODES]
    for fn in (*second, *(derive(loop(marked)) for derive in MODES for loop in LOOPS.values())):
        with pytest.raises(TypeError, match="first derivatives only"):
            jax.eval_shape(fn, 1.5)
