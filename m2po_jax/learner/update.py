"""One model update: log-probs of a mini-batch under the policy, the objective, an optimiser step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from m2po_jax.learner.packing import Packed, micro_batches_of
from m2po_jax.learner.state import TrainState, apply_gradients
from m2po_jax.models import Transformer, packed_logprobs, response_logprobs
from m2po_jax.models.sharding import laid_out
from m2po_jax.objectives import Objective, group_advantages, overlong_penalty
from m2po_jax.objectives.metrics import measure
from m2po_jax.objectives.tokens import Tokens, counts_of

HostOrDevice = Array | np.ndarray
Update = Callable[[TrainState, "MiniBatch"], tuple[TrainState, dict[str, Array]]]
Score = Callable[[Any, "MiniBatch"], Array]


class MiniBatch(NamedTuple):
    """Whole groups of responses, a row each; rows of one group stand together."""

    prompt_tokens: HostOrDevice | None
    """int32 (B, P), padded on the left; None where `packed` holds the prompts."""
    prompt_valid: HostOrDevice | None
    """bool (B, P), True on real tokens; None with `packed`."""
    prompt_lengths: HostOrDevice
    """int32 (B,)."""
    response_tokens: HostOrDevice
    """int32 (B, T), padded on the right."""
    response_mask: HostOrDevice
    """bool (B, T), True on sampled tokens, the end token included."""
    behavior_logprobs: HostOrDevice
    """float32 (B, T), recorded by the sampler."""
    rewards: HostOrDevice
    """float32 (B,)."""
    truncated: HostOrDevice
    """bool (B,): cut by length, from the recorded finish reason."""
    staleness: HostOrDevice
    """int32 (B,): age in model updates at this update."""
    proximal_logprobs: HostOrDevice | None = None
    """float32 (B, T), under the policy at the batch's first update, for the objectives that have a proximal policy."""
    reference_logprobs: HostOrDevice | None = None
    """float32 (B, T), under the base policy, for a KL penalty."""
    packed: Packed | None = None
    """The same sequences, several in a row, for the model; None: it has a row for each response."""


class UpdateSpec(NamedTuple):
    """What an update computes with; hashable, so one compiled program serves a run."""

    model: Transformer
    objective: Objective
    temperature: float
    group_size: int
    normalize_advantages: str
    max_new_tokens: int
    overlong_cache: int = 0
    micro_batches: int = 1
    """Parts that a mini-batch is cut into; of a packed one, the most."""


def make_update(spec: UpdateSpec, optimizer: optax.GradientTransformation, shardings: Any = None) -> Update:
    """The jitted `update(state, batch) -> (state, metrics)`; the state is donated, metrics are float32 arrays.

    `shardings` is a tree like the state's, of where the next state is to lie; None leaves that to XLA.
    """

    def update(state: TrainState, batch: MiniBatch) -> tuple[TrainState, dict[str, Array]]:
        loss, grads, metrics = loss_and_gradient(state.params, spec, batch)
        state, step_metrics = apply_gradients(state, grads, loss, optimizer)
        return state, metrics | step_metrics

    # The version lies on all devices, as the metrics are to.
    out = None if shardings is None else (shardings, shardings.version)
    return jax.jit(update, donate_argnums=0, out_shardings=out)


def make_score(spec: UpdateSpec) -> Score:
    """The jitted `score(params, batch) -> log-probs`, float32 (B, T): of a proximal or a reference policy."""

    def score(params: Any, batch: MiniBatch) -> Array:
        return _logprobs(params, spec, _cut(spec, batch, jnp.zeros_like(batch.rewards)))

    return jax.jit(score)


class Seen(NamedTuple):
    """What the forward pass of an update leaves behind, (B, T)."""

    logprobs: Array
    entropy: Array
    kept: Array


Rows = tuple[MiniBatch, Array]
"""Responses and their advantages."""

Share = Callable[[Any, Any], tuple[Array, Seen]]


class Cut(NamedTuple):
    """A mini-batch in micro-batches."""

    parts: Any
    """Stacked: what differs from one to the next."""
    of: Callable[[Any], Rows]
    """From one of `parts` to its responses."""
    joined: Callable[[Array], Array]
    """From an array of the responses of each, stacked, to one of all of them in order, (B, ...)."""


def loss_and_gradient(params: Any, spec: UpdateSpec, batch: MiniBatch) -> tuple[Array, Any, dict[str, Array]]:
    """Loss, gradient and metrics of one mini-batch, but for rounding the same from any number of micro-batches.

    Denominators are counts of the whole mini-batch. An objective that looks at the whole mini-batch, such as M2PO's
    mask, has a forward pass of its own first, if there are several micro-batches. Metrics are taken of the whole.
    """
    advantages_B = advantages(spec, batch)
    cut = _cut(spec, batch, advantages_B)
    loss, grads, seen = _accumulated(_share(params, spec, batch, advantages_B, cut), params, cut.parts)
    seen = jax.tree.map(cut.joined, seen)
    tokens = _tokens(spec, batch, advantages_B, seen.logprobs)
    metrics = measure(tokens, seen.kept, loss, entropy=seen.entropy, staleness=batch.staleness)
    return loss, grads, metrics | _batch_metrics(spec, batch, advantages_B)


def look(params: Any, spec: UpdateSpec, batch: MiniBatch) -> Seen:
    """What an update sees and keeps, in the same micro-batches, without its gradient."""
    advantages_B = advantages(spec, batch)
    cut = _cut(spec, batch, advantages_B)
    share = _share(params, spec, batch, advantages_B, cut)
    return jax.tree.map(cut.joined, jax.lax.map(lambda part: share(params, part)[1], cut.parts))


def _share(params: Any, spec: UpdateSpec, batch: MiniBatch, advantages_B: Array, cut: Cut) -> Share:
    """The function from a micro-batch to its share of the loss."""
    objective = spec.objective
    counts = counts_of(_tokens(spec, batch, advantages_B, jnp.zeros_like(batch.behavior_logprobs)))
    statistics = None
    if _count(cut.parts) > 1 and objective.needs_whole_batch:
        statistics = objective.statistics(_tokens(spec, batch, advantages_B, _logprobs(params, spec, cut)))

    def share(params: Any, part: Any) -> tuple[Array, Seen]:
        rows = cut.of(part)
        logprobs_BT, entropy_BT = policy_logprobs(params, spec, rows[0])
        tokens = _tokens(spec, *rows, logprobs_BT)
        known = objective.statistics(tokens) if statistics is None else statistics
        loss, kept_BT = objective.partial_loss(tokens, known, counts)
        return loss, jax.lax.stop_gradient(Seen(logprobs_BT, entropy_BT, kept_BT))

    return share


def _logprobs(params: Any, spec: UpdateSpec, cut: Cut) -> Array:
    """Log-probs of all responses, (B, T), a micro-batch at a time."""
    return cut.joined(jax.lax.map(lambda part: policy_logprobs(params, spec, cut.of(part)[0])[0], cut.parts))


def _accumulated(share: Share, params: Any, parts: Any) -> tuple[Array, Any, Seen]:
    """Sum of the losses and gradients of the parts, and what each has seen, stacked."""
    value_and_grad = jax.value_and_grad(share, has_aux=True)
    if _count(parts) == 1:
        (loss, seen), grads = value_and_grad(params, jax.tree.map(lambda x: x[0], parts))
        return loss, grads, jax.tree.map(lambda x: x[None], seen)

    def add(total: tuple[Array, Any], part: Any) -> tuple[tuple[Array, Any], Seen]:
        (loss, seen), grads = value_and_grad(params, part)
        return jax.tree.map(jnp.add, total, (loss, grads)), seen

    start = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), seen = jax.lax.scan(add, start, parts)
    return loss, grads, seen


def _count(parts: Any) -> int:
    return len(jax.tree.leaves(parts)[0])


def _cut(spec: UpdateSpec, batch: MiniBatch, advantages_B: Array) -> Cut:
    return _cut_rows(spec, batch, advantages_B) if batch.packed is None else _cut_packed(spec, batch, advantages_B)


def _cut_rows(spec: UpdateSpec, batch: MiniBatch, advantages_B: Array) -> Cut:
    """Responses dealt out; where some are missing are rows without a response."""
    count, responses = spec.micro_batches, len(advantages_B)
    size = -(-responses // count)
    rows: Rows = batch, advantages_B
    if size * count != responses:
        index = np.arange(size * count)
        batch, advantages_B = jax.tree.map(lambda x: jnp.asarray(x)[index % responses], rows)
        rows = batch._replace(response_mask=batch.response_mask & (index < responses)[:, None]), advantages_B
    return Cut(_dealt(rows, count), lambda part: part, lambda x: _gathered(x)[:responses])


def _cut_packed(spec: UpdateSpec, batch: MiniBatch, advantages_B: Array) -> Cut:
    """Packed rows dealt out; each part sees all responses, and masks those that lie in the rows of others."""
    packed = batch.packed
    assert packed is not None
    row_B = jnp.asarray(packed.row)
    count = micro_batches_of(len(packed.tokens), len(advantages_B), spec.micro_batches)

    def of(part: tuple[tuple[Array, Array, Array], Array]) -> Rows:
        rows, index = part
        mine_B1 = (row_B % count == index)[:, None]
        inside = Packed(*rows, row_B // count, packed.start)
        return batch._replace(response_mask=batch.response_mask & mine_B1, packed=inside), advantages_B

    rows = _dealt((packed.tokens, packed.segment_ids, packed.scored), count)
    return Cut((rows, jnp.arange(count)), of, _together)


def _together(x: Array) -> Array:
    """One array of parts that are each zero, or False, where the others are not."""
    return jnp.any(x, axis=0) if x.dtype == jnp.bool_ else jnp.sum(x, axis=0)


def _dealt(rows: Any, count: int) -> Any:
    """Rows dealt out like cards, (rows, ...) to (count, rows / count, ...): of a mesh, every part has all devices."""
    return jax.tree.map(lambda x: jnp.swapaxes(jnp.reshape(x, (-1, count, *x.shape[1:])), 0, 1), rows)


def _gathered(x: Array) -> Array:
    """The inverse of `_dealt` for one array."""
    return jnp.reshape(jnp.swapaxes(x, 0, 1), (-1, *x.shape[2:]))


def _tokens(spec: UpdateSpec, batch: MiniBatch, advantages_B: Array, logprobs_BT: Array) -> Tokens:
    return spec.objective.tokens(
        logprobs_BT,
        batch.behavior_logprobs,
        advantages_B[:, None],
        batch.response_mask,
        proximal_logprobs=batch.proximal_logprobs,
        reference_logprobs=batch.reference_logprobs,
        finish_reason=batch.truncated,
    )


def advantages(spec: UpdateSpec, batch: MiniBatch) -> Array:
    """Group advantages (B,) of the rewards, contiguous groups."""
    rewards_B = jnp.asarray(batch.rewards)
    if spec.overlong_cache:
        lengths_B = jnp.sum(batch.response_mask, axis=1, dtype=jnp.int32)
        rewards_B = rewards_B + overlong_penalty(lengths_B, spec.max_new_tokens, spec.overlong_cache)
    return group_advantages(rewards_B, group_size=spec.group_size, normalize=spec.normalize_advantages)


def policy_logprobs(params: Any, spec: UpdateSpec, batch: MiniBatch) -> tuple[Array, Array]:
    """Log-prob and entropy of the batch's response tokens under `params`, float32 (B, T) each."""
    if batch.packed is None:
        prompts = batch.prompt_tokens, batch.prompt_valid
        responses = batch.response_tokens, batch.response_mask
        return response_logprobs(spec.model, params, *prompts, *responses, spec.temperature)  # type: ignore[arg-type]
    tokens, segment_ids, scored, *_ = batch.packed
    values = packed_logprobs(spec.model, params, tokens, segment_ids, spec.temperature, scored_BW=scored)
    logprobs_BT, entropy_BT = (_of_responses(x, batch.packed, batch.response_mask) for x in values)
    return logprobs_BT, entropy_BT


def _of_responses(x_RW: Array, packed: Packed, response_mask_BT: HostOrDevice) -> Array:
    """From the scored slots of packed rows to a row for each response, (B, T), zero off its tokens."""
    length = response_mask_BT.shape[1]
    padded = jnp.pad(x_RW, ((0, 0), (0, length)))
    response = lambda row, start: jax.lax.dynamic_slice(padded, (row, start), (1, length))[0]  # noqa: E731
    x_BT = laid_out(jax.vmap(response)(jnp.asarray(packed.row), jnp.asarray(packed.start)), "BT")
    return jnp.where(response_mask_BT, x_BT, 0.0)


def _batch_metrics(spec: UpdateSpec, batch: MiniBatch, advantages_B: Array) -> dict[str, Array]:
    silent = jnp.all(jnp.reshape(advantages_B, (-1, spec.group_size)) == 0.0, axis=1)
    lengths_B = jnp.asarray(batch.prompt_lengths) + jnp.sum(batch.response_mask, axis=1, dtype=jnp.int32)
    lengths_B = lengths_B.astype(jnp.float32)
    return {
        "sequence_tokens": jnp.sum(lengths_B),
        "token_pairs": jnp.sum(lengths_B * (lengths_B + 1.0)) / 2.0,
        "reward_mean": jnp.mean(batch.rewards),
        "response_length_mean": jnp.sum(batch.response_mask, dtype=jnp.float32) / batch.rewards.shape[0],
        "truncated_frac": jnp.mean(jnp.asarray(batch.truncated).astype(jnp.float32)),
        "no_signal_groups_frac": jnp.mean(silent.astype(jnp.float32)),
    }
