"""Slots of the decode engine: which response of the queue each decodes, and what its cache holds of the prompt.

On a mesh every part of it that computes rows of its own has its own prompts, its own part of the queue and its own
slots, so that nothing of a cache moves between devices. The cache of a slot is a ring: all slots write to one place at
a time, and what was written before a response began is not looked at. The prompt stands behind the ring.

Axis letters as in `generation.engine`; C is a part of the mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from m2po_jax.models.decoding import AnyCache
from m2po_jax.models.sharding import by_hand
from m2po_jax.models.transformer import Cache

FEWEST_SLOTS = 8
"""Fewer slots than this are not halved: weights are read with every step, however few the slots are."""
SHORT_TOKENS = 32
"""Responses of at most this many tokens end so close to each other that halving the slots gains nothing."""


@dataclass(frozen=True)
class Queue:
    """Responses to draw: those of a prompt stand together, and the prompts of a part of the mesh too."""

    cut: int
    """Parts C of the mesh."""
    prompts: int
    """Prompts of a part."""
    samples: int
    """Responses to each prompt."""
    last_Q: Array
    """int32: the last token of each prompt, which a slot begins with."""
    before_Q: Array
    """int32: tokens before it."""

    @property
    def rows(self) -> int:
        """Responses of a part; as a row, it means that a slot is idle."""
        return self.prompts * self.samples


class Slots(NamedTuple):
    """What each slot does; those of a part of the mesh stand together."""

    row_B: Array
    """int32: response in the queue of its part, `Queue.rows` if it is idle."""
    step_B: Array
    """int32: tokens of that response that were drawn."""
    token_B: Array
    """int32: the last of them, or of the prompt; not in the cache yet."""
    before_B: Array
    """int32: tokens of the prompt before its last one."""
    next_C: Array
    """int32: the first response of each part's queue that no slot has begun."""


def first(queue: Queue, each: int) -> Slots:
    """The state in which the first `each` responses of every part begin."""
    row_B = jnp.tile(jnp.arange(each, dtype=jnp.int32), queue.cut)
    prompt_B = row_B // queue.samples + jnp.repeat(_offsets(queue.cut, queue.prompts), each)
    next_C = jnp.full((queue.cut,), each, jnp.int32)
    return Slots(row_B, jnp.zeros_like(row_B), queue.last_Q[prompt_B], queue.before_Q[prompt_B], next_C)


def first_cache(queue: Queue, each: int, prefilled: AnyCache, ring: int) -> AnyCache:
    """The cache of `first`: `ring` empty places, then the prompt."""
    prompt_B = jnp.arange(each) // queue.samples

    def begun(places: int, prompts: Array) -> Array:
        taken = jnp.take(prompts, prompt_B, axis=_rows_axis(prompts))
        return jnp.pad(taken, [(ring if axis == taken.ndim + places else 0, 0) for axis in range(taken.ndim)])

    return _on_caches(queue.cut, begun, (prefilled,))


def active(queue: Queue, slots: Slots) -> Array:
    """bool (B,): True on the slots that decode a response."""
    return slots.row_B < queue.rows


def seen(slots: Slots, time: Array, ring: int, prompt: int) -> Array:
    """bool (B, S): what a token written at `time` attends to: its response so far, itself, and its prompt.

    Args:
        time: int32 scalar, steps since the start; `ring` and `prompt` are the places S = ring + prompt of the cache.
    """
    age_S = (time - jnp.arange(ring)) % ring
    drawn_BS = age_S[None] <= slots.step_B[:, None]
    place_1S = jnp.arange(prompt)[None]
    prompt_BS = (place_1S >= prompt - 1 - slots.before_B[:, None]) & (place_1S < prompt - 1)
    return jnp.concatenate([drawn_BS, prompt_BS], axis=1)


def advanced(queue: Queue, slots: Slots, tokens_B: Array, ended_B: Array) -> Slots:
    """After a step in which these tokens were drawn; slots whose response has ended are idle."""
    row_B = jnp.where(ended_B, queue.rows, slots.row_B)
    return slots._replace(row_B=row_B, step_B=slots.step_B + 1, token_B=tokens_B)


def admitted(queue: Queue, slots: Slots, cache: AnyCache, prefilled: AnyCache, ring: int) -> tuple[Slots, AnyCache]:
    """With the next responses of the queue in the slots that are idle, one at a time in each part."""

    def can_C(slots: Slots) -> Array:
        return jnp.any(_by_part(queue.cut, ~active(queue, slots)), axis=1) & (slots.next_C < queue.rows)

    def put(places: int, cached: Array, prompts: Array, slot_1: Array, prompt_1: Array, real_1: Array) -> Array:
        axis = _rows_axis(cached)
        prompt = jax.lax.dynamic_slice_in_dim(prompts, prompt_1[0], 1, axis)
        start = [slot_1[0] if i == axis else ring if i == cached.ndim + places else 0 for i in range(cached.ndim)]
        before = jax.lax.dynamic_slice(cached, start, prompt.shape)
        return jax.lax.dynamic_update_slice(cached, jnp.where(real_1[0], prompt, before), start)

    def admit(state: tuple[Slots, AnyCache]) -> tuple[Slots, AnyCache]:
        slots, cache = state
        real_C, each = can_C(slots), len(slots.row_B) // queue.cut
        slot_C = jnp.argmax(_by_part(queue.cut, ~active(queue, slots)), axis=1).astype(jnp.int32)
        here_B = jnp.ravel((jnp.arange(each)[None] == slot_C[:, None]) & real_C[:, None])
        prompt_C = jnp.minimum(slots.next_C, queue.rows - 1) // queue.samples
        of_C = prompt_C + _offsets(queue.cut, queue.prompts)
        put_in = lambda old_B, new_C: jnp.where(here_B, jnp.repeat(new_C, each), old_B)  # noqa: E731
        slots = Slots(
            put_in(slots.row_B, slots.next_C),
            put_in(slots.step_B, jnp.zeros_like(slot_C)),
            put_in(slots.token_B, queue.last_Q[of_C]),
            put_in(slots.before_B, queue.before_Q[of_C]),
            slots.next_C + real_C.astype(jnp.int32),
        )
        return slots, _on_caches(queue.cut, put, (cache, prefilled), slot_C, prompt_C, real_C)

    return jax.lax.while_loop(lambda state: jnp.any(can_C(state[0])), admit, (slots, cache))


def ladder(each: int, ring: int) -> list[int]:
    """Numbers of slots of a part, one after the other, as the last responses of the queue end."""
    sizes = [each]
    while ring > SHORT_TOKENS and sizes[-1] >= 2 * FEWEST_SLOTS:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def exceed(queue: Queue, slots: Slots, fewer: int) -> Array:
    """bool scalar: whether more than `fewer` slots of a part are needed."""
    needed_C = jnp.sum(_by_part(queue.cut, active(queue, slots)), axis=1, dtype=jnp.int32)
    return jnp.any((needed_C > fewer) | (slots.next_C < queue.rows))


def shrunk(queue: Queue, slots: Slots, cache: AnyCache, each: int) -> tuple[Slots, AnyCache]:
    """With `each` slots in a part, where no more are needed."""
    now = len(slots.row_B) // queue.cut
    kept_CB = jnp.argsort(_by_part(queue.cut, ~active(queue, slots)), axis=1, stable=True)[:, :each]
    kept_B = jnp.ravel(kept_CB + _offsets(queue.cut, now)[:, None])
    take = lambda _, cached, kept_B: jnp.take(cached, kept_B, axis=_rows_axis(cached))  # noqa: E731
    cache = _on_caches(queue.cut, take, (cache,), jnp.ravel(kept_CB))
    row_B, step_B, token_B, before_B = (x[kept_B] for x in slots[:4])
    return Slots(row_B, step_B, token_B, before_B, slots.next_C), cache


def first_rows(queue: Queue, slots: int) -> Array:
    """int32 (B,): of each slot, where the queue of its part begins in the whole queue."""
    return jnp.repeat(_offsets(queue.cut, queue.rows), slots // queue.cut)


def _offsets(cut: int, each: int) -> Array:
    """int32 (C,): where each part begins."""
    return jnp.arange(cut, dtype=jnp.int32) * each


def _by_part(cut: int, x_B: Array) -> Array:
    return x_B.reshape(cut, -1)


def _rows_axis(cached: Array) -> int:
    return cached.ndim - 4


def _on_caches(cut: int, function: Callable[..., Array], caches: tuple[AnyCache, ...], *rows: Array) -> AnyCache:
    """`function` of an array of each cache and of `rows`, for every array of the first; each part on its own devices.

    What comes before them is the axis of the array's places S, counted from the end.
    """
    stacked = isinstance(caches[0], Cache)
    letters = ("N" if stacked else "C") * len(caches) + "B" * len(rows)

    def applied(places: int, *arrays: Array) -> Array:
        alone = partial(function, places)
        if cut == 1:
            return alone(*arrays, *rows)
        return cast(Array, by_hand(lambda *inputs: (alone(*inputs),), letters, letters[0])(*arrays, *rows)[0])

    def layer(*of_each: Any) -> Any:
        keys, values = (applied(places, *arrays) for places, *arrays in zip((-1, -2), *of_each, strict=True))
        return type(of_each[0])(keys, values)

    return cast(
        AnyCache, layer(*caches) if stacked else tuple(layer(*of_each) for of_each in zip(*caches, strict=True))
    )
