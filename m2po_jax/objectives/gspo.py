"""GSPO: group sequence policy optimisation (arXiv 2507.18071), clipped by whole responses.

    s_i = exp(mean_t log r_it)                                                   (geometric mean of the token ratios)
    J   = 1 / (number of responses) * sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)

Each token carries 1 / |o_i| of its response's term, so that the terms of a response add up to it; with advantages that
differ within a response this is the paper's GSPO-token with an undetached ratio.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from m2po_jax.objectives.grpo import ClipConfig, clip_branch
from m2po_jax.objectives.tokens import Tokens, ratio_of


@dataclass(frozen=True)
class SequenceClipConfig(ClipConfig):
    """Clip range of the sequence ratio; the defaults are those of GSPO's paper, section 5.1."""

    epsilon_low: float = 3e-4
    """The sequence ratio is clipped below at 1 - epsilon_low."""
    epsilon_high: float = 4e-4
    """The sequence ratio is clipped above at 1 + epsilon_high."""


def token_loss(
    config: SequenceClipConfig, tokens: Tokens, statistics: tuple[()]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Each token's share of its response's clipped loss, and where the gradient of the response passes."""
    length_B1 = jnp.sum(tokens.response_mask, axis=1, keepdims=True, dtype=jnp.float32)
    length_B1 = jnp.maximum(length_B1, 1.0)
    log_ratio_B1 = jnp.sum(tokens.log_ratio, axis=1, keepdims=True) / length_B1
    clipped_BT, at_bound_BT = clip_branch(config, log_ratio_B1, tokens.advantages)
    loss_BT = jnp.where(clipped_BT, at_bound_BT, -ratio_of(log_ratio_B1) * tokens.advantages)
    return jnp.where(tokens.usable, loss_BT / length_B1, 0.0), tokens.usable & ~clipped_BT
