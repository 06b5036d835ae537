"""M2PO: second-moment trust policy optimisation (arXiv 2510.01161).

    r_t = pi_theta(o_t) / pi_behav(o_t),    M2_t = (log r_t)^2
    T   = {t : A_t > 0 and r_t > 1,  or  A_t < 0 and r_t < 1}
    keep: drop the largest M2_t of T until the mean of M2 over what is left of T is <= tau
    J   = 1 / (number of tokens in the batch)  *  sum_t  keep_t  r_t  A_t

The mask depends on the whole optimiser batch through one cut between two second moments; that cut is the statistic,
and the rest is per token.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.objectives.aggregation import MaskConfig
from m2po_jax.objectives.cutoffs import Cut, mask_cut
from m2po_jax.objectives.tokens import TokenLoss, Tokens, policy_gradient_loss, second_moment_of, trust_region_of


@dataclass(frozen=True)
class M2POConfig(MaskConfig):
    """Hyperparameters of `m2po` and `m2po_clip`."""


def statistics(config: M2POConfig, tokens: Tokens) -> Cut:
    """Where Algorithm 1 cuts the second moments of T, over the whole batch."""
    return mask_cut(second_moment_of(tokens), trust_region_of(tokens), jnp.float32(config.threshold))


def token_loss(config: M2POConfig, tokens: Tokens, cut: Cut) -> TokenLoss:
    """-keep_t r_t A_t and keep_t."""
    kept_BT = tokens.usable & ~(trust_region_of(tokens) & cut.masks(second_moment_of(tokens)))
    return TokenLoss(jnp.where(kept_BT, policy_gradient_loss(tokens), 0.0), kept_BT)
