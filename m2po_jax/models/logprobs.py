"""Log-prob and entropy of given tokens, in chunks, so that the logits of a whole batch are never held."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from m2po_jax.models.positions import positions
from m2po_jax.models.sharding import by_hand, divides, laid_out, parts
from m2po_jax.models.transformer import Transformer, forward, forward_packed, logits_of, output_table

CHUNK_TOKENS = 4096
CHUNK_LOGITS = 2**26
"""Most tokens, and most logits (256 MB in float32), of a chunk, on each device, where the caller does not say."""


def response_logprobs(
    model: Transformer,
    params: Any,
    prompt_tokens_BP: Array | np.ndarray,
    prompt_valid_BP: Array | np.ndarray,
    response_tokens_BT: Array | np.ndarray,
    response_mask_BT: Array | np.ndarray,
    temperature: float | Array = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Array, Array]:
    """Log-prob of each response token given the tokens before it, and the entropy of its distribution.

    Differentiable in `params`; (B, T, V) is never materialised: logits live for `chunk_tokens` tokens at a time and
    are computed again in the backward pass.

    Args:
        prompt_tokens_BP: int32, padded on the left; prompt_valid_BP bool, True on real tokens.
        response_tokens_BT: int32, padded on the right; response_mask_BT bool, True on real tokens.
        temperature: divides the logits, as it did when the tokens were sampled.
        chunk_tokens: tokens whose logits are held at a time, or one of each row where that is more; None: as many as
            256 MB of logits hold on each device.

    Returns:
        log-probs and entropies, float32 (B, T), both zero off `response_mask_BT`.
    """
    tokens_BS = jnp.concatenate([prompt_tokens_BP, response_tokens_BT], axis=1)
    valid_BS = jnp.concatenate([prompt_valid_BP, response_mask_BT], axis=1)
    hidden_BSD, _ = forward(model, params, tokens_BS, positions(valid_BS), valid_BS)
    before = prompt_tokens_BP.shape[1] - 1
    hidden_BTD = hidden_BSD[:, before : before + response_tokens_BT.shape[1]]
    logprobs_BT, entropy_BT = _chunked(model, params, hidden_BTD, response_tokens_BT, temperature, chunk_tokens)
    return jnp.where(response_mask_BT, logprobs_BT, 0.0), jnp.where(response_mask_BT, entropy_BT, 0.0)


def packed_logprobs(
    model: Transformer,
    params: Any,
    tokens_BS: Array | np.ndarray,
    segment_ids_BS: Array | np.ndarray,
    temperature: float | Array = 1.0,
    chunk_tokens: int | None = None,
    scored_BW: Array | np.ndarray | None = None,
) -> tuple[Array, Array]:
    """`response_logprobs` for rows that hold several sequences each, one after the other.

    Args:
        tokens_BS: int32; segment_ids_BS int32, a positive number for each sequence of a row, 0 on padding.
        scored_BW: int32, slots of the tokens that are asked for, each at most once, 0 for none; None: all slots.
            Logits are computed for these alone.

    Returns:
        log-prob of each token given those before it in its segment, and the entropy there, float32 (B, S) or (B, W),
        both zero on the first token of a segment, which nothing scores, and on padding.
    """
    tokens_BS, segment_ids_BS = jnp.asarray(tokens_BS), jnp.asarray(segment_ids_BS)
    hidden_BSD = forward_packed(model, params, tokens_BS, segment_ids_BS)
    scored = (segment_ids_BS[:, 1:] == segment_ids_BS[:, :-1]) & (segment_ids_BS[:, 1:] > 0)
    if scored_BW is None:
        values = _chunked(model, params, hidden_BSD[:, :-1], tokens_BS[:, 1:], temperature, chunk_tokens)
        logprobs_BS, entropy_BS = (jnp.pad(jnp.where(scored, x, 0.0), ((0, 0), (1, 0))) for x in values)
        return logprobs_BS, entropy_BS
    asked_BW = jnp.asarray(scored_BW)
    before_BW = jnp.maximum(asked_BW - 1, 0)
    hidden_BWD = laid_out(_taken(hidden_BSD, before_BW), "BTD")
    targets_BW = jnp.take_along_axis(tokens_BS, asked_BW, axis=1)
    real_BW = jnp.take_along_axis(scored, before_BW, axis=1) & (asked_BW > 0)
    values = _chunked(model, params, hidden_BWD, targets_BW, temperature, chunk_tokens)
    logprobs_BW, entropy_BW = (jnp.where(real_BW, x, 0.0) for x in values)
    return logprobs_BW, entropy_BW


def _taken(x_BSD: Array, slots_BW: Array) -> Array:
    """Slots of each row, (B, W, D); row by row, so that a mesh that cuts rows moves nothing."""
    return jax.vmap(lambda x_SD, slots_W: x_SD[slots_W])(x_BSD, slots_BW)


def _chunked(
    model: Transformer,
    params: Any,
    hidden_BTD: Array,
    tokens_BT: Array | np.ndarray,
    temperature: float | Array,
    chunk_tokens: int | None,
) -> tuple[Array, Array]:
    """Log-probs and entropies (B, T), in chunks with tokens of every row, so that all devices have a part of each."""
    rows, length = tokens_BT.shape
    if chunk_tokens is None:
        chunk_tokens = min(CHUNK_TOKENS * parts("B"), CHUNK_LOGITS * parts("BV") // model.vocab_size)
    if rows * length <= chunk_tokens:
        values = _logprob_and_entropy(
            model, params, hidden_BTD.reshape(rows * length, -1), jnp.ravel(tokens_BT), temperature
        )
        return values[0].reshape(rows, length), values[1].reshape(rows, length)
    width = -(-length // -(-length // max(1, chunk_tokens // rows)))
    return _scanned(output_table(model, params), hidden_BTD, jnp.asarray(tokens_BT), temperature, width)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scanned(
    table_VD: Array, hidden_BTD: Array, tokens_BT: Array, temperature: float | Array, width: int
) -> tuple[Array, Array]:
    """Log-probs and entropies (B, T), `width` tokens of each row at a time; no gradient for the temperature.

    The backward pass computes the logits again, chunk by chunk, and adds up the gradient of the table in float32. On a
    mesh the table is gathered once, and its gradient added over devices once, rather than with every chunk.
    """
    return _scanned_forward(table_VD, hidden_BTD, tokens_BT, temperature, width)[0]


def _scanned_forward(
    table_VD: Array, hidden_BTD: Array, tokens_BT: Array, temperature: float | Array, width: int
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    used_VD = laid_out(table_VD.astype(hidden_BTD.dtype), "VD")
    tensor = "tensor" if divides(len(hidden_BTD), *table_VD.shape) else None

    def local(used_VD: Array, temperature: Array, hidden_BTD: Array, tokens_BT: Array) -> tuple[Array, ...]:
        def chunk(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, ...]]:
            logits = _logits(inputs[0], used_VD, temperature)
            (logprob, entropy), kept = _of_logits_forward(logits, _own(inputs[1], used_VD, tensor), tensor)
            return None, (logprob, entropy, kept[2])

        _, outputs = jax.lax.scan(chunk, None, (_cut(hidden_BTD, width), _cut(tokens_BT, width)))
        return tuple(_uncut(x, *tokens_BT.shape) for x in outputs)

    scan = by_hand(local, "W1BB", "BBB") if tensor else local
    logprobs, entropy, normaliser = scan(used_VD, jnp.float32(temperature), hidden_BTD, tokens_BT)
    return (logprobs, entropy), (used_VD, temperature, hidden_BTD, tokens_BT, normaliser, entropy)


def _scanned_backward(
    width: int, kept: tuple[Any, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    used_VD, temperature, hidden_BTD, *rows = kept
    tensor = "tensor" if divides(len(hidden_BTD), *used_VD.shape) else None

    def local(used_VD: Array, temperature: Array, hidden_BTD: Array, *rows: Array) -> tuple[Array, Array]:
        def chunk(sum_VD: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
            hidden, tokens, normaliser, entropy, *slopes = inputs
            logits = _logits(hidden, used_VD, temperature)
            known = logits, _own(tokens, used_VD, tensor), normaliser, entropy
            by_product = (_of_logits_backward(known, (slopes[0], slopes[1]))[0] / temperature).astype(hidden.dtype)
            by_hidden = _added(jnp.einsum("tv,vd->td", by_product, used_VD), tensor)
            by_table = jnp.einsum("tv,td->vd", by_product, hidden, preferred_element_type=jnp.float32)
            return sum_VD + by_table, by_hidden

        inputs = tuple(_cut(x, width) for x in (hidden_BTD, *rows))
        sum_VD, by_hidden = jax.lax.scan(chunk, jnp.zeros(used_VD.shape, jnp.float32), inputs)
        return sum_VD, _uncut(by_hidden, *hidden_BTD.shape[:2])

    scan = by_hand(local, "W1BBBBBB", "SB") if tensor else local
    by_table, by_hidden = scan(used_VD, jnp.float32(temperature), hidden_BTD, *rows, *cotangents)
    return by_table, by_hidden, None, None


_scanned.defvjp(_scanned_forward, _scanned_backward)


def _cut(x_BT: Array, width: int) -> Array:
    """(B, T, ...) to (chunks, B * width, ...), zeros at the end; each chunk has tokens of every row."""
    rows, length = x_BT.shape[:2]
    chunks = -(-length // width)
    padded = jnp.pad(x_BT, ((0, 0), (0, chunks * width - length), *((0, 0),) * (x_BT.ndim - 2)))
    swapped = jnp.swapaxes(padded.reshape(rows, chunks, width, *x_BT.shape[2:]), 0, 1)
    return swapped.reshape(chunks, rows * width, *x_BT.shape[2:])


def _uncut(x: Array, rows: int, length: int) -> Array:
    """The inverse of `_cut`."""
    split = jnp.swapaxes(x.reshape(len(x), rows, -1, *x.shape[2:]), 0, 1)
    return split.reshape(rows, -1, *x.shape[2:])[:, :length]


def _logits(hidden: Array, used_VD: Array, temperature: Array) -> Array:
    return jnp.einsum("td,vd->tv", hidden, used_VD, preferred_element_type=jnp.float32) / temperature


def _own(tokens: Array, used_VD: Array, tensor: str | None) -> Array:
    """Tokens counted from the first row of the table that this device has."""
    return tokens if tensor is None else tokens - jax.lax.axis_index(tensor) * len(used_VD)


def _added(x: Array, tensor: str | None) -> Array:
    """The sum over the parts of the vocabulary, where devices have one each."""
    return x if tensor is None else jax.lax.psum(x, tensor)


def _logprob_and_entropy(
    model: Transformer, params: Any, hidden: Array, tokens: Array | np.ndarray, temperature: float | Array
) -> tuple[Array, Array]:
    return _of_logits(logits_of(model, params, hidden) / temperature, jnp.asarray(tokens))


@jax.custom_vjp
def _of_logits(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """Log-prob of the tokens (...) and entropy (...), float32, under logits (..., V)."""
    return _of_logits_forward(logits, tokens)[0]


def _of_logits_forward(
    logits: Array, tokens: Array, tensor: str | None = None
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """With a mesh axis, a device has the logits of its part of the vocabulary, and tokens counted from its start."""
    largest = jnp.max(logits, axis=-1)
    if tensor is not None:
        largest = jax.lax.pmax(largest, tensor)
    shifted = logits - largest[..., None]
    sums = jax.lax.platform_dependent(shifted, cpu=_sums_in_lanes, default=_sums)
    total, weighted = (_added(x, tensor) for x in sums)
    entropy, normaliser = jnp.log(total) - weighted / total, largest + jnp.log(total)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1, mode=None if tensor is None else "clip")[..., 0]
    if tensor is not None:
        chosen = _added(jnp.where((tokens >= 0) & (tokens < logits.shape[-1]), chosen, 0.0), tensor)
    return (chosen - normaliser, entropy), (logits, tokens, normaliser, entropy)


def _sums(x: Array) -> tuple[Array, Array]:
    """Sums of e^x and of x e^x over the last axis."""
    weights = jnp.exp(x)
    return jnp.sum(weights, axis=-1), jnp.sum(weights * x, axis=-1)


def _sums_in_lanes(x: Array) -> tuple[Array, Array]:
    """The same in one pass that stores nothing of the size of `x`: 16 running sums side by side, then their sum."""
    lanes = math.gcd(x.shape[-1], 16)
    split = x.reshape(*x.shape[:-1], -1, lanes)
    weights, zero = jnp.exp(split), jnp.float32(0.0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    total, weighted = jax.lax.reduce((weights, weights * split), (zero, zero), add, (x.ndim - 1,))
    return jnp.sum(total, axis=-1), jnp.sum(weighted, axis=-1)


def _of_logits_backward(kept: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array, None]:
    """d log p_t / dz = 1_t - p and dH / dz = -p (log p + H), in one pass over the logits."""
    logits, tokens, normaliser, entropy = kept
    by_logprob, by_entropy = (x[..., None] for x in cotangents)
    logprobs = logits - normaliser[..., None]
    slope = by_logprob + by_entropy * (logprobs + entropy[..., None])
    ids = jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
    return jnp.where(ids == tokens[..., None], by_logprob, 0.0) - jnp.exp(logprobs) * slope, None


_of_logits.defvjp(_of_logits_forward, _of_logits_backward)
