"""Supervised steps on worked responses, until the base policy (version 0) reaches a set accuracy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from m2po_jax.config import UserError, WarmStartConfig
from m2po_jax.models import Transformer, response_logprobs

Demonstrations = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Prompt tokens (B, P) padded on the left, their validity, response tokens (B, T), their mask."""


def warm_start(
    config: WarmStartConfig,
    model: Transformer,
    key: Array,
    demonstrations: Callable[[int], Demonstrations],
    accuracy: Callable[[Any, int], float],
    on_check: Callable[[int, float], None],
) -> Any:
    """Parameters of the base policy.

    Args:
        config: the stopping rule and the optimiser's settings.
        model: the decoder.
        key: initialises the parameters.
        demonstrations: step -> a batch of worked problems.
        accuracy: (params, step) -> sampled accuracy on held-out prompts, in [0, 1].
        on_check: called with (step, accuracy) at every check, for progress.

    Raises:
        UserError: the accuracy is not reached in `config.max_steps`.
    """
    optimizer = optax.adam(config.learning_rate)
    params = model.init_params(key)
    opt_state = optimizer.init(params)
    for step in range(config.max_steps + 1):
        if step % config.check_every == 0 or step == config.max_steps:
            reached = accuracy(params, step)
            on_check(step, reached)
            if reached >= config.target_accuracy:
                return params
        params, opt_state = _supervised_step(params, opt_state, demonstrations(step), model, optimizer)
    raise UserError(
        f"the warm start reached {reached:.3f} after {config.max_steps} steps, below warm_start.target_accuracy"
        f" {config.target_accuracy}: raise warm_start.max_steps or lower the target"
    )


@partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnums=(0, 1))
def _supervised_step(
    params: Any, opt_state: Any, batch: Demonstrations, model: Transformer, optimizer: optax.GradientTransformation
) -> tuple[Any, Any]:
    def loss_fn(params: Any) -> Array:
        logprobs_BT, _ = response_logprobs(model, params, *batch)
        return -jnp.sum(logprobs_BT) / jnp.sum(batch[3])

    updates, opt_state = optimizer.update(jax.grad(loss_fn)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state
