"""Faults that other systems had, as tests; the numbers are those of the list they are kept under."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax import objectives
from m2po_jax.objectives import group_advantages, metrics, second_moment_mask
from m2po_jax.objectives.tokens import prepare
from tests.objectives import batches, reference
from tests.objectives.test_losses import every_objective, jitted_gradient_of, jitted_kept

jitted = jax.jit(lambda objective, *arrays: objective(*arrays), static_argnums=0)


def row(log_ratio, advantage=1.0, dtype=np.float32):
    """One response with those log-ratios, all of its tokens in the response."""
    log_ratio = np.asarray([log_ratio], np.float32).astype(dtype)
    return log_ratio, np.zeros_like(log_ratio), np.full((1, 1), advantage, np.float32), np.ones(log_ratio.shape, bool)


@every_objective
@pytest.mark.parametrize("size", [200.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_1_huge_log_ratios_are_finite_and_a_masked_one_has_no_gradient(name, size, sign, advantage):
    log_ratio, behavior, advantages, mask = row([0.1, sign * size, sign * size, -0.1], advantage)
    mask[0, 1] = False
    loss, values, gradient = jitted_gradient_of(objectives.get(name), log_ratio, behavior, advantages, mask)
    assert np.isfinite(loss) and np.isfinite(gradient).all() and all(np.isfinite(v) for v in values.values())
    assert gradient[0, 1] == 0.0
    assert float(values["saturated_frac"]) == np.float32(1 / 3)


@every_objective
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_2_log_ratios_of_a_thousand_are_finite_in_either_precision(name, dtype):
    arrays = row([1000.0, -1000.0], dtype=dtype)
    loss, values, gradient = jitted_gradient_of(objectives.get(name), *arrays)
    assert loss.dtype == np.float32 and gradient.dtype == dtype
    assert np.isfinite(loss) and np.isfinite(np.asarray(gradient, np.float32)).all()
    assert float(values["k1"]) == 0.0
    np.testing.assert_allclose(values["k3"], (np.expm1(20.0) - 1000.0 + np.expm1(-20.0) + 1000.0) / 2, rtol=1e-6)


@every_objective
@pytest.mark.parametrize("where", ["policy", "behavior"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_4_a_missing_log_prob_is_neutral_masked_and_counted(name, where, value):
    policy, behavior, advantages, mask = batches.normal_batch(0)
    mask[1] = True
    broken = {"policy": policy.copy(), "behavior": behavior.copy()}
    broken[where][1, 2] = value
    arrays = (broken["policy"], broken["behavior"], advantages, mask)
    loss, values, gradient = jitted_gradient_of(objectives.get(name), *arrays)
    expected_loss, expected_gradient, kept = reference.objective(name, reference.Batch.of(*arrays))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    assert gradient[1, 2] == 0.0 and not jitted_kept(objectives.get(name), *arrays)[1, 2] and not kept[1, 2]
    assert float(values["nonfinite_tokens"]) == 1.0 and float(values["tokens"]) == mask.sum()
    assert all(np.isfinite(v) for v in values.values())


def test_5_many_small_log_ratios_read_as_ratios_of_their_kind():
    """300 tokens at +0.005: token ratio and geometric mean 1.005, and the product 4.48, are finite."""
    arrays = row([0.005] * 300)
    token_loss, values = jitted(objectives.get("grpo_no_tr"), *arrays)
    sequence_loss, _ = jitted(objectives.get("gspo", epsilon_high=1.0), *arrays)
    assert float(-token_loss) == pytest.approx(1.005, abs=1e-4)
    assert float(-sequence_loss) == pytest.approx(1.005, abs=1e-4)
    assert float(values["ratio_max"]) == pytest.approx(1.005, abs=1e-4)
    assert float(jnp.exp(-300 * values["k1"])) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", ["m2po", "m2po_clip", "grpo", "gspo"])
def test_5_a_batch_in_which_everything_is_masked_raises_the_alarm(name):
    _, values = jitted(objectives.get(name), *row([0.5, 0.6, 0.7]))
    assert float(values["all_masked"]) == 1.0 and float(values["masked_frac"]) == 1.0
    _, values = jitted(objectives.get(name), *row([0.5, -0.9, 0.0]))
    assert float(values["all_masked"]) == 0.0


@functools.partial(jax.jit, static_argnums=0)
def partial_gradient(objective, statistics, denominator, policy, behavior, advantages, mask):
    def share(policy):
        return objective.partial_loss(prepare(policy, behavior, advantages, mask), statistics, denominator)

    (loss, parts), gradient = jax.value_and_grad(share, has_aux=True)(policy)
    return loss, parts, gradient


def ragged_batch():
    """14 responses of unequal length, three of them empty."""
    policy, behavior, advantages, _ = batches.normal_batch(1, (14, 6))
    lengths = np.asarray([6, 1, 3, 0, 0, 2, 6, 5, 4, 0, 1, 6, 2, 3])
    return policy, behavior, advantages, np.arange(6)[None, :] < lengths[:, None]


def padded(piece, rows):
    """The same responses, and empty ones up to that many rows."""
    return [np.concatenate([x, np.zeros((rows - len(x), x.shape[1]), x.dtype)]) for x in piece]


@every_objective
@pytest.mark.parametrize("splits", [(14,), (3, 11), (3, 2, 8, 1), (1, 2, 2, 5, 0, 3, 1)])
def test_6_micro_batches_give_the_gradient_of_the_whole(name, splits):
    arrays, objective = ragged_batch(), objectives.get(name)
    loss, values, gradient = jitted_gradient_of(objective, *arrays)
    whole = prepare(*arrays)
    statistics, denominator = objective.statistics(whole), objective.denominator(whole)
    pieces = zip(*(np.split(x, np.cumsum(splits)[:-1]) for x in arrays), strict=True)
    results = [partial_gradient(objective, statistics, denominator, *padded(piece, 14)) for piece in pieces]
    np.testing.assert_allclose(sum(float(r[0]) for r in results), loss, rtol=1e-5)
    by_parts = np.concatenate([r[2][:size] for r, size in zip(results, splits, strict=True)])
    np.testing.assert_allclose(by_parts, gradient, rtol=1e-6, atol=1e-9)
    together = metrics.finish(functools.reduce(metrics.combine, [r[1] for r in results]))
    for key in values:
        np.testing.assert_allclose(together[key], values[key], rtol=1e-5, atol=1e-6, err_msg=key)


@every_objective
@pytest.mark.parametrize("shards", [2, 4])
def test_6_shards_give_the_gradient_of_one_device(name, shards):
    arrays = batches.normal_batch(2, (8, 6))
    arrays[3][:2] = False
    mesh = jax.make_mesh((shards,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in arrays]
    expected, actual = (jitted_gradient_of(objectives.get(name), *x) for x in (arrays, sharded))
    assert len(sharded[0].sharding.device_set) == shards
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), actual, expected)


def test_7_masked_tokens_stay_in_the_denominator():
    """3 of 5 tokens are masked; the sum over the two that are left is divided by 5, in micro-batches too."""
    arrays = row([0.6, 0.7, 0.8, 0.0, -0.1])
    loss, values, gradient = jitted_gradient_of(objectives.get("m2po"), *arrays)
    assert float(values["tokens"]) == 5.0 and float(values["masked_frac"]) == pytest.approx(0.6)
    assert float(loss) == pytest.approx(-(1.0 + np.exp(-0.1)) / 5)
    np.testing.assert_allclose(gradient[0], [0.0, 0.0, 0.0, -0.2, -np.exp(-0.1) / 5], rtol=1e-6)

    objective, whole = objectives.get("m2po"), prepare(*arrays)
    statistics, denominator = objective.statistics(whole), objective.denominator(whole)
    halves = [(x[:, :4], x[:, 4:]) if x.shape[1] > 1 else (x, x) for x in arrays]
    shares = [partial_gradient(objective, statistics, denominator, *half)[0] for half in zip(*halves, strict=True)]
    assert float(sum(shares)) == pytest.approx(float(loss))


def test_8_moments_are_summed_before_the_division():
    """Weights [1, 1] and [2, 2]: each half has a normalised effective sample size of 1, the whole one of 0.9."""
    objective = objectives.get("grpo_no_tr")
    parts = []
    for weight in (1.0, 2.0):
        half = row([np.log(weight)] * 2)
        parts.append(partial_gradient(objective, (), jnp.int32(4), *half)[1])
        assert float(metrics.finish(parts[-1])["ess"]) == pytest.approx(1.0)
    whole = metrics.finish(metrics.combine(*parts))
    assert float(whole["ess"]) == pytest.approx(0.9)
    assert float(whole["chi2"]) == pytest.approx(0.5)
    assert float(whole["m2_all"]) == pytest.approx(np.log(2.0) ** 2 / 2)


@every_objective
def test_9_a_group_with_equal_rewards_gives_no_gradient(name):
    policy, behavior, _, mask = batches.normal_batch(3)
    advantages = group_advantages(jnp.asarray([1.0, 1.0, 1.0, 0.0]), group_size=2)[:, None]
    _, values, gradient = jitted_gradient_of(objectives.get(name), policy, behavior, advantages, mask)
    assert not np.any(gradient[:2]) and np.any(gradient[2:]) and np.isfinite(gradient).all()
    assert float(values["no_signal_frac"]) == 0.5


def spread(second_moment, count):
    """Distinct values within half a percent below that second moment."""
    return np.sqrt(np.linspace(0.995, 1.0, count) * second_moment)


@pytest.mark.parametrize(
    ("second_moments", "by_algorithm_1", "by_clip"),
    [
        (((1e-4, 5), (0.1, 5)), 2, 5),
        (((0.01, 9), (1.0, 1)), 1, 1),
        (((0.03999, 4),), 0, 0),
        (((0.0503, 4),), 4, 4),
    ],
)
def test_10_masked_counts_by_variant(second_moments, by_algorithm_1, by_clip):
    arrays = row(np.concatenate([spread(v, count) for v, count in second_moments]))
    assert int((~second_moment_mask(arrays[0], arrays[2], arrays[3], 0.04)).sum()) == by_algorithm_1
    assert int((~jitted_kept(objectives.get("m2po"), *arrays)).sum()) == by_algorithm_1
    assert int((~jitted_kept(objectives.get("m2po_clip"), *arrays)).sum()) == by_clip


def test_10_four_tokens_whose_float32_square_does_not_exceed_the_threshold():
    log_ratio = np.float32(0.2)
    while log_ratio * log_ratio > np.float32(0.04):
        log_ratio = np.nextafter(log_ratio, np.float32(0))
    for name in ("m2po", "m2po_clip"):
        assert jitted_kept(objectives.get(name), *row([log_ratio] * 4)).all()
        assert not jitted_kept(objectives.get(name), *row([np.nextafter(log_ratio, np.float32(1))] * 4)).any()
