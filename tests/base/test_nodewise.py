"""Functions of a few numbers at many nodes give what `jax.vmap` gives, whatever they are made of."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import pytest
from jax import lax

from tiedattn_jax.base.nodewise import nodewise


@jax.custom_vjp
def doubled(z):
    return 2.0 * z


doubled.defvjp(lambda z: (2.0 * z, None), lambda _, g: (2.0 * g,))
softplus = jax.custom_jvp(lambda z: jnp.log1p(jnp.exp(z)))
softplus.defjvps(lambda g, _, z: jax.nn.sigmoid(z) * g)

# Functions of Z (2, 2), with entries between .1 and 1, and of a shared number s = 1.3; all are smooth there.
UNARY = {jnp: "arccos arcsin arcsinh arctan arctanh cbrt cos cosh exp2 expm1 log log1p sinc sinh sqrt tan",
         special: "erf erfc", jax.nn: "sigmoid gelu silu"}  # fmt: skip
MATHS = {
    **{name: partial(lambda fn, Z, s: fn(0.7 * s * Z), getattr(module, name))
       for module, names in UNARY.items() for name in names.split()},
    "abs": lambda Z, s: abs(Z - 2), "acosh": lambda Z, s: jnp.arccosh(1.5 + Z),
    "atan2": lambda Z, s: jnp.arctan2(Z, Z.T + s), "div": lambda Z, s: Z / (s + Z[::-1]),
    "hypot": lambda Z, s: jnp.hypot(Z, s), "pow": lambda Z, s: Z**s, "integer_pow": lambda Z, s: Z**-3,
    "rsqrt": lambda Z, s: lax.rsqrt(Z), "rem": lambda Z, s: jnp.mod(Z, 0.37 * s) * Z,
    "square": lambda Z, s: jnp.square(Z) - s, "tanh": lambda Z, s: jnp.tanh(s - Z),
    "xlogy": lambda Z, s: special.xlogy(Z, Z),
    "bitwise": lambda Z, s: jnp.where(((Z > 0.3) & ~(Z > 0.8)) | (Z < 0.2) ^ (Z >= 0.9), Z, s * Z**2),
    "steps": lambda Z, s: Z * (jnp.sign(Z - 0.45) + jnp.floor(3 * Z) + jnp.ceil(2 * Z) + jnp.round(5 * Z)),
    "finite": lambda Z, s: jnp.where(jnp.isfinite(Z) & (Z != s) & (Z <= s), Z**3, 0.0),
    "clip": lambda Z, s: jnp.clip(Z**2, 0.2, 0.7 * s), "stopped": lambda Z, s: Z**2 * lax.stop_gradient(Z),
    "nextafter": lambda Z, s: jnp.where(jnp.nextafter(lax.stop_gradient(Z), s) > Z, Z**2, Z),
}  # fmt: skip
ARRAYS = {
    "max": lambda Z, s: Z.max(0) ** 2, "min": lambda Z, s: s * Z.min(1), "prod": lambda Z, s: jnp.prod(Z, 0),
    "mean": lambda Z, s: Z.mean(0) ** 2,
    "any": lambda Z, s: jnp.where(jnp.any(Z > 0.9, 0) | jnp.all(Z > 0.2, 0), Z, Z**2),
    "norm": lambda Z, s: jnp.linalg.norm(Z), "argmax": lambda Z, s: jnp.argmax(Z, 0) * Z[0],
    "softmax": lambda Z, s: jax.nn.softmax(s * Z @ Z.T), "logsumexp": lambda Z, s: special.logsumexp(Z, 1),
    "log_softmax": lambda Z, s: jax.nn.log_softmax(Z, 0), "matmul": lambda Z, s: Z.T @ Z * s,
    "integer matmul": lambda Z, s: jnp.arange(6).reshape(3, 2) @ Z * s,
    "einsum": lambda Z, s: jnp.einsum("ik,jk,ij->k", Z, Z, np.arange(4).reshape(2, 2)),
    "batched": lambda Z, s: jnp.einsum("bi,bj->bij", Z, Z), "outer": lambda Z, s: jnp.outer(Z[:, 0], Z[0]),
    "kron": lambda Z, s: jnp.kron(Z, Z[:1]), "trace": lambda Z, s: jnp.trace(Z @ Z.T),
    "concatenate": lambda Z, s: jnp.concatenate([Z, Z[:1] * s]), "stack": lambda Z, s: jnp.stack([Z, Z**2], 1),
    "tile": lambda Z, s: jnp.tile(Z**2, (1, 2)), "flip": lambda Z, s: Z[::-1] * Z,
    "roll": lambda Z, s: jnp.roll(Z, 1, 0) * Z, "split": lambda Z, s: jnp.split(Z, 2)[1] ** 2,
    "take": lambda Z, s: Z[np.array([1, 1, 0])] ** 2, "pad": lambda Z, s: jnp.pad(Z, 1, constant_values=2.0) ** 2,
    "pad a row": lambda Z, s: lax.pad(Z[0] ** 2, s, [(2, -1, 1)]),
    "stack entries": lambda Z, s: jnp.stack([*Z[0]]) ** 2,
    "unstack": lambda Z, s: jnp.unstack(Z[0] ** 2)[1] * jnp.unstack(Z, axis=1)[0],
    "tile a row": lambda Z, s: jnp.tile(Z[0] ** 2, 2),
    "empty": lambda Z, s: (Z[:0].sum(0) + s) * (Z + Z[:, :0] @ Z[:0]), "eye": lambda Z, s: jnp.eye(2) @ Z * s,
    "at set": lambda Z, s: Z.at[1].set(s * Z[0] ** 2), "at add": lambda Z, s: Z.at[0, 1].add(Z[1, 0] ** 2),
    "tril": lambda Z, s: jnp.tril(Z @ Z.T), "where": lambda Z, s: jnp.where(Z > 0.5, Z**2, s),
    "select": lambda Z, s: jnp.select([Z > 0.7, Z > 0.3], [Z**2, s * Z], 0.0),
    "sort": lambda Z, s: jnp.sort(Z, 0) * jnp.arange(2.0)[:, None] ** 2, "cumsum": lambda Z, s: jnp.cumsum(Z, 0) ** 2,
    "cumprod": lambda Z, s: jnp.cumprod(Z, 1), "cummax": lambda Z, s: lax.cummax(Z, 0) ** 2,
    "cummin": lambda Z, s: lax.cummin(Z, 1, reverse=True) ** 2, "cumlogsumexp": lambda Z, s: lax.cumlogsumexp(Z, 0),
    "associative_scan": lambda Z, s: lax.associative_scan(jnp.multiply, Z),
    "top_k": lambda Z, s: lax.top_k(Z[:, 0], 2)[0] ** 2,
    "reduce": lambda Z, s: lax.reduce(Z, np.float64(1), lambda a, b: a * b, (0,)),
    "reduce_window": lambda Z, s: lax.reduce_window(Z, 0.0, lax.add, (2, 1), (1, 1), "VALID") ** 2,
    "fori_loop": lambda Z, s: lax.fori_loop(0, 3, lambda _, z: 0.5 * z**2 + s, Z),
    "scan": lambda Z, s: lax.scan(lambda c, z: (c + z**2, c * z), Z[0], Z)[1],
    "cond": lambda Z, s: lax.cond(Z[0, 0] > 0.5, lambda z: z**2, lambda z: s * z, Z),
    "map": lambda Z, s: lax.map(lambda z: jnp.sum(z) ** 2, Z),
    "solve": lambda Z, s: jnp.linalg.solve(Z.T @ Z + s * jnp.eye(2), Z[0]),
    "inv": lambda Z, s: jnp.linalg.inv(Z.T @ Z + jnp.eye(2)), "det": lambda Z, s: jnp.linalg.det(Z + s * jnp.eye(2)),
    "cholesky": lambda Z, s: jnp.linalg.cholesky(Z.T @ Z + jnp.eye(2)),
    "eigh": lambda Z, s: jnp.linalg.eigvalsh(Z.T @ Z), "jit": lambda Z, s: jax.jit(lambda z: s * z**2)(Z),
    "checkpoint": lambda Z, s: jax.checkpoint(lambda z: jnp.sin(s * z))(Z),
    "vmap": lambda Z, s: jax.vmap(lambda z: z @ z * s)(Z), "custom_jvp": lambda Z, s: softplus(s * Z),
    "custom_vjp": lambda Z, s: doubled(Z) ** 2,
    "grad inside": lambda Z, s: jax.grad(lambda z: jnp.sum(jnp.tanh(s * z) ** 3))(Z),
    "cotangents": lambda Z, s: jax.grad(lambda z: jnp.sum(z) + jnp.sum(s * z**2))(Z),
    "cotangents in another order": lambda Z, s: jax.grad(lambda z: jnp.sum(s * z**2) + jnp.sum(z))(Z),
    "half precision": lambda Z, s: jnp.asarray(Z, jnp.float32) * np.float32(2) * s,
    "constant": lambda Z, s: jnp.array([[0.6, 0.4]]), "integers": lambda Z, s: (Z > 0.5).astype(int) + 1,
}  # fmt: skip
FUNCTIONS = MATHS | ARRAYS
GROUPS = [list(FUNCTIONS)[k : k + 12] for k in range(0, len(FUNCTIONS), 12)]
# Loops and LAPACK compile for long.
MARKED = [pytest.param(names, marks=[pytest.mark.full] * ("solve" in names)) for names in GROUPS]
DIRECTION = jnp.array([[1.0, -0.4], [0.7, 0.2]])
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # programs that run once


def derivatives(fn, shared, Z, order):
    """A function's value, the gradient of its sum of squares, and their Hessian's product with `DIRECTION`."""

    def total(Z):
        return jnp.sum(jnp.asarray(fn(Z, shared), float) ** 2)

    if order == 1:
        return fn(Z, shared), jax.grad(total)(Z)
    return fn(Z, shared), *jax.jvp(jax.grad(total), (Z,), (DIRECTION,))


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("names", MARKED, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_any_function(names, order):
    """Both forms, entry by entry for four numbers and whole arrays for more, equal `vmap`, traced inside."""
    Z, more = np.random.default_rng(0).uniform(0.1, 1.0, (2, 2, 3)), np.zeros((1, 3))

    def all_functions(shared, Z, *_):
        return {name: derivatives(FUNCTIONS[name], shared, Z, order) for name in names}

    def run(shared, *nodes):
        entries, arrays = nodewise(all_functions)(shared, nodes[0]), nodewise(all_functions)(shared, *nodes)
        return entries, arrays, jax.vmap(all_functions, (None, -1), -1)(shared, nodes[0])

    *results, expected = jax.jit(run, compiler_options=QUICK)(1.3, Z, more)
    for form, result in zip(("entries", "arrays"), results, strict=True):
        for name in names:
            for k, (a, b) in enumerate(zip(result[name], expected[name], strict=True)):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), (form, name, k)
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=f"{form}: {name}, derivative {k}")


def assert_like_vmap(fn, Z, rtol=0.0):
    result, expected = jax.jit(lambda Z: (nodewise(fn)(0.0, Z), jax.vmap(lambda z: fn(0.0, z), -1, -1)(Z)))(Z)
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol)


@pytest.mark.parametrize("dtype", [float, int, np.float16, bool])
def test_constants_are_promoted_as_jax_does(dtype):
    """Also in a matrix product, whose operands jax does not convert."""
    constant = jnp.eye(2, dtype=dtype) if dtype is np.float16 else np.eye(2, dtype=dtype)
    assert_like_vmap(
        lambda _, Z: (constant @ Z, jnp.einsum("ik,jk,ij->ij", Z, Z, constant), Z * constant),
        np.ones((2, 1, 3), np.float32),
    )


def test_known_numbers_make_the_program_shorter():
    """Zeros and ones drop out and equal operations are done once, which saves work; values stay those of `vmap`."""
    Z, K = np.random.default_rng(0).uniform(0.1, 1.0, (2, 2, 3)), np.array([[0.0, 1.0], [1.0, 0.0]])

    def fn(_, Z):
        return Z + K, K + Z, Z - K, K - Z, Z * K, K * Z, Z / (K + 1), K / Z, lax.pow(Z, jnp.asarray(K)), lax.max(Z, K)

    assert_like_vmap(fn, Z, 1e-14)

    def products(fn):
        return str(jax.make_jaxpr(nodewise(fn))(0.0, Z)).count(" mul ")

    assert products(lambda _, Z: Z * K) == 0
    assert products(lambda _, Z: (Z[:, :1] @ Z[:, :1].T, Z[:, 0] * Z[:, 0])) == 3
