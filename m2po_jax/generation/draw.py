"""Drawing a token from logits: tempered, perhaps truncated, by the inverse of the distribution function.

Axis letters: B sequence, V vocabulary, K block of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from m2po_jax.config import SamplingConfig
from m2po_jax.models.sharding import laid_out

BLOCK = 128
"""Ids of a block of the vocabulary: one uniform number finds the block, a second one the token in it."""


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn; the default is all of them."""

    top_p: float = 1.0
    """The likeliest tokens, as few as together have this probability."""
    top_k: int | None = None
    """This many of the likeliest tokens; None: all."""

    @classmethod
    def of(cls, config: SamplingConfig) -> "Truncation":
        """What a configuration asks for."""
        return cls(config.top_p, config.top_k)

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.top_p >= 1.0 and self.top_k is None


WHOLE = Truncation()
"""Every token may be drawn."""


def draw(logits_BV: Array, keys_B: Array, temperature: Array, truncation: Truncation = WHOLE) -> tuple[Array, Array]:
    """A token a row, int32 (B,), and its log-prob float32 (B,) under the softmax of all tempered logits.

    The log-prob is that before truncation, of which a learner can compute a ratio. Probabilities are exact to about
    2^-23, the steps of a uniform number in float32.

    Args:
        logits_BV: float32; keys_B: a key for each row.
        temperature: positive float32 scalar.
    """
    scaled_BV = logits_BV / temperature
    largest_B1 = jnp.max(scaled_BV, axis=1, keepdims=True)
    weights_BV = jnp.exp(scaled_BV - largest_B1)
    total_B = jnp.sum(weights_BV, axis=1)
    uniform_B2 = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_B)
    tokens_B = _drawn(weights_BV if truncation.whole else truncated(weights_BV, truncation), uniform_B2)
    chosen_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], axis=1)[:, 0]
    return tokens_B, chosen_B - largest_B1[:, 0] - jnp.log(total_B)


def truncated(weights_BV: Array, truncation: Truncation) -> Array:
    """Weights, not negative, with those of tokens that may not be drawn set to zero.

    First the `top_k` largest, then of these the fewest that have a share `top_p` of their sum; what equals the least of
    the kept is kept too. Instead of sorting, the least is found bit by bit.
    """
    if truncation.top_k is not None:
        wanted = min(truncation.top_k, weights_BV.shape[1])
        count = lambda kept_BV: jnp.sum(kept_BV, axis=1, dtype=jnp.int32)  # noqa: E731
        weights_BV = _above(weights_BV, lambda kept_BV: count(kept_BV) >= wanted)
    if truncation.top_p < 1.0:
        share = lambda kept_BV: jnp.sum(jnp.where(kept_BV, weights_BV, 0.0), axis=1)  # noqa: E731
        least_B = truncation.top_p * jnp.sum(weights_BV, axis=1)
        weights_BV = _above(weights_BV, lambda kept_BV: share(kept_BV) >= least_B)
    return weights_BV


def _above(weights_BV: Array, enough: Callable[[Array], Array]) -> Array:
    """Weights at or above the largest bound at which those kept are enough; zero below it.

    Floats that are not negative are in the order of their bits.
    """
    bits_BV = jax.lax.bitcast_convert_type(weights_BV, jnp.int32)

    def set_bit(step: Array, bound_B: Array) -> Array:
        higher_B = bound_B | (jnp.int32(1 << 30) >> step)
        return jnp.where(enough(bits_BV >= higher_B[:, None]), higher_B, bound_B)

    bound_B = jax.lax.fori_loop(0, 31, set_bit, jnp.zeros(weights_BV.shape[:1], jnp.int32))
    return jnp.where(bits_BV >= bound_B[:, None], weights_BV, 0.0)


def _drawn(weights_BV: Array, uniform_B2: Array) -> Array:
    """Index int32 (B,) of a weight, by chances in proportion to the weights; never that of a zero."""
    rows, size = weights_BV.shape
    width = min(size, BLOCK)
    blocks_BKv = jnp.pad(weights_BV, ((0, 0), (0, -size % width))).reshape(rows, -1, width)
    sums_BK = laid_out(jnp.sum(blocks_BKv, axis=2), "BT")  # the blocks of all devices, gathered once
    block_B = _first_above(sums_BK, uniform_B2[:, 0])
    block_Bv = jnp.take_along_axis(blocks_BKv, block_B[:, None, None], axis=1)[:, 0]
    return block_B * width + _first_above(block_Bv, uniform_B2[:, 1])


def _first_above(weights_BK: Array, uniform_B: Array) -> Array:
    """First place whose running sum is above a share `uniform_B` of the whole sum, and whose own weight is not zero.

    The last with a weight, where rounding of the sums leaves none above.
    """
    sums_BK = jnp.cumsum(weights_BK, axis=1)
    real_BK = weights_BK > 0.0
    above_BK = real_BK & (sums_BK > (uniform_B * sums_BK[:, -1])[:, None])
    last_B = weights_BK.shape[1] - 1 - jnp.argmax(real_BK[:, ::-1], axis=1)
    return jnp.where(jnp.any(above_BK, axis=1), jnp.argmax(above_BK, axis=1), last_B).astype(jnp.int32)
