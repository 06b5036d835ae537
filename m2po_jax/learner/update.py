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
from m2po_jax.objectives import Objective, group_advantages

HostOrDevice = Array | np.ndarray
Update = Callable[[TrainState, "MiniBatch"], tuple[TrainState, dict[str, Array]]]


class MiniBatch(NamedTuple):
    """Whole groups of responses, a row each; rows of one group stand together."""

    prompt_tokens: HostOrDevice
    """int32 (B, P), padded on the left."""
    prompt_valid: HostOrDevice
    """bool (B, P), True on real tokens."""
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


class UpdateSpec(NamedTuple):
    """What an update computes with; hashable, so one compiled program serves a run."""

    model: Transformer
    objective: Objective
    temperature: float
    group_size: int
    normalize_advantages: str


def make_update(spec: UpdateSpec, optimizer: optax.GradientTransformation) -> Update:
    """The jitted `update(state, batch) -> (state, metrics)`; the state is donated, metrics are float32 scalars."""

    def update(state: TrainState, batch: MiniBatch) -> tuple[TrainState, dict[str, Array]]:
        (loss, metrics), grads = jax.value_and_grad(_loss, has_aux=True)(state.params, spec, batch)
        state, step_metrics = apply_gradients(state, grads, loss, optimizer)
        return state, metrics | step_metrics

    return jax.jit(update, donate_argnums=0)


def _loss(params: Any, spec: UpdateSpec, batch: MiniBatch) -> tuple[Array, dict[str, Array]]:
    advantages_B1 = advantages(spec, batch.rewards)[:, None]
    logprobs_BT, entropy_BT = policy_logprobs(params, spec, batch)
    loss, metrics = spec.objective(logprobs_BT, batch.behavior_logprobs, advantages_B1, batch.response_mask)
    return loss, metrics | _batch_metrics(batch, jax.lax.stop_gradient(entropy_BT))


def advantages(spec: UpdateSpec, rewards_B: HostOrDevice) -> Array:
    """Group advantages (B,) of rewards (B,), contiguous groups."""
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


def _batch_metrics(batch: MiniBatch, entropy_BT: Array) -> dict[str, Array]:
    tokens = jnp.sum(batch.response_mask, dtype=jnp.float32)
    return {
        "reward_mean": jnp.mean(batch.rewards),
        "response_length_mean": tokens / batch.rewards.shape[0],
        "truncated_frac": jnp.mean(batch.truncated.astype(jnp.float32)),
        "entropy_mean": jnp.sum(entropy_BT) / jnp.maximum(tokens, 1.0),
    }
