"""Importance-weight statistics of a batch, kept as sums and extremes so that any split of the batch adds up to it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from m2po_jax.objectives.tokens import MAX_EXPONENT, Tokens, ratio_of, second_moment_of, trust_region_of

Metrics = dict[str, Float[Array, ""]]


class MetricParts(NamedTuple):
    """Metrics of a part of the batch before the division."""

    sums: dict[str, Float[Array, ""]]
    """To be added over parts."""
    maxima: dict[str, Float[Array, ""]]
    """Of which the maximum over parts is to be taken; -inf for an empty part."""


def measure(tokens: Tokens, kept: Bool[Array, "B T"], loss: Float[Array, ""]) -> MetricParts:
    """Sums and extremes over one part of the batch; `loss` is that part's share of the loss."""
    tokens = lax.stop_gradient(tokens)
    ratio_BT, second_moment_BT, trust_region_BT = _weights(tokens)
    sums = {"loss": lax.stop_gradient(loss)}
    sums |= _count_sums(tokens, kept, trust_region_BT)
    sums |= _second_moment_sums(tokens, kept, trust_region_BT, second_moment_BT)
    sums |= _ratio_sums(tokens, ratio_BT)
    sums |= _advantage_sums(tokens)
    maxima = {
        "ratio": _max(ratio_BT, tokens.usable),
        "log_ratio": _max(tokens.log_ratio, tokens.usable),
        "negative_log_ratio": _max(-tokens.log_ratio, tokens.usable),
    }
    return MetricParts(sums, maxima)


def combine(a: MetricParts, b: MetricParts) -> MetricParts:
    """The parts of two disjoint pieces of a batch, as if measured together."""
    sums = {key: a.sums[key] + b.sums[key] for key in a.sums}
    maxima = {key: jnp.maximum(a.maxima[key], b.maxima[key]) for key in a.maxima}
    return MetricParts(sums, maxima)


def finish(parts: MetricParts) -> Metrics:
    """The metrics, float32 scalars; everything is 0 for an empty batch.

    Unless said otherwise means run over the response tokens with a finite log-ratio.

    loss: the objective's loss. tokens: response tokens. masked_frac: share of response tokens whose gradient a mask or
    an active clip drops. trust_region_frac: share of response tokens in T. m2_all, m2_trust_region, m2_kept: mean of
    (log r)^2 over all tokens, over T, over the kept tokens of T. ratio_mean, ratio_max, log_ratio_min, log_ratio_max.
    k1: mean of -log r; k3: mean of r - 1 - log r (estimates of KL(behaviour || policy)). ess: effective sample size
    (sum r)^2 / (n sum r^2). chi2: mean of (r - 1)^2. saturated_frac: share of tokens at or beyond the clamp of the
    exponent. nonfinite_tokens: response tokens without a finite log-ratio. all_masked: 1 when there are response
    tokens and none is kept. advantage_mean, advantage_std: over response tokens. no_signal_frac: share of responses
    whose advantage is 0.
    """
    s = parts.sums
    advantage_mean = _divide(s["advantage"], s["tokens"])
    advantage_variance = _divide(s["advantage_squared"], s["tokens"]) - advantage_mean**2
    return {
        "loss": s["loss"],
        "tokens": s["tokens"],
        "masked_frac": _divide(s["masked"], s["tokens"]),
        "trust_region_frac": _divide(s["trust_region"], s["tokens"]),
        "m2_all": _divide(s["m2_all"], s["usable"]),
        "m2_trust_region": _divide(s["m2_trust_region"], s["trust_region"]),
        "m2_kept": _divide(s["m2_kept"], s["trust_region_kept"]),
        "ratio_mean": _divide(s["ratio"], s["usable"]),
        "ratio_max": _extreme(parts.maxima["ratio"]),
        "log_ratio_min": -_extreme(parts.maxima["negative_log_ratio"]),
        "log_ratio_max": _extreme(parts.maxima["log_ratio"]),
        "k1": _divide(s["k1"], s["usable"]),
        "k3": _divide(s["k3"], s["usable"]),
        "ess": _divide(s["ratio"], s["usable"]) * _divide(s["ratio"], s["ratio_squared"]),
        "chi2": _divide(s["chi2"], s["usable"]),
        "saturated_frac": _divide(s["saturated"], s["tokens"]),
        "nonfinite_tokens": s["tokens"] - s["usable"],
        "all_masked": ((s["tokens"] > 0.0) & (s["masked"] == s["tokens"])).astype(jnp.float32),
        "advantage_mean": advantage_mean,
        "advantage_std": jnp.sqrt(jnp.maximum(advantage_variance, 0.0)),
        "no_signal_frac": _divide(s["no_signal"], s["sequences"]),
    }


def _weights(tokens: Tokens) -> tuple[Array, Array, Array]:
    return ratio_of(tokens.log_ratio), second_moment_of(tokens), trust_region_of(tokens)


def _count_sums(tokens: Tokens, kept_BT: Array, trust_region_BT: Array) -> dict[str, Array]:
    return {
        "tokens": _sum(tokens.response_mask),
        "usable": _sum(tokens.usable),
        "masked": _sum(tokens.response_mask & ~kept_BT),
        "trust_region": _sum(trust_region_BT),
        "trust_region_kept": _sum(trust_region_BT & kept_BT),
        "saturated": _sum(tokens.usable & (jnp.abs(tokens.log_ratio) >= MAX_EXPONENT)),
    }


def _second_moment_sums(tokens: Tokens, kept_BT: Array, trust_region_BT: Array, v_BT: Array) -> dict[str, Array]:
    return {
        "m2_all": _sum(v_BT, tokens.usable),
        "m2_trust_region": _sum(v_BT, trust_region_BT),
        "m2_kept": _sum(v_BT, trust_region_BT & kept_BT),
    }


def _ratio_sums(tokens: Tokens, ratio_BT: Array) -> dict[str, Array]:
    clamped_BT = jnp.clip(tokens.log_ratio, -MAX_EXPONENT, MAX_EXPONENT)
    return {
        "ratio": _sum(ratio_BT, tokens.usable),
        "ratio_squared": _sum(ratio_BT**2, tokens.usable),
        "chi2": _sum(jnp.expm1(clamped_BT) ** 2, tokens.usable),
        "k1": _sum(-tokens.log_ratio, tokens.usable),
        "k3": _sum(jnp.expm1(clamped_BT) - tokens.log_ratio, tokens.usable),
    }


def _advantage_sums(tokens: Tokens) -> dict[str, Array]:
    nonempty_B = jnp.any(tokens.response_mask, axis=1)
    return {
        "advantage": _sum(tokens.advantages, tokens.response_mask),
        "advantage_squared": _sum(tokens.advantages**2, tokens.response_mask),
        "sequences": _sum(nonempty_B),
        "no_signal": _sum(nonempty_B & jnp.all(tokens.advantages == 0.0, axis=1)),
    }


def _sum(x: Array, where: Array | None = None) -> Array:
    kind = jnp.int32 if x.dtype == jnp.bool_ else jnp.float32
    return jnp.sum(x, where=where, dtype=kind).astype(jnp.float32)


def _max(x_BT: Array, where_BT: Array) -> Array:
    return jnp.max(x_BT, where=where_BT, initial=-jnp.inf)


def _extreme(x: Array) -> Array:
    return jnp.where(x == -jnp.inf, 0.0, x)


def _divide(total: Array, count: Array) -> Array:
    """total / count, and 0 where the count is 0."""
    return jnp.where(count > 0.0, total / jnp.where(count > 0.0, count, 1.0), 0.0)
