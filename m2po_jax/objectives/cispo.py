"""CISPO: the importance weight is clipped, the token's gradient never is (MiniMax-M1, arXiv 2506.13585).

    J = 1 / (number of tokens) * sum_t stop_gradient(clip(r_t, 1 - eps_low, 1 + eps_high)) A_t log pi(o_t)

Equations 4 and 5. The paper sets no lower bound (eps_low = 1 here) and tunes the upper one without giving it; the
default caps the weight at 5, within the range that "The Art of Scaling RL Compute" (arXiv 2510.13786) found flat.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import LossConfig
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of, weighted_log_likelihood_loss


@dataclass(frozen=True)
class CISPOConfig(LossConfig):
    """Hyperparameters of `cispo`."""

    epsilon_low: float = 1.0
    """The weight is clipped below at 1 - epsilon_low; 1 sets no lower bound."""
    epsilon_high: float = 4.0
    """The weight is clipped above at 1 + epsilon_high."""

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.epsilon_low <= 1.0:
            raise ConfigError(f"objective.epsilon_low is {self.epsilon_low}: use 0 to 1")
        if not self.epsilon_high >= 0.0:
            raise ConfigError(f"objective.epsilon_high is {self.epsilon_high}: use 0 or more")


def token_loss(config: CISPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """-w_t A_t log pi(o_t) with the clipped ratio for weight."""
    lowest = math.log1p(-config.epsilon_low) if config.epsilon_low < 1.0 else -math.inf
    weight_BT = ratio_of(jnp.clip(tokens.log_ratio, lowest, math.log1p(config.epsilon_high)))
    loss_BT = weighted_log_likelihood_loss(tokens, weight_BT)
    return TokenLoss(jnp.where(tokens.usable, loss_BT, 0.0), tokens.usable)
