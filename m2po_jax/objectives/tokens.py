"""The prelude all objectives share: from log-probs and advantages to log-ratios that are safe to exponentiate."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from m2po_jax.objectives.masks import as_float32, second_moment, trust_region

MAX_EXPONENT = 20.0
"""Log-ratios are clamped to [-20, 20] before exp; from there on a token's ratio is constant, its gradient 0."""


class Tokens(NamedTuple):
    """One batch as an objective sees it. Arrays are (B, T)."""

    log_ratio: Float[Array, "B T"]
    """Policy minus behaviour log-probs, float32, differentiable; 0 on padding and where either is not finite."""
    advantages: Float[Array, "B T"]
    """Float32, constant for the gradient; 0 on padding."""
    response_mask: Bool[Array, "B T"]
    """True for response tokens; they make up every denominator."""
    usable: Bool[Array, "B T"]
    """True for response tokens with a finite log-ratio; the others are neutral, and counted."""


def prepare(
    policy_logprobs: ArrayLike, behavior_logprobs: ArrayLike, advantages: ArrayLike, response_mask: ArrayLike
) -> Tokens:
    """Log-ratios in float32, masked before anything is exponentiated.

    A masked or non-finite token has log-ratio 0 and a gradient of exactly 0, whatever stood there.

    Args:
      policy_logprobs, behavior_logprobs: (B, T) float.
      advantages: (B, 1) or (B, T) float.
      response_mask: (B, T) bool.
    """
    mask_BT = jnp.asarray(response_mask)
    policy_BT, behavior_BT = as_float32(policy_logprobs), lax.stop_gradient(as_float32(behavior_logprobs))
    usable_BT = mask_BT & jnp.isfinite(policy_BT - behavior_BT)
    log_ratio_BT = jnp.where(usable_BT, policy_BT, 0.0) - jnp.where(usable_BT, behavior_BT, 0.0)
    advantages_BT = jnp.where(mask_BT, lax.stop_gradient(as_float32(advantages)), 0.0)
    return Tokens(log_ratio_BT, advantages_BT, mask_BT, usable_BT)


def ratio_of(log_ratio: Array) -> Array:
    """exp(log ratio) with the exponent clamped to +-MAX_EXPONENT; the gradient is 0 at the clamp and beyond."""
    return jnp.exp(lax.clamp(-MAX_EXPONENT, log_ratio, MAX_EXPONENT))


def trust_region_of(tokens: Tokens) -> Bool[Array, "B T"]:
    """T among the usable tokens."""
    return trust_region(tokens.log_ratio, tokens.advantages)


def second_moment_of(tokens: Tokens) -> Float[Array, "B T"]:
    """(log r)^2 of each token."""
    return second_moment(tokens.log_ratio)


def policy_gradient_loss(tokens: Tokens) -> Float[Array, "B T"]:
    """-r A of each token: the importance-weighted policy gradient, to be minimised."""
    return -ratio_of(tokens.log_ratio) * tokens.advantages


def token_count(tokens: Tokens) -> Int[Array, ""]:
    """Response tokens, masked ones too: the denominator of the token mean."""
    return jnp.sum(tokens.response_mask, dtype=jnp.int32)


def sequence_count(tokens: Tokens) -> Int[Array, ""]:
    """Responses with at least one token: the denominator of the sequence mean."""
    return jnp.sum(jnp.any(tokens.response_mask, axis=1), dtype=jnp.int32)


def no_statistics(config: object, tokens: Tokens) -> tuple[()]:
    """The batch statistics of an objective that looks at one token (or response) at a time."""
    return ()
