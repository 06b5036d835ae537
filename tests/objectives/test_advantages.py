"""Group advantages against the reference and by hand, and the penalty of long responses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m2po_jax.objectives import group_advantages, overlong_penalty
from tests.objectives import reference

COUNT = 12
rewards = hnp.arrays(np.float32, COUNT, elements=st.sampled_from(np.asarray([0.0, 1.0, 0.5, 0.1, -3.0], np.float32)))
group_ids = hnp.arrays(np.int32, COUNT, elements=st.sampled_from((-7, 0, 3, 2**31 - 1)))
jitted = jax.jit(group_advantages, static_argnames=("group_size", "normalize"))


@settings(max_examples=100, deadline=None)
@given(rewards, group_ids, st.sampled_from(("std", "none")))
def test_arbitrary_groups_are_the_references(rewards, group_ids, normalize):
    expected = reference.group_advantages(rewards, group_ids, normalize)
    actual = jitted(rewards, group_ids=group_ids, normalize=normalize)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(actual)[expected == 0.0] == 0.0, True)


@settings(max_examples=100, deadline=None)
@given(rewards, st.sampled_from((1, 2, 3, 4, 6, 12)), st.sampled_from(("std", "none")))
def test_contiguous_groups_are_the_references(rewards, group_size, normalize):
    expected = reference.group_advantages(rewards, np.arange(COUNT) // group_size, normalize)
    actual = jitted(rewards, group_size=group_size, normalize=normalize)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_by_hand():
    """1, 0, 0, 0: mean 1/4, sample variance (9 + 3) / 16 / 3 = 1/4."""
    actual = group_advantages(jnp.asarray([1.0, 0.0, 0.0, 0.0]), group_size=4)
    np.testing.assert_allclose(actual, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    actual = group_advantages(jnp.asarray([1.0, 0.0, 0.0, 0.0]), group_size=4, normalize="none")
    np.testing.assert_allclose(actual, [0.75, -0.25, -0.25, -0.25])
    assert actual.dtype == jnp.float32


@pytest.mark.parametrize("value", [0.1, 1.0, 1 / 3])
def test_equal_rewards_give_exactly_zero(value):
    for group_size in (1, 3, 12):
        for normalize in ("std", "none"):
            rewards = np.full(COUNT, value, np.float32)
            assert not np.any(jitted(rewards, group_size=group_size, normalize=normalize))


def test_integer_rewards_are_taken():
    actual = group_advantages(np.asarray([1, 0]), group_ids=np.asarray([5, 5]))
    np.testing.assert_allclose(actual, [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


def test_with_and_without_jit():
    rewards, ids = jnp.asarray([1.0, 0.0, 0.5, 1.0]), jnp.asarray([2, 2, 1, 2])
    np.testing.assert_allclose(jitted(rewards, group_ids=ids), group_advantages(rewards, group_ids=ids), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one of group_size and group_ids"),
        ({"group_size": 2, "group_ids": np.zeros(4, np.int32)}, "exactly one of group_size and group_ids"),
        ({"group_size": 3}, "group_size 3 does not divide the 4 rewards"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": 2, "normalize": "mean"}, "normalize is 'mean'"),
    ],
)
def test_wrong_values_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(jnp.zeros((4,)), **arguments)


@pytest.mark.parametrize(
    ("rewards", "group_ids"),
    [(np.zeros((4, 1)), np.zeros(4, int)), (np.zeros(4), np.zeros(3, int)), (np.zeros(4), np.zeros(4))],
)
def test_wrong_shapes_and_dtypes_are_refused(rewards, group_ids):
    with pytest.raises(TypeError, match="group_advantages"):
        group_advantages(rewards, group_ids=group_ids)


def test_overlong_penalty_by_hand():
    """At most 10 tokens, a cache of 4: nothing up to 6, then a quarter a token, -1 from 10 on."""
    lengths = np.asarray([0, 5, 6, 7, 8, 9, 10, 11, 100])
    penalties = overlong_penalty(lengths, 10, 4)
    np.testing.assert_array_equal(penalties, [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0])
    assert penalties.dtype == jnp.float32
    np.testing.assert_array_equal(overlong_penalty(lengths.astype(np.float32), 10, 4), penalties)
    jitted_penalty = jax.jit(overlong_penalty, static_argnums=(1, 2))
    np.testing.assert_array_equal(jitted_penalty(lengths, 10, 4), penalties)


def test_overlong_penalty_of_a_cache_of_one_is_a_step():
    np.testing.assert_array_equal(overlong_penalty(np.asarray([8, 9, 10, 11]), 10, 1), [0.0, 0.0, -1.0, -1.0])


def test_overlong_penalty_refuses_other_shapes():
    with pytest.raises(TypeError, match="overlong_penalty"):
        overlong_penalty(np.zeros((2, 2)), 10, 4)


def test_groups_do_not_see_each_other():
    rewards = jnp.asarray([1.0, 0.0, 5.0, 7.0])
    alone = group_advantages(rewards[:2], group_size=2)
    np.testing.assert_array_equal(group_advantages(rewards, group_size=2)[:2], alone)
    np.testing.assert_array_equal(group_advantages(rewards, group_ids=jnp.asarray([9, 9, -1, -1]))[:2], alone)


def test_an_empty_batch_has_no_advantages():
    assert group_advantages(np.zeros(0, np.float32), group_size=4).shape == (0,)
    assert group_advantages(np.zeros(0, np.float32), group_ids=np.zeros(0, np.int32)).shape == (0,)


@pytest.mark.parametrize("ids", [[2**33, 0, 2**33, 0], [1, 1 + 2**32, 1, 1 + 2**32], [-5, 2**62, -5, 2**62]])
def test_group_ids_of_64_bits_are_not_cut(ids):
    found = group_advantages(np.array([1.0, 0.0, 3.0, 4.0]), group_ids=np.array(ids), normalize="none")
    np.testing.assert_array_equal(found, [-1.0, -2.0, 1.0, 2.0])
