"""The decode engine: left-padded prompts in, sampled token ids and their float32 log-probs out."""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from m2po_jax.models.positions import positions
from m2po_jax.models.sharding import everywhere
from m2po_jax.models.transformer import Cache, Transformer, forward, logits_of


class Generated(NamedTuple):
    """Responses, a row each, padded on the right."""

    tokens: Array
    """int32 (B, T): sampled ids, the end token included, padding id after it."""
    logprobs: Array
    """float32 (B, T): log-prob of each sampled token at the sampling temperature; zero after the end."""
    mask: Array
    """bool (B, T): True on sampled tokens."""
    stopped: Array
    """bool (B,): True if the response ended by its end token, False if it was cut by length."""


class _Carry(NamedTuple):
    step: Array
    logits_BV: Array
    cache: Cache
    tokens_BT: Array
    logprobs_BT: Array
    done_B: Array


class Streams(NamedTuple):
    """Independent keys for the uses of randomness in a run, all from its seed."""

    rollouts: Array
    evaluation: Array
    parameters: Array

    @classmethod
    def of(cls, seed: int) -> "Streams":
        """The streams of a run with this seed."""
        return cls(*jax.random.split(jax.random.key(seed), 3))


@jax.jit
def sampling_keys(stream: Array, version: Array, group_ids: Array, sample_indices: Array) -> Array:
    """One key a response: (stream, version, group, sample) folded, whatever batch, host or restart it is drawn in.

    Args:
        stream: the key of this use of randomness, from the run's seed.
        version: behaviour version, uint32 scalar.
        group_ids: uint32 (B,), unique within the version; sample_indices uint32 (B,).

    Returns:
        A key array (B,).
    """
    base = jax.random.fold_in(stream, version)
    fold = jax.vmap(lambda group, sample: jax.random.fold_in(jax.random.fold_in(base, group), sample))
    return fold(group_ids, sample_indices)


@partial(jax.jit, static_argnames=("model", "samples_per_prompt", "max_new_tokens", "stop_ids", "pad_id"))
def generate(
    params: dict,
    prompt_tokens_QP: Array,
    prompt_valid_QP: Array,
    keys_B: Array,
    temperature: Array,
    *,
    model: Transformer,
    samples_per_prompt: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Generated:
    """Sample `samples_per_prompt` responses to each prompt; prompts are prefilled once and share their cache.

    Args:
        params: the model's parameters.
        prompt_tokens_QP: int32 (Q, P), padded on the left; prompt_valid_QP bool, True on real tokens.
        keys_B: a key for each response, B = Q * samples_per_prompt, rows of one prompt together.
        temperature: positive float32 scalar; the recorded log-probs are those of the sampled distribution.
        stop_ids: any of these ends a response; pad_id, which stands after the end, may be one of them.
    """
    valid_QS = jnp.pad(prompt_valid_QP, ((0, 0), (0, max_new_tokens)))
    cache = Cache.zeros(model.config, prompt_tokens_QP.shape[0], valid_QS.shape[1])
    hidden_QPD, filled = forward(model, params, prompt_tokens_QP, positions(prompt_valid_QP), valid_QS, cache)
    last_logits_QV = logits_of(model, params, hidden_QPD[:, -1])

    repeat = partial(jnp.repeat, repeats=samples_per_prompt, axis=0)
    valid_BS = repeat(valid_QS)
    lengths_B = jnp.sum(valid_BS, axis=1, dtype=jnp.int32)
    prompt_slots = prompt_tokens_QP.shape[1]
    shape = (keys_B.shape[0], max_new_tokens)

    def sample(carry: _Carry) -> tuple[Array, Array]:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, carry.step)
        logprobs_BV = jax.nn.log_softmax(carry.logits_BV / temperature)
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logprobs_BV.shape[1:]))(keys)
        tokens_B = jnp.argmax(logprobs_BV + noise_BV, axis=-1).astype(jnp.int32)
        return tokens_B, jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=1)[:, 0]

    def step(carry: _Carry) -> _Carry:
        sampled_B, logprobs_B = sample(carry)
        tokens_B = jnp.where(carry.done_B, pad_id, sampled_B)
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=carry.step, axis=1)
        slot = prompt_slots + carry.step
        slots_valid_BS = valid_BS | _between(prompt_slots, slot, valid_BS.shape[1])
        hidden_B1D, cache = forward(
            model, params, tokens_B[:, None], (lengths_B + carry.step)[:, None], slots_valid_BS, carry.cache, slot
        )
        return _Carry(
            step=carry.step + 1,
            logits_BV=logits_of(model, params, hidden_B1D[:, 0]),
            cache=cast(Cache, cache),
            tokens_BT=write(carry.tokens_BT, tokens_B[:, None]),
            logprobs_BT=write(carry.logprobs_BT, jnp.where(carry.done_B, 0.0, logprobs_B)[:, None]),
            done_B=carry.done_B | _is_any(sampled_B, stop_ids),
        )

    start = _Carry(
        step=jnp.int32(0),
        logits_BV=repeat(last_logits_QV),
        cache=cast(Cache, filled).repeat(samples_per_prompt),
        tokens_BT=jnp.full(shape, pad_id, jnp.int32),
        logprobs_BT=jnp.zeros(shape, jnp.float32),
        done_B=jnp.zeros(shape[:1], bool),
    )
    end = jax.lax.while_loop(lambda c: (c.step < max_new_tokens) & ~jnp.all(c.done_B), step, start)
    ends_BT = _is_any(end.tokens_BT, stop_ids).astype(jnp.int32)
    first_or_before_BT = jnp.cumsum(ends_BT, axis=1) == ends_BT  # so the padding may be the end token itself
    return everywhere(Generated(end.tokens_BT, end.logprobs_BT, first_or_before_BT, end.done_B))


def _is_any(tokens: Array, ids: tuple[int, ...]) -> Array:
    """bool of the shape of `tokens`: True on those that are one of `ids`."""
    return jnp.isin(tokens, jnp.array(ids))


def _between(low: int, high: Array, size: int) -> Array:
    """bool (1, size): True on slots low to high, both included."""
    slots = jnp.arange(size)
    return ((slots >= low) & (slots <= high))[None, :]
