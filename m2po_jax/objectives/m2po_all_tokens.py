"""M2PO over all tokens: the variant in AReaL's public code, between the behaviour and a proximal policy.

    M2_t = (log pi_proximal(o_t) - log pi_behav(o_t))^2
    keep: drop the largest M2_t of all response tokens until the mean over the rest is < tau; the smallest stays
    J    = 1 / (number of tokens) * sum_t keep_t w_t min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t)
    w_t  = pi_proximal / pi_behav,    u_t = pi / pi_proximal

There is no quadrant, the bound is strict, and PPO's clip and the behaviour weight of `decoupled_ppo` stand on top. In
a run the proximal policy is the one at the batch's first update; where none is given it is the behaviour policy, M2 is
0 and this is `grpo`. Equal values are kept or dropped together here, also the smallest ones.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import MaskConfig
from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.cutoffs import Cut, mask_cut_strict
from m2po_jax.objectives.masks import second_moment
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of


@dataclass(frozen=True)
class M2POAllTokensConfig(ClipConfig, MaskConfig):
    """Hyperparameters of `m2po_all_tokens`."""

    denominator: Literal["all", "kept"] = "all"
    """Tokens that the token mean counts: all response tokens, or those that the mask keeps, as in AReaL's code."""

    def __post_init__(self):
        super().__post_init__()
        if self.denominator == "kept" and self.aggregation != "token_mean":
            raise ConfigError(f"objective.denominator kept goes with aggregation token_mean, not {self.aggregation}")


class Statistics(NamedTuple):
    """Of the whole batch."""

    cut: Cut
    scale: Float[Array, ""]
    """Response tokens over those in the denominator."""


def statistics(config: M2POAllTokensConfig, tokens: Tokens) -> Statistics:
    """Where the second moments of all tokens are cut, over the whole batch."""
    moments_BT = second_moment(tokens.behavior_log_weight)
    cut = mask_cut_strict(moments_BT, tokens.usable, jnp.float32(config.threshold))
    if config.denominator == "all":
        return Statistics(cut, jnp.float32(1.0))
    count = lambda where_BT: jnp.sum(where_BT, dtype=jnp.int32).astype(jnp.float32)  # noqa: E731
    kept = count(tokens.usable & ~cut.masks(moments_BT))
    return Statistics(cut, count(tokens.response_mask) / jnp.maximum(kept, 1.0))


def token_loss(config: M2POAllTokensConfig, tokens: Tokens, statistics: Statistics) -> TokenLoss:
    """The weighted and clipped loss of the tokens that the mask keeps."""
    loss_BT, kept_BT = clipped_loss(config, tokens, tokens.proximal_log_ratio)
    masked_BT = statistics.cut.masks(second_moment(tokens.behavior_log_weight))
    loss_BT = statistics.scale * ratio_of(tokens.behavior_log_weight) * loss_BT
    return TokenLoss(jnp.where(masked_BT, 0.0, loss_BT), kept_BT & ~masked_BT)
