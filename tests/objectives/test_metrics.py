"""Every metric against the reference, by hand, and the same however a batch is wide, ordered or spread over devices."""

import math

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax import objectives
from tests.objectives import batches, reference
from tests.objectives.batches import full_batch, metrics_of, without_measurements

NEVER_ROUNDED = (*reference.EXACT, "log_ratio_min", "log_ratio_max", "no_signal_frac")


def agree(actual, expected):
    """Counts are equal, the rest equal to float32 rounding of what it is the sum of."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == np.float32 and actual[key].shape == np.shape(value), key
        if key in reference.QUANTILES:
            np.testing.assert_allclose(actual[key], value, rtol=1e-6, err_msg=key)
        elif key in NEVER_ROUNDED:
            np.testing.assert_array_equal(actual[key], np.float32(value), err_msg=key)
        else:
            np.testing.assert_allclose(actual[key], value, rtol=1e-5, atol=slack(key, expected), err_msg=key)


def slack(key, expected):
    """Absolute error of a mean whose terms cancel, from the size of the terms."""
    most = max(abs(expected["log_ratio_min"]), abs(expected["log_ratio_max"]))
    return {"k1": 1e-6 * most, "k3": 1e-6 * most}.get(key, 1e-6)


@pytest.mark.parametrize("wide", [False, True])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.data())
def test_every_metric_is_the_references(wide, data):
    """Whatever is kept: the metrics take it as given."""
    arguments = data.draw(batches.measured_batches(wide))
    batch = reference.Batch.of(**arguments)
    assume(not near_an_edge(batch))
    kept = batch.usable & data.draw(batches.masks())
    actual = metrics_of(arguments, kept, np.float32(1.5))
    assert all(np.isfinite(value).all() for value in actual.values())
    agree(actual, reference.metrics(batch, kept, 1.5))


def near_an_edge(batch):
    """Whether rounding decides the bin of |r - 1|, or PPO's clip."""
    x = batch.log_ratio.ravel()
    distance = np.abs(np.expm1(np.clip(x, -20, 20)))[np.abs(x) < 15]
    close = [np.abs(distance - edge) < 1e-6 for edge in reference.RATIO_EDGES]
    close += [np.abs(x - edge) < 1e-6 for edge in np.log1p([-0.2, 0.2])]
    return any(where.any() for where in close)


@settings(max_examples=25, deadline=None)
@given(batches.batches())
def test_without_optional_inputs_there_is_one_age_and_no_entropy(arguments):
    given_up = ("proximal_logprobs", "reference_logprobs", "finish_reason")
    arguments = {key: x for key, x in arguments.items() if key not in given_up}
    batch = reference.Batch.of(**arguments)
    assume(not near_an_edge(batch))
    actual = metrics_of(arguments, batch.usable, np.float32(0.0))
    agree(actual, reference.metrics(batch, batch.usable, 0.0))
    assert actual["log_ratio_histogram"].shape == (1, 3, 31)
    assert not any(key.startswith(("entropy", "reference")) or "proximal" in key for key in actual)


def test_by_hand():
    """Ratios 2 and 1/2 of a kept and a dropped token, A = 1; one token without a log-prob, one of padding."""
    batch = batches.of_log_ratios([math.log(2), -math.log(2), 0.0])
    batch["behavior_logprobs"] = batch["behavior_logprobs"].copy()
    batch["behavior_logprobs"][0, 2] = -np.inf
    batch["entropy"][0] = [0.5, 1.5, 9.0, 9.0, 9.0, 9.0]
    batch["staleness"][0] = 5
    kept = np.zeros(batches.SHAPE, bool)
    kept[0, 0] = True
    square, log_2 = math.log(2) ** 2, math.log(2)
    # log 2 = 0.6931 in binary is 1.0110001 0111... * 2^-1, cut to 1.0110001.
    cut = (1 + 0b0110001 / 128) / 2
    expected = {
        "loss": 0.25,
        "tokens": 3.0,
        "masked_frac": 2 / 3,
        "eps_clipped_frac": 1 / 3,
        "trust_region_frac": 1 / 3,
        "m2_all": square,
        "m2_trust_region": square,
        "m2_kept": square,
        "ratio_mean": 1.25,
        "ratio_max": 2.0,
        "log_ratio_min": -log_2,
        "log_ratio_max": log_2,
        "ratio_p01": math.exp(-cut),
        "ratio_p50": math.exp(-cut),
        "ratio_p99": math.exp(cut),
        "ratio_p999": math.exp(cut),
        "k1": 0.0,
        "k3": 0.25,
        "ess": 2.5**2 / (2 * 4.25),
        "chi2": (1 + 0.25) / 2,
        "saturated_frac": 0.0,
        "nonfinite_tokens": 1.0,
        "nonfinite_policy": 0.0,
        "nonfinite_behavior": 1.0,
        "nonfinite_proximal": 0.0,
        "nonfinite_reference": 0.0,
        "all_masked": 0.0,
        "advantage_mean": 1.0,
        "advantage_std": 0.0,
        "no_signal_frac": 0.0,
        "reference_kl": (0.5 - 1 + log_2 + 2 - 1 - log_2) / 2,
        "entropy_mean": 1.0,
        "entropy_kept": 0.5,
        "entropy_masked": 1.5,
        "entropy_by_ratio": [0.0, 0.0, 0.0, 0.0, 1.5, 0.0, 0.5],
        "tokens_by_ratio": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0],
    }
    actual = dict(metrics_of(batch, kept, np.float32(0.25)))
    histogram = np.zeros((7, 3, 31))
    # Age 4 to 15; A > 0; 0.69 lies in [2^-1, 2^0), the tenth bin from the middle one.
    histogram[2, 2, [15 - 10, 15 + 10]] = 1.0
    np.testing.assert_array_equal(actual.pop("log_ratio_histogram"), histogram)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", reference.NAMES)
def test_the_kept_tokens_of_every_objective_make_its_shares(name):
    arguments = full_batch(1)
    batch = reference.Batch.of(**arguments)
    loss, _, kept, _ = batches.jitted_outcome(objectives.get(name), without_measurements(arguments))
    expected = reference.metrics(batch, reference.objective(name, batch).kept, float(loss))
    agree(metrics_of(arguments, kept, loss), expected)


@pytest.mark.parametrize("width", [1, 127, *(pytest.param(wide, marks=pytest.mark.slow) for wide in (128, 129, 300))])
def test_batches_wider_than_a_block_of_columns(width):
    arguments = full_batch(width, (3, width), spread=0.6, wide=width == 300)
    arguments["policy_logprobs"][1, width // 2] = np.nan
    if width in (127, 129):
        arguments = {key: x for key, x in arguments.items() if key not in ("proximal_logprobs", "reference_logprobs")}
    batch = reference.Batch.of(**arguments)
    kept = reference.algorithm_1(batch, 0.04)
    assert not near_an_edge(batch)
    agree(metrics_of(arguments, kept, np.float32(0.5)), reference.metrics(batch, kept, 0.5))


def test_the_order_of_responses_and_tokens_does_not_matter():
    arguments = full_batch(300, (3, 300), spread=0.6, wide=True)
    kept = reference.algorithm_1(reference.Batch.of(**arguments), 0.04)
    expected = metrics_of(arguments, kept, np.float32(0.5))
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows, columns = rng.permutation(3), rng.permutation(300)
        move = lambda x, rows=rows, columns=columns: x[rows][:, columns] if x.ndim == 2 else x[rows]  # noqa: E731
        actual = metrics_of({key: move(x) for key, x in arguments.items()}, move(kept), np.float32(0.5))
        for key in expected:
            if key in (*NEVER_ROUNDED, *reference.QUANTILES):
                np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)
            np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)


def test_rows_on_eight_devices_give_the_same(devices):
    arguments = full_batch(3, (8, 40))
    arguments["response_mask"][:2] = False
    batch = reference.Batch.of(**arguments)
    kept = reference.algorithm_1(batch, 0.04)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    sharded = jax.device_put(arguments, NamedSharding(mesh, PartitionSpec("data")))
    assert len(sharded["policy_logprobs"].sharding.device_set) == 8
    agree(metrics_of(sharded, kept, np.float32(0.5)), reference.metrics(batch, kept, 0.5))


def test_m2_after_masking_is_within_the_threshold_and_before_it_is_not():
    arguments = full_batch(3, (3, 300), wide=True)
    kept = reference.algorithm_1(reference.Batch.of(**arguments), 0.04)
    metrics = metrics_of(arguments, kept, np.float32(0.5))
    assert metrics["m2_kept"] <= 0.04 < metrics["m2_trust_region"]
    assert 0.0 < metrics["masked_frac"] < metrics["trust_region_frac"] < 1.0


@pytest.mark.parametrize("nothing", ["mask", "rows"])
def test_an_empty_batch_measures_zeros(nothing):
    arguments = full_batch(4)
    if nothing == "mask":
        arguments["response_mask"][:] = False
    else:
        arguments = {key: x[:0] for key, x in arguments.items()}
    metrics = metrics_of(arguments, np.zeros(arguments["response_mask"].shape, bool), np.float32(0.0))
    assert not any(np.any(value) for value in metrics.values()), metrics


def test_a_batch_without_one_usable_token_is_counted_and_finite():
    arguments = full_batch(5)
    arguments["response_mask"][:] = True
    arguments["policy_logprobs"][:] = np.nan
    metrics = metrics_of(arguments, np.zeros(batches.SHAPE, bool), np.float32(0.0))
    assert all(np.isfinite(value).all() for value in metrics.values())
    assert metrics["tokens"] == metrics["nonfinite_tokens"] == metrics["nonfinite_policy"] == 24.0
    assert metrics["all_masked"] == metrics["masked_frac"] == 1.0 and metrics["ratio_p50"] == 0.0


def test_saturated_tokens_are_counted():
    arguments = batches.of_log_ratios([19.0, 20.0, -21.0, 0.0])
    assert metrics_of(arguments, arguments["response_mask"], np.float32(0.0))["saturated_frac"] == 0.5


def test_a_ratio_near_zero_is_less_than_one_away_from_one():
    """exp(-18) - 1 rounds to -1 in float32; its bin is still [0.7, 1), and not that of ratios of 2 and more."""
    arguments = batches.of_log_ratios([-18.0, -20.0, -1e4])
    metrics = metrics_of(arguments, arguments["response_mask"], np.float32(0.0))
    np.testing.assert_array_equal(metrics["tokens_by_ratio"], [0, 0, 0, 0, 0, 3, 0])


def test_the_entropy_of_one_dropped_token_among_many_is_not_lost():
    """Nine million nats kept would swallow 0.3 nats dropped, were one the difference of two sums."""
    shape = (3, 300)
    arguments = full_batch(6, shape, spread=0.01, wide=True)
    arguments["response_mask"] = np.ones(shape, bool)
    arguments["entropy"] = np.full(shape, 1e4, np.float32)
    arguments["policy_logprobs"][2, 200] = arguments["behavior_logprobs"][2, 200] + 0.6
    arguments["entropy"][2, 200] = 0.3
    kept = np.ones(shape, bool)
    kept[2, 200] = False
    metrics = metrics_of(arguments, kept, np.float32(0.0))
    np.testing.assert_allclose(metrics["entropy_masked"], 0.3, rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy_by_ratio"][-2], 0.3, rtol=1e-6)
    np.testing.assert_array_equal(metrics["tokens_by_ratio"], [899, 0, 0, 0, 0, 1, 0])
    np.testing.assert_allclose(metrics["entropy_kept"], 1e4, rtol=1e-5)


def test_the_deviation_of_advantages_far_from_zero_is_not_lost():
    """1000 and 1001: deviation 1/2, which squares of a thousand would swallow."""
    arguments = batches.of_log_ratios([0.1, 0.1])
    arguments["response_mask"][1, :2] = True
    arguments["advantages"] = np.float32([[1000.0], [1001.0], [0.0], [0.0]])
    metrics = metrics_of(arguments, arguments["response_mask"], np.float32(0.0))
    assert metrics["advantage_mean"] == 1000.5 and metrics["advantage_std"] == 0.5
