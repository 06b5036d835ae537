"""Batches for the tests: drawn by hypothesis (ties, zeros, huge values) or by a seeded generator (well-behaved)."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

SHAPE = (4, 6)
"""One shape, so that what is jitted once is used by every example."""

SPECIAL = (0.0, 1e-3, 0.1, 0.2, 0.19999999, 0.25, 0.75, 1.0, 20.0, 200.0, 1e-21, 1e-40)
HUGE = (1e4, 1e10, 3e19, 1e30, 3e38)


def float32(low, high, allow_subnormal=True):
    return st.floats(np.float32(low), np.float32(high), width=32, allow_subnormal=allow_subnormal)


def log_ratios(extreme=True):
    """(B, T) float32 with ties, zeros and, if `extreme`, what overflows when squared."""
    special = st.sampled_from(SPECIAL + (HUGE if extreme else ())).flatmap(lambda x: st.sampled_from((x, -x)))
    elements = st.one_of(special, float32(-0.5, 0.5), float32(-3, 3)).map(np.float32)
    return hnp.arrays(np.float32, SHAPE, elements=elements)


def advantages():
    """(B, 1) or (B, T) float32 with zeros; no subnormal ones, which XLA takes for 0 in one place and not in another."""
    elements = st.one_of(st.sampled_from((0.0, 1.0, -1.0)), float32(-2, 2, allow_subnormal=False)).map(np.float32)
    return st.sampled_from((SHAPE, (SHAPE[0], 1))).flatmap(
        lambda shape: hnp.arrays(np.float32, shape, elements=elements)
    )


def masks():
    return hnp.arrays(np.bool_, SHAPE, elements=st.sampled_from((True, True, True, False)))


def thresholds():
    return st.one_of(st.sampled_from((0.0, 1e-6, 0.04, 0.3125, 1.0, 1e30)), float32(0, 1)).map(np.float32)


def normal_batch(seed, shape=SHAPE, spread=0.3, wide=False):
    """policy, behavior, advantages, mask with log-ratios of that spread and about a fifth of the tokens masked."""
    rng = np.random.default_rng(seed)
    behavior = rng.normal(-1.0, 0.5, shape).astype(np.float32)
    policy = behavior + rng.normal(0.0, spread, shape).astype(np.float32)
    advantages = rng.normal(0.0, 1.0, shape if wide else (shape[0], 1)).astype(np.float32)
    return policy, behavior, advantages, rng.random(shape) < 0.8
