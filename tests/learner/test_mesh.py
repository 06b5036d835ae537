"""One update with weights, optimiser and rows laid out by the rules: on every mesh it is the same update."""

import functools

import jax
import numpy as np
import optax
import pytest

from m2po_jax.config import MeshConfig
from m2po_jax.learner.state import abstract_state, init_state, shardings_of
from m2po_jax.learner.update import make_update
from m2po_jax.models import logprobs, sharding
from m2po_jax.models.mesh import make_mesh
from tests.learner import batches
from tests.learner.test_invariance import assert_same, whole_batch
from tests.models import policies

MESHES = {"8x1x1": MeshConfig(8, 1, 1), "1x8x1": MeshConfig(1, 8, 1), "2x2x2": MeshConfig(2, 2, 2), "1x2x4": MeshConfig(1, 2, 4)}  # fmt: skip  # noqa: E501
POLICY = {"layers": 2, "kv_heads": 4, "vocab_size": 16}


@functools.cache
def policy():
    return policies.random_policy(None, seed=3, spread=2.0, **POLICY)


def placed(mesh):
    """Parameters laid out on the mesh, or on the first device."""
    model, params = policy()
    return params if mesh is None else jax.device_put(params, sharding.shardings(model.config, mesh))


def updated(mesh_name: str | None, micro_batches: int = 1, optimizer=batches.SGD):
    """Loss, what the update took off the parameters, metrics; and the next state."""
    mesh = None if mesh_name is None else make_mesh(MESHES[mesh_name])
    spec = batches.spec("m2po", micro_batches=micro_batches)._replace(model=policy()[0])
    state = init_state(placed(mesh), optimizer)
    before = jax.device_get(state.params)
    if mesh is None:
        after, metrics = make_update(spec, optimizer)(state, whole_batch())
    else:
        where = shardings_of(state)
        batch = jax.device_put(whole_batch(), sharding.batch_sharding(mesh))
        with jax.set_mesh(mesh):
            after, metrics = make_update(spec, optimizer, where)(state, batch)
        assert shardings_of(after) == where
    taken = jax.tree.map(np.subtract, before, jax.device_get(after.params))
    metrics = jax.device_get(metrics)
    return (metrics["loss"], taken, metrics), after


@functools.cache
def expected():
    return updated(None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_is_the_same_on_every_mesh(mesh, micro_batches):
    """A plain step at rate 1, so that parameters show the gradient; an Adam step would hide errors."""
    found, _ = updated(mesh, micro_batches)
    assert_same(found, expected())


def test_each_device_has_its_share_of_weights_and_moments():
    mesh = make_mesh(MESHES["2x2x2"])
    state = init_state(placed(mesh), optax.adamw(1e-3))
    like = abstract_state(placed(mesh), optax.adamw(1e-3))
    assert shardings_of(state) == shardings_of(like)
    kernel = state.params["blocks"]["gate"]["kernel"]
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == kernel.shape]
    assert len(moments) == 4  # two moments of gate, and of up, which has its shape
    for leaf in (kernel, *moments):
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_is_the_same_where_logits_come_in_chunks(mesh, monkeypatch):
    """Chunks of one token of each row, whose gradients of the output embedding a device adds up by itself."""
    whole = expected()
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 1)
    found, _ = updated(mesh, 2)
    assert_same(found, whole)
