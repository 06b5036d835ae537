"""GRPO's token-level surrogate, with PPO's clip and without any trust region.

    grpo:        J = 1 / (number of tokens) * sum_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
    grpo_no_tr:  J = 1 / (number of tokens) * sum_t r_t A_t

DeepSeekMath (arXiv 2402.03300), equation 3, with the token mean and without KL term or dual clip.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.objectives.aggregation import LossConfig
from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens, policy_gradient_loss


@dataclass(frozen=True)
class GRPOConfig(ClipConfig):
    """Hyperparameters of `grpo`."""


@dataclass(frozen=True)
class NoTrustRegionConfig(LossConfig):
    """`grpo_no_tr` has no hyperparameters of its own."""


def token_loss(config: GRPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """PPO's clipped loss of each token."""
    return clipped_loss(config, tokens, tokens.log_ratio)


def token_loss_no_trust_region(config: NoTrustRegionConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """-r_t A_t of every token."""
    return TokenLoss(jnp.where(tokens.usable, policy_gradient_loss(tokens), 0.0), tokens.usable)
