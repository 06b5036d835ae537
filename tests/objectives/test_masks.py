"""The second-moment mask against the literal loop, exactly."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_jax.objectives import second_moment_mask
from m2po_jax.objectives.masks import trust_region
from tests.objectives import batches, reference

jitted_mask = jax.jit(second_moment_mask)
inputs = st.tuples(batches.log_ratios(), batches.advantages(), batches.masks(), batches.thresholds())


def reference_batch(log_ratio, advantages, mask):
    return reference.Batch.of(log_ratio, np.zeros_like(log_ratio), advantages, mask)


def column(*log_ratios):
    """All in T: one response a token, advantage of the log-ratio's sign."""
    log_ratio = jnp.asarray(log_ratios, jnp.float32)[:, None]
    return log_ratio, jnp.sign(log_ratio), jnp.ones(log_ratio.shape, bool)


@settings(max_examples=150, deadline=None)
@given(inputs)
def test_mask_is_algorithm_1(case):
    log_ratio, advantages, mask, threshold = case
    batch = reference_batch(log_ratio, advantages, mask)
    kept = jitted_mask(log_ratio, advantages, mask, threshold)
    np.testing.assert_array_equal(kept, reference.algorithm_1(batch, threshold))


@pytest.mark.parametrize(("shape", "seeds"), [((8, 16), 10), ((24, 16), 1)])
def test_random_batches(shape, seeds):
    for seed in range(seeds):
        policy, behavior, advantages, mask = batches.normal_batch(seed, shape)
        batch = reference.Batch.of(policy, behavior, advantages, mask)
        kept = jitted_mask(policy - behavior, advantages, mask, 0.04)
        np.testing.assert_array_equal(kept, reference.algorithm_1(batch, 0.04))


def largest_log_ratio(second_moment):
    """Largest float32 whose float32 square is at most that."""
    x = np.float32(np.sqrt(float(second_moment)) * 1.00001)
    while Fraction(reference.second_moment(x)) > second_moment:
        x = np.nextafter(x, np.float32(0))
    return x


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_sum_decides_where_a_float32_sum_would_not(seed):
    """An outlier uses up what the mean allows but for 1e-9 in a sum of 10: one float more, and it is masked."""
    small = np.random.default_rng(seed).uniform(0.01, 0.1, 254).astype(np.float32)
    tau, base = Fraction(float(np.float32(0.04))), Fraction(1, 100)
    room = sum(tau - Fraction(reference.second_moment(x)) for x in small) + 2 * tau - base
    outlier = largest_log_ratio(room)
    last = largest_log_ratio(base + room - Fraction(reference.second_moment(outlier)))
    for value, masked in ((last, 0), (np.nextafter(last, np.float32(1)), 1)):
        log_ratio, advantages, mask = column(*small, outlier, value)
        assert int((~jitted_mask(log_ratio, advantages, mask, 0.04)).sum()) == masked


@settings(max_examples=50, deadline=None)
@given(inputs)
def test_what_is_kept_is_within_the_threshold_and_maximal(case):
    log_ratio, advantages, mask, threshold = case
    batch = reference_batch(log_ratio, advantages, mask)
    kept = np.asarray(jitted_mask(log_ratio, advantages, mask, threshold))
    values = {token: reference.second_moment(batch.log_ratio[token]) for token in reference.trust_region(batch)}
    within = [values[token] for token in values if kept[token]]
    dropped = [values[token] for token in values if not kept[token]]
    assert not within or reference.mean(within) <= Fraction(float(threshold))
    if dropped:
        next_block = [value for value in dropped if value == min(dropped)]
        assert reference.mean(within + next_block) > Fraction(float(threshold))
        assert min(dropped) > max(within, default=-1.0)
        assert min(dropped) > threshold


@settings(max_examples=50, deadline=None)
@given(inputs)
def test_tokens_outside_the_trust_region_are_never_masked(case):
    log_ratio, advantages, mask, threshold = case
    kept = np.asarray(jitted_mask(log_ratio, advantages, mask, threshold))
    region = np.asarray(trust_region(jnp.asarray(log_ratio), jnp.asarray(advantages)))
    assert kept[mask & ~region].all()
    assert not kept[~mask].any()


@settings(max_examples=50, deadline=None)
@given(inputs, st.permutations(range(batches.SHAPE[0])), st.permutations(range(batches.SHAPE[1])))
def test_the_order_of_responses_and_tokens_does_not_matter(case, rows, columns):
    log_ratio, advantages, mask, threshold = case
    wide = np.broadcast_to(advantages, mask.shape)
    kept = np.asarray(jitted_mask(log_ratio, wide, mask, threshold))
    moved = [x[rows][:, columns] for x in (log_ratio, wide, mask)]
    np.testing.assert_array_equal(jitted_mask(*moved, threshold), kept[rows][:, columns])


@settings(max_examples=10, deadline=None)
@given(inputs)
def test_with_and_without_jit(case):
    np.testing.assert_array_equal(second_moment_mask(*case), jitted_mask(*case))


def test_vmap_over_batches_and_over_thresholds():
    stacked = [jnp.stack(x) for x in zip(*(batches.normal_batch(seed) for seed in range(3)), strict=True)]
    log_ratio, advantages, mask = stacked[0] - stacked[1], stacked[2], stacked[3]
    together = jax.jit(jax.vmap(second_moment_mask, in_axes=(0, 0, 0, None)))(log_ratio, advantages, mask, 0.04)
    for i in range(3):
        np.testing.assert_array_equal(together[i], jitted_mask(log_ratio[i], advantages[i], mask[i], 0.04))
    taus = jnp.asarray([0.0, 0.01, 0.04, 1.0])
    by_tau = jax.jit(jax.vmap(second_moment_mask, in_axes=(None, None, None, 0)))(
        log_ratio[0], advantages[0], mask[0], taus
    )
    kept_counts = [int(kept.sum()) for kept in by_tau]
    assert kept_counts == sorted(kept_counts) and kept_counts[0] < kept_counts[-1] == int(mask[0].sum())
    for i, tau in enumerate(taus):
        np.testing.assert_array_equal(by_tau[i], jitted_mask(log_ratio[0], advantages[0], mask[0], tau))


def test_no_gradient_passes_through_the_mask():
    policy, behavior, advantages, mask = batches.normal_batch(0)

    def kept_count(log_ratio, advantages, threshold):
        return jnp.sum(jitted_mask(log_ratio, advantages, mask, threshold).astype(jnp.float32))

    count, gradients = jax.value_and_grad(kept_count, argnums=(0, 1, 2))(policy - behavior, advantages, 0.04)
    assert 0 < float(count) < mask.sum()
    assert all(float(jnp.abs(g).max()) == 0.0 for g in gradients)


def test_hand_worked():
    """T is the first, second, fifth and sixth token: M2 of 0.01, 0.09, 0.25 and 0.01."""
    log_ratio = jnp.asarray([[0.1, 0.3, -2.0, 0.0], [-0.5, -0.1, 3.0, 9.0]])
    advantages = jnp.asarray([[1.0], [-0.5]])
    mask = jnp.asarray([[True, True, True, True], [True, True, True, False]])
    expected = {
        0.1: [[True, True, True, True], [True, True, True, False]],
        0.04: [[True, True, True, True], [False, True, True, False]],
        0.03: [[True, False, True, True], [False, True, True, False]],
        0.005: [[False, False, True, True], [False, False, True, False]],
    }
    for threshold, kept in expected.items():
        np.testing.assert_array_equal(jitted_mask(log_ratio, advantages, mask, threshold), kept)


def test_a_single_outlier_alone_is_masked_and_an_empty_trust_region_is_legal():
    log_ratio = jnp.asarray([[0.01, -3.0, 2.0, 0.02]])
    mask = jnp.ones((1, 4), bool)
    one_outlier = jitted_mask(log_ratio, jnp.ones((1, 1)), mask, 0.04)
    np.testing.assert_array_equal(one_outlier, [[True, True, False, True]])
    assert jitted_mask(log_ratio, jnp.zeros((1, 1)), mask, 0.0).all()
    assert not jitted_mask(log_ratio, jnp.ones((1, 1)), jnp.zeros((1, 4), bool), 0.04).any()


def test_a_mean_that_meets_the_threshold_exactly_keeps_all():
    log_ratio, advantages, mask = column(0.25, -0.75)
    assert jitted_mask(log_ratio, advantages, mask, 0.3125).all()
    below = np.nextafter(np.float32(0.3125), np.float32(0))
    np.testing.assert_array_equal(jitted_mask(log_ratio, advantages, mask, below), [[True], [False]])


def test_equal_values_are_kept_or_masked_together():
    log_ratio, advantages, mask = column(0.1, 0.3, -0.3, 0.3, -0.1)
    np.testing.assert_array_equal(
        jitted_mask(log_ratio, advantages, mask, 0.04).ravel(), [True, False, False, False, True]
    )


def test_values_at_the_threshold_are_never_masked_however_many():
    log_ratio, advantages, mask = column(*[0.3] * 4097)
    tau = np.float32(0.3) * np.float32(0.3)
    assert jitted_mask(log_ratio, advantages, mask, tau).all()
    assert not jitted_mask(log_ratio, advantages, mask, np.nextafter(tau, np.float32(0))).any()


def test_non_finite_log_ratios_are_masked_and_outside_all_statistics():
    log_ratio = jnp.asarray([[0.1, jnp.nan, jnp.inf, 0.25, -jnp.inf, jnp.nan]])
    mask = jnp.asarray([[True, True, True, True, True, False]])
    kept = jitted_mask(log_ratio, jnp.ones((1, 1)), mask, 0.04)
    np.testing.assert_array_equal(kept, [[True, False, False, True, False, False]])


def test_squares_that_overflow_are_dropped_first():
    log_ratio, advantages, mask = column(0.1, 1e19, 3e38, -1e25)
    np.testing.assert_array_equal(jitted_mask(log_ratio, advantages, mask, 0.04).ravel(), [True, False, False, False])
    assert jitted_mask(log_ratio, advantages, mask, jnp.inf).all()


def test_threshold_zero_masks_the_whole_trust_region():
    policy, behavior, advantages, mask = batches.normal_batch(1)
    kept = jitted_mask(policy - behavior, advantages, mask, 0.0)
    region = trust_region(jnp.asarray(policy - behavior), jnp.asarray(advantages))
    np.testing.assert_array_equal(kept, mask & ~np.asarray(region))


@pytest.mark.parametrize("threshold", [-0.01, float("nan"), np.float32(-1.0)])
def test_an_impossible_threshold_is_refused_by_name(threshold):
    log_ratio, advantages, mask = column(0.1)
    with pytest.raises(ValueError, match="threshold"):
        second_moment_mask(log_ratio, advantages, mask, threshold)


def test_a_traced_nan_threshold_masks_the_trust_region():
    log_ratio, advantages, mask = column(0.1, -0.2)
    assert not jitted_mask(log_ratio, advantages, mask, jnp.nan).any()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("log_ratio", jnp.zeros((2, 4))),
        ("log_ratio", jnp.zeros((2, 3), jnp.int32)),
        ("advantages", jnp.zeros((2,))),
        ("advantages", jnp.zeros((3, 1))),
        ("response_mask", jnp.ones((2, 3))),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused_by_name(argument, value):
    arguments = {
        "log_ratio": jnp.zeros((2, 3)),
        "advantages": jnp.zeros((2, 1)),
        "response_mask": jnp.ones((2, 3), bool),
    }
    assert second_moment_mask(**arguments, threshold=0.04).all()
    with pytest.raises(TypeError, match="log_ratio|advantages|response_mask") as error:
        jax.eval_shape(lambda: second_moment_mask(**(arguments | {argument: value}), threshold=0.04))
    # The first of two arrays that do not fit each other gives the sizes.
    said = str(error.value)
    assert "\n" not in said and (str(list(value.shape)).replace(" ", "") in said or f"T = {value.shape[-1]}" in said)
