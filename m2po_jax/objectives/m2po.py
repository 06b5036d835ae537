"""M2PO: second-moment trust policy optimisation (arXiv 2510.01161).

    r_t = pi_theta(o_t) / pi_behav(o_t),    M2_t = (log r_t)^2
    T   = {t : A_t > 0 and r_t > 1,  or  A_t < 0 and r_t < 1}
    keep: drop the largest M2_t of T until the mean of M2 over what is left of T is <= tau
    J   = 1 / (number of tokens in the batch)  *  sum_t  keep_t  r_t  A_t

The mask depends on the whole optimiser batch through one number, the largest second moment that is kept; that number
is the statistic, and the rest is per token.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from m2po_jax.config import ConfigError
from m2po_jax.objectives.cutoffs import mask_cutoff
from m2po_jax.objectives.tokens import Tokens, policy_gradient_loss, second_moment_of, trust_region_of


@dataclass(frozen=True)
class M2POConfig:
    """Hyperparameters of `m2po` and `m2po_clip`."""

    threshold: float = 0.04
    """tau, the bound on the mean second moment of the trust region; 0.04 in all of the paper's experiments."""

    def __post_init__(self):
        if not self.threshold >= 0.0:
            raise ConfigError(f"objective.threshold is {self.threshold}: the second-moment threshold is 0 or more")


def statistics(config: M2POConfig, tokens: Tokens) -> Float[Array, ""]:
    """The largest second moment of T that Algorithm 1 keeps, over the whole batch; inf when it keeps all."""
    return mask_cutoff(second_moment_of(tokens), trust_region_of(tokens), jnp.float32(config.threshold))


def token_loss(
    config: M2POConfig, tokens: Tokens, cutoff: Float[Array, ""]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """-keep_t r_t A_t and keep_t."""
    masked_BT = trust_region_of(tokens) & (second_moment_of(tokens) > cutoff)
    kept_BT = tokens.usable & ~masked_BT
    return jnp.where(kept_BT, policy_gradient_loss(tokens), 0.0), kept_BT
