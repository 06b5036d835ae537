"""Group-relative advantages: a response is as good as it is better than its siblings."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from m2po_jax.objectives.checks import checked
from m2po_jax.objectives.masks import as_float32

Normalization = Literal["std", "none"]

STD_EPSILON = 1e-6
"""Added to the sample standard deviation."""


@checked
def group_advantages(
    rewards: Real[Array | np.ndarray, "B"],
    *,
    group_size: int | None = None,
    group_ids: Int[Array | np.ndarray, "B"] | None = None,
    normalize: str = "std",
) -> Float[Array, "B"]:
    """A_i = (R_i - mean of the group) / (sample standard deviation of the group + 1e-6).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, with ddof = 1; Dr. GRPO (arXiv 2503.20783) divides by nothing.

    Args:
      rewards: (B,) real.
      group_size: responses to a prompt, for groups that lie one after the other; or
      group_ids: (B,) integers, equal within a group; any integers, in any order.
      normalize: "std" or "none".

    Returns:
      (B,) float32. Exactly 0 in a group whose rewards are all equal, hence also in a group of one.

    Raises:
      TypeError: a shape or dtype is wrong (the message names the argument).
      ValueError: neither or both of group_size and group_ids; a group_size that does not divide B; an unknown
        normalize.
    """
    if normalize not in get_args(Normalization):
        raise ValueError(f"normalize is {normalize!r}: use one of {', '.join(get_args(Normalization))}")
    rewards_B = as_float32(rewards)
    segments_B = _segments(rewards_B.shape[0], group_size, group_ids)
    centred_B = rewards_B - _group_mean(rewards_B, segments_B)
    if normalize == "std":
        centred_B = centred_B / (_group_std(centred_B, segments_B) + STD_EPSILON)
    return jnp.where(_all_equal(rewards_B, segments_B), 0.0, centred_B)


def _segments(count: int, group_size: int | None, group_ids: Array | np.ndarray | None) -> Array:
    """Group of each response as an integer in [0, B)."""
    if (group_size is None) == (group_ids is None):
        raise ValueError("give exactly one of group_size and group_ids")
    if isinstance(group_ids, np.ndarray):  # may hold 64 bits, which JAX would cut to 32
        return jnp.asarray(np.unique(group_ids, return_inverse=True)[1].astype(np.int32))
    if group_ids is not None:
        return jnp.unique(group_ids, return_inverse=True, size=count)[1]
    assert group_size is not None
    if group_size < 1 or count % group_size:
        raise ValueError(f"group_size {group_size} does not divide the {count} rewards")
    return jnp.arange(count, dtype=jnp.int32) // group_size


def _group_sum(x_B: Array, segments_B: Array) -> Array:
    return jax.ops.segment_sum(x_B, segments_B, num_segments=x_B.shape[0])[segments_B]


def _group_mean(x_B: Array, segments_B: Array) -> Array:
    return _group_sum(x_B, segments_B) / _group_sum(jnp.ones_like(x_B), segments_B)


def _group_std(centred_B: Array, segments_B: Array) -> Array:
    """Sample standard deviation (ddof = 1) of centred values; 0 in a group of one."""
    degrees_B = jnp.maximum(_group_sum(jnp.ones_like(centred_B), segments_B) - 1.0, 1.0)
    return jnp.sqrt(_group_sum(centred_B**2, segments_B) / degrees_B)


def _all_equal(x_B: Array, segments_B: Array) -> Array:
    largest = jax.ops.segment_max(x_B, segments_B, num_segments=x_B.shape[0])
    smallest = jax.ops.segment_min(x_B, segments_B, num_segments=x_B.shape[0])
    return (largest == smallest)[segments_B]


@checked
def overlong_penalty(lengths: Real[Array | np.ndarray, "B"], max_tokens: int, cache: int) -> Float[Array, "B"]:
    """What a long response loses of its reward: 0 up to `max_tokens - cache`, falling linearly to -1 at `max_tokens`.

    DAPO (arXiv 2503.14476), equation 13.

    Args:
      lengths: (B,) response tokens.
      max_tokens: longest response allowed.
      cache: tokens before it over which the penalty grows; 1 or more.

    Raises:
      ValueError: a cache below 1.
    """
    if cache < 1:
        raise ValueError(f"cache is {cache}: use 1 token or more")
    return jnp.clip(((max_tokens - cache) - as_float32(lengths)) / cache, -1.0, 0.0)
