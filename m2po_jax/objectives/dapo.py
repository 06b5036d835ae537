"""DAPO: clip-higher, and no policy gradient from responses that were cut by length (arXiv 2503.14476).

    J = 1 / (number of tokens) * sum_t finished_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

Equation 8 with eps_low = 0.2 and eps_high = 0.28 (section 3.1), and the overlong filtering of section 3.4; tokens of
filtered responses stay in the denominator. The soft punishment of length (equation 13) is a matter of rewards:
`advantages.overlong_penalty`. Dynamic sampling is a matter of what is generated, and is not here.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens


@dataclass(frozen=True)
class DAPOConfig(ClipConfig):
    """Hyperparameters of `dapo`."""

    epsilon_high: float = 0.28
    """The ratio is clipped above at 1 + epsilon_high."""
    overlong_filter: bool = True
    """Drop every token of a response whose finish reason is `length`."""


def token_loss(config: DAPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """PPO's clipped loss of each token of a finished response."""
    loss_BT, kept_BT = clipped_loss(config, tokens, tokens.log_ratio)
    if not config.overlong_filter:
        return TokenLoss(loss_BT, kept_BT)
    return TokenLoss(jnp.where(tokens.truncated, 0.0, loss_BT), kept_BT & ~tokens.truncated)
