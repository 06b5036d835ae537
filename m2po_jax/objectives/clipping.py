"""PPO's clip: the pessimistic minimum of the surrogate and its clipped twin (arXiv 1707.06347, equation 7)."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import LossConfig
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of


@dataclass(frozen=True)
class ClipConfig(LossConfig):
    """Clip range of the ratio; the defaults are those of GRPO."""

    epsilon_low: float = 0.2
    """The ratio is clipped below at 1 - epsilon_low."""
    epsilon_high: float = 0.2
    """The ratio is clipped above at 1 + epsilon_high."""

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.epsilon_low < 1.0:
            raise ConfigError(f"objective.epsilon_low is {self.epsilon_low}: use 0 or more, below 1")
        if not self.epsilon_high >= 0.0:
            raise ConfigError(f"objective.epsilon_high is {self.epsilon_high}: use 0 or more")


def clipped_loss(config: ClipConfig, tokens: Tokens, log_ratio: Array) -> TokenLoss:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) of each usable token.

    Args:
      log_ratio: (B, T), or (B, 1) for one ratio a response.
    """
    clipped, at_bound = clip_branch(config, log_ratio, tokens.advantages)
    loss_BT = jnp.where(clipped, at_bound, -ratio_of(log_ratio) * tokens.advantages)
    return TokenLoss(jnp.where(tokens.usable, loss_BT, 0.0), tokens.usable & ~clipped)


def clip_branch(config: ClipConfig, log_ratio: Array, advantages: Array) -> tuple[Array, Array]:
    """Where PPO's clipped branch is active, decided on log-ratios, and its constant loss there; 0 elsewhere."""
    too_high = (advantages > 0.0) & (log_ratio > math.log1p(config.epsilon_high))
    too_low = (advantages < 0.0) & (log_ratio < math.log1p(-config.epsilon_low))
    loss = jnp.where(too_high, -(1.0 + config.epsilon_high) * advantages, 0.0)
    loss = jnp.where(too_low, -(1.0 - config.epsilon_low) * advantages, loss)
    return too_high | too_low, loss
