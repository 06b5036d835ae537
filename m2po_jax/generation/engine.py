"""The decode engine: left-padded prompts in, sampled token ids and their float32 log-probs out.

A queue of responses, row by row, is decoded in a fixed number of slots. The whole queue is one program on the devices:
it asks the host for nothing, so that hosts need not agree on anything while they decode together, and what it draws
is a function of its arguments alone.

Axis letters as in `models.transformer`; here B is a slot, R a response of the queue, Q a prompt, P a token of a prompt,
T a token of a response, and S a slot of the cache.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from m2po_jax.generation import slots as scheduling
from m2po_jax.generation.draw import WHOLE, Truncation, draw
from m2po_jax.generation.slots import Queue, Slots
from m2po_jax.models.decoding import AnyCache, ByLayer, by_layer, decode
from m2po_jax.models.positions import positions
from m2po_jax.models.sharding import everywhere, parts
from m2po_jax.models.splash import on_tpu
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
    slot_steps: Array
    """int32 scalar: tokens that the slots had time for; the share of sampled ones among them is their occupancy."""


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


class _State(NamedTuple):
    time: Array
    slots: Slots
    cache: AnyCache
    tokens_RT: Array
    logprobs_RT: Array
    slot_steps: Array


@partial(
    jax.jit,
    static_argnames=("model", "samples_per_prompt", "max_new_tokens", "stop_ids", "pad_id", "slots", "truncation"),
)
def generate(
    params: dict,
    prompt_tokens_QP: Array,
    prompt_valid_QP: Array,
    keys_R: Array,
    temperature: Array,
    *,
    model: Transformer,
    samples_per_prompt: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    slots: int | None = None,
    truncation: Truncation = WHOLE,
) -> Generated:
    """Sample `samples_per_prompt` responses to each prompt; prompts are prefilled once and their cache is copied.

    Args:
        params: the model's parameters.
        prompt_tokens_QP: int32 (Q, P), padded on the left; prompt_valid_QP bool, True on real tokens, one at least.
        keys_R: a key for each response, R = Q * samples_per_prompt, rows of one prompt together.
        temperature: positive float32 scalar; the recorded log-probs are those of the tempered softmax.
        stop_ids: any of these ends a response; pad_id, which stands after the end, may be one of them.
        slots: responses that are decoded side by side; None, or more than there are: all of them.
        truncation: which tokens may be drawn.
    """
    prompts, responses, ring = len(prompt_tokens_QP), len(keys_R), max_new_tokens
    cut = parts("B") if prompts % parts("B") == 0 else 1
    each = -(-min(slots or responses, responses) // cut)
    before_Q = jnp.sum(prompt_valid_QP, axis=1, dtype=jnp.int32) - 1
    queue = Queue(cut, prompts // cut, samples_per_prompt, jnp.asarray(prompt_tokens_QP)[:, -1], before_Q)
    weights, prefilled = _prefilled(model, params, prompt_tokens_QP, prompt_valid_QP)

    def step(state: _State) -> _State:
        places = ring, prompt_tokens_QP.shape[1]
        hidden_BD, cache = _forward(model, weights, state, *places)
        logits_BV = logits_of(model, params, hidden_BD)
        state = _recorded(queue, state._replace(cache=cache), logits_BV, keys_R, temperature, truncation, stop_ids)
        if each < queue.rows:
            refilled = scheduling.admitted(queue, state.slots, state.cache, prefilled, ring)
            state = state._replace(slots=refilled[0], cache=refilled[1])
        return state

    state = _State(
        time=jnp.int32(0),
        slots=scheduling.first(queue, each),
        cache=scheduling.first_cache(queue, each, prefilled, ring),
        tokens_RT=everywhere(jnp.full((responses, ring), pad_id, jnp.int32)),
        logprobs_RT=everywhere(jnp.zeros((responses, ring), jnp.float32)),
        slot_steps=jnp.int32(0),
    )
    sizes = [each] if on_tpu() else scheduling.ladder(each, ring)
    for size, fewer in zip(sizes, [*sizes[1:], 0], strict=True):
        if size < each:
            kept = scheduling.shrunk(queue, state.slots, state.cache, size)
            state = state._replace(slots=kept[0], cache=kept[1])
        state = jax.lax.while_loop(partial(_goes_on, queue, fewer), step, state)
    ends_RT = _is_any(state.tokens_RT, stop_ids).astype(jnp.int32)
    first_or_before_RT = jnp.cumsum(ends_RT, axis=1) == ends_RT  # so the padding may be the end token itself
    stopped_R = jnp.any(ends_RT > 0, axis=1)
    return everywhere(Generated(state.tokens_RT, state.logprobs_RT, first_or_before_RT, stopped_R, state.slot_steps))


def _prefilled(model: Transformer, params: dict, tokens_QP: Array, valid_QP: Array) -> tuple[dict | ByLayer, AnyCache]:
    """Weights as `decode` wants them, and the cache of the prompts."""
    empty = Cache.zeros(model.config, *tokens_QP.shape)
    _, filled = forward(model, params, tokens_QP, positions(valid_QP), valid_QP, empty)
    if on_tpu():
        return params, cast(Cache, filled)
    return by_layer(params, model.config.layers), cast(Cache, filled).layers()


def _forward(
    model: Transformer, weights: dict | ByLayer, state: _State, ring: int, prompt: int
) -> tuple[Array, AnyCache]:
    """Hidden states (B, D) of the token of each slot, and the cache with it."""
    slots = state.slots
    seen_BS = scheduling.seen(slots, state.time, ring, prompt)
    where_B = slots.before_B + slots.step_B
    return decode(model, weights, slots.token_B, where_B, seen_BS, state.cache, state.time % ring)


def _goes_on(queue: Queue, fewer: int, state: _State) -> Array:
    return scheduling.exceed(queue, state.slots, fewer)


def _recorded(
    queue: Queue,
    state: _State,
    logits_BV: Array,
    keys_R: Array,
    temperature: Array,
    truncation: Truncation,
    stop_ids: tuple[int, ...],
) -> _State:
    """After a token of each slot was drawn and written down; what idle slots drew is dropped."""
    slots, (responses, ring) = state.slots, state.tokens_RT.shape
    active_B = scheduling.active(queue, slots)
    row_B = jnp.where(active_B, slots.row_B + scheduling.first_rows(queue, len(active_B)), responses)
    keys_B = jax.vmap(jax.random.fold_in)(keys_R[jnp.minimum(row_B, responses - 1)], slots.step_B)
    tokens_B, logprobs_B = everywhere(draw(logits_BV, keys_B, temperature, truncation))
    ended_B = _is_any(tokens_B, stop_ids) | (slots.step_B + 1 == ring)
    return state._replace(
        time=state.time + 1,
        slots=everywhere(scheduling.advanced(queue, slots, tokens_B, ended_B | ~active_B)),
        tokens_RT=state.tokens_RT.at[row_B, slots.step_B].set(tokens_B, mode="drop"),
        logprobs_RT=state.logprobs_RT.at[row_B, slots.step_B].set(logprobs_B, mode="drop"),
        slot_steps=state.slot_steps + len(active_B),
    )


def _is_any(tokens: Array, ids: tuple[int, ...]) -> Array:
    """bool of the shape of `tokens`: True on those that are one of `ids`."""
    return jnp.isin(tokens, jnp.array(ids))
