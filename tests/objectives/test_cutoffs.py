"""The cut against literal loops in exact fractions, its independence of order and devices, and what it compiles to."""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax.objectives.cutoffs import SECOND_MOMENT_LIMIT, Cut, clip_cut, mask_cut, mask_cut_strict

RULES = (mask_cut, mask_cut_strict, clip_cut)
SHAPE = (4, 6)
UNIT = 2.0**-20
INF = float("inf")
SPECIAL = (
    0.0,
    1e-45,
    1e-40,
    2.0**-126,
    1e-30,
    0.01,
    0.04,
    0.09,
    0.3125,
    0.99999994,
    1.0,
    1e4,
    1e20,
    SECOND_MOMENT_LIMIT,
)


def float32(low, high):
    return st.floats(np.float32(low), np.float32(high), width=32).map(np.float32)


def near(x):
    """A handful of neighbours of x in float32, so that ties are frequent and sums differ in the last digits."""
    return st.integers(-2, 2).map(lambda steps: (np.float32(x).view(np.int32) + np.int32(steps)).view(np.float32))


values = st.one_of(
    st.sampled_from(SPECIAL).map(np.float32), near(0.04), near(0.3), float32(0, 0.2), float32(0, 9), float32(0, 2.0**96)
)
second_moments = hnp.arrays(np.float32, SHAPE, elements=values)
memberships = hnp.arrays(np.bool_, SHAPE, elements=st.sampled_from((True, True, True, False)))
thresholds = st.one_of(
    st.sampled_from((0.0, 1e-45, 1e-40, 1e-38, 1e-6, 0.04, 0.3125, 1.0, 1e20, 2.0**96, 1e30, INF)).map(np.float32),
    near(0.04),
    near(0.3),
    float32(0, 2),
)


def exact_cut(rule, second_moment, members, threshold):
    """(largest kept, smallest masked) by trying every value in exact arithmetic."""
    v = [Fraction(float(x)) for x in np.asarray(second_moment)[np.asarray(members)]]
    blocks = sorted(set(v))
    fitting = [c for c in blocks if threshold == INF or fits(rule, v, c, Fraction(float(threshold)))]
    masked = [c for c in blocks if c not in fitting]
    assert not fitting or not masked or max(fitting) < min(masked)
    return float(max(fitting, default=0)), float(min(masked)) if masked else INF


def fits(rule, v, c, tau):
    kept = [x for x in v if x <= c]
    if rule is mask_cut:
        return sum(kept) / len(kept) <= tau
    if rule is mask_cut_strict:
        return sum(kept) / len(kept) < tau or c == min(v)
    return sum(min(x, c) for x in v) / len(v) <= tau


def ends(cut):
    return float(cut.largest_kept), float(cut.smallest_masked)


def assert_same_cut(cut, other):
    for one, two in zip(cut, other, strict=True):
        assert np.asarray(one).view(np.int32).tolist() == np.asarray(two).view(np.int32).tolist()


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=300)
@given(second_moments, memberships, thresholds)
def test_the_cut_is_that_of_exact_arithmetic(rule, second_moment, members, threshold):
    assert ends(rule(second_moment, members, threshold)) == exact_cut(rule, second_moment, members, threshold)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.1, 0.3, 3.0, 40.0])
def test_the_cut_is_exact_in_larger_batches_of_light_and_heavy_tails(rule, spread, rng):
    """Log-normal values; the shape has groups of two rows."""
    second_moment = np.exp(np.clip(rng.normal(-3.5, spread, (128, 2)), -80, 60)).astype(np.float32)
    members = rng.random(second_moment.shape) < 0.7
    for threshold in (0.0, 0.01, 0.03, 0.04, 1.0, 1e9):
        expected = exact_cut(rule, second_moment, members, np.float32(threshold))
        assert ends(rule(second_moment, members, threshold)) == expected


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=100)
@given(second_moments, memberships, thresholds, st.permutations(range(24)))
def test_the_order_of_tokens_changes_no_bit(rule, second_moment, members, threshold, order):
    moved = [x.ravel()[list(order)].reshape(SHAPE) for x in (second_moment, members)]
    assert_same_cut(rule(*moved, threshold), rule(second_moment, members, threshold))


def near_miss(size):
    """0, a large value and many others, multiples of 2^-20 with a mean of exactly 41943 of them; and that mean."""
    tau, large = 41943, 12_000_000
    each, left_over = divmod(tau * size - large, size - 2)
    spread = np.random.default_rng(0).integers(-30_000, 30_000, size // 2 - 1)
    others = each + np.concatenate([spread, -spread]) + (np.arange(size - 2) < left_over)
    v = np.concatenate([[0, large], others])
    assert int(v.sum()) == tau * size
    return (v * UNIT).astype(np.float32), np.float32(tau * UNIT)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1024, 1024), (1, 2**20), (2**19, 2)])
def test_a_mean_that_meets_the_threshold_in_a_million_tokens(shape):
    """A sum above that by 2e-11 of it, or by 1e-38 in all, and the large value is masked."""
    v, tau = near_miss(shape[0] * shape[1])
    members, large = np.ones(shape, bool), float(v[1])
    second = float(np.sort(v)[-2])
    for more in (UNIT, 2.0**-70, 2.0**-126):
        above = v.copy()
        above[0] = more
        for rule in (mask_cut, clip_cut):
            assert ends(rule(v.reshape(shape), members, tau)) == (large, INF)
            assert ends(rule(above.reshape(shape), members, tau)) == (second, large)
    below = v.copy()
    below[3] -= UNIT
    assert ends(mask_cut_strict(v.reshape(shape), members, tau)) == (second, large)
    assert ends(mask_cut_strict(below.reshape(shape), members, tau)) == (large, INF)


@pytest.mark.parametrize("shape", [(1024, 1024), (1, 2**20), (2**19, 2)])
@pytest.mark.parametrize("value", [0.99999994, 2.0**-126, SECOND_MOMENT_LIMIT])
def test_sums_of_equal_values_do_not_overflow(shape, value):
    v, members, value = np.full(shape, value, np.float32), np.ones(shape, bool), np.float32(value)
    previous = np.nextafter(value, np.float32(0))
    assert ends(mask_cut(v, members, value)) == ends(clip_cut(v, members, value)) == (value, INF)
    assert ends(mask_cut(v, members, previous)) == ends(clip_cut(v, members, previous)) == (0.0, value)
    assert ends(mask_cut_strict(v, members, previous)) == (value, INF)
    v[0, 0] = 0.0
    assert ends(mask_cut_strict(v, members, value)) == (value, INF)


def placed(array, mesh_shape):
    mesh = jax.make_mesh(mesh_shape, ("b", "t"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec("b", "t")))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("mesh_shape", "shape"), [((8, 1), (512, 16)), ((4, 2), (512, 16)), ((1, 8), (6, 16))])
def test_eight_devices_change_no_bit(rule, mesh_shape, shape, rng):
    members = rng.random(shape) < 0.7
    for spread in (0.1, 0.3, 2.0):
        v = (rng.normal(0.0, spread, shape) ** 2).astype(np.float32)
        one, eight = rule(v, members, 0.04), rule(placed(v, mesh_shape), placed(members, mesh_shape), 0.04)
        assert_same_cut(one, eight)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mesh_shape", [(8, 1), (4, 2)])
def test_only_small_sums_travel_between_devices(rule, mesh_shape):
    shape = (2048, 2560)
    v, members = placed(np.zeros(shape, np.float32), mesh_shape), placed(np.zeros(shape, bool), mesh_shape)

    def mask(log_ratio, members):
        v = log_ratio * log_ratio
        return members & rule(v, members, jnp.float32(0.04)).masks(v)

    text = jax.jit(mask).lower(v, members).compile().as_text()
    assert not re.search(r"\b(sort|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(", text)
    reduced = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    assert reduced
    for result in reduced:
        for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", result):
            assert dtype in ("s32", "f32", "pred")
            assert 4 * np.prod([int(n) for n in dimensions.split(",") if n], initial=1) <= 4096


@pytest.mark.parametrize("rule", RULES)
def test_memory_is_one_array_and_a_fraction(rule):
    shape = (2048, 2560)
    compiled = rule.lower(
        jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.bool_), jnp.float32(0.04)
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * shape[0] * shape[1]


@pytest.mark.parametrize("rule", RULES)
def test_squares_made_in_the_same_computation_are_rounded_first(rule, rng):
    """A square fused into the difference from the threshold would skip its rounding."""
    of_square = jax.jit(lambda log_ratio, members, threshold: rule(log_ratio * log_ratio, members, threshold))
    for _ in range(20):
        log_ratio = rng.choice(np.float32([0.2, 0.19999999, 0.20000002]), SHAPE)
        squared, members = log_ratio * log_ratio, np.ones(SHAPE, bool)
        threshold = np.float32(rng.choice(np.unique(squared)))
        together = of_square(log_ratio, members, threshold)
        assert_same_cut(together, rule(squared, members, threshold))
        assert ends(together) == exact_cut(rule, squared, members, threshold)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_vmap_over_batches_and_over_thresholds(rule, rng):
    v = (rng.normal(0.0, 0.3, (3, *SHAPE)) ** 2).astype(np.float32)
    members = rng.random(v.shape) < 0.8
    batches = jax.jit(jax.vmap(rule, in_axes=(0, 0, None)))(v, members, 0.04)
    for i in range(3):
        assert_same_cut([x[i] for x in batches], rule(v[i], members[i], 0.04))
    taus = np.float32([0.0, 0.01, 0.04, 1.0, INF, np.nan])
    by_tau = jax.jit(jax.vmap(rule, in_axes=(None, None, 0)))(v[0], members[0], taus)
    for i, tau in enumerate(taus):
        assert_same_cut([x[i] for x in by_tau], rule(v[0], members[0], tau))


def test_thresholds_at_the_ends():
    v, members = np.float32([[0.0, 0.01, 0.0, 1e28]]), np.ones((1, 4), bool)
    for rule in RULES:
        assert ends(rule(v, members, INF)) == (np.float32(1e28), INF)
    assert ends(mask_cut(v, members, 0.0)) == ends(clip_cut(v, members, 0.0)) == (0.0, np.float32(0.01))
    assert ends(mask_cut_strict(v, members, 0.0)) == (0.0, np.float32(0.01))
    for rule in RULES:
        assert ends(rule(v, v > 0, np.nan)) == (0.0, np.float32(0.01))
        assert rule(v, members, np.nan).masks(v).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("threshold", [0.0, 0.04, INF, np.nan])
def test_no_members(rule, threshold):
    assert ends(rule(np.ones(SHAPE, np.float32), np.zeros(SHAPE, bool), threshold)) == (0.0, INF)


def test_the_strict_rule_stays_below_the_threshold_but_keeps_the_smallest():
    def cut(*v, tau=0.25):
        return ends(mask_cut_strict(np.float32([v]), np.ones((1, len(v)), bool), tau))

    assert cut(0.125, 0.375) == (0.125, 0.375)
    assert cut(0.125, 0.25, 0.25) == (0.25, INF)
    assert cut(0.25, 0.25, 0.5) == (0.25, 0.5)
    assert cut(0.5, 0.5, 0.75) == (0.5, 0.75)
    assert cut(0.5) == (0.5, INF)
    assert cut(0.0, 0.0, tau=0.0) == (0.0, INF)
    assert cut(0.0, 0.5, 1e4) == (0.0, 0.5)


def test_hand_worked():
    """Mean of 0, 0.25, 0.5: 0.25; with all four capped at 0.5: 0.3125; with 0.25: 0.1875."""
    v, members = np.float32([[0.25, 9.0], [0.5, 0.0]]), np.ones((2, 2), bool)
    assert ends(mask_cut(v, members, 0.25)) == (0.5, 9.0)
    assert ends(mask_cut_strict(v, members, 0.25)) == (0.25, 0.5)
    assert ends(clip_cut(v, members, 0.3125)) == (0.5, 9.0)
    assert ends(clip_cut(v, members, 0.3)) == (0.25, 0.5)
    assert ends(clip_cut(v[:, :1], members[:, :1], 0.2)) == (0.0, 0.25)


def test_the_mask_divides_at_the_middle_of_the_gap():
    v = np.float32([0.0, 0.25, 0.25000003, 0.4, 0.99999994, 1.0, 4.0])
    cut = Cut(jnp.float32(0.25), jnp.float32(1.0))
    assert cut.masks(v).tolist() == [False, False, False, False, True, True, True]
    neighbours = Cut(jnp.float32(0.25), jnp.float32(0.25000003))
    assert neighbours.masks(v).tolist() == [False, False, True, True, True, True, True]
    assert Cut(jnp.float32(0.0), jnp.float32(2.0**-126)).masks(np.float32([0.0, 2.0**-126])).tolist() == [False, True]
    assert not Cut(jnp.float32(0.25), jnp.float32(INF)).masks(v).any()


def test_no_gradient_passes_through_the_cut(rng):
    v = (rng.normal(0.0, 0.3, SHAPE) ** 2).astype(np.float32)

    def largest(v, tau):
        return mask_cut(v, np.ones(SHAPE, bool), tau).largest_kept

    gradients = jax.grad(largest, argnums=(0, 1))(v, jnp.float32(0.04))
    assert all(not x.any() for x in gradients)


@pytest.mark.parametrize("shape", [(2**19 + 1, 1), (1, 2**20 + 1), (2**19, 2**13)])
def test_a_batch_beyond_the_limits_is_refused(shape):
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.bool_))
    with pytest.raises(ValueError, match="limits"):
        jax.eval_shape(mask_cut, *arguments, jnp.float32(0.04))
