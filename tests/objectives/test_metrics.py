"""Metrics against the reference; parts of a batch add up to the whole."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from m2po_jax import objectives
from tests.objectives import batches, reference

jitted = jax.jit(lambda objective, *arrays: objective(*arrays), static_argnums=0)
# Squares beyond the range of float32 are covered by test_masks; here the sums must be comparable in float64.
inputs = st.tuples(batches.log_ratios(extreme=False), batches.advantages(), batches.masks())


@settings(max_examples=100, deadline=None)
@given(inputs)
def test_every_metric_is_the_references(case):
    log_ratio, advantages, mask = case
    batch = reference.Batch.of(log_ratio, np.zeros_like(log_ratio), advantages, mask)
    assume(not reference.nearly_undecided(batch, 0.04))
    loss, metrics = jitted(objectives.get("m2po"), log_ratio, np.zeros_like(log_ratio), advantages, mask)
    expected_loss, _, kept = reference.objective("m2po", batch)
    expected = reference.metrics(batch, kept, expected_loss)
    assert metrics.keys() == expected.keys()
    for key in expected.keys() - {"loss", "advantage_std"}:
        np.testing.assert_allclose(metrics[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)
    # A variance from moments: what is lost to cancellation is a few float32 roundings of the square.
    np.testing.assert_allclose(metrics["advantage_std"], expected["advantage_std"], atol=2e-3)
    assert metrics["loss"] == loss


@pytest.mark.parametrize("name", reference.NAMES)
def test_every_objective_reports_the_same_float32_scalars(name):
    _, metrics = jitted(objectives.get(name), *batches.normal_batch(0))
    _, of_m2po = jitted(objectives.get("m2po"), *batches.normal_batch(0))
    assert metrics.keys() == of_m2po.keys()
    assert all(value.dtype == np.float32 and value.shape == () for value in metrics.values())


def test_m2_after_masking_is_within_the_threshold_and_before_it_is_not():
    _, metrics = jitted(objectives.get("m2po"), *batches.normal_batch(1, (16, 16)))
    assert metrics["m2_kept"] <= 0.04 < metrics["m2_trust_region"]
    assert 0.0 < metrics["masked_frac"] < metrics["trust_region_frac"] < 1.0


def test_saturated_tokens_are_counted():
    log_ratio = np.asarray([[19.0, 20.0, -21.0, 0.0]], np.float32)
    one = np.ones((1, 1), np.float32)
    mask = np.asarray([[True, True, True, True]])
    _, metrics = jitted(objectives.get("grpo_no_tr"), log_ratio, np.zeros_like(log_ratio), one, mask)
    assert float(metrics["saturated_frac"]) == 0.5
