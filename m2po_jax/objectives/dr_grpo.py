"""Dr. GRPO: no length in the denominator and no standard deviation in the advantage (arXiv 2503.20783).

    J = 1 / (number of responses * constant) * sum_i sum_t min(r_it A_i, clip(r_it, 1 - eps_low, 1 + eps_high) A_i)
    A_i = R_i - mean of the group

Section 3.2. The paper's equation has no constant; its code divides by the longest response allowed, as a run does here.
"""

from dataclasses import dataclass

from m2po_jax.objectives.aggregation import Aggregation
from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens


@dataclass(frozen=True)
class DrGRPOConfig(ClipConfig):
    """Hyperparameters of `dr_grpo`."""

    aggregation: Aggregation = "constant_sum"
    """How the losses of tokens become one."""


def token_loss(config: DrGRPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """PPO's clipped loss of each token."""
    return clipped_loss(config, tokens, tokens.log_ratio)
