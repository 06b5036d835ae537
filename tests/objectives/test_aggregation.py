"""Weights of the three aggregations and the KL estimators, by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax import objectives
from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import LossConfig, kl_penalty, token_weights
from m2po_jax.objectives.tokens import Counts
from tests.objectives import batches
from tests.objectives.batches import full_batch, jitted_outcome, without_measurements
from tests.objectives.test_losses import SETTINGS, every_objective

MASK = np.asarray([[True, True, True, True], [True, False, False, False], [False] * 4, [True, False, True, False]])


def counts(tokens, sequences):
    return Counts(jnp.int32(tokens), jnp.int32(sequences))


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (LossConfig(), [1 / 7] * 4),
        (LossConfig(aggregation="sequence_mean"), [1 / 12, 1 / 3, 1 / 3, 1 / 6]),
        (LossConfig(aggregation="constant_sum"), [1 / 3] * 4),
        (LossConfig(aggregation="constant_sum", length_constant=4.0), [1 / 12] * 4),
    ],
)
def test_weights_by_hand(config, weights):
    """Lengths 4, 1, 0 and 2: 7 tokens of 3 responses; the weight of the empty response meets no token."""
    actual = token_weights(config, MASK, counts(7, 3))
    assert actual.shape == (4, 1) and actual.dtype == jnp.float32
    np.testing.assert_allclose(actual[:, 0], weights, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_sum"])
def test_weights_take_the_counts_of_the_whole_batch_and_the_lengths_of_the_part(aggregation):
    config = LossConfig(aggregation=aggregation, length_constant=2.0)
    whole = token_weights(config, MASK, counts(70, 30))
    parts = [token_weights(config, half, counts(70, 30)) for half in np.split(MASK, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_allclose(10 * whole, token_weights(config, MASK, counts(7, 3)), rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_sum"])
def test_weights_of_nothing_are_finite(aggregation):
    assert np.isfinite(token_weights(LossConfig(aggregation=aggregation), np.zeros((2, 3), bool), counts(0, 0))).all()


def test_the_gradient_under_each_aggregation_is_weights_times_the_same():
    """Those of all objectives under all aggregations are compared with the reference's in test_losses."""
    batch = without_measurements(full_batch(1))
    mask = batch["response_mask"]
    gradients = {
        aggregation: np.asarray(jitted_outcome(objectives.get("gspo", aggregation=aggregation), batch).gradient)
        for aggregation in ("token_mean", "sequence_mean", "constant_sum")
    }
    each = 4 * gradients["constant_sum"]
    assert mask.any(axis=1).all() and np.any(each)
    np.testing.assert_allclose(gradients["token_mean"], each / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradients["sequence_mean"], each / (4 * mask.sum(axis=1, keepdims=True)), rtol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [math.log(2), 0.0, -math.log(2)], [1.0, 1.0, 1.0]),
        ("k2", [math.log(2) ** 2 / 2, 0.0, math.log(2) ** 2 / 2], [math.log(2), 0.0, -math.log(2)]),
        ("k3", [0.5 - 1 + math.log(2), 0.0, 2 - 1 - math.log(2)], [1 - 0.5, 0.0, 1 - 2]),
    ],
)
def test_estimators_by_hand(estimator, values, slopes):
    """At policy over reference 2, 1 and 1/2: k3 is 1/r - 1 + log r, its slope 1 - 1/r."""
    log_ratio = jnp.log(jnp.asarray([[2.0, 1.0, 0.5]]))
    np.testing.assert_allclose(kl_penalty(estimator, log_ratio)[0], values, rtol=1e-6, atol=1e-7)
    gradient = jax.grad(lambda x: jnp.sum(kl_penalty(estimator, x)))(log_ratio)
    np.testing.assert_allclose(gradient[0], slopes, rtol=1e-6, atol=1e-7)


def test_k3_is_never_negative_and_small_where_the_policies_nearly_agree():
    """x - (1 - exp(-x)) is x^2 / 2 there, and not the rounding of 1."""
    log_ratio = jnp.asarray([[1e-4, -1e-4, 1e-3, 3.0, -3.0, 30.0, -30.0]])
    values = np.asarray(kl_penalty("k3", log_ratio))[0]
    assert (values > 0.0).all()
    np.testing.assert_allclose(values[:3], np.asarray([1e-8, 1e-8, 1e-6]) / 2, rtol=2e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_log_ratios_of_a_thousand_give_finite_penalties_and_gradients(estimator, dtype):
    """grpo at policy = behaviour and A = 0: loss and gradient are those of the penalty, the mean over two tokens."""
    batch = without_measurements(batches.of_log_ratios([1000.0, -1000.0], advantage=0.0, dtype=dtype))
    batch["behavior_logprobs"] = batch["policy_logprobs"]
    objective = objectives.get("grpo", kl_coefficient=1.0, kl_estimator=estimator)
    loss, gradient, *_ = jitted_outcome(objective, batch)
    assert gradient.dtype == dtype
    expected = {
        "k1": (0.0, [0.5, 0.5]),
        "k2": (500_000.0, [500.0, -500.0]),
        # 1000 - 1, and what it is at log r = -20, below which it is constant.
        "k3": ((999.0 + math.expm1(20.0) - 20.0) / 2, [0.5, 0.0]),
    }[estimator]
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient, np.float32)[0, :2], expected[1], rtol=5e-3)
    assert not np.asarray(gradient, np.float32)[1:].any()


@pytest.mark.parametrize("name", ["m2po", "m2po_all_tokens", "grpo", "dapo", "tis", "icepop"])
def test_masked_and_clipped_tokens_still_carry_the_penalty(name):
    """Ratios 3 and 1 with A = 1: the first is dropped, so that its gradient is that of the penalty alone."""
    batch = without_measurements(batches.of_log_ratios([math.log(3.0), 0.0]))
    if name in ("m2po_all_tokens", "icepop"):
        batch["proximal_logprobs"] = 2.0 * batch["policy_logprobs"]
    if name == "dapo":
        batch["finish_reason"][:] = 1
    changed = SETTINGS[name][2]
    assert changed["aggregation"] == "sequence_mean"
    _, gradient, kept, _ = jitted_outcome(objectives.get(name, **changed), batch)
    slope = {"k1": 1.0, "k2": math.log(3.0), "k3": 1 - 1 / 3}[changed["kl_estimator"]]
    assert not kept[0, 0] and bool(kept[0, 1]) == (name != "dapo")
    np.testing.assert_allclose(gradient[0, 0], 0.1 * slope / 2, rtol=1e-5)
    assert not np.any(gradient[:, 2:]) and not np.any(gradient[1:])


@pytest.mark.parametrize(
    ("hyperparameters", "words"),
    [
        ({"kl_coefficient": -0.1}, "objective.kl_coefficient is -0.1: use 0 or more"),
        ({"length_constant": 0.0}, "objective.length_constant is 0.0: use a positive number"),
        (
            {"aggregation": "mean"},
            "objective.aggregation is 'mean': use one of token_mean, sequence_mean, constant_sum",
        ),
        ({"kl_estimator": "k4"}, "objective.kl_estimator is 'k4': use one of k1, k2, k3"),
    ],
)
@every_objective
def test_what_every_objective_refuses(name, hyperparameters, words):
    with pytest.raises(ConfigError, match=words):
        objectives.get(name, **hyperparameters)
