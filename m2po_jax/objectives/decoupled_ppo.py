"""Decoupled PPO: the trust region is around a recent proximal policy, the data come from an older behaviour policy.

    J = 1 / (number of tokens) * sum_t w_t min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t)
    w_t = pi_proximal / pi_behaviour,    u_t = pi / pi_proximal

"Batch size-invariance for policy optimization" (arXiv 2110.00641), section 3, and AReaL (arXiv 2505.24298), section
5.2. In a run the proximal policy is the one at the batch's first update. `tis` caps w, `icepop` drops tokens by it.
"""

from dataclasses import dataclass

from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of


@dataclass(frozen=True)
class DecoupledPPOConfig(ClipConfig):
    """Hyperparameters of `decoupled_ppo`; the clip range is that of the ratio to the proximal policy."""


def token_loss(config: DecoupledPPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """PPO's clipped loss around the proximal policy, weighted by the proximal over the behaviour policy."""
    loss_BT, kept_BT = clipped_loss(config, tokens, tokens.proximal_log_ratio)
    return TokenLoss(ratio_of(tokens.behavior_log_weight) * loss_BT, kept_BT)
