"""Batches for the tests, drawn by hypothesis (ties, zeros, huge values) or seeded (well-behaved); their outcomes."""

from typing import NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m2po_jax.objectives.metrics import measure
from m2po_jax.objectives.tokens import counts_of, prepare

SHAPE = (4, 6)
"""One shape, so that what is jitted once is used by every example."""

SPECIAL = (0.0, 1e-3, 0.1, 0.2, 0.19999999, 0.25, 0.75, 1.0, 20.0, 200.0, 1e-21, 1e-40)
LARGE = (1e4,)
HUGE = (1e4, 1e10, 3e19, 1e30, 3e38)
LOGPROBS = ("policy_logprobs", "behavior_logprobs", "proximal_logprobs", "reference_logprobs")


def float32(low, high, allow_subnormal=True):
    return st.floats(np.float32(low), np.float32(high), width=32, allow_subnormal=allow_subnormal)


def log_ratios(large=HUGE):
    """(B, T) float32 with ties, zeros and, by default, what overflows when squared."""
    special = st.sampled_from(SPECIAL + large).flatmap(lambda x: st.sampled_from((x, -x)))
    elements = st.one_of(special, float32(-0.5, 0.5), float32(-3, 3)).map(np.float32)
    return hnp.arrays(np.float32, SHAPE, elements=elements)


def advantages(shape=None):
    """(B, 1) or (B, T) float32 with zeros; no subnormal ones, which XLA takes for 0 in one place and not in another."""
    elements = st.one_of(st.sampled_from((0.0, 1.0, -1.0)), float32(-2, 2, allow_subnormal=False)).map(np.float32)
    shapes = st.sampled_from((SHAPE, (SHAPE[0], 1))) if shape is None else st.just(shape)
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=elements))


def masks():
    return hnp.arrays(np.bool_, SHAPE, elements=st.sampled_from((True, True, True, False)))


def thresholds():
    return st.one_of(st.sampled_from((0.0, 1e-6, 0.04, 0.3125, 1.0, 1e30)), float32(0, 1)).map(np.float32)


@st.composite
def batches(draw, wide=False):
    """Arguments of an objective but for entropies and ages: log-ratios to 1e4, up to two log-probs not finite."""
    behavior = draw(hnp.arrays(np.float32, SHAPE, elements=st.sampled_from(np.float32([0.0, 0.0, -1.0, -0.3]))))
    policy = behavior + draw(log_ratios(LARGE))
    others = st.one_of(st.sampled_from((policy, behavior)), log_ratios(LARGE).map(lambda x: policy - x))
    batch = {
        "policy_logprobs": policy,
        "behavior_logprobs": behavior,
        "advantages": draw(advantages(SHAPE if wide else (SHAPE[0], 1))),
        "response_mask": draw(masks()),
        "proximal_logprobs": draw(others).copy(),
        "reference_logprobs": draw(others).copy(),
        "finish_reason": draw(hnp.arrays(np.int32, SHAPE[0], elements=st.integers(0, 1))),
    }
    token = st.tuples(st.integers(0, SHAPE[0] - 1), st.integers(0, SHAPE[1] - 1))
    missing = st.tuples(st.sampled_from(LOGPROBS), token, st.sampled_from((np.nan, np.inf, -np.inf)))
    for name, where, value in draw(st.lists(missing, max_size=2)):
        batch[name][where] = value
    return batch


@st.composite
def measured_batches(draw, wide=False):
    """The same with entropies, a few of them not finite, and ages."""
    entropies = st.one_of(float32(0, 12, allow_subnormal=False), st.sampled_from((np.nan, np.inf))).map(np.float32)
    ages = st.sampled_from((0, 1, 3, 4, 63, 64, 255, 256, 1023, 1024, 100_000))
    return draw(batches(wide)) | {
        "entropy": draw(hnp.arrays(np.float32, SHAPE, elements=entropies)),
        "staleness": draw(hnp.arrays(np.int32, SHAPE[0], elements=ages)),
    }


def normal_batch(seed, shape=SHAPE, spread=0.3, wide=False):
    """policy, behavior, advantages, mask with log-ratios of that spread and about a fifth of the tokens masked."""
    rng = np.random.default_rng(seed)
    behavior = rng.normal(-1.0, 0.5, shape).astype(np.float32)
    policy = behavior + rng.normal(0.0, spread, shape).astype(np.float32)
    advantages = rng.normal(0.0, 1.0, shape if wide else (shape[0], 1)).astype(np.float32)
    return policy, behavior, advantages, rng.random(shape) < 0.8


def full_batch(seed, shape=SHAPE, spread=0.3, wide=False):
    """All arguments of an objective: the proximal policy near, a reference, entropies, ages and one cut response."""
    policy, behavior, advantages, mask = normal_batch(seed, shape, spread, wide)
    rng = np.random.default_rng(seed + 1000)
    return {
        "policy_logprobs": policy,
        "behavior_logprobs": behavior,
        "advantages": advantages,
        "response_mask": mask,
        "proximal_logprobs": policy + rng.normal(0.0, spread / 2, shape).astype(np.float32),
        "reference_logprobs": policy + rng.normal(0.0, 2 * spread, shape).astype(np.float32),
        "finish_reason": np.arange(shape[0], dtype=np.int32) % 4 // 3,
        "entropy": rng.uniform(0.0, 2.0, shape).astype(np.float32),
        "staleness": rng.integers(0, 2000, shape[0], dtype=np.int32),
    }


def of_log_ratios(*responses, advantage=1.0, dtype=np.float32, shape=SHAPE):
    """Responses with those log-ratios to one older policy, which is proximal and reference policy too."""
    policy, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for i, log_ratio in enumerate(responses):
        policy[i, : len(log_ratio)] = log_ratio
        mask[i, : len(log_ratio)] = True
    older = np.zeros(shape, np.float32).astype(dtype)
    return {
        "policy_logprobs": policy.astype(dtype),
        "behavior_logprobs": older,
        "advantages": np.full((shape[0], 1), advantage, np.float32),
        "response_mask": mask,
        "proximal_logprobs": older,
        "reference_logprobs": older,
        "finish_reason": np.zeros(shape[0], np.int32),
        "entropy": np.ones(shape, np.float32),
        "staleness": np.zeros(shape[0], np.int32),
    }


class Outcome(NamedTuple):
    """What an objective makes of a batch."""

    loss: jax.Array
    gradient: jax.Array
    """By the policy log-probs."""
    kept: jax.Array
    by_others: dict[str, jax.Array]
    """Gradients by what is constant: the other log-probs and the advantages."""


def without_measurements(batch):
    """The arguments that can change a loss."""
    return {name: x for name, x in batch.items() if name not in ("entropy", "staleness")}


def outcome(objective, batch, statistics=None, counts=None):
    """Loss, gradient and kept tokens of a batch, or of a part of one with its statistics and counts; no metrics."""

    def loss_of(chosen):
        tokens = prepare(**(without_measurements(batch) | chosen))
        if counts is None:
            return objective.partial_loss(tokens, objective.statistics(tokens), counts_of(tokens))
        return objective.partial_loss(tokens, statistics, counts)

    chosen = {key: batch[key] for key in (*LOGPROBS, "advantages") if key in batch}
    (loss, kept), gradients = jax.value_and_grad(loss_of, has_aux=True)(chosen)
    return Outcome(loss, gradients.pop("policy_logprobs"), kept, gradients)


jitted_outcome = jax.jit(outcome, static_argnums=0)


@jax.jit
def metrics_of(batch, kept, loss):
    """The metrics of a batch with that outcome: one program for all objectives."""
    tokens = prepare(**without_measurements(batch))
    return measure(tokens, kept, loss, entropy=batch.get("entropy"), staleness=batch.get("staleness"))
