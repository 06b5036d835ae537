"""M2PO as a clip: the variant in the paper authors' public code, over the whole batch and without its rounding.

    c  = the largest M2_t in T with  mean over T of min(M2, c) <= tau      (outliers count at the cap)
    J  = 1 / (number of tokens)  *  sum_t  min(r_t A_t, clip(r_t, exp(-sqrt c), exp(sqrt c)) A_t)

There is no clip when the plain mean of M2 over T is within tau, and everything in T is clipped (c = 0) when even its
smallest value is too large. At one tau it drops at least as many tokens as Algorithm 1 does.
"""

import jax.numpy as jnp

from m2po_jax.objectives.cutoffs import Cut, clip_cut
from m2po_jax.objectives.m2po import M2POConfig
from m2po_jax.objectives.tokens import (
    TokenLoss,
    Tokens,
    policy_gradient_loss,
    ratio_of,
    second_moment_of,
    trust_region_of,
)


def statistics(config: M2POConfig, tokens: Tokens) -> Cut:
    """Where the winsorised mean cuts the second moments of T, over the whole batch; c is the largest kept."""
    return clip_cut(second_moment_of(tokens), trust_region_of(tokens), jnp.float32(config.threshold))


def token_loss(config: M2POConfig, tokens: Tokens, cut: Cut) -> TokenLoss:
    """PPO's pessimistic minimum with the range exp(+-sqrt c); the clip acts on tokens of T alone.

    The decision compares second moments, so that rounding of the root never moves the boundary token.
    """
    clipped_BT = trust_region_of(tokens) & cut.masks(second_moment_of(tokens))
    kept_BT = tokens.usable & ~clipped_BT
    bound = ratio_of(jnp.sign(tokens.advantages) * jnp.sqrt(cut.largest_kept))
    at_bound_BT = jnp.where(clipped_BT, -bound * tokens.advantages, 0.0)
    return TokenLoss(jnp.where(kept_BT, policy_gradient_loss(tokens), at_bound_BT), kept_BT)
