"""Drawing a token: the sets of top-p and top-k, the distribution, the log-prob before truncation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.generation.draw import BLOCK, WHOLE, Truncation, draw, truncated

SIZES = (5, BLOCK, 3 * BLOCK + 17)
TRUNCATIONS = [Truncation(0.7), Truncation(0.05), Truncation(0.999), Truncation(1.0, 1), Truncation(1.0, 4)]
TRUNCATIONS += [Truncation(0.6, 4), Truncation(0.5, 10**6)]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.float64(logits) - logits.max())
    return weights / weights.sum()


def allowed(probabilities: np.ndarray, truncation: Truncation) -> np.ndarray:
    """bool (V,): what may be drawn, by sorting."""
    order = np.argsort(-probabilities)
    order = order[: truncation.top_k]
    sums = np.cumsum(probabilities[order]) / probabilities[order].sum()
    kept = order[: int(np.argmax(sums >= truncation.top_p - 1e-12)) + 1] if truncation.top_p < 1.0 else order
    return np.isin(np.arange(len(probabilities)), kept)


def drawn(logits: np.ndarray, count: int, temperature=1.0, truncation=WHOLE) -> tuple[np.ndarray, np.ndarray]:
    """`count` draws from one row of logits."""
    rows = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (count, 1))
    keys = jax.random.split(jax.random.key(3), count)
    tokens, logprobs = jax.jit(draw, static_argnums=3)(rows, keys, np.float32(temperature), truncation)
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_what_may_be_drawn_is_what_sorting_says(size, truncation, rng):
    logits = rng.normal(0.0, 2.0, (16, size)).astype(np.float32)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    found = np.asarray(jax.jit(truncated, static_argnums=1)(weights, truncation))
    for row, kept, before in zip(logits, found, weights, strict=True):
        expected = allowed(softmax(row), truncation)
        np.testing.assert_array_equal(kept > 0, expected)
        np.testing.assert_array_equal(kept[expected], before[expected])


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too():
    weights = np.array([[0.25, 1.0, 0.5, 0.5, 0.25, 0.0]], np.float32)
    for truncation, kept in ((Truncation(1.0, 2), [1, 2, 3]), (Truncation(0.5), [1, 2, 3]), (Truncation(0.3), [1])):
        assert np.flatnonzero(truncated(jnp.asarray(weights), truncation)[0]).tolist() == kept


@pytest.mark.parametrize("truncation", [WHOLE, Truncation(0.8), Truncation(1.0, 9)], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_by_their_chances_and_scored_before_truncation(truncation, temperature, rng):
    size, count = 2 * BLOCK + 40, 1 << 14
    logits = rng.normal(0.0, 3.0, size).astype(np.float32)
    whole = softmax(logits / temperature)
    chances = np.where(allowed(whole, truncation), whole, 0.0)
    chances /= chances.sum()
    tokens, logprobs = drawn(logits, count, temperature, truncation)
    assert chances[tokens].min() > 0.0
    np.testing.assert_allclose(logprobs, np.log(whole)[tokens], atol=2e-6)
    often = chances * count > 5
    seen = np.bincount(tokens, minlength=size)
    rare_seen, rare = seen[~often].sum(), chances[~often].sum() * count
    statistic = np.sum((seen - chances * count)[often] ** 2 / (chances[often] * count))
    statistic += (rare_seen - rare) ** 2 / rare if rare > 5 else 0.0
    freedom = often.sum() - 1 + (rare > 5)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 8


def test_a_weight_of_zero_is_never_drawn_and_one_alone_always():
    for size in SIZES:
        logits = np.full(size, -1e4, np.float32)
        logits[size - 1] = 3.0
        tokens, logprobs = drawn(logits, 512)
        assert (tokens == size - 1).all() and (logprobs == 0.0).all()


def test_the_chances_of_many_equal_tokens_are_equal():
    """One uniform number in float32 has 2^23 values; one for the block and one for the token have more than enough."""
    size, count = 64 * BLOCK, 1 << 17
    tokens, logprobs = drawn(np.zeros(size, np.float32), count)
    np.testing.assert_allclose(logprobs, -np.log(size), rtol=1e-6)
    expected = count / size
    statistic = np.sum((np.bincount(tokens, minlength=size) - expected) ** 2 / expected)
    assert abs(statistic - (size - 1)) < 4 * np.sqrt(2 * size)
