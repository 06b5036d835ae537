"""IcePop: tokens on which two policies disagree too much, either way, are dropped (arXiv 2510.18855).

    J = 1 / (number of tokens) * sum_t M(w_t) min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t)
    M(w) = w  for  low <= w <= high,  else 0;    w_t = pi_proximal / pi_behaviour,    u_t = pi / pi_proximal

"Every Step Evolves", section on IcePop, low = 0.5 and high = 5. In a run the proximal policy is the one at the
batch's first update.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.config import ConfigError
from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of


@dataclass(frozen=True)
class IcePopConfig(ClipConfig):
    """Hyperparameters of `icepop`."""

    weight_low: float = 0.5
    """Smallest weight of the proximal over the behaviour policy that a token may have."""
    weight_high: float = 5.0
    """Largest weight that a token may have."""

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 < self.weight_low <= self.weight_high:
            raise ConfigError(
                f"objective.weight_low {self.weight_low} and weight_high {self.weight_high}: use 0 < low <= high"
            )


def token_loss(config: IcePopConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """PPO's weighted and clipped loss around the proximal policy, of the tokens whose weight lies in the band."""
    loss_BT, kept_BT = clipped_loss(config, tokens, tokens.proximal_log_ratio)
    log_weight_BT = tokens.behavior_log_weight
    inside_BT = (log_weight_BT >= math.log(config.weight_low)) & (log_weight_BT <= math.log(config.weight_high))
    return TokenLoss(jnp.where(inside_BT, ratio_of(log_weight_BT) * loss_BT, 0.0), kept_BT & inside_BT)
