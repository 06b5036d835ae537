"""One mini-batch, one update: packed or not, in any number of micro-batches, on every mesh, by any number of hosts."""

import functools
import re

import jax
import numpy as np
import pytest

from m2po_jax import objectives
from m2po_jax.learner.diagnostics import token_view
from m2po_jax.learner.packing import Packing, Size, micro_batches_of
from m2po_jax.learner.state import init_state, shardings_of
from m2po_jax.learner.update import MiniBatch, loss_and_gradient, make_score, make_update
from m2po_jax.models import sharding
from m2po_jax.models.mesh import make_mesh
from tests.learner import batches, test_invariance
from tests.learner.test_invariance import jitted
from tests.learner.test_mesh import MESHES, placed, policy
from tests.models import policies

pytestmark = pytest.mark.usefixtures("standard_promotion")

RESPONSES, WIDTH = 32, 24
CUTS = {1: (1, Size(16, 24)), 2: (4, Size(16, 12)), 4: (4, Size(32, 24))}
"""Micro-batches that there are -> learner.micro_batches, and the size."""


@functools.cache
def whole_batch() -> MiniBatch:
    """32 ragged responses, among them an empty one; behaviour, proximal and reference log-probs near the policy's."""
    parts = [batches.mini_batch(seed) for seed in range(3)]
    batch = jax.tree.map(lambda *x: np.concatenate(x)[:RESPONSES], *parts)
    batch.response_mask[5] = False
    spec = batches.spec()._replace(model=policy()[0])
    logprobs = np.asarray(make_score(spec)(placed(None), batch))
    rng = np.random.default_rng(9)
    near = lambda spread: np.where(batch.response_mask, logprobs + rng.normal(0, spread, logprobs.shape), 0)  # noqa: E731
    return batch._replace(
        behavior_logprobs=near(0.3).astype(np.float32),
        proximal_logprobs=near(0.1).astype(np.float32),
        reference_logprobs=near(0.5).astype(np.float32),
        staleness=np.repeat([3, 256], 16).astype(np.int32),
    )


def packed_batch(cut: int, parts: int = 1, row_parts: int = 8) -> MiniBatch:
    micro_batches, size = CUTS[cut]
    packing = Packing(WIDTH, batches.RESPONSE, RESPONSES, micro_batches, row_parts, parts)
    assert micro_batches_of(size.rows, RESPONSES, micro_batches) == cut
    return batches.packed(whole_batch(), packing, size)


def updated(objective: str, batch: MiniBatch, micro_batches: int = 1, mesh_name: str | None = None, **told):
    """Loss, what a plain step at rate 1 took off the parameters, and metrics; an Adam step would hide errors."""
    spec = batches.spec(objective, micro_batches=micro_batches, **told)._replace(model=policy()[0])
    mesh = None if mesh_name is None else make_mesh(MESHES[mesh_name])
    state = init_state(placed(mesh), batches.SGD)
    if mesh is None:
        taken, metrics = batches.gradient_of(make_update(spec, batches.SGD), state, batch)
    else:
        batch = jax.device_put(batch, sharding.batch_sharding(mesh))
        with jax.set_mesh(mesh):
            update = make_update(spec, batches.SGD, shardings_of(state))
            taken, metrics = batches.gradient_of(update, state, batch)
    return metrics["loss"], taken, metrics


@functools.cache
def expected(objective: str):
    """Of the mini-batch with a row for each response, whole, on one device."""
    return updated(objective, whole_batch())


def gradient(objective: str, batch: MiniBatch, micro_batches: int = 1, **told):
    """Loss, gradient and metrics, by a program that is quickly compiled."""
    spec = batches.spec(objective, micro_batches=micro_batches, **told)._replace(model=policy()[0])
    return jax.device_get(jitted(placed(None), spec, batch))


assert_same = functools.partial(test_invariance.assert_same, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mesh", [None, *MESHES])
def test_a_packed_update_is_the_same_on_every_mesh(mesh, cut):
    parts = 1 if mesh is None or cut == 1 or mesh == "1x2x4" else 2
    found = updated("m2po", packed_batch(cut, parts), CUTS[cut][0], mesh)
    assert 0.01 < found[2]["masked_frac"] < 0.5, "the mask is at work"
    assert_same(found, expected("m2po"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "grpo" else pytest.mark.slow) for name in objectives.names()]
)
def test_every_objective_is_the_same_packed(name):
    found = gradient(name, packed_batch(2, parts=2), CUTS[2][0])
    assert_same(found, gradient(name, whole_batch()))


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant_sum"])
def test_aggregations_and_penalties_are_the_same_packed(aggregation):
    told = {"aggregation": aggregation, "length_constant": 3.0, "kl_coefficient": 0.1}
    found = gradient("m2po_all_tokens", packed_batch(4), CUTS[4][0], **told)
    assert_same(found, gradient("m2po_all_tokens", whole_batch(), **told))


def test_what_rows_hold_beyond_their_sequences_changes_no_bit():
    batch = packed_batch(1)
    rows = batch.packed
    other = np.where(rows.segment_ids > 0, rows.tokens, 7)
    assert (other != rows.tokens).any()
    clean = gradient("grpo", batch)
    dirty = gradient("grpo", batch._replace(packed=rows._replace(tokens=other)))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_scores_and_diagnostics_are_by_response():
    spec = batches.spec("m2po", micro_batches=4)._replace(model=policy()[0])
    batch, rows = whole_batch(), packed_batch(2)
    score = make_score(spec)
    np.testing.assert_allclose(score(placed(None), rows), score(placed(None), batch), atol=2e-5)
    ours, theirs = (token_view(placed(None), spec, x) for x in (rows, batch))
    assert np.asarray(ours["kept"]).any() and (~np.asarray(ours["kept"]) & batch.response_mask).any()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, atol=5e-5, err_msg=name)


def test_logits_are_of_response_tokens_alone():
    """Of the 24 slots of each of 16 rows, at most 12 hold a response token; nothing else is 23 wide."""
    model, params = policies.random_policy(23, layers=1)
    for width in (12, 24):
        batch = batches.packed(whole_batch(), Packing(WIDTH, batches.RESPONSE, RESPONSES), Size(16, width))
        program = jax.jit(loss_and_gradient, static_argnums=1)
        text = program.lower(params, batches.spec("grpo")._replace(model=model), batch).as_text()
        assert set(re.findall(r"dot_general.*tensor<(\d+)x23xf32>\n", text)) == {str(16 * width)}


@pytest.mark.slow
def test_hidden_states_stay_on_the_devices_of_their_rows():
    """Devices exchange weights, gradients and numbers by token, but nothing as large as the rows' hidden states."""
    model, mesh = policy()[0], make_mesh(MESHES["8x1x1"])
    spec = batches.spec("m2po")._replace(model=model)
    state = init_state(placed(mesh), batches.SGD)
    packing = Packing(WIDTH, batches.RESPONSE, RESPONSES, 1, 8)
    batch = jax.device_put(batches.packed(whole_batch(), packing, Size(16, 12)), sharding.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        text = make_update(spec, batches.SGD, shardings_of(state)).lower(state, batch).compile().as_text()
    kinds = "all-gather|all-to-all|collective-permute|all-reduce"
    moved = re.findall(rf"= \(?\w+\[([\d,]*)\]\S* (?:{kinds})(?:-start)?\(", text)
    sizes = {shape: np.prod([int(x) for x in shape.split(",") if x]) for shape in moved}
    assert sizes and max(sizes.values()) < 16 * 12 * model.config.width, sizes
