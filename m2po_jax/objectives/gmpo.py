"""GMPO: the geometric mean of a response's clipped token ratios (arXiv 2507.20673).

    J   = 1 / (number of responses) * sum_i exp(1 / |o_i| * sum_t x_it) A_i
    x_t = min(log r_t, clip_high) where A > 0,    max(log r_t, -clip_low) where A < 0

The clip is by token and in log space, and the paper's range is the default, (exp(-0.4), exp(0.4)). Each token carries
its share of its response's term; the gradient passes through the tokens that are not clipped.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import Aggregation, LossConfig
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of, response_mean


@dataclass(frozen=True)
class GMPOConfig(LossConfig):
    """Hyperparameters of `gmpo`."""

    aggregation: Aggregation = "sequence_mean"
    """How the losses of tokens become one."""
    clip_low: float = 0.4
    """The log-ratio of a token is clipped below at -clip_low."""
    clip_high: float = 0.4
    """The log-ratio of a token is clipped above at clip_high."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}: use 0 or more")


def token_loss(config: GMPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """Each token's share of its response's loss, and where its gradient passes."""
    too_high_BT = (tokens.advantages > 0.0) & (tokens.log_ratio > config.clip_high)
    too_low_BT = (tokens.advantages < 0.0) & (tokens.log_ratio < -config.clip_low)
    clipped_BT = jnp.where(too_high_BT, config.clip_high, jnp.where(too_low_BT, -config.clip_low, tokens.log_ratio))
    loss_BT = -ratio_of(response_mean(clipped_BT, tokens)) * tokens.advantages
    return TokenLoss(jnp.where(tokens.usable, loss_BT, 0.0), tokens.usable & ~(too_high_BT | too_low_BT))
