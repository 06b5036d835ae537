"""One model update: log-probs of a mini-batch under the policy, the objective, an optimiser step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from m2po_jax.learner.state import TrainState, apply_gradients
from m2po_jax.models import Transformer, response_logprobs
from m2po_jax.objectives import Objective, group_advantages, overlong_penalty
from m2po_jax.objectives.metrics import measure
from m2po_jax.objectives.tokens import Tokens, counts_of

HostOrDevice = Array | np.ndarray
Update = Callable[[TrainState, "MiniBatch"], tuple[TrainState, dict[str, Array]]]
Score = Callable[[Any, "MiniBatch"], Array]


class MiniBatch(NamedTuple):
    """Whole groups of responses, a row each; rows of one group stand together."""

    prompt_tokens: HostOrDevice
    """int32 (B, P), padded on the left."""
    prompt_valid: HostOrDevice
    """bool (B, P), True on real tokens."""
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
        parts = _split((batch, jnp.zeros_like(batch.rewards)), spec.micro_batches)[0]
        return _joined(jax.lax.map(lambda part: policy_logprobs(params, spec, part)[0], parts), batch)

    return jax.jit(score)


class Seen(NamedTuple):
    """What the forward pass of an update leaves behind, (B, T)."""

    logprobs: Array
    entropy: Array
    kept: Array


Part = tuple[MiniBatch, Array]
"""Rows and their advantages."""

Share = Callable[[Any, Part], tuple[Array, Seen]]


def loss_and_gradient(params: Any, spec: UpdateSpec, batch: MiniBatch) -> tuple[Array, Any, dict[str, Array]]:
    """Loss, gradient and metrics of one mini-batch, but for rounding the same from any number of micro-batches.

    Denominators are counts of the whole mini-batch. An objective that looks at the whole mini-batch, such as M2PO's
    mask, has a forward pass of its own first, if there are several micro-batches. Metrics are taken of the whole.
    """
    advantages_B = advantages(spec, batch)
    share, parts = _share(params, spec, batch, advantages_B)
    loss, grads, seen = _accumulated(share, params, parts)
    seen = jax.tree.map(lambda x: _joined(x, batch), seen)
    tokens = _tokens(spec, batch, advantages_B, seen.logprobs)
    metrics = measure(tokens, seen.kept, loss, entropy=seen.entropy, staleness=batch.staleness)
    return loss, grads, metrics | _batch_metrics(spec, batch, advantages_B)


def look(params: Any, spec: UpdateSpec, batch: MiniBatch) -> Seen:
    """What an update sees and keeps, in the same micro-batches, without its gradient."""
    share, parts = _share(params, spec, batch, advantages(spec, batch))
    seen = jax.lax.map(lambda part: share(params, part)[1], parts)
    return jax.tree.map(lambda x: _joined(x, batch), seen)


def _share(params: Any, spec: UpdateSpec, batch: MiniBatch, advantages_B: Array) -> tuple[Share, Part]:
    """The parts of the batch, stacked, and the function from one of them to its share of the loss."""
    objective = spec.objective
    counts = counts_of(_tokens(spec, batch, advantages_B, jnp.zeros_like(batch.behavior_logprobs)))
    parts = _split((batch, advantages_B), spec.micro_batches)
    statistics = None
    if spec.micro_batches > 1 and objective.needs_whole_batch:
        logprobs_BT = jax.lax.map(lambda part: policy_logprobs(params, spec, part[0])[0], parts)
        statistics = objective.statistics(_tokens(spec, batch, advantages_B, _joined(logprobs_BT, batch)))

    def share(params: Any, part: Part) -> tuple[Array, Seen]:
        logprobs_BT, entropy_BT = policy_logprobs(params, spec, part[0])
        tokens = _tokens(spec, *part, logprobs_BT)
        known = objective.statistics(tokens) if statistics is None else statistics
        loss, kept_BT = objective.partial_loss(tokens, known, counts)
        return loss, jax.lax.stop_gradient(Seen(logprobs_BT, entropy_BT, kept_BT))

    return share, parts


def _accumulated(share: Share, params: Any, parts: Part) -> tuple[Array, Any, Seen]:
    """Sum of the losses and gradients of the parts, and what each has seen, stacked."""
    value_and_grad = jax.value_and_grad(share, has_aux=True)
    if len(parts[1]) == 1:
        (loss, seen), grads = value_and_grad(params, jax.tree.map(lambda x: x[0], parts))
        return loss, grads, jax.tree.map(lambda x: x[None], seen)

    def add(total: tuple[Array, Any], part: Part) -> tuple[tuple[Array, Any], Seen]:
        (loss, seen), grads = value_and_grad(params, part)
        return jax.tree.map(jnp.add, total, (loss, grads)), seen

    start = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), seen = jax.lax.scan(add, start, parts)
    return loss, grads, seen


def _split(parts: Part, count: int) -> Part:
    """Rows dealt out to `count` parts, (B, ...) to (count, rows, ...); what is missing are rows without a response.

    They are dealt like cards, so that on a mesh that shards rows every part lies on all devices.
    """
    rows = len(parts[1])
    size = -(-rows // count)
    if size * count != rows:
        index = np.arange(size * count)
        batch, advantages_B = jax.tree.map(lambda x: jnp.asarray(x)[index % rows], parts)
        batch = batch._replace(response_mask=batch.response_mask & (index < rows)[:, None])
        parts = batch, advantages_B
    return jax.tree.map(lambda x: jnp.swapaxes(jnp.reshape(x, (size, count, *x.shape[1:])), 0, 1), parts)


def _joined(x: Array, batch: MiniBatch) -> Array:
    """The inverse of `_split` for one array."""
    return jnp.reshape(jnp.swapaxes(x, 0, 1), (-1, *x.shape[2:]))[: len(batch.rewards)]


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
    return response_logprobs(
        spec.model,
        params,
        batch.prompt_tokens,
        batch.prompt_valid,
        batch.response_tokens,
        batch.response_mask,
        spec.temperature,
    )


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
