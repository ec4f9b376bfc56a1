import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.averages.nodewise import nodewise

pytestmark = pytest.mark.usefixtures("quick_programs")


def attention(shared, Z):
    return jax.nn.softmax(Z @ Z.T * shared["scale"], axis=-1) @ shared["mix"]


def reductions(shared, Z):
    return {
        "max": Z.max(0), "prod": jnp.prod(Z), "any": jnp.any(Z > 0, 0), "norm": jnp.linalg.norm(Z),
        "concat": jnp.concatenate([Z, Z[:1] * shared["scale"]]), "clip": jnp.clip(Z, -0.5, 0.5),
    }  # fmt: skip


def fallbacks(shared, Z):
    loop = jax.lax.fori_loop(0, 3, lambda _, z: 0.5 * z + shared["scale"], Z)
    return jnp.sort(Z, 0), jnp.cumsum(Z, 1), loop, jnp.einsum("ij,kj->ik", Z, Z)[::-1], jnp.eye(2)


def hessian(shared, Z):
    return jax.hessian(lambda z: jnp.sum(attention(shared, z) ** 2))(Z)


@pytest.mark.parametrize("fn", [attention, reductions, fallbacks, hessian])
@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_equals_vmap(fn, shape):
    shared = {"scale": jnp.array(1.3), "mix": jnp.asarray(np.random.default_rng(1).normal(size=(shape[0],) * 2))}
    Z = jnp.asarray(np.random.default_rng(0).normal(size=(*shape, 17)))
    got = nodewise(fn)(shared, Z)
    want = jax.vmap(lambda z: fn(shared, z), in_axes=-1, out_axes=-1)(Z)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_derivatives_reach_shared_and_nodes():
    shared = {"scale": jnp.array(0.7), "mix": jnp.eye(2)}
    Z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 5)))

    def total(run):
        return jax.grad(lambda s, z: jnp.sum(run(s, z) ** 3), (0, 1))(shared, Z)

    got = total(nodewise(attention))
    want = total(lambda s, z: jax.vmap(lambda a: attention(s, a), in_axes=-1, out_axes=-1)(z))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_traces_once_a_shape():
    calls = []

    def counted(shared, Z):
        calls.append(Z.shape)
        return shared * Z

    run = nodewise(counted)
    for _ in range(3):
        run(jnp.array(2.0), jnp.ones((2, 1, 8)))
    assert len(calls) == 1
