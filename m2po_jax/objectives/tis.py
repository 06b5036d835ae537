"""TIS: truncated importance sampling, the weight towards the behaviour policy capped.

    J = 1 / (number of tokens) * sum_t min(w_t, cap) min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t)
    w_t = pi_proximal / pi_behaviour,    u_t = pi / pi_proximal

F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), cap = 2; the idea is
that of E. Ionides, "Truncated importance sampling" (2008). In a run the proximal policy is the one at the batch's
first update.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.config import ConfigError
from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of


@dataclass(frozen=True)
class TISConfig(ClipConfig):
    """Hyperparameters of `tis`."""

    cap: float = 2.0
    """Largest weight of the proximal over the behaviour policy."""

    def __post_init__(self):
        super().__post_init__()
        if not self.cap > 0.0:
            raise ConfigError(f"objective.cap is {self.cap}: use a positive number")


def token_loss(config: TISConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """PPO's clipped loss around the proximal policy with a capped weight; the cap drops no token."""
    loss_BT, kept_BT = clipped_loss(config, tokens, tokens.proximal_log_ratio)
    return TokenLoss(jnp.minimum(ratio_of(tokens.behavior_log_weight), config.cap) * loss_BT, kept_BT)
