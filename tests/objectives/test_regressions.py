"""Faults that other systems had, as tests; the numbers are those of the list they are kept under."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax import objectives
from m2po_jax.objectives import group_advantages, second_moment_mask
from m2po_jax.objectives.tokens import counts_of, prepare
from tests.objectives import batches, reference
from tests.objectives.batches import full_batch, jitted_outcome, metrics_of, of_log_ratios, without_measurements
from tests.objectives.test_losses import SETTINGS, agree, every_objective


def results(objective, batch):
    """Outcome and metrics."""
    outcome = jitted_outcome(objective, without_measurements(batch))
    return outcome, metrics_of(batch, outcome.kept, outcome.loss)


def all_finite(*trees):
    return all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(trees))


@every_objective
def test_1_huge_log_ratios_are_finite_and_a_masked_one_has_no_gradient(name):
    """Mask before exp: +-200 on a masked and on an unmasked token; also from the clamp at 20 up to 1e4."""
    for size in (20.0, -20.0, 200.0, -200.0, 1e4, -1e4):
        for advantage in (1.0, -1.0):
            batch = of_log_ratios([0.1, size, size, -0.1], advantage=advantage)
            batch["response_mask"][0, 1] = False
            outcome, metrics = results(objectives.get(name), batch)
            assert all_finite(outcome, metrics)
            assert outcome.gradient[0, 1] == 0.0 and not outcome.kept[0, 1]
            assert float(metrics["saturated_frac"]) == np.float32(1 / 3)
            agree(outcome, name, reference.Batch.of(**without_measurements(batch)))


@every_objective
def test_2_log_ratios_of_a_thousand_are_finite_in_bfloat16_too(name):
    """+-1000 to the behaviour, proximal and reference policy; the three estimators stand in test_aggregation."""
    batch = of_log_ratios([1000.0, -1000.0], dtype=jnp.bfloat16)
    outcome, metrics = results(objectives.get(name, kl_coefficient=0.1), batch)
    assert outcome.loss.dtype == np.float32 and outcome.gradient.dtype == jnp.bfloat16
    assert all_finite(outcome, metrics)
    assert float(metrics["k1"]) == 0.0
    np.testing.assert_allclose(metrics["k3"], (np.expm1(20.0) - 1000.0 + np.expm1(-20.0) + 1000.0) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["reference_kl"], (999.0 + np.expm1(20.0) - 20.0) / 2, rtol=1e-6)


@every_objective
def test_4_a_missing_log_prob_is_neutral_masked_and_counted(name):
    """NaN or infinite under any of the four policies: the batch survives, and that token is the only one changed."""
    for policy in ("policy", "behavior", "proximal", "reference"):
        for value in (np.nan, np.inf, -np.inf):
            batch = full_batch(0)
            batch["response_mask"][1] = True
            batch[f"{policy}_logprobs"][1, 2] = value
            outcome, metrics = results(objectives.get(name), batch)
            assert all_finite(outcome, metrics)
            assert outcome.gradient[1, 2] == 0.0 and not outcome.kept[1, 2]
            agree(outcome, name, reference.Batch.of(**without_measurements(batch)))
            counted = {key: float(x) for key, x in metrics.items() if key.startswith("nonfinite_")}
            expected = dict.fromkeys(counted, 0.0) | {"nonfinite_tokens": 1.0, f"nonfinite_{policy}": 1.0}
            assert counted == expected and float(metrics["tokens"]) == batch["response_mask"].sum()


@pytest.mark.parametrize(
    ("name", "hyperparameters", "ratio"),
    [
        ("grpo_no_tr", {}, 1.005),
        ("gspo", {"epsilon_high": 1.0}, 1.005),
        ("gmpo", {}, 1.005),
        ("topr", {"cap": 10.0}, 4.48),
    ],
)
def test_5_many_small_log_ratios_read_as_ratios_of_their_kind(name, hyperparameters, ratio):
    """300 tokens at +0.005: token ratio and geometric mean 1.005, and the product 4.48, are finite.

    The product weighs responses with A < 0, and the gradient of each of 300 tokens is the ratio / 300.
    """
    sign = -1.0 if name == "topr" else 1.0
    batch = of_log_ratios([0.005] * 300, advantage=sign, shape=(1, 300))
    outcome = jitted_outcome(objectives.get(name, **hyperparameters), without_measurements(batch))
    np.testing.assert_allclose(outcome.gradient, np.full((1, 300), -sign * ratio / 300), rtol=1e-3)


MASKING = ("m2po", "m2po_clip", "m2po_all_tokens", "grpo", "gspo", "dapo", "dr_grpo", "decoupled_ppo", "tis", "icepop")


@pytest.mark.parametrize("name", (*MASKING, "gmpo"))
def test_5_a_batch_in_which_everything_is_masked_raises_the_alarm(name):
    """Everything far above a clip; the rule of m2po_all_tokens keeps the smallest, so that its clip does it there."""
    outcome, metrics = results(objectives.get(name), of_log_ratios([0.5, 0.6, 0.7]))
    assert float(metrics["all_masked"]) == 1.0 and float(metrics["masked_frac"]) == 1.0
    assert not np.any(outcome.gradient)
    _, metrics = results(objectives.get(name), of_log_ratios([0.1, -0.9, 0.0]))
    assert float(metrics["all_masked"]) == 0.0


@pytest.mark.parametrize("name", ["icepop", "dapo"])
def test_5_the_alarm_of_weights_out_of_the_band_and_of_cut_responses(name):
    batch = of_log_ratios([0.0, 0.0])
    if name == "icepop":
        batch["behavior_logprobs"] = np.full(batches.SHAPE, -2.0, np.float32)
    else:
        batch["finish_reason"][:] = 1
    outcome, metrics = results(objectives.get(name), batch)
    assert float(metrics["all_masked"]) == 1.0 and not np.any(outcome.gradient)


ROWS = 16
LENGTHS = (6, 1, 3, 0, 0, 2, 6, 5, 4, 0, 1, 6, 2, 3, 0, 0)
SPLITS = ((14,), (3, 11), (3, 2, 8, 1), (1, 2, 2, 5, 0, 3, 1))
"""1, 2, 4 and 7 micro-batches of 14 responses of unequal length; one micro-batch is empty, another without tokens."""


def ragged_batch():
    """14 responses of unequal length, three of them empty, and two empty rows so that shards are even."""
    batch = without_measurements(full_batch(1, (ROWS, 6)))
    return batch | {"response_mask": np.arange(6)[None, :] < np.asarray(LENGTHS)[:, None]}


def piece(batch, start, stop):
    """The responses of a micro-batch, and rows of padding up to ROWS."""
    return {key: np.concatenate([x[start:stop], np.zeros_like(x)[: ROWS - stop + start]]) for key, x in batch.items()}


jitted_counts = jax.jit(lambda batch: counts_of(prepare(**batch)))
jitted_statistics = jax.jit(lambda objective, batch: objective.statistics(prepare(**batch)), static_argnums=0)


def in_micro_batches(objective, whole, sizes, place):
    """The outcome of a batch of ROWS from one of each micro-batch; `place` puts arrays on devices."""
    statistics = jitted_statistics(objective, place(whole)) if objective.needs_whole_batch else ()
    counts = jitted_counts(place(whole))
    parts = []
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        part = jitted_outcome(objective, place(piece(whole, end - size, end)), statistics, counts)
        assert part.gradient.sharding == place(whole["policy_logprobs"]).sharding
        parts.append((part, size))
    missing = np.zeros((ROWS - sum(sizes), whole["policy_logprobs"].shape[1]))
    gradient, kept = (
        np.concatenate([*(part[field][:size] for part, size in parts), missing.astype(parts[0][0][field].dtype)])
        for field in (1, 2)
    )
    by_others = [part.by_others for part, _ in parts]
    return batches.Outcome(sum(float(part.loss) for part, _ in parts), gradient, kept, by_others)


def placement(shards):
    """Rows over that many devices."""
    mesh = jax.make_mesh((shards,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    return functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("data")))


@every_objective
@pytest.mark.parametrize(
    ("shards", "changed"),
    [
        (1, {"aggregation": "token_mean"}),
        (2, {"aggregation": "sequence_mean", "kl_coefficient": 0.1}),
        (4, {"aggregation": "constant_sum", "length_constant": 3.0}),
    ],
    ids=("1", "2", "4"),
)
def test_6_micro_batches_on_shards_give_the_gradient_of_the_whole(name, shards, changed):
    whole = ragged_batch()
    for sizes in SPLITS:
        together = in_micro_batches(objectives.get(name, **changed), whole, sizes, placement(shards))
        agree(together, name, reference.Batch.of(**whole), **changed)


def test_6_micro_batches_share_one_count_of_kept_tokens():
    """AReaL's denominator counts the kept tokens of all micro-batches."""
    changed, whole = {"denominator": "kept"}, ragged_batch()
    batch = reference.Batch.of(**whole)
    assert 0 < reference.all_tokens_mask(batch, 0.04).sum() < batch.usable.sum()
    for sizes in SPLITS:
        together = in_micro_batches(objectives.get("m2po_all_tokens", **changed), whole, sizes, placement(1))
        agree(together, "m2po_all_tokens", batch, **changed)


@pytest.mark.parametrize("name", (*MASKING, "gmpo"))
def test_7_masked_tokens_stay_in_the_denominator(name):
    """3 of 5 tokens go at a ratio of 6; the other two, at 0.9, are divided by 5, in micro-batches too."""
    batch = without_measurements(of_log_ratios([np.log(6.0)] * 3, [np.log(0.9)] * 2, shape=(ROWS, 6)))
    if name in ("m2po_all_tokens", "icepop"):
        batch["proximal_logprobs"] = batch["policy_logprobs"]
    expected = np.zeros((ROWS, 6))
    expected[1, :2] = -0.9 / 5
    for sizes in ((2,), (1, 1)):
        outcome = in_micro_batches(objectives.get(name, aggregation="token_mean"), batch, sizes, placement(1))
        np.testing.assert_allclose(outcome.gradient, expected, rtol=1e-5)
        np.testing.assert_array_equal(outcome.kept, expected != 0.0)


@every_objective
def test_7_tokens_without_a_log_prob_stay_in_the_denominator(name):
    """On policy, 3 of 5 tokens missing: a gradient of -1/5 for the other two; |o| is 5 in the mean of a response."""
    batch = without_measurements(of_log_ratios([0.0, np.nan, np.nan, 0.0, np.nan]))
    outcome = jitted_outcome(objectives.get(name, aggregation="token_mean"), batch)
    share = 0.4 if name in ("gspo", "gmpo") else 1.0  # two tokens carry their fifth of the mean of five
    np.testing.assert_allclose(outcome.gradient[0, :5], [-share / 5, 0.0, 0.0, -share / 5, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(outcome.kept[0], [True, False, False, True, False, False])


def test_7_the_option_of_counting_kept_tokens():
    """AReaL's denominator: weights of 6 are dropped, the two of 0.9 are divided by 2."""
    batch = without_measurements(of_log_ratios([np.log(6.0)] * 3 + [np.log(0.9)] * 2))
    batch["proximal_logprobs"] = batch["policy_logprobs"]
    outcome = jitted_outcome(objectives.get("m2po_all_tokens", denominator="kept"), batch)
    np.testing.assert_allclose(outcome.gradient[0, :5], [0.0, 0.0, 0.0, -0.45, -0.45], rtol=1e-5)


def test_8_moments_are_summed_before_the_division():
    """Weights [1, 1] and [2, 2]: each half has a normalised effective sample size of 1, the whole one of 0.9."""
    halves = [0.0, 0.0], [np.log(2.0)] * 2
    for half in halves:
        batch = of_log_ratios(half)
        assert float(metrics_of(batch, batch["response_mask"], np.float32(0.0))["ess"]) == pytest.approx(1.0)
    batch = of_log_ratios(*halves)
    whole = metrics_of(batch, batch["response_mask"], np.float32(0.0))
    assert float(whole["ess"]) == pytest.approx(0.9)
    assert float(whole["chi2"]) == pytest.approx(0.5)
    assert float(whole["m2_all"]) == pytest.approx(np.log(2.0) ** 2 / 2)


@every_objective
def test_9_a_group_with_equal_rewards_gives_no_gradient_but_that_of_the_penalty(name):
    batch = full_batch(3)
    rewards = np.asarray([1.0, 1.0, 1.0, 0.0], np.float32)
    batch["advantages"] = np.asarray(group_advantages(rewards, group_size=2))[:, None]
    batch["finish_reason"][:] = 0
    outcome, metrics = results(objectives.get(name), batch)
    assert not np.any(outcome.gradient[:2]) and np.any(outcome.gradient[2:]) and all_finite(outcome, metrics)
    assert float(metrics["no_signal_frac"]) == 0.5

    changed = SETTINGS[name][2]
    penalised = jitted_outcome(objectives.get(name, **changed), without_measurements(batch))
    wide, setting = reference.Batch.of(**without_measurements(batch)), reference.settings(name, **changed)
    weights = reference.token_weights(setting, wide)
    for i, t in np.ndindex(2, batches.SHAPE[1]):
        slope = reference.penalty(setting.kl_estimator, wide.reference_log_ratio[i, t])[1] * wide.usable[i, t]
        np.testing.assert_allclose(penalised.gradient[i, t], 0.1 * weights[i] * slope, rtol=1e-5)


def spread(second_moment, count):
    """Log-ratios of distinct second moments within half a percent below that one."""
    return np.sqrt(np.linspace(0.995, 1.0, count) * second_moment)


@pytest.mark.parametrize(
    ("second_moments", "by_algorithm_1", "by_clip", "by_all_tokens"),
    [
        (((1e-4, 5), (0.1, 5)), 2, 5, 2),
        (((0.01, 9), (1.0, 1)), 1, 1, 1),
        (((0.03999, 4),), 0, 0, 0),
        (((0.0503, 4),), 4, 4, 3),
    ],
)
def test_10_masked_counts_by_variant(second_moments, by_algorithm_1, by_clip, by_all_tokens):
    """At tau = 0.04, all in T. Four distinct values below 0.04 have a mean below it, so that all-tokens keeps all four;
    the 3 in the list is of a rule that compares a rounded sum with tau. The mean there must be strictly below tau.
    """
    log_ratios = np.concatenate([spread(v, count) for v, count in second_moments])
    batch = without_measurements(of_log_ratios(log_ratios[:5], log_ratios[5:]))
    mask = batch["response_mask"]
    batch["proximal_logprobs"] = batch["policy_logprobs"]
    kept = second_moment_mask(batch["policy_logprobs"], batch["advantages"], mask, 0.04)
    assert int(mask.sum() - kept.sum()) == by_algorithm_1
    expected = {"m2po": by_algorithm_1, "m2po_clip": by_clip, "m2po_all_tokens": by_all_tokens}
    for name, count in expected.items():
        kept = jitted_outcome(objectives.get(name), batch).kept
        assert int(mask.sum() - kept.sum()) == count, name
        np.testing.assert_array_equal(kept, reference.objective(name, reference.Batch.of(**batch)).kept)


def test_10_four_tokens_whose_float32_square_does_not_exceed_the_threshold():
    """Four equal values at the largest square up to 0.04: both rules with <= keep them, and one float more keeps none.

    All-tokens keeps equal values together, the smallest always; with one smaller value it keeps that alone.
    """
    log_ratio = np.float32(0.2)
    while log_ratio * log_ratio > np.float32(0.04):
        log_ratio = np.nextafter(log_ratio, np.float32(0))
    above = np.nextafter(log_ratio, np.float32(1))
    for name in ("m2po", "m2po_clip", "m2po_all_tokens"):
        counts = []
        for values in ([log_ratio] * 4, [above] * 4, [np.float32(0.1999)] + [above * np.float32(1.1)] * 3):
            batch = without_measurements(of_log_ratios(values))
            batch["proximal_logprobs"] = batch["policy_logprobs"]
            counts.append(int(jitted_outcome(objectives.get(name), batch).kept.sum()))
        assert counts == [4, 4 if name == "m2po_all_tokens" else 0, 1], name
