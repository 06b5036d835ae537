"""Positions of tokens under padding and packing, and the rotary embedding of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from m2po_jax.config import ModelConfig


def positions(valid_BT: Array | np.ndarray) -> Array:
    """Rotary positions that count real tokens only, so that padding on either side changes nothing."""
    return jnp.maximum(jnp.cumsum(valid_BT.astype(jnp.int32), axis=1) - 1, 0)


def segment_positions(segment_ids_BS: Array | np.ndarray) -> Array:
    """Rotary positions that start at 0 wherever the segment id changes."""
    slots_S = jnp.arange(segment_ids_BS.shape[1], dtype=jnp.int32)
    starts_BS = jnp.pad(segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return slots_S[None] - jax.lax.cummax(jnp.where(starts_BS, slots_S[None], 0), axis=1)


def frequencies(config: ModelConfig) -> Array:
    """Turns of the rotary embedding in radians a position, float32 (head_dim / 2,).

    With `rope_factor`, Llama 3's scaling: with n = original positions * frequency / (2 pi) turns over the original
    context, a frequency is divided by the factor below n = low, kept above n = high, and in between it is
    share * kept + (1 - share) * divided with share = (n - low) / (high - low).
    """
    half = config.head_dim // 2
    kept = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_factor is None:
        return kept
    turns = config.rope_original_positions / (2.0 * np.pi) * kept
    share = (turns - config.rope_low_factor) / (config.rope_high_factor - config.rope_low_factor)
    share = jnp.clip(share, 0.0, 1.0)
    return share * kept + (1.0 - share) * (kept / config.rope_factor)


def rotate(x_BTHd: Array, positions_BT: Array, frequencies_d: Array) -> Array:
    """Rotary position embedding, halves convention (as in Llama and Qwen checkpoints); float32 angles."""
    half = x_BTHd.shape[-1] // 2
    angles_BT1d = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies_d[None, None, None, :]
    cos, sin = jnp.cos(angles_BT1d).astype(x_BTHd.dtype), jnp.sin(angles_BT1d).astype(x_BTHd.dtype)
    first, second = x_BTHd[..., :half], x_BTHd[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
