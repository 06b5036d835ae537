"""The objectives once more, slowly: NumPy float64, exact fractions where a decision is made, loops as in the paper."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

TINY = 2.0**-126
LIMIT = 2.0**96
NAMES = ("m2po", "m2po_clip", "grpo", "grpo_no_tr", "gspo")


@dataclass
class Batch:
    """One batch as float64: log_ratio 0 and usable False where masked or not finite; XLA reads subnormals as 0."""

    log_ratio: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    usable: np.ndarray

    @classmethod
    def of(cls, policy, behavior, advantages, mask):
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.asarray(policy, np.float32) - np.asarray(behavior, np.float32)
        usable = mask & np.isfinite(difference)
        log_ratio = np.where(usable & (np.abs(difference) >= TINY), difference, 0.0).astype(np.float64)
        wide = np.broadcast_to(np.asarray(advantages, np.float64), mask.shape)
        return cls(log_ratio, np.where(mask, wide, 0.0), mask, usable)

    def tokens(self):
        return [(i, t) for i, t in np.ndindex(self.mask.shape) if self.mask[i, t]]


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


def algorithm_1(batch, threshold):
    """Kept tokens, bool (B, T): while the mean over T exceeds tau, drop the largest value, its equals with it."""
    tau = Fraction(float(np.float32(threshold)))
    values = {token: second_moment(batch.log_ratio[token]) for token in trust_region(batch)}
    kept = batch.usable.copy()
    while values and mean(values.values()) > tau:
        largest = max(values.values())
        for token in [token for token, value in values.items() if value == largest]:
            kept[token] = False
            del values[token]
    return kept


def winsorised_cap(values, threshold):
    """The largest value c with mean(min(v, c)) <= tau; inf where the plain mean is within tau, 0 where no c is."""
    tau = Fraction(float(np.float32(threshold)))
    if not values or mean(values) <= tau:
        return math.inf
    within = [c for c in values if mean([min(v, c) for v in values]) <= tau]
    return max(within, default=0.0)


def winsorised_clip(batch, threshold):
    """Kept tokens and the cap c of the authors' variant."""
    values = {token: second_moment(batch.log_ratio[token]) for token in trust_region(batch)}
    cap = winsorised_cap(list(values.values()), threshold)
    kept = batch.usable.copy()
    for token, value in values.items():
        kept[token] = value <= cap
    return kept, cap


def nearly_undecided(batch, threshold):
    """Whether the sum behind some decision lies within the stated rounding bound of 0 (see m2po_jax's cutoffs)."""
    tau = Fraction(float(np.float32(threshold)))
    values = [Fraction(second_moment(batch.log_ratio[token])) for token in trust_region(batch)]
    removed = [[v - tau for v in values if v <= c] for c in set(values)]
    winsorised = [[min(v, c) - tau for v in values] for c in set(values)]
    return any(_is_close(terms) for terms in removed + winsorised)


def _is_close(terms):
    one_sided = all(x <= 0 for x in terms) or all(x > 0 for x in terms)
    return not one_sided and abs(sum(terms)) <= Fraction(4 * len(terms), 2**48) * sum(map(abs, terms))


def ratio(log_ratio):
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def ratio_slope(log_ratio):
    """d ratio / d log_ratio."""
    return ratio(log_ratio) if abs(log_ratio) < 20.0 else 0.0


def clip_bound(log_ratio, advantage, low, high):
    """The bound that PPO's pessimistic minimum picks in place of the ratio, or None where it picks the ratio."""
    if advantage > 0 and log_ratio > math.log1p(high):
        return 1 + high
    if advantage < 0 and log_ratio < math.log1p(-low):
        return 1 - low
    return None


def objective(name, batch, decided_on=None, **hyperparameters):
    """(loss, gradient with respect to the policy log-probs, kept) in float64.

    What a token objective masks or clips, and where, follows from `decided_on`, by default the batch itself.
    """
    if name == "gspo":
        return _gspo(batch, **hyperparameters)
    count = max(len(batch.tokens()), 1)
    loss, gradient, kept = 0.0, np.zeros(batch.mask.shape), np.zeros(batch.mask.shape, bool)
    bounds = _token_bounds(name, decided_on or batch, **hyperparameters)
    for token in [token for token in batch.tokens() if batch.usable[token]]:
        log_ratio, advantage = batch.log_ratio[token], batch.advantages[token]
        if bounds[token] is None:
            kept[token] = True
            loss -= ratio(log_ratio) * advantage / count
            gradient[token] = -ratio_slope(log_ratio) * advantage / count
        else:
            loss -= bounds[token] * advantage / count
    return loss, gradient, kept


def _token_bounds(name, batch, threshold=0.04, epsilon_low=0.2, epsilon_high=0.2):
    """Constant that stands for the ratio of each token (0: the token is dropped), None where the ratio itself does."""
    if name == "m2po":
        kept = algorithm_1(batch, threshold)
        return {token: None if kept[token] else 0.0 for token in batch.tokens()}
    if name == "m2po_clip":
        kept, cap = winsorised_clip(batch, threshold)
        bound = {1.0: ratio(math.sqrt(cap)), -1.0: ratio(-math.sqrt(cap))} if cap < math.inf else {}
        return {t: None if kept[t] else bound.get(np.sign(batch.advantages[t]), 0.0) for t in batch.tokens()}
    if name == "grpo":
        args = {token: (batch.log_ratio[token], batch.advantages[token]) for token in batch.tokens()}
        return {token: clip_bound(*args[token], epsilon_low, epsilon_high) for token in args}
    return dict.fromkeys(batch.tokens())


def _gspo(batch, epsilon_low=3e-4, epsilon_high=4e-4):
    loss, gradient, kept = 0.0, np.zeros(batch.mask.shape), np.zeros(batch.mask.shape, bool)
    count = max(int(batch.mask.any(axis=1).sum()), 1)
    for i in np.flatnonzero(batch.mask.any(axis=1)):
        length = int(batch.mask[i].sum())
        log_ratio = math.fsum(batch.log_ratio[i]) / length
        slope = 0.0
        for t in np.flatnonzero(batch.usable[i]):
            advantage = batch.advantages[i, t]
            bound = clip_bound(log_ratio, advantage, epsilon_low, epsilon_high)
            loss -= (ratio(log_ratio) if bound is None else bound) * advantage / length / count
            kept[i, t] = bound is None
            slope -= ratio_slope(log_ratio) * advantage / length / count if bound is None else 0.0
        gradient[i, batch.usable[i]] = slope / length
    return loss, gradient, kept


def metrics(batch, kept, loss):
    """Every metric of m2po_jax.objectives, in float64, from its definition."""
    x, r, v = _usable_weights(batch)
    everywhere, region = batch.tokens(), trust_region(batch)
    a = np.array([batch.advantages[token] for token in everywhere])
    rows = np.flatnonzero(batch.mask.any(axis=1))
    region_v = [second_moment(batch.log_ratio[token]) for token in region]
    kept_v = [second_moment(batch.log_ratio[token]) for token in region if kept[token]]
    n = len(everywhere)
    return {
        "loss": loss,
        "tokens": n,
        "masked_frac": _share(sum(not kept[token] for token in everywhere), n),
        "trust_region_frac": _share(len(region), n),
        "m2_all": _mean(v),
        "m2_trust_region": _mean(region_v),
        "m2_kept": _mean(kept_v),
        "ratio_mean": _mean(r),
        "ratio_max": max(r, default=0.0),
        "log_ratio_min": min(x, default=0.0),
        "log_ratio_max": max(x, default=0.0),
        "k1": _mean(-x),
        "k3": _mean(np.expm1(np.clip(x, -20, 20)) - x),
        "ess": _share(math.fsum(r) ** 2, len(r) * math.fsum(r**2)),
        "chi2": _mean(np.expm1(np.clip(x, -20, 20)) ** 2),
        "saturated_frac": _share(int(np.sum(np.abs(x) >= 20)), n),
        "nonfinite_tokens": n - len(x),
        "all_masked": float(n > 0 and not kept.any()),
        "advantage_mean": _mean(a),
        "advantage_std": float(a.std()) if n else 0.0,
        "no_signal_frac": _share(sum(not batch.advantages[i].any() for i in rows), len(rows)),
    }


def _usable_weights(batch):
    x = batch.log_ratio[batch.usable]
    return x, np.array([ratio(y) for y in x]), np.array([second_moment(y) for y in x])


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
