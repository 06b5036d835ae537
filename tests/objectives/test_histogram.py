"""Histogram and quantiles of log-ratios, exactly, against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax.objectives.histogram import LOG_RATIO_EDGES, coarse, fine_histogram, quantiles
from tests.objectives import batches, reference

PER_MILLE = (1, 10, 500, 990, 999, 1000)


@jax.jit
def histogram_and_quantiles(values, advantages, where, ages):
    fine = fine_histogram(values, advantages, where, ages, 3)
    return coarse(fine), quantiles(fine, PER_MILLE)


WIDTH = 2000


def of_row(values):
    """Histogram (31,) of values with positive advantages, and their quantiles; among others that do not count."""
    padded = np.full((1, WIDTH), 7.0, np.float32)
    padded[0, : len(values)] = values
    where = np.arange(WIDTH)[None, :] < len(values)
    by_age, levels = histogram_and_quantiles(padded, np.ones((1, 1), np.float32), where, np.zeros((1, 1), np.int32))
    assert by_age.dtype == jnp.int32 and by_age.shape == (3, 3, 31) and levels.dtype == jnp.float32
    assert not np.any(by_age[1:]) and not np.any(by_age[0, :2])
    return np.asarray(by_age[0, 2]), np.asarray(levels)


EDGES = np.float32(LOG_RATIO_EDGES)
ON_EDGES = np.concatenate([EDGES, np.nextafter(EDGES, np.float32(0)), np.nextafter(EDGES, np.float32(2) * EDGES)])
anything = st.one_of(
    st.sampled_from(ON_EDGES),
    st.sampled_from(np.float32([0.0, -0.0, 0.1, -0.1, 31.9, 32.0, -40.0, 1e30, -3e38, 1e-40])),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    batches.float32(-1, 1),
).map(np.float32)


@pytest.mark.parametrize("width", [1, batches.SHAPE[1]])
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_are_numpys_by_age_and_sign(width, data):
    values = data.draw(hnp.arrays(np.float32, batches.SHAPE, elements=anything))
    signs = hnp.arrays(np.float32, (batches.SHAPE[0], width), elements=st.sampled_from(np.float32([-2.0, 0.0, 0.5])))
    advantages, where = data.draw(signs), data.draw(batches.masks())
    ages = data.draw(hnp.arrays(np.int32, (batches.SHAPE[0], 1), elements=st.integers(0, 2)))
    counted, levels = histogram_and_quantiles(values, advantages, where, ages)
    groups = 3 * np.broadcast_to(ages, values.shape) + np.sign(np.broadcast_to(advantages, values.shape)) + 1
    for group in range(9):
        expected = numpy_histogram(values[where & (groups == group)])
        np.testing.assert_array_equal(counted[group // 3, group % 3], expected)
    if where.any():
        expected = [reference.quantile(values[where].astype(np.float64), p) for p in PER_MILLE]
        np.testing.assert_array_equal(levels, np.float32(expected))


def numpy_histogram(values):
    """Sizes below 2^-10 in the middle, then up to each power of two, an edge going outwards."""
    sizes = [0.0, *(2.0**k for k in range(-10, 5)), math.inf]
    outwards = lambda x: np.histogram(np.abs(x.astype(np.float64)), sizes)[0]  # noqa: E731
    negative, positive = outwards(values[values < 0]), outwards(values[values >= 0])
    return [*negative[:0:-1], negative[0] + positive[0], *positive[1:]]


def test_histogram_by_hand():
    """31 bins: 16 and more is the last, [8, 16) the one before, (-2^-10, 2^-10) the middle one."""
    counted, _ = of_row([16.0, 100.0, 15.99, 8.0, 2**-10, 0.0, -0.0, 9e-4, -9e-4, -(2**-10), -16.0, -15.99])
    expected = np.zeros(31, int)
    expected[[30, 29, 16, 15, 14, 1, 0]] = [2, 2, 1, 4, 1, 1, 1]
    np.testing.assert_array_equal(counted, expected)


def test_edges_are_as_published():
    assert len(LOG_RATIO_EDGES) == 30 and list(LOG_RATIO_EDGES) == sorted(LOG_RATIO_EDGES)
    np.testing.assert_array_equal(LOG_RATIO_EDGES, [-(2.0**k) for k in range(4, -11, -1)] + reference.SIZES)
    counted, _ = of_row(LOG_RATIO_EDGES)
    np.testing.assert_array_equal(counted, [1] * 15 + [0] + [1] * 15)


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 2000])
def test_per_mille_at_its_edges(count):
    """The values 1/128, 2/128, ... are their own cuts while below 2; needed is ceil(p n / 1000)."""
    values = np.arange(1, count + 1, dtype=np.float32) / 1024
    expected = [reference.cut(values[math.ceil(p * count / 1000) - 1]) for p in PER_MILLE]
    _, levels = of_row(np.random.default_rng(0).permutation(values))
    np.testing.assert_array_equal(levels, np.float32(expected))


def test_quantiles_of_ties_of_one_value_and_of_the_far_ends():
    for value, cut in ((0.1, 0.099609375), (-0.1, -0.099609375), (2**-10, 2**-10), (9e-4, 0.0), (-9e-4, 0.0)):
        np.testing.assert_array_equal(of_row([value])[1], np.float32([cut] * 6))
        np.testing.assert_array_equal(of_row([value] * 37)[1], np.float32([cut] * 6))
    for value, cut in ((31.9, 31.875), (32.0, 31.875), (-200.0, -31.875), (3e38, 31.875), (0.0, 0.0), (-0.0, 0.0)):
        np.testing.assert_array_equal(of_row([value])[1], np.float32([cut] * 6))
    _, levels = of_row([-1.0] * 5 + [0.0] * 4 + [1.0])
    np.testing.assert_array_equal(levels, [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])


def test_a_cut_value_is_within_a_hundredth_of_the_value():
    for value in np.random.default_rng(0).uniform(-30, 30, 50).astype(np.float32):
        _, levels = of_row([value])
        assert abs(levels[0]) <= abs(value) and levels[0] == pytest.approx(float(value), rel=0.0079)


def test_nothing_counts_as_zeros():
    counted, levels = of_row([])
    assert not np.any(counted) and np.isfinite(levels).all()


@pytest.mark.parametrize("shards", [1, 8])
def test_large_counts_are_exact_on_any_mesh(shards):
    """2^21 normal values and 2^21 equal ones."""
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(0.0, 0.2, 2**21), np.full(2**21, 0.25)]).astype(np.float32)
    expected = [float(np.sort(values)[math.ceil(p * len(values) / 1000) - 1]) for p in PER_MILLE]
    mesh = jax.make_mesh((shards,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    shape = (64, len(values) // 64)
    arrays = (values.reshape(shape), np.ones((64, 1), np.float32), np.ones(shape, bool), np.zeros((64, 1), np.int32))
    sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in arrays]
    counted, levels = histogram_and_quantiles(*sharded)
    np.testing.assert_array_equal(counted[0, 2], numpy_histogram(values))
    np.testing.assert_array_equal(levels, np.float32([reference.cut(x) for x in expected]))


def test_vmap():
    rng = np.random.default_rng(2)
    values = rng.normal(0.0, 1.0, (3, *batches.SHAPE)).astype(np.float32)
    others = (np.ones((3, 4, 1), np.float32), np.ones(values.shape, bool), np.zeros((3, 4, 1), np.int32))
    together = jax.vmap(histogram_and_quantiles)(values, *others)
    for i in range(3):
        expected = histogram_and_quantiles(values[i], *(x[i] for x in others))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], together), expected)
