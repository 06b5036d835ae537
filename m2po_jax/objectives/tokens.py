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
    """One batch as an objective sees it. Every array is neutral where its token is not `usable`."""

    logprobs: Float[Array, "B T"]
    """Policy log-probs, float32, differentiable."""
    log_ratio: Float[Array, "B T"]
    """Policy minus behaviour log-probs, differentiable."""
    proximal_log_ratio: Float[Array, "B T"]
    """Policy minus proximal log-probs, differentiable; `log_ratio` where behaviour and proximal policy are one."""
    behavior_log_weight: Float[Array, "B T"]
    """Proximal minus behaviour log-probs, constant for the gradient; 0 where the two policies are one."""
    reference_log_ratio: Float[Array, "B T"] | None
    """Policy minus reference log-probs, differentiable."""
    advantages: Float[Array, "B #T"]
    """Float32, constant for the gradient, (B, 1) or (B, T) as given; 0 on padding."""
    response_mask: Bool[Array, "B T"]
    """True for response tokens; they make up every denominator."""
    usable: Bool[Array, "B T"]
    """True for response tokens whose log-probs are all finite; the others are neutral, and counted."""
    truncated: Bool[Array, "B 1"]
    """True for responses that the length limit cut, by their finish reason."""
    nonfinite: dict[str, Int[Array, ""]]
    """Response tokens whose log-prob is not finite, by the policy it is of."""


class TokenLoss(NamedTuple):
    """What an objective makes of each token."""

    loss: Float[Array, "B T"]
    """To be aggregated and minimised; 0 off the usable tokens."""
    kept: Bool[Array, "B T"]
    """True where the policy gradient passes: a usable token, not masked and not on the active branch of a clip.

    The gradient of a KL penalty passes everywhere; that of a ratio is 0 beyond the clamp of its exponent.
    """


class Counts(NamedTuple):
    """What a mean is taken over, counted in the whole optimiser batch; int32 scalars."""

    tokens: Int[Array, ""]
    """Response tokens, masked ones too."""
    sequences: Int[Array, ""]
    """Responses with at least one token."""


def prepare(
    policy_logprobs: ArrayLike,
    behavior_logprobs: ArrayLike,
    advantages: ArrayLike,
    response_mask: ArrayLike,
    *,
    proximal_logprobs: ArrayLike | None = None,
    reference_logprobs: ArrayLike | None = None,
    finish_reason: ArrayLike | None = None,
) -> Tokens:
    """Log-ratios in float32, masked before anything is exponentiated.

    A masked or non-finite token has log-ratio 0 and a gradient of exactly 0, whatever stood there.

    Args:
      policy_logprobs, behavior_logprobs: (B, T) float.
      advantages: (B, 1) or (B, T) float.
      response_mask: (B, T) bool.
      proximal_logprobs: (B, T) float; None where the behaviour policy stands for the proximal one.
      reference_logprobs: (B, T) float.
      finish_reason: (B,) bool or int, True or 1 where the length limit cut the response.
    """
    mask_BT = jnp.asarray(response_mask)
    policy_BT = as_float32(policy_logprobs)
    fixed = {"behavior": behavior_logprobs, "proximal": proximal_logprobs, "reference": reference_logprobs}
    others = {name: lax.stop_gradient(as_float32(x)) for name, x in fixed.items() if x is not None}
    finite = {name: jnp.isfinite(x) for name, x in ({"policy": policy_BT} | others).items()}
    usable_BT = mask_BT
    for other in others.values():
        usable_BT = usable_BT & jnp.isfinite(policy_BT - other)
    policy_BT = jnp.where(usable_BT, policy_BT, 0.0)
    others = {name: jnp.where(usable_BT, x, 0.0) for name, x in others.items()}
    log_ratio_BT = policy_BT - others["behavior"]
    apart = "proximal" in others
    return Tokens(
        logprobs=policy_BT,
        log_ratio=log_ratio_BT,
        proximal_log_ratio=policy_BT - others["proximal"] if apart else log_ratio_BT,
        behavior_log_weight=others["proximal"] - others["behavior"] if apart else jnp.zeros_like(log_ratio_BT),
        reference_log_ratio=policy_BT - others["reference"] if "reference" in others else None,
        advantages=_masked_advantages(advantages, mask_BT),
        response_mask=mask_BT,
        usable=usable_BT,
        truncated=_truncated(finish_reason, mask_BT.shape[0]),
        nonfinite={name: jnp.sum(mask_BT & ~is_finite, dtype=jnp.int32) for name, is_finite in finite.items()},
    )


def _masked_advantages(advantages: ArrayLike, mask_BT: Array) -> Array:
    """Advantages as wide as they were given, so that one value a response takes no memory by the token."""
    advantages = lax.stop_gradient(as_float32(advantages))
    inside = mask_BT if advantages.shape == mask_BT.shape else jnp.any(mask_BT, axis=1, keepdims=True)
    return jnp.where(inside, advantages, 0.0)


def _truncated(finish_reason: ArrayLike | None, rows: int) -> Array:
    if finish_reason is None:
        return jnp.zeros((rows, 1), bool)
    cut = finish_reason if jnp.result_type(finish_reason) == jnp.bool_ else finish_reason == 1
    return jnp.reshape(jnp.asarray(cut), (rows, 1))


def ratio_of(log_ratio: Array) -> Array:
    """exp(log ratio) with the exponent clamped to +-MAX_EXPONENT; the gradient is 0 at the clamp and beyond."""
    return jnp.exp(lax.clamp(jnp.float32(-MAX_EXPONENT), log_ratio, jnp.float32(MAX_EXPONENT)))


def ratio_minus_one_of(log_ratio: Array) -> Array:
    """exp(log ratio) - 1 without cancellation, clamped as `ratio_of`."""
    return jnp.expm1(lax.clamp(jnp.float32(-MAX_EXPONENT), log_ratio, jnp.float32(MAX_EXPONENT)))


def trust_region_of(tokens: Tokens) -> Bool[Array, "B T"]:
    """T among the usable tokens."""
    return trust_region(tokens.log_ratio, tokens.advantages)


def second_moment_of(tokens: Tokens) -> Float[Array, "B T"]:
    """(log r)^2 of each token."""
    return second_moment(tokens.log_ratio)


def policy_gradient_loss(tokens: Tokens) -> Float[Array, "B T"]:
    """-r A of each token: the importance-weighted policy gradient, to be minimised."""
    return -ratio_of(tokens.log_ratio) * tokens.advantages


def weighted_log_likelihood_loss(tokens: Tokens, weight: Array) -> Float[Array, "B T"]:
    """-w A log pi of each token, the weight constant for the gradient."""
    return -lax.stop_gradient(weight) * tokens.advantages * tokens.logprobs


def counts_of(tokens: Tokens) -> Counts:
    """Counts of these tokens; those of the parts of a batch add up."""
    return Counts(
        tokens=jnp.sum(tokens.response_mask, dtype=jnp.int32),
        sequences=jnp.sum(jnp.any(tokens.response_mask, axis=1), dtype=jnp.int32),
    )


def response_mean(x_BT: Array, tokens: Tokens) -> Float[Array, "B 1"]:
    """Mean over the response tokens of each response, of values that are 0 off the usable ones."""
    return jnp.sum(x_BT, axis=1, keepdims=True) / response_lengths(tokens.response_mask)


def response_lengths(response_mask: Array) -> Float[Array, "B 1"]:
    """Response tokens of each response, and 1 for a response without any."""
    return jnp.maximum(jnp.sum(response_mask, axis=1, keepdims=True, dtype=jnp.float32), 1.0)
