"""Where the second moment is cut: exact selection by binary search on float32 bit patterns, without a sort.

Non-negative float32 numbers are ordered like their bit patterns read as integers. Both rules below keep the values up
to the largest `t` for which a sum over the trust region is not positive, and in both the good `t` form an interval
from 0, so `t` is found bit by bit: 31 passes of one masked sum, the same on one device as on many.

Accuracy: `v - threshold` is split into two floats without error, and the sum runs in two floats. In any order of
addition the sum of n terms is off by at most 4 n 2^-48 sum|v - threshold|, so the result is that of exact arithmetic
unless the exact sum at some block of equal values lies that close to 0. A sum of terms that are all <= 0 (or all > 0)
has the right sign always.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

SECOND_MOMENT_LIMIT = 2.0**96
"""Larger second moments count as this much: 2^31 of them still add up to a finite float32."""

_INFINITY_BITS = 0x7F800000

TwoFloat = tuple[Array, Array]


@jax.jit
def mask_cutoff(
    second_moment: Float[Array, "B T"], trust_region: Bool[Array, "B T"], threshold: Float[Array, ""]
) -> Float[Array, ""]:
    """Largest second moment that Algorithm 1 keeps: a token of the trust region is masked where it lies above.

    The sum over {v <= t} of (v - threshold) first falls, then rises with t, and is <= 0 exactly where the mean of the
    values up to t is within the threshold (arXiv 2510.01161, Algorithm 1, equal values dropped together).

    Args:
      second_moment: float32 from `masks.second_moment`.
      trust_region: True for the tokens T.
      threshold: float32 scalar, tau.

    Returns:
      A float32 scalar; inf when nothing is to be masked.
    """
    threshold = jnp.minimum(threshold, SECOND_MOMENT_LIMIT)

    def excess(cutoff_bits: Array, v_BT: Array) -> Array:
        below_BT = trust_region & (_bits(v_BT) <= cutoff_bits)
        return _sum_of_differences(v_BT, threshold, below_BT)

    return _float(_largest_without_excess(excess, second_moment))


@jax.jit
def clip_cutoff(
    second_moment: Float[Array, "B T"], trust_region: Bool[Array, "B T"], threshold: Float[Array, ""]
) -> Float[Array, ""]:
    """Largest second moment in T at which the winsorised mean, mean over T of min(v, c), is within the threshold.

    Args and accuracy as for `mask_cutoff`.

    Returns:
      A float32 scalar: inf when the plain mean is within the threshold (no clip), 0 when even the smallest value is
      too large (everything in T is clipped).
    """
    threshold = jnp.minimum(threshold, SECOND_MOMENT_LIMIT)

    def excess(cutoff_bits: Array, v_BT: Array) -> Array:
        return _sum_of_differences(jnp.minimum(v_BT, _float(cutoff_bits)), threshold, trust_region)

    crossing_bits = _largest_without_excess(excess, second_moment)
    below_BT = trust_region & (_bits(second_moment) <= crossing_bits)
    largest = jnp.max(jnp.where(below_BT, second_moment, 0.0), initial=0.0)
    return jnp.where(crossing_bits == _INFINITY_BITS, jnp.inf, largest)


def _largest_without_excess(excess: Callable[[Array, Array], Array], v_BT: Array) -> Int[Array, ""]:
    """Largest bit pattern, up to that of inf, at which `excess(pattern, v_BT)` is <= 0 (0 if there is none).

    The values pass through the loop's state, so that no compiler fuses the square that made them into the difference
    from the threshold, which would skip the rounding of the square.
    """

    def try_bit(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        best, v_BT = state
        candidate = best | jnp.left_shift(jnp.int32(1), 30 - step)
        fits = (candidate <= _INFINITY_BITS) & (excess(candidate, v_BT) <= 0.0)
        return jnp.where(fits, candidate, best), v_BT

    best, _ = lax.fori_loop(jnp.int32(0), jnp.int32(31), try_bit, (jnp.int32(0), v_BT))
    return best


def _sum_of_differences(v_BT: Array, threshold: Array, include_BT: Array) -> Array:
    """Sum of (v - threshold) over the included tokens, rounded once to float32, with the sign of the two-float sum."""
    high_BT, low_BT = _two_diff(v_BT, threshold)
    terms = (jnp.where(include_BT, high_BT, 0.0), jnp.where(include_BT, low_BT, 0.0))
    high, _ = lax.reduce(terms, (jnp.float32(0.0), jnp.float32(0.0)), _add_two_floats, tuple(range(v_BT.ndim)))
    return high


def _two_diff(a: Array, b: Array) -> TwoFloat:
    """a - b as (rounded difference, exact error). Knuth, The Art of Computer Programming 2, section 4.2.2."""
    high = a - b
    b_virtual = a - high
    a_virtual = high + b_virtual
    return high, (a - a_virtual) + (b_virtual - b)


def _add_two_floats(a: TwoFloat, b: TwoFloat) -> TwoFloat:
    """Sum of two two-floats, normalised: the high part is the float32 nearest to the whole."""
    high = a[0] + b[0]
    b_virtual = high - a[0]
    error = (a[0] - (high - b_virtual)) + (b[0] - b_virtual)
    low = error + (a[1] + b[1])
    total = high + low
    return total, low - (total - high)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
