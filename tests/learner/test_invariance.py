"""One mini-batch, one gradient: whatever the micro-batches, the mesh, the padding and the order of its rows."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax import objectives
from m2po_jax.learner.diagnostics import token_view
from m2po_jax.learner.update import MiniBatch, loss_and_gradient, make_score
from tests.learner import batches
from tests.learner.batches import mini_batch

MESHES = {"1": (1, 1), "2": (2, 1), "8": (8, 1), "2x2": (2, 2)}
"""Devices along the axis that shards rows, and along the one that shards parameters."""
MICRO_BATCHES = (1, 2, 4, 7)
FAST = ("m2po",)
EXACT = ("tokens", "log_ratio_histogram", "tokens_by_ratio", "masked_frac", "trust_region_frac", "eps_clipped_frac")
jitted = jax.jit(loss_and_gradient, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
"""Dozens of programs: what is saved is compilation."""


@functools.cache
def whole_batch() -> MiniBatch:
    """24 ragged responses, among them an empty one; behaviour, proximal and reference log-probs near the policy's."""
    parts = [mini_batch(seed) for seed in range(2)]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    batch.response_mask[5] = False
    logprobs = np.asarray(make_score(batches.spec())(batches.params(), batch))
    rng = np.random.default_rng(9)
    near = lambda spread: np.where(batch.response_mask, logprobs + rng.normal(0, spread, logprobs.shape), 0)  # noqa: E731
    return batch._replace(
        behavior_logprobs=near(0.3).astype(np.float32),
        proximal_logprobs=near(0.1).astype(np.float32),
        reference_logprobs=near(0.5).astype(np.float32),
        staleness=np.repeat([3, 256], 12).astype(np.int32),
    )


def wider(batch: MiniBatch) -> MiniBatch:
    """More padding, with other things in it."""
    left = lambda x, value: np.pad(x, ((0, 0), (3, 0)), constant_values=value)  # noqa: E731
    right = lambda x, value: np.pad(x, ((0, 0), (0, 2)), constant_values=value)  # noqa: E731
    return batch._replace(
        prompt_tokens=left(batch.prompt_tokens, 3),
        prompt_valid=left(batch.prompt_valid, False),
        response_tokens=right(batch.response_tokens, 4),
        response_mask=right(batch.response_mask, False),
        behavior_logprobs=right(batch.behavior_logprobs, -99.0),
        proximal_logprobs=right(batch.proximal_logprobs, np.nan),
        reference_logprobs=right(batch.reference_logprobs, np.inf),
    )


def reordered(batch: MiniBatch) -> MiniBatch:
    """Groups in another order, and the responses within them."""
    rng = np.random.default_rng(4)
    groups = rng.permutation(len(batch.rewards) // batches.SIZE)
    rows = np.concatenate([group * batches.SIZE + rng.permutation(batches.SIZE) for group in groups])
    return jax.tree.map(lambda x: x[rows], batch)


PADDINGS = {"narrow": lambda batch: batch, "wide": wider}
ORDERS = {"in order": lambda batch: batch, "shuffled": reordered}


def on_mesh(params, batch: MiniBatch, mesh_name: str):
    rows, columns = MESHES[mesh_name]
    devices = jax.devices()[: rows * columns]
    mesh = jax.make_mesh((rows, columns), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)

    def spec_of(leaf):
        divides = leaf.ndim and leaf.shape[-1] % columns == 0
        return PartitionSpec(*(None,) * (leaf.ndim - 1), "model") if divides else PartitionSpec()

    params = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec_of(leaf))), params)
    return params, jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def run(name: str, batch: MiniBatch, mesh: str = "1", micro_batches: int = 1, **hyperparameters):
    spec = batches.spec(name, micro_batches=micro_batches, **hyperparameters)
    params, batch = on_mesh(batches.params(), batch, mesh)
    loss, grads, metrics = jitted(params, spec, batch)
    assert len(jax.tree.leaves(grads)[0].sharding.device_set) == np.prod(MESHES[mesh])
    return jax.device_get((loss, grads, metrics))


@functools.cache
def expected(name: str, **hyperparameters):
    return run(name, whole_batch(), **hyperparameters)


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


def assert_same(found, wanted, rtol=2e-4, atol=2e-6):
    loss, grads, metrics = wanted
    assert norm(grads) > 1e-3
    assert norm(jax.tree.map(np.subtract, found[1], grads)) <= 1e-5 * norm(grads)
    np.testing.assert_allclose(found[0], loss, rtol=1e-5, atol=1e-6)
    assert found[2].keys() == metrics.keys()
    for key, value in metrics.items():
        if key in EXACT:
            np.testing.assert_array_equal(found[2][key], value, err_msg=key)
        else:
            np.testing.assert_allclose(found[2][key], value, rtol=rtol, atol=atol, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_m2po_is_the_same_on_every_cut_mesh_padding_and_order(micro_batches, mesh, padding):
    for reorder in ORDERS.values():
        batch = reorder(PADDINGS[padding](whole_batch()))
        found = run("m2po", batch, mesh, micro_batches)
        assert 0.05 < found[2]["masked_frac"] < 0.5, "the mask is at work"
        assert_same(found, expected("m2po"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in objectives.names()]
)
def test_every_objective_is_the_same_in_micro_batches(name):
    """Seven micro-batches of 24 rows, the last ones padded, other padding, another order, eight devices."""
    assert_same(run(name, reordered(wider(whole_batch())), "8", 7), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant_sum"])
@pytest.mark.parametrize("name", ["m2po", "m2po_all_tokens", "dapo"])
def test_aggregations_and_penalties_are_the_same_in_micro_batches(name, aggregation):
    told = {"aggregation": aggregation, "length_constant": 3.0, "kl_coefficient": 0.1}
    assert_same(run(name, reordered(whole_batch()), "2x2", 4, **told), expected(name, **told))


@pytest.mark.slow
def test_a_denominator_of_kept_tokens_is_that_of_the_whole():
    told = {"denominator": "kept", "threshold": 0.02}
    found = run("m2po_all_tokens", whole_batch(), "2", 4, **told)
    assert_same(found, expected("m2po_all_tokens", **told))
    everything = expected("m2po_all_tokens", threshold=0.02)
    assert norm(found[1]) > 1.05 * norm(everything[1])


@pytest.mark.slow
def test_a_mask_of_each_micro_batch_is_another_mask():
    """As in the authors' code: its own threshold for each part, and so a gradient that depends on the cut."""
    whole = expected("m2po")
    of_parts = run("m2po", whole_batch(), "1", 4, mask_scope="microbatch")
    assert norm(jax.tree.map(np.subtract, of_parts[1], whole[1])) > 1e-2 * norm(whole[1])
    assert_same(run("m2po", whole_batch(), "1", 1, mask_scope="microbatch"), whole)


def test_an_update_of_a_sharded_batch_moves_no_tokens_between_devices():
    """Beyond gradients and statistics, which are added up, devices exchange rewards; nothing is sorted."""
    params, batch = on_mesh(batches.params(), whole_batch(), "8")
    text = jitted.lower(params, batches.spec("m2po"), batch).compile().as_text()
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert all(np.prod([int(x) for x in shape.split(",") if x]) <= len(batch.rewards) for shape in moved)
    assert " all-reduce(" in text and not re.search(r"\bsort\(%", text)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["minibatch", "microbatch"])
def test_diagnostics_show_what_the_update_keeps(scope):
    spec = batches.spec("m2po", micro_batches=4, mask_scope=scope)
    view = token_view(batches.params(), spec, whole_batch())
    _, _, metrics = run("m2po", whole_batch(), "1", 4, mask_scope=scope)
    dropped = (whole_batch().response_mask & ~np.asarray(view["kept"])).sum()
    assert dropped > 0
    assert metrics["masked_frac"] == pytest.approx(dropped / whole_batch().response_mask.sum())
