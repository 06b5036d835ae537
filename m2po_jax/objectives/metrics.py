"""Importance-weight statistics of a whole optimiser batch, computed on device from what its update used.

Float32 scalars unless a shape is given; everything is 0 for an empty batch. Means run over the response tokens with
finite log-probs unless said otherwise, r is policy over behaviour, and T are the tokens of the trust region.

loss                      the objective's loss
tokens                    response tokens
masked_frac               share of response tokens whose policy gradient a mask or an active clip drops
eps_clipped_frac          share of response tokens that PPO's clip at 0.2 would drop
trust_region_frac         share of response tokens in T
m2_all, m2_trust_region, m2_kept    mean of (log r)^2 over all tokens, over T, over the kept tokens of T
ratio_mean, ratio_max, log_ratio_min, log_ratio_max
ratio_p01, ratio_p50, ratio_p99, ratio_p999    quantiles, from `histogram.quantiles`
k1, k3                    mean of -log r and of r - 1 - log r: estimates of KL(behaviour || policy)
ess                       effective sample size (sum r)^2 / (n sum r^2), a share
chi2                      mean of (r - 1)^2
saturated_frac            share of response tokens at or beyond the clamp of the exponent
nonfinite_tokens          response tokens without a finite log-ratio
nonfinite_policy, nonfinite_behavior, ...      response tokens whose log-prob under that policy is not finite
all_masked                1 when there are response tokens and none is kept
advantage_mean, advantage_std                  over response tokens
no_signal_frac            share of responses whose advantage is 0
reference_kl              mean of the k3 estimate of KL(policy || reference), where the objective has a KL penalty
log_ratio_histogram       (A, 3, 31) tokens by age (AGE_EDGES), sign of the advantage (-, 0, +) and log r
                          (histogram.LOG_RATIO_EDGES); A is 1 where no ages are given
with entropies given:
entropy_mean, entropy_kept, entropy_masked     mean over all, kept and dropped tokens, nats
entropy_by_ratio, tokens_by_ratio              (7,) mean entropy, and tokens, by |r - 1| (RATIO_EDGES)
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from m2po_jax.objectives.aggregation import kl_penalty
from m2po_jax.objectives.clipping import ClipConfig, clip_branch
from m2po_jax.objectives.histogram import coarse, fine_histogram, quantiles
from m2po_jax.objectives.masks import as_float32, second_moment, trust_region
from m2po_jax.objectives.reductions import Totals, over_columns, row_counts, row_max, row_sum
from m2po_jax.objectives.tokens import MAX_EXPONENT, Tokens, ratio_minus_one_of, ratio_of

Metrics = dict[str, Float[Array, "..."]]

AGE_EDGES = (1, 4, 16, 64, 256, 1024)
"""Between the ages of `log_ratio_histogram`, in model updates: 0, 1 to 3, 4 to 15, ..., 1024 and more."""

RATIO_EDGES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Between the bins of |r - 1|; bins hold their lower edge, the last is open."""

QUANTILES = {"ratio_p01": 10, "ratio_p50": 500, "ratio_p99": 990, "ratio_p999": 999}

_BELOW_ONE = float(np.nextafter(np.float32(1.0), np.float32(0.0)))


class _Columns(NamedTuple):
    """What the statistics are taken of, constant for the gradient; (B, T), or (B, 1)."""

    log_ratio: Array
    reference_log_ratio: Array | None
    advantages: Array
    response_mask: Array
    usable: Array
    kept: Array
    entropy: Array | None


def measure(
    tokens: Tokens,
    kept: Array,
    loss: Array,
    *,
    entropy: Array | np.ndarray | None = None,
    staleness: Array | np.ndarray | None = None,
) -> Metrics:
    """The metrics of the whole batch, described above; `staleness` is the age (B,) in model updates."""
    c = lax.stop_gradient(
        _Columns(
            log_ratio=tokens.log_ratio,
            reference_log_ratio=tokens.reference_log_ratio,
            advantages=tokens.advantages,
            response_mask=tokens.response_mask,
            usable=tokens.usable,
            kept=kept,
            entropy=None if entropy is None else as_float32(entropy),
        )
    )
    return {
        "loss": lax.stop_gradient(loss),
        **_finished(over_columns(_totals, c)),
        **_of_distribution(c, staleness),
        **_of_advantages(c),
        **{f"nonfinite_{name}": number.astype(jnp.float32) for name, number in tokens.nonfinite.items()},
    }


def _totals(c: _Columns) -> Totals:
    kinds, sums = _kinds(c), _weight_sums(c)
    if c.entropy is not None:
        more_kinds, more_sums = _of_entropy(c, c.entropy)
        kinds, sums = kinds | more_kinds, sums | more_sums
    if c.reference_log_ratio is not None:
        sums["reference_kl"] = row_sum(kl_penalty("k3", c.reference_log_ratio), c.usable)
    maxima = {
        "log_ratio": row_max(c.log_ratio, c.usable),
        "negative_log_ratio": row_max(-c.log_ratio, c.usable),
    }
    return Totals(row_counts(kinds), sums, maxima)


def _kinds(c: _Columns) -> dict[str, Array]:
    in_region = trust_region(c.log_ratio, c.advantages)
    clipped, _ = clip_branch(ClipConfig(), c.log_ratio, c.advantages)
    return {
        "tokens": c.response_mask,
        "usable": c.usable,
        "kept": c.kept,
        "trust_region": in_region,
        "trust_region_kept": in_region & c.kept,
        "eps_clipped": c.usable & clipped,
        "saturated": c.usable & (jnp.abs(c.log_ratio) >= MAX_EXPONENT),
    }


def _weight_sums(c: _Columns) -> dict[str, Array]:
    ratio, less_one = ratio_of(c.log_ratio), ratio_minus_one_of(c.log_ratio)
    moment, in_region = second_moment(c.log_ratio), trust_region(c.log_ratio, c.advantages)
    return {
        "m2_all": row_sum(moment, c.usable),
        "m2_trust_region": row_sum(moment, in_region),
        "m2_kept": row_sum(moment, in_region & c.kept),
        "ratio": row_sum(ratio, c.usable),
        "ratio_squared": row_sum(ratio**2, c.usable),
        "chi2": row_sum(less_one**2, c.usable),
        "k1": row_sum(-c.log_ratio, c.usable),
        "k3": row_sum(less_one - c.log_ratio, c.usable),
    }


def _of_entropy(c: _Columns, entropy: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    distance = jnp.abs(ratio_minus_one_of(c.log_ratio))
    # Below r = 1 the distance is below 1, and reaches it by rounding alone.
    distance = jnp.where(c.log_ratio < 0.0, jnp.minimum(distance, _BELOW_ONE), distance)
    finite = c.usable & jnp.isfinite(entropy)
    bounds = zip((0.0, *RATIO_EDGES), (*RATIO_EDGES, math.inf), strict=True)
    bins = [finite & (distance >= low) & (distance < high) for low, high in bounds]
    kinds = {"kept_with_entropy": finite & c.kept, "masked_with_entropy": finite & ~c.kept}
    kinds |= {f"ratio_bin_{i}": inside for i, inside in enumerate(bins)}
    sums = {
        "entropy_kept": row_sum(entropy, finite & c.kept),
        "entropy_masked": row_sum(entropy, finite & ~c.kept),
        "entropy_by_ratio": jnp.stack([row_sum(entropy, inside) for inside in bins], axis=1),
    }
    return kinds, sums


def _of_distribution(c: _Columns, staleness: Array | np.ndarray | None) -> Metrics:
    rows, age_count = c.log_ratio.shape[0], 1 if staleness is None else len(AGE_EDGES) + 1
    ages_B1 = jnp.zeros((rows, 1), jnp.int32) if staleness is None else _age_bins(staleness)
    fine = fine_histogram(c.log_ratio, c.advantages, c.usable, ages_B1, age_count)
    empty = jnp.sum(fine, dtype=jnp.int32) == 0
    levels = jnp.where(empty, 0.0, ratio_of(quantiles(fine, tuple(QUANTILES.values()))))
    return {"log_ratio_histogram": coarse(fine).astype(jnp.float32), **dict(zip(QUANTILES, levels, strict=True))}


def _age_bins(staleness_B: Array | np.ndarray) -> Array:
    if isinstance(staleness_B, np.ndarray):  # may hold 64 bits, which JAX would cut to 32
        staleness_B = np.clip(staleness_B, 0, AGE_EDGES[-1])
    ages_B = jnp.asarray(staleness_B).astype(jnp.int32)
    return jnp.sum(ages_B[:, None] >= jnp.asarray(AGE_EDGES)[None, :], axis=1, keepdims=True, dtype=jnp.int32)


def _of_advantages(c: _Columns) -> Metrics:
    """Mean, deviation and share of zeros, around the mean itself: moments about 0 would cancel."""
    lengths = jnp.sum(c.response_mask, axis=1, dtype=jnp.float32)
    nonempty = lengths > 0.0
    tokens = jnp.sum(lengths)
    weighted = lambda x: jnp.sum(_row_sums(x, c.response_mask, lengths))  # noqa: E731
    mean = _divide(weighted(c.advantages), tokens)
    variance = _divide(weighted((c.advantages - mean) ** 2), tokens)
    silent = nonempty & jnp.all(c.advantages == 0.0, axis=1)
    return {
        "advantage_mean": mean,
        "advantage_std": jnp.sqrt(variance),
        "no_signal_frac": _divide(_number(silent), _number(nonempty)),
    }


def _row_sums(x: Array, mask_BT: Array, lengths_B: Array) -> Array:
    if x.shape[1] == 1:
        return jnp.where(lengths_B > 0.0, x[:, 0] * lengths_B, 0.0)
    return jnp.sum(jnp.where(mask_BT, x, 0.0), axis=1)


def _finished(totals: Totals) -> Metrics:
    """The divisions, once, after everything has been added up."""
    counts = totals.counts
    lost = {"masked": counts["tokens"] - counts["kept"], "nonfinite": counts["tokens"] - counts["usable"]}
    s = {name: x.astype(jnp.float32) for name, x in (counts | lost).items()} | totals.sums
    most = {name: jnp.where(x == -jnp.inf, 0.0, x) for name, x in totals.maxima.items()}
    n, usable = s["tokens"], s["usable"]
    found = {
        "tokens": n,
        "masked_frac": _divide(s["masked"], n),
        "eps_clipped_frac": _divide(s["eps_clipped"], n),
        "trust_region_frac": _divide(s["trust_region"], n),
        "m2_all": _divide(s["m2_all"], usable),
        "m2_trust_region": _divide(s["m2_trust_region"], s["trust_region"]),
        "m2_kept": _divide(s["m2_kept"], s["trust_region_kept"]),
        "ratio_mean": _divide(s["ratio"], usable),
        "ratio_max": jnp.where(usable > 0.0, ratio_of(most["log_ratio"]), 0.0),
        "log_ratio_min": -most["negative_log_ratio"],
        "log_ratio_max": most["log_ratio"],
        "k1": _divide(s["k1"], usable),
        "k3": _divide(s["k3"], usable),
        "ess": _divide(s["ratio"], usable) * _divide(s["ratio"], s["ratio_squared"]),
        "chi2": _divide(s["chi2"], usable),
        "saturated_frac": _divide(s["saturated"], n),
        "nonfinite_tokens": s["nonfinite"],
        "all_masked": ((n > 0.0) & (s["kept"] == 0.0)).astype(jnp.float32),
    }
    if "entropy_kept" in s:
        found |= _finished_entropy(s)
    if "reference_kl" in s:
        found["reference_kl"] = _divide(s["reference_kl"], usable)
    return found


def _finished_entropy(s: dict[str, Array]) -> Metrics:
    kept, masked = s["kept_with_entropy"], s["masked_with_entropy"]
    tokens = jnp.stack([s[f"ratio_bin_{i}"] for i in range(len(RATIO_EDGES) + 1)])
    return {
        "entropy_mean": _divide(s["entropy_kept"] + s["entropy_masked"], kept + masked),
        "entropy_kept": _divide(s["entropy_kept"], kept),
        "entropy_masked": _divide(s["entropy_masked"], masked),
        "entropy_by_ratio": _divide(s["entropy_by_ratio"], tokens),
        "tokens_by_ratio": tokens,
    }


def _number(where: Array) -> Array:
    return jnp.sum(where, dtype=jnp.int32).astype(jnp.float32)


def _divide(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 where the denominator is 0."""
    return jnp.where(denominator > 0.0, numerator / jnp.where(denominator > 0.0, denominator, 1.0), 0.0)
