"""One fine histogram of log-ratios, from which the published one and the quantiles are read; no sort.

The bins are those of bfloat16 numbers: 128 to a factor of two, from 2^-10 to 2^5, for each sign, and one for all that
is smaller. A token adds 1 to its bin; on a mesh each device counts its own and the counts are added up once.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_PER_OCTAVE = 128
_OCTAVES = 15
_SIDE = _PER_OCTAVE * _OCTAVES
_FINE = 2 * _SIDE + 1
_FIRST = 127 - 10

LOG_RATIO_EDGES = tuple(-(2.0**k) for k in range(4, -11, -1)) + tuple(2.0**k for k in range(-10, 5))
"""Between the bins of a histogram: log r from -16 by powers of two to -2^-10, and from 2^-10 to 16. An edge belongs to
the bin further from 0; the outermost bins are open."""

SIGNS = 3
"""Of the advantage: negative, zero, positive."""


def fine_histogram(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B #T"],
    where: Bool[Array, "B T"],
    ages: Int[Array, "B 1"],
    age_count: int,
) -> Int[Array, "A 3 K"]:
    """Tokens of `where` by age, sign of the advantage and fine bin, int32; `ages` are in [0, age_count)."""
    bits = lax.bitcast_convert_type(log_ratio, jnp.int32)
    size = jnp.right_shift(bits & np.int32(0x7FFFFFFF), 16) - (_FIRST * _PER_OCTAVE - 1)
    size = jnp.clip(size, 0, _SIDE)
    fine = _SIDE + jnp.where(bits < 0, -size, size)
    sign = 1 + jnp.sign(advantages).astype(jnp.int32)
    index = (ages * SIGNS + sign) * _FINE + fine
    index = jnp.where(where, index, age_count * SIGNS * _FINE)
    counts = jnp.zeros(age_count * SIGNS * _FINE, jnp.int32).at[index].add(jnp.int32(1), mode="drop")
    return jnp.reshape(counts, (age_count, SIGNS, _FINE))


def coarse(fine: Int[Array, "A 3 K"]) -> Int[Array, "A 3 31"]:
    """The same tokens between LOG_RATIO_EDGES."""
    octaves = lambda side: jnp.sum(jnp.reshape(side, (*side.shape[:2], _OCTAVES, _PER_OCTAVE)), axis=3)  # noqa: E731
    below, middle, above = jnp.split(fine, (_SIDE, _SIDE + 1), axis=2)
    return jnp.concatenate([octaves(below), middle, octaves(above)], axis=2)


def quantiles(fine: Int[Array, "A 3 K"], per_mille: tuple[int, ...]) -> Float[Array, "Q"]:
    """The smallest value v with at least so many thousandths of the values <= v, for each of `per_mille`.

    Exact for the values cut towards 0 to bfloat16 (within 1 %), 0 for those under 2^-10 and at most 31.875 in size.

    Args:
      fine: from `fine_histogram`.
      per_mille: integers from 1 to 1000.
    """
    up_to = jnp.cumsum(jnp.sum(fine, axis=(0, 1), dtype=jnp.int32), dtype=jnp.int32)
    number, thousandths = up_to[-1], jnp.asarray(per_mille, jnp.int32)
    needed = number // 1000 * thousandths + (number % 1000 * thousandths + 999) // 1000
    found = jnp.sum(up_to[None, :] < needed[:, None], axis=1, dtype=jnp.int32) - _SIDE
    size = jnp.where(found == 0, 0, jnp.abs(found) + (_FIRST * _PER_OCTAVE - 1))
    magnitude = lax.bitcast_convert_type(jnp.left_shift(size, 16), jnp.float32)
    return jnp.where(found < 0, -magnitude, magnitude)
