"""Grouped-query attention, exact, a few queries at a time: no array is as large as queries times keys when both grow.

Axis letters as in `models.transformer`; G is the query heads that share a key/value head, Q the queries of a chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

QUERY_CHUNK = 256
"""Most queries whose scores against all keys are held at a time."""


def attention(q_BTHd: Array, k_BSKd: Array, v_BSKd: Array, mask_BTS: Array) -> Array:
    """Softmax attention (B, T, H, head_dim) in the dtype of `v_BSKd`; scores and softmax are float32.

    Scores are computed again in the backward pass, which finds none of them kept.

    Args:
        mask_BTS: bool, True where a query sees a key; a query that sees none gets the mean of all values.
    """
    return _attention("bksd", q_BTHd, jnp.swapaxes(k_BSKd, 1, 2), jnp.swapaxes(v_BSKd, 1, 2), mask_BTS)


def cached_attention(q_BTHd: Array, k_BKdS: Array, v_BKSd: Array, mask_BTS: Array) -> Array:
    """`attention` to a cache: of each head both products are plain ones of matrices, which a CPU does in place."""
    return _attention("bkds", q_BTHd, k_BKdS, v_BKSd, mask_BTS)


def _attention(keys: str, q_BTHd: Array, k: Array, v_BKSd: Array, mask_BTS: Array) -> Array:
    """`keys` are the axes of `k`."""
    batch, length, _, head_dim = q_BTHd.shape
    q_BKTGd = jnp.swapaxes(q_BTHd.reshape(batch, length, k.shape[1], -1, head_dim), 1, 2)
    chunks = -(-length // QUERY_CHUNK)
    if chunks == 1:
        out_BKTGd = _chunk(keys, q_BKTGd, k, v_BKSd, mask_BTS)
    else:
        size = -(-length // chunks)

        def split(x: Array, axis: int) -> Array:
            widths = [(0, chunks * size - length if i == axis else 0) for i in range(x.ndim)]
            shape = (*x.shape[:axis], chunks, size, *x.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)

        pieces = split(q_BKTGd, 2), split(mask_BTS, 1)
        out = jax.lax.map(lambda piece: _chunk(keys, piece[0], k, v_BKSd, piece[1]), pieces)
        out_BKTGd = jnp.moveaxis(out, 0, 2).reshape(*q_BKTGd.shape[:2], -1, *q_BKTGd.shape[3:])[:, :, :length]
    return jnp.swapaxes(out_BKTGd, 1, 2).reshape(q_BTHd.shape)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _chunk(keys: str, q_BKQGd: Array, k: Array, v_BKSd: Array, mask_BQS: Array) -> Array:
    batch, kv_heads, queries, group, head_dim = q_BKQGd.shape
    rows = q_BKQGd.reshape(batch, kv_heads, queries * group, head_dim)
    scores = jnp.einsum(f"bkqd,{keys}->bkqs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, queries, group, -1) * head_dim**-0.5
    scores = jnp.where(mask_BQS[:, None, :, None], scores, jnp.finfo(jnp.float32).min / 2)
    weights = jax.nn.softmax(scores).reshape(batch, kv_heads, queries * group, -1).astype(v_BKSd.dtype)
    return jnp.einsum("bkqs,bksd->bkqd", weights, v_BKSd).reshape(q_BKQGd.shape)
