"""Closed forms against hand-worked numbers."""

from dataclasses import replace

import pytest

from m2po_jax.models.chips import CHIPS
from m2po_jax.models.flops import Forward
from m2po_jax.planning.formulas import forward_flops, kernel_flops, update_flops
from m2po_jax.planning.roofline import roofline
from m2po_jax.planning.storage import parameters, store_cost, versions_kept
from tests.planning.small import SMALL


def test_a_forward_pass():
    """Width 256, two heads of 128 for queries, keys and values, 512 in the middle, 1,024 ids, three layers."""
    weights = 3 * (4 * 256 * 256 + 3 * 256 * 512)
    found = forward_flops(SMALL.model, rows=2, prompt=3, response=5)
    assert found == Forward(
        blocks=2 * weights * 16, attention=4 * 3 * 256 * 2 * (8 * 9 / 2), logits=2 * 256 * 1024 * 10
    )


def test_what_is_computed_again_follows_from_the_configuration():
    one = forward_flops(SMALL.model, 32, 128, 128)
    found = update_flops(SMALL, kernels=True)
    assert found.useful == 3 * one.total
    assert found.executed == 5 * one.blocks + (3 + 3.5) * one.attention + 5 * one.logits
    assert found.first_pass == one.total
    whole = replace(SMALL, learner=replace(SMALL.learner, micro_batches=1), model=replace(SMALL.model, remat="none"))
    assert update_flops(whole, kernels=True).executed == 3 * one.blocks + 4.5 * one.attention + 4 * one.logits


def test_a_kernel_computes_blocks_on_the_diagonal_whole():
    pairs = 4096 * 4096 / 2 + 8 * 512 * 512 / 2
    forward = kernel_flops("splash_mha_fwd_residuals", SMALL.model, 4, 4096, 2, 512)
    assert forward == 2 * 2 * 4 * 1 * 128 * pairs
    assert kernel_flops("splash_mha_dkv", SMALL.model, 4, 4096, 2, 512) == 2 * forward


def test_a_bound_is_the_slowest_part_at_its_peak():
    chip = CHIPS["v5e"]
    found = roofline(chip, flops=197e12, hbm_bytes=2 * 819e9, sent_bytes=100e9)
    assert (found.compute_s, found.hbm_s, found.interconnect_s, found.bound_s) == (1.0, 2.0, 0.5, 2.0)
    assert found.limit == "HBM"
    assert found.most_mfu(8 * 197e12, devices=8, chip=chip) == 0.5


def test_the_store_of_a_run():
    """Two updates a batch of 64 responses, 30 s each: 60 batches an hour."""
    found = store_cost(SMALL, update_s=30.0)
    assert found.batches_per_hour == 60.0
    assert found.rollout_bytes_per_batch == 64 * (4 * 128 + 12 * 128)
    assert found.weights_bytes == 4 * parameters(SMALL)
    assert found.weights_bytes_per_hour == 60 * found.weights_bytes
    assert found.objects_per_hour == pytest.approx(60 * (2 + 1 + 25) + 60 / 16 + 120 / 128)
    assert found.requests_per_hour > found.objects_per_hour


def test_versions_that_are_kept():
    """1,280 updates, a version every 2, none stale: what the two newest checkpoints may still need, and version 0."""
    assert versions_kept(SMALL) == 256 // 2 + 1 + 1
    forever = replace(SMALL, rollouts=replace(SMALL.rollouts, keep_weights_every=256))
    assert versions_kept(forever) == 130 + 3
