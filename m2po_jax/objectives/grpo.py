"""GRPO's token-level surrogate, with PPO's clip and without any trust region.

    grpo:        J = 1 / (number of tokens) * sum_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
    grpo_no_tr:  J = 1 / (number of tokens) * sum_t r_t A_t

DeepSeekMath (arXiv 2402.03300), equation 3, with the token mean and without KL term or dual clip; PPO's clip is
equation 7 of arXiv 1707.06347.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from m2po_jax.config import ConfigError
from m2po_jax.objectives.tokens import Tokens, policy_gradient_loss


@dataclass(frozen=True)
class ClipConfig:
    """Clip range of the ratio; the defaults are those of `grpo`."""

    epsilon_low: float = 0.2
    """The ratio is clipped below at 1 - epsilon_low."""
    epsilon_high: float = 0.2
    """The ratio is clipped above at 1 + epsilon_high."""

    def __post_init__(self):
        if not 0.0 <= self.epsilon_low < 1.0:
            raise ConfigError(f"objective.epsilon_low is {self.epsilon_low}: use 0 or more, below 1")
        if not self.epsilon_high >= 0.0:
            raise ConfigError(f"objective.epsilon_high is {self.epsilon_high}: use 0 or more")


@dataclass(frozen=True)
class NoTrustRegionConfig:
    """`grpo_no_tr` has no hyperparameters."""


def token_loss(
    config: ClipConfig, tokens: Tokens, statistics: tuple[()]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """PPO's clipped loss of each token, and where its gradient passes."""
    clipped_BT, at_bound_BT = clip_branch(config, tokens.log_ratio, tokens.advantages)
    kept_BT = tokens.usable & ~clipped_BT
    return jnp.where(kept_BT, policy_gradient_loss(tokens), at_bound_BT), kept_BT


def clip_branch(config: ClipConfig, log_ratio: Array, advantages_BT: Array) -> tuple[Array, Array]:
    """Where PPO's clipped branch is active, decided on log-ratios, and its constant loss there; 0 elsewhere."""
    too_high_BT = (advantages_BT > 0.0) & (log_ratio > math.log1p(config.epsilon_high))
    too_low_BT = (advantages_BT < 0.0) & (log_ratio < math.log1p(-config.epsilon_low))
    loss_BT = jnp.where(too_high_BT, -(1.0 + config.epsilon_high) * advantages_BT, 0.0)
    loss_BT = jnp.where(too_low_BT, -(1.0 - config.epsilon_low) * advantages_BT, loss_BT)
    return too_high_BT | too_low_BT, loss_BT


def token_loss_no_trust_region(
    config: NoTrustRegionConfig, tokens: Tokens, statistics: tuple[()]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """-r_t A_t of every token."""
    return jnp.where(tokens.usable, policy_gradient_loss(tokens), 0.0), tokens.usable
