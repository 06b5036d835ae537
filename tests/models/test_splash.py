"""The kernel of TPUs, interpreted on CPUs, against the attention of every other device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.config import MeshConfig
from m2po_jax.models import splash
from m2po_jax.models.attention import attention
from m2po_jax.models.mesh import make_mesh

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 4, 2, 128


@pytest.fixture
def inputs(rng):
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (rng.normal(size=(BATCH, LENGTH, n, HEAD_DIM)).astype(np.float32) for n in heads)
    slots = np.arange(LENGTH)[None]
    first, last = np.array([0, 5, 100, 0])[:, None], np.array([256, 250, 256, 70])[:, None]
    ids = ((slots >= first) & (slots < last)).astype(np.int32)  # padding on both sides
    ids[3] += slots[0] > 40  # and a row of several sequences
    return (q, k, v), ids


def plain(q, k, v, ids):
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    return attention(q, k, v, causal[None] & (ids[:, :, None] == ids[:, None, :]))


def kernel(q, k, v, ids):
    return splash.splash_attention(q, k, v, splash.Segments(ids), interpret=True)


def value_and_gradient(function, arrays, ids):
    real = (ids > 0)[:, :, None, None]
    program = lambda q, k, v: jnp.sum(jnp.where(real, jnp.sin(function(q, k, v, ids)), 0.0))  # noqa: E731
    return jax.jit(jax.value_and_grad(program, (0, 1, 2)))(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, MeshConfig(fsdp=2, tensor=2)])
def test_values_and_gradients_are_those_of_plain_attention(inputs, mesh):
    arrays, ids = inputs
    real = ids > 0
    expected, wanted = plain(*arrays, ids), value_and_gradient(plain, arrays, ids)
    if mesh is None:
        found, got = jax.jit(kernel)(*arrays, ids), value_and_gradient(kernel, arrays, ids)
    else:
        with jax.set_mesh(make_mesh(mesh)):
            found, got = jax.jit(kernel)(*arrays, ids), value_and_gradient(kernel, arrays, ids)
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-4), got, wanted)


def test_it_is_used_where_it_fits_and_nowhere_but_on_tpus(devices):
    assert not splash.on_tpu()
    assert splash.fits((4, 4096), 16, 8, 128)
    assert not splash.fits((4, 100), 16, 8, 128)
    assert not splash.fits((4, 4096), 16, 8, 64)
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4), devices)):
        assert not splash.on_tpu()
        assert splash.fits((4, 4096), 16, 8, 128)
        assert not splash.fits((3, 4096), 16, 8, 128)
        assert not splash.fits((4, 4096), 16, 2, 128)
