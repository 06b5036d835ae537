"""Quantiles by counting: a binary search on bit patterns, without a sort, the same on one device as on many."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from m2po_jax.objectives.reductions import Totals, count, over_columns

_SHIFT = 16


def quantiles(values: Float[Array, "B T"], where: Bool[Array, "B T"], per_mille: tuple[int, ...]) -> Float[Array, "K"]:
    """The smallest value v with at least so many thousandths of the values <= v, for each of `per_mille`.

    Values are first cut to their upper 16 bits (bfloat16, towards 0), that is to 2 to 3 significant digits; the
    quantile of the cut values is exact. 16 passes, each ending in a count a level.

    Args:
      values: float32, finite.
      where: True for the values that count.
      per_mille: integers from 1 to 1000.

    Returns:
      float32; without values something finite or not that means nothing.
    """
    columns = (_keys(values), where)
    number = over_columns(lambda c: Totals({"n": count(c[1])}, {}), columns).sums["n"]
    thousandths = jnp.asarray(per_mille, jnp.int32)
    needed = number // 1000 * thousandths + (number % 1000 * thousandths + 999) // 1000

    def try_bit(step: Array, below: Array) -> Array:
        """`below`: the largest key known to have fewer than `needed` values up to it."""
        candidate = below + jnp.left_shift(jnp.int32(1), 15 - step)
        up_to = over_columns(lambda c: Totals({"n": _counts_up_to(*c, candidate)}, {}), columns).sums["n"]
        return jnp.where(up_to < needed, candidate, below)

    start = jnp.full(len(per_mille), -(2**15) - 1, jnp.int32)
    return _values(lax.fori_loop(jnp.int32(0), jnp.int32(16), try_bit, start) + 1)


def _counts_up_to(keys_BT: Array, where_BT: Array, candidates_K: Array) -> Array:
    return jnp.stack([count(where_BT & (keys_BT <= candidate)) for candidate in candidates_K])


def _keys(x: Array) -> Array:
    """int32 in [-2^15, 2^15), ordered like the values: the upper half of the bits, mirrored for negative numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    upper = jnp.right_shift(bits & np.int32(0x7FFFFFFF), _SHIFT)
    return jnp.where(bits < 0, -1 - upper, upper)


def _values(keys: Array) -> Array:
    upper = jnp.where(keys < 0, -1 - keys, keys)
    magnitude = lax.bitcast_convert_type(jnp.left_shift(upper, _SHIFT), jnp.float32)
    return jnp.where(keys < 0, -magnitude, magnitude)
