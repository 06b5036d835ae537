"""The objectives and metrics once more, slowly: NumPy float64, exact where a decision is made, token by token.

Written from the papers and the definitions in docstrings, with no code of the package. The inputs are float32, and so
are the differences of log-probs and their squares; from there on everything is exact or float64.
"""

import bisect
import math
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

TINY = 2.0**-126
LIMIT = 2.0**96
MAX_EXPONENT = 20.0

LOSS = {"aggregation": "token_mean", "length_constant": 1.0, "kl_coefficient": 0.0, "kl_estimator": "k3"}
CLIP = LOSS | {"epsilon_low": 0.2, "epsilon_high": 0.2}
M2PO = {"threshold": 0.04, "mask_scope": "minibatch"}
DEFAULTS = {
    "m2po": LOSS | M2PO,
    "m2po_clip": LOSS | M2PO,
    "m2po_all_tokens": CLIP | M2PO | {"denominator": "all"},
    "grpo": CLIP,
    "grpo_no_tr": LOSS,
    "gspo": CLIP | {"aggregation": "sequence_mean", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "dapo": CLIP | {"epsilon_high": 0.28, "overlong_filter": True},
    "dr_grpo": CLIP | {"aggregation": "constant_sum"},
    "cispo": LOSS | {"epsilon_low": 1.0, "epsilon_high": 4.0},
    "decoupled_ppo": CLIP,
    "tis": CLIP | {"cap": 2.0},
    "icepop": CLIP | {"weight_low": 0.5, "weight_high": 5.0},
    "sapo": LOSS | {"aggregation": "sequence_mean", "tau_positive": 1.0, "tau_negative": 1.05},
    "topr": LOSS | {"cap": 1.0},
    "gmpo": LOSS | {"aggregation": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
}
NAMES = tuple(DEFAULTS)


@dataclass
class Batch:
    """One batch as float64, log-ratios 0 where a token is not usable; XLA reads subnormals as 0."""

    logprobs: np.ndarray
    log_ratio: np.ndarray
    proximal_log_ratio: np.ndarray
    log_weight: np.ndarray
    reference_log_ratio: np.ndarray | None
    advantages: np.ndarray
    mask: np.ndarray
    usable: np.ndarray
    truncated: np.ndarray
    nonfinite: dict = field(default_factory=dict)
    entropy: np.ndarray | None = None
    staleness: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        policy_logprobs,
        behavior_logprobs,
        advantages,
        response_mask,
        proximal_logprobs=None,
        reference_logprobs=None,
        finish_reason=None,
        entropy=None,
        staleness=None,
    ):
        """From the arguments of an objective."""
        policy = np.asarray(policy_logprobs, np.float32)
        given = {"behavior": behavior_logprobs, "proximal": proximal_logprobs, "reference": reference_logprobs}
        given = {name: np.asarray(x, np.float32) for name, x in given.items() if x is not None}
        usable = response_mask.copy()
        for other in given.values():
            usable &= np.isfinite(_difference(policy, other))
        apart = {name: np.where(usable, _difference(policy, other), 0.0) for name, other in given.items()}
        weight = np.zeros(usable.shape)
        if "proximal" in given:
            weight = np.where(usable, _difference(given["proximal"], given["behavior"]), 0.0)
        wide = np.broadcast_to(np.asarray(advantages, np.float64), usable.shape)
        return cls(
            logprobs=np.where(usable, policy, 0.0).astype(np.float64),
            log_ratio=apart["behavior"],
            proximal_log_ratio=apart.get("proximal", apart["behavior"]),
            log_weight=weight,
            reference_log_ratio=apart.get("reference"),
            advantages=np.where(response_mask, wide, 0.0),
            mask=response_mask,
            usable=usable,
            truncated=np.zeros(len(usable), bool) if finish_reason is None else np.asarray(finish_reason) == 1,
            nonfinite={
                name: int((response_mask & ~np.isfinite(x)).sum()) for name, x in ({"policy": policy} | given).items()
            },
            entropy=entropy,
            staleness=staleness,
        )

    def moved(self, token, step):
        """The batch with the policy's log-prob of one usable token moved, in float64."""
        moved = {}
        for name in ("logprobs", "log_ratio", "proximal_log_ratio", "reference_log_ratio"):
            x = getattr(self, name)
            if x is not None:
                moved[name] = x.copy()
                moved[name][token] += step
        return Batch(**{**vars(self), **moved})

    def tokens(self):
        return [token for token in np.ndindex(self.mask.shape) if self.mask[token]]

    def usable_tokens(self):
        return [token for token in self.tokens() if self.usable[token]]

    def lengths(self):
        return self.mask.sum(axis=1)


def _difference(a, b):
    """float32 subtraction, as float64, subnormal -> 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = a - b
        return np.where(np.abs(difference) < TINY, 0.0, difference).astype(np.float64)


def second_moment(log_ratio):
    """float32 square, subnormal -> 0, huge -> LIMIT; returned as a Python float."""
    with np.errstate(over="ignore", under="ignore"):
        square = float(np.float32(log_ratio) * np.float32(log_ratio))
    return 0.0 if square < TINY else min(square, LIMIT)


def in_trust_region(log_ratio, advantage):
    return (advantage >= TINY and log_ratio >= TINY) or (advantage <= -TINY and log_ratio <= -TINY)


def trust_region(batch):
    return [(i, t) for i, t in batch.tokens() if in_trust_region(batch.log_ratio[i, t], batch.advantages[i, t])]


def mean(values):
    return sum(map(Fraction, values), Fraction(0)) / len(values)


def exact(threshold):
    """The threshold as read: float32."""
    return Fraction(float(np.float32(threshold)))


def algorithm_1(batch, threshold):
    """Kept tokens, bool (B, T): while the mean over T exceeds tau, drop the largest value, its equals with it."""
    values = {token: second_moment(batch.log_ratio[token]) for token in trust_region(batch)}
    kept = batch.usable.copy()
    while values and mean(values.values()) > exact(threshold):
        _drop_largest(values, kept)
    return kept


def _drop_largest(values, kept):
    largest = max(values.values())
    for token in [token for token, value in values.items() if value == largest]:
        kept[token] = False
        del values[token]


def winsorised_cap(values, threshold):
    """The largest value c with mean(min(v, c)) <= tau; inf where the plain mean is within tau, 0 where no c is."""
    if not values or mean(values) <= exact(threshold):
        return math.inf
    within = [c for c in set(values) if mean([min(v, c) for v in values]) <= exact(threshold)]
    return max(within, default=0.0)


def winsorised_clip(batch, threshold):
    """Kept tokens and the cap c of the authors' variant."""
    values = {token: second_moment(batch.log_ratio[token]) for token in trust_region(batch)}
    cap = winsorised_cap(list(values.values()), threshold)
    kept = batch.usable.copy()
    for token, value in values.items():
        kept[token] = value <= cap
    return kept, cap


def all_tokens_mask(batch, threshold):
    """Kept tokens of AReaL's variant: all tokens' (log w)^2, mean strictly below tau, the smallest values stay."""
    values = {token: second_moment(batch.log_weight[token]) for token in batch.usable_tokens()}
    kept = batch.usable.copy()
    while len(set(values.values())) > 1 and mean(values.values()) >= exact(threshold):
        _drop_largest(values, kept)
    return kept


def ratio(log_ratio):
    return math.exp(min(max(log_ratio, -MAX_EXPONENT), MAX_EXPONENT))


def ratio_slope(log_ratio):
    """d ratio / d log_ratio."""
    return ratio(log_ratio) if abs(log_ratio) < MAX_EXPONENT else 0.0


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


@dataclass
class Terms:
    """What the tokens of a batch add to J, before weights."""

    gain: np.ndarray
    """(B, T)"""
    slope: np.ndarray
    """(B, T, T): [i, t, s] is the derivative of gain[i, t] with respect to the policy's log-prob of token s."""
    kept: np.ndarray
    """(B, T)"""
    slope_size: np.ndarray
    """(B, T, T): sum of the absolute values that a slope is the sum of."""

    @classmethod
    def none(cls, shape):
        square = (*shape, shape[1])
        return cls(np.zeros(shape), np.zeros(square), np.zeros(shape, bool), np.zeros(square))


def by_token(batch, rule):
    """Terms where each token stands alone: rule(token) -> gain, slope, kept, perhaps the size of the slope's parts."""
    terms = Terms.none(batch.mask.shape)
    for i, t in batch.usable_tokens():
        gain, slope, kept, *size = rule((i, t))
        terms.gain[i, t], terms.slope[i, t, t], terms.kept[i, t] = gain, slope, kept
        terms.slope_size[i, t, t] = size[0] if size else abs(slope)
    return terms


def clip_bound(log_ratio, advantage, low, high):
    """The bound that PPO's pessimistic minimum picks in place of the ratio, or None where it picks the ratio."""
    if advantage > 0 and log_ratio > math.log1p(high):
        return 1 + high
    if advantage < 0 and log_ratio < math.log1p(-low):
        return 1 - low
    return None


def pessimistic(s, log_ratio, advantage, decided_on):
    """min(r A, clip(r) A): value, slope, whether the gradient passes."""
    bound = clip_bound(decided_on, advantage, s.epsilon_low, s.epsilon_high)
    if bound is None:
        return ratio(log_ratio) * advantage, ratio_slope(log_ratio) * advantage, True
    return bound * advantage, 0.0, False


def plain(batch, token):
    """r A."""
    return ratio(batch.log_ratio[token]) * batch.advantages[token], _slope(batch, token), True


def _slope(batch, token):
    return ratio_slope(batch.log_ratio[token]) * batch.advantages[token]


DROPPED = (0.0, 0.0, False)


def _m2po(s, batch, decided):
    kept = algorithm_1(decided, s.threshold)
    return by_token(batch, lambda token: plain(batch, token) if kept[token] else DROPPED)


def _m2po_clip(s, batch, decided):
    kept, cap = winsorised_clip(decided, s.threshold)

    def rule(token):
        advantage = batch.advantages[token]
        if kept[token]:
            return plain(batch, token)
        return ratio(math.copysign(math.sqrt(cap), advantage)) * advantage, 0.0, False

    return by_token(batch, rule)


def _weighted(s, batch, decided, weight_of):
    """PPO's clip around the proximal policy with a weight for each token, None where it is dropped."""

    def rule(token):
        weight = weight_of(token)
        if weight is None:
            return DROPPED
        advantage, x = batch.advantages[token], batch.proximal_log_ratio[token]
        gain, slope, kept = pessimistic(s, x, advantage, decided.proximal_log_ratio[token])
        return weight * gain, weight * slope, kept

    return by_token(batch, rule)


def _m2po_all_tokens(s, batch, decided):
    kept = all_tokens_mask(decided, s.threshold)
    scale = len(batch.tokens()) / max(int(kept.sum()), 1) if s.denominator == "kept" else 1.0
    return _weighted(s, batch, decided, lambda token: scale * ratio(batch.log_weight[token]) if kept[token] else None)


def _decoupled_ppo(s, batch, decided):
    return _weighted(s, batch, decided, lambda token: ratio(batch.log_weight[token]))


def _tis(s, batch, decided):
    return _weighted(s, batch, decided, lambda token: min(ratio(batch.log_weight[token]), s.cap))


def _icepop(s, batch, decided):
    def weight(token):
        log_weight = batch.log_weight[token]
        inside = math.log(s.weight_low) <= log_weight <= math.log(s.weight_high)
        return ratio(log_weight) if inside else None

    return _weighted(s, batch, decided, weight)


def _grpo(s, batch, decided):
    return by_token(
        batch, lambda token: pessimistic(s, batch.log_ratio[token], batch.advantages[token], decided.log_ratio[token])
    )


def _grpo_no_tr(s, batch, decided):
    return by_token(batch, lambda token: plain(batch, token))


def _dapo(s, batch, decided):
    terms = _grpo(s, batch, decided)
    for i in np.flatnonzero(batch.truncated & s.overlong_filter):
        terms.gain[i], terms.slope[i], terms.kept[i], terms.slope_size[i] = 0.0, 0.0, False, 0.0
    return terms


def _cispo(s, batch, decided):
    def rule(token):
        weight = min(max(ratio(decided.log_ratio[token]), 1 - s.epsilon_low), 1 + s.epsilon_high)
        weighted = weight * batch.advantages[token]
        return weighted * batch.logprobs[token], weighted, True

    return by_token(batch, rule)


def _topr(s, batch, decided):
    def rule(token):
        product = ratio(math.fsum(decided.log_ratio[token[0]]))
        advantage = batch.advantages[token]
        weighted = advantage * (min(product, s.cap) if advantage < 0 else 1.0)
        return weighted * batch.logprobs[token], weighted, True

    return by_token(batch, rule)


def _sapo(s, batch, decided):
    def rule(token):
        advantage, x = batch.advantages[token], batch.log_ratio[token]
        tau = s.tau_positive if advantage > 0 else s.tau_negative
        gate = sigmoid(tau * (ratio(x) - 1))
        slope = 4 * gate * (1 - gate) * ratio_slope(x) * advantage
        return 4 / tau * gate * advantage, slope, True, abs(4 * gate * ratio_slope(x) * advantage)

    return by_token(batch, rule)


def _gspo(s, batch, decided):
    terms = Terms.none(batch.mask.shape)
    for i, t in batch.usable_tokens():
        length, members = batch.lengths()[i], batch.usable[i]
        x, decided_x = (math.fsum(b.log_ratio[i]) / length for b in (batch, decided))
        gain, slope, kept = pessimistic(s, x, batch.advantages[i, t], decided_x)
        terms.gain[i, t], terms.slope[i, t, members], terms.kept[i, t] = gain, slope / length, kept
        terms.slope_size[i, t, members] = abs(slope) / length
    return terms


def _gmpo(s, batch, decided):
    def clipped(token):
        """The bound of a clipped log-ratio, else None."""
        advantage, x = batch.advantages[token], decided.log_ratio[token]
        if advantage > 0 and x > s.clip_high:
            return s.clip_high
        return -s.clip_low if advantage < 0 and x < -s.clip_low else None

    bounds = {token: clipped(token) for token in batch.usable_tokens()}
    terms = Terms.none(batch.mask.shape)
    for i, t in bounds:
        length, members = batch.lengths()[i], [u for j, u in bounds if j == i]
        xs = [batch.log_ratio[i, u] if bounds[i, u] is None else bounds[i, u] for u in members]
        advantage, x = batch.advantages[i, t], math.fsum(xs) / length
        terms.gain[i, t], terms.kept[i, t] = ratio(x) * advantage, bounds[i, t] is None
        for u in members:
            terms.slope[i, t, u] = ratio_slope(x) * advantage / length if bounds[i, u] is None else 0.0
    terms.slope_size = np.abs(terms.slope)
    return terms


RULES = {
    "m2po": _m2po,
    "m2po_clip": _m2po_clip,
    "m2po_all_tokens": _m2po_all_tokens,
    "grpo": _grpo,
    "grpo_no_tr": _grpo_no_tr,
    "gspo": _gspo,
    "dapo": _dapo,
    "dr_grpo": _grpo,
    "cispo": _cispo,
    "decoupled_ppo": _decoupled_ppo,
    "tis": _tis,
    "icepop": _icepop,
    "sapo": _sapo,
    "topr": _topr,
    "gmpo": _gmpo,
}


@dataclass
class Result:
    """An objective's loss, its gradient by the policy log-probs, and what is kept."""

    loss: float
    gradient: np.ndarray
    kept: np.ndarray
    loss_size: float
    """Sum of the absolute values that the loss is the sum of; float32 rounds in proportion to it."""
    gradient_size: np.ndarray
    """The same of the gradient."""


def settings(name, **changed):
    assert changed.keys() <= DEFAULTS[name].keys(), changed
    return SimpleNamespace(**(DEFAULTS[name] | changed))


def objective(name, batch, decided_on=None, **changed):
    """The `Result` of an objective on a batch.

    What it masks or clips, and what is constant for the gradient, follows from `decided_on`, by default the batch.
    """
    s = settings(name, **changed)
    terms = RULES[name](s, batch, decided_on or batch)
    weights = token_weights(s, batch)
    losses, sizes = -terms.gain, np.abs(terms.gain)
    gradient = -np.einsum("i,its->is", weights, terms.slope)
    gradient_size = np.einsum("i,its->is", weights, terms.slope_size)
    if s.kl_coefficient:
        for i, t in batch.usable_tokens():
            value, slope, size, slope_size = penalty(s.kl_estimator, batch.reference_log_ratio[i, t])
            losses[i, t] += s.kl_coefficient * value
            sizes[i, t] += s.kl_coefficient * size
            gradient[i, t] += weights[i] * s.kl_coefficient * slope
            gradient_size[i, t] += weights[i] * s.kl_coefficient * slope_size
    loss, loss_size = (math.fsum((weights[:, None] * x).ravel()) for x in (losses, sizes))
    return Result(loss, gradient, terms.kept, loss_size, gradient_size)


def token_weights(s, batch):
    """Weight of each token of each response, (B,)."""
    tokens, responses = int(batch.mask.sum()), int(batch.mask.any(axis=1).sum())
    if s.aggregation == "token_mean":
        return np.full(len(batch.mask), 1 / max(tokens, 1))
    if s.aggregation == "sequence_mean":
        return np.asarray([1 / (responses * length) if length else 0.0 for length in batch.lengths()])
    assert s.aggregation == "constant_sum"
    return np.full(len(batch.mask), 1 / (max(responses, 1) * s.length_constant))


def penalty(estimator, x):
    """Value and slope of the KL estimate at x = log policy - log reference, and the sizes of their parts."""
    if estimator == "k1":
        return x, 1.0, abs(x), 1.0
    if estimator == "k2":
        return x**2 / 2, x, x**2 / 2, abs(x)
    if x <= -MAX_EXPONENT:
        return math.expm1(MAX_EXPONENT) - MAX_EXPONENT, 0.0, math.exp(MAX_EXPONENT), 0.0
    inverse = math.expm1(-x)
    return inverse + x, 1.0 - math.exp(-x), abs(inverse) + abs(x), 1.0 + math.exp(-x)


SIZES = [2.0**k for k in range(-10, 5)]
AGE_EDGES = (1, 4, 16, 64, 256, 1024)
RATIO_EDGES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
QUANTILES = {"ratio_p01": 10, "ratio_p50": 500, "ratio_p99": 990, "ratio_p999": 999}
EXACT = ("tokens", "nonfinite_tokens", "all_masked", "log_ratio_histogram", "tokens_by_ratio", *QUANTILES)
"""Metrics in which nothing is rounded, but for the exponential of a quantile."""


def metrics(batch, kept, loss):
    """Every metric of m2po_jax.objectives, in float64, from its definition."""
    x = batch.log_ratio[batch.usable]
    r = np.array([ratio(y) for y in x])
    less_one = np.array([_ratio_minus_one(y) for y in x])
    everywhere, region = batch.tokens(), trust_region(batch)
    n = len(everywhere)
    found = {
        "loss": loss,
        "tokens": n,
        "masked_frac": _share(sum(not kept[token] for token in everywhere), n),
        "eps_clipped_frac": _share(sum(_ppo_would_clip(batch, token) for token in batch.usable_tokens()), n),
        "trust_region_frac": _share(len(region), n),
        "m2_all": _mean([second_moment(y) for y in x]),
        "m2_trust_region": _mean([second_moment(batch.log_ratio[token]) for token in region]),
        "m2_kept": _mean([second_moment(batch.log_ratio[token]) for token in region if kept[token]]),
        "ratio_mean": _mean(r),
        "ratio_max": max(r, default=0.0),
        "log_ratio_min": min(x, default=0.0),
        "log_ratio_max": max(x, default=0.0),
        **{name: ratio(quantile(x, thousandths)) if len(x) else 0.0 for name, thousandths in QUANTILES.items()},
        "k1": _mean(-x),
        "k3": _mean(less_one - x),
        "ess": _share(math.fsum(r) ** 2, len(r) * math.fsum(r**2)),
        "chi2": _mean(less_one**2),
        "saturated_frac": _share(int(np.sum(np.abs(x) >= MAX_EXPONENT)), n),
        "nonfinite_tokens": n - len(x),
        **{f"nonfinite_{name}": number for name, number in batch.nonfinite.items()},
        "all_masked": float(n > 0 and not kept.any()),
        **_of_advantages(batch),
        "log_ratio_histogram": _histogram(batch),
    }
    if batch.reference_log_ratio is not None:
        found["reference_kl"] = _mean([penalty("k3", y)[0] for y in batch.reference_log_ratio[batch.usable]])
    return found | (_of_entropy(batch, kept) if batch.entropy is not None else {})


def _ratio_minus_one(log_ratio):
    return math.expm1(min(max(log_ratio, -MAX_EXPONENT), MAX_EXPONENT))


def _ppo_would_clip(batch, token):
    return clip_bound(batch.log_ratio[token], batch.advantages[token], 0.2, 0.2) is not None


def quantile(values, thousandths):
    """The smallest value v, of those cut as for quantiles, with at least so many thousandths of the values <= v."""
    values = sorted(map(cut, values))
    needed = math.ceil(Fraction(thousandths * len(values), 1000))
    return next(v for v in sorted(set(values)) if bisect.bisect_right(values, v) >= needed)


def cut(x):
    """The float32 towards 0 to bfloat16, its upper 16 bits; 0 below 2^-10 and at most 31.875 in size."""
    if abs(x) < 2.0**-10:
        return 0.0
    upper = (np.float32(abs(x)).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return math.copysign(min(float(upper), 31.875), x)


def _of_advantages(batch):
    a = np.array([batch.advantages[token] for token in batch.tokens()])
    rows = np.flatnonzero(batch.mask.any(axis=1))
    return {
        "advantage_mean": _mean(a),
        "advantage_std": float(a.std()) if len(a) else 0.0,
        "no_signal_frac": _share(sum(not batch.advantages[i].any() for i in rows), len(rows)),
    }


def _bin(value, edges):
    """How many edges are at or below the value."""
    return sum(value >= edge for edge in edges)


def _histogram(batch):
    counts = np.zeros((1 if batch.staleness is None else len(AGE_EDGES) + 1, 3, 2 * len(SIZES) + 1), int)
    for i, t in batch.usable_tokens():
        age = 0 if batch.staleness is None else _bin(batch.staleness[i], AGE_EDGES)
        sign, side = np.sign([batch.advantages[i, t], batch.log_ratio[i, t]]).astype(int)
        counts[age, 1 + sign, len(SIZES) + side * _bin(abs(batch.log_ratio[i, t]), SIZES)] += 1
    return counts


def _of_entropy(batch, kept):
    tokens = [token for token in batch.usable_tokens() if np.isfinite(batch.entropy[token])]
    bins = [[] for _ in range(len(RATIO_EDGES) + 1)]
    for token in tokens:
        bins[_bin(abs(_ratio_minus_one(batch.log_ratio[token])), RATIO_EDGES)].append(float(batch.entropy[token]))
    return {
        "entropy_mean": _mean([float(batch.entropy[token]) for token in tokens]),
        "entropy_kept": _mean([float(batch.entropy[token]) for token in tokens if kept[token]]),
        "entropy_masked": _mean([float(batch.entropy[token]) for token in tokens if not kept[token]]),
        "entropy_by_ratio": np.array([_mean(values) for values in bins]),
        "tokens_by_ratio": np.array([len(values) for values in bins]),
    }


def _share(part, whole):
    return part / whole if whole else 0.0


def _mean(values):
    return math.fsum(values) / len(values) if len(values) else 0.0


def group_advantages(rewards, group_ids, normalize="std"):
    """Group-relative advantages, group by group."""
    rewards, out = np.asarray(rewards, np.float64), np.zeros(len(rewards))
    for group in set(np.asarray(group_ids).tolist()):
        members = np.flatnonzero(np.asarray(group_ids) == group)
        values = rewards[members]
        if len(set(values)) > 1:
            centred = values - values.mean()
            out[members] = centred / (values.std(ddof=1) + 1e-6) if normalize == "std" else centred
    return out
