"""Log-probs and entropies of given tokens: right, chunked without a trace, deaf to padding."""

import math
import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.models import response_logprobs
from m2po_jax.tasks import left_padded, right_padded
from tests.models import policies, reference

VOCAB = 131
ONE = np.float32(1.0)
PROMPTS = [[3, 1, 4], [2], [5, 9], [7, 7, 7]]
RESPONSES = [[1, 5, 9, 2, 6, 5, 3], [5], [0, 0, 8, 1], []]
CHUNK = 5
"""Divides none of 28 tokens, 7 tokens and 4 rows."""


@pytest.fixture(scope="module")
def policy():
    return policies.random_policy(VOCAB, layers=1)


@pytest.fixture(scope="module")
def batch():
    return *left_padded(PROMPTS, 4, pad_id=0), *right_padded(RESPONSES, 7, pad_id=0)


@partial(jax.jit, static_argnames=("model", "chunk_tokens"))
def scored(model, params, batch, temperature=ONE, chunk_tokens=4096):
    return response_logprobs(model, params, *batch, temperature, chunk_tokens)


@partial(jax.jit, static_argnames=("model", "chunk_tokens"))
def gradient(model, params, batch, temperature=ONE, chunk_tokens=4096):
    """Of a sum that weighs every log-prob and entropy differently."""

    def loss(params):
        logprobs, entropy = response_logprobs(model, params, *batch, temperature, chunk_tokens)
        weights = jnp.arange(logprobs.size, dtype=jnp.float32).reshape(logprobs.shape) / 10.0
        return jnp.sum(weights * logprobs) + jnp.sum(jnp.cos(weights) * entropy)

    return jax.grad(loss)(params)


@pytest.fixture(scope="module")
def chunked_gradient(policy, batch):
    """The compiled program, for its results and for its text."""
    return gradient.lower(*policy, batch, ONE, chunk_tokens=CHUNK).compile()


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), a, b)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_and_entropies_agree_with_the_reference(policy, batch, temperature):
    logprobs, entropy = scored(*policy, batch, np.float32(temperature))
    assert logprobs.dtype == entropy.dtype == jnp.float32
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = reference.response(*policy, prompt, tokens, temperature)
        np.testing.assert_allclose(logprobs[row, : len(tokens)], expected[0], atol=1e-5)
        np.testing.assert_allclose(entropy[row, : len(tokens)], expected[1], atol=2e-5)


def test_both_are_zero_off_the_mask(policy, batch):
    off = ~batch[3]
    for values in scored(*policy, batch):
        assert (np.asarray(values)[off] == 0.0).all()
        assert (np.asarray(values)[~off] != 0.0).all()


def test_a_uniform_policy_has_the_entropy_of_its_vocabulary(policy, batch):
    model, params = policy
    logprobs, entropy = scored(model, params | {"embedding": jnp.zeros_like(params["embedding"])}, batch)
    np.testing.assert_allclose(np.asarray(entropy)[batch[3]], math.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(logprobs)[batch[3]], -math.log(VOCAB), rtol=1e-6)


def test_a_certain_policy_has_no_entropy_and_finite_values():
    model, params = policies.random_policy(VOCAB, layers=1, spread=1e5)
    batch = *left_padded(PROMPTS, 4, pad_id=0), *right_padded(RESPONSES, 7, pad_id=0)
    logprobs, entropy = scored(model, params, batch)
    assert logprobs.min() < -1e4
    assert np.isfinite(logprobs).all() and np.abs(entropy).max() < 1e-3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient(model, params, batch)))


def test_chunks_change_neither_values_nor_gradient(policy, batch, chunked_gradient):
    temperature = np.float32(0.7)
    for whole, chunked in zip(
        scored(*policy, batch, temperature), scored(*policy, batch, temperature, chunk_tokens=CHUNK), strict=True
    ):
        np.testing.assert_allclose(whole, chunked, atol=1e-6)
    assert_trees_close(
        gradient(*policy, batch, temperature),
        chunked_gradient(policy[1], batch, temperature),
        atol=2e-5,
        rtol=1e-5,
    )


def test_the_gradient_agrees_with_a_difference_quotient(policy, batch, rng):
    model, params = policy
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    moved = lambda sign: jax.tree.map(lambda x, d: np.float64(x) + sign * 1e-6 * d, params, direction)  # noqa: E731
    total = lambda params: sum(  # noqa: E731
        reference.response(model, params, prompt, tokens)[0] @ np.arange(7 * row, 7 * row + len(tokens)) / 10.0
        + reference.response(model, params, prompt, tokens)[1] @ np.cos(np.arange(7 * row, 7 * row + len(tokens)) / 10)
        for row, (prompt, tokens) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    )
    expected = (total(moved(+1)) - total(moved(-1))) / 2e-6
    slopes = jax.tree.map(lambda g, d: np.sum(np.float64(g) * d), gradient(model, params, batch), direction)
    assert sum(jax.tree.leaves(slopes)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("garbage", [1, -1, 10**6])
def test_what_padding_holds_changes_no_bit(policy, batch, garbage):
    prompts, prompt_valid, responses, mask = batch
    other = (
        np.where(prompt_valid, prompts, garbage).astype(np.int32),
        prompt_valid,
        np.where(mask, responses, garbage).astype(np.int32),
        mask,
    )
    for a, b in zip(scored(*policy, batch), scored(*policy, other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_trees_close(gradient(*policy, batch), gradient(*policy, other), atol=1e-6)


def test_wider_padding_on_both_sides_changes_nothing(policy, batch):
    wide = *left_padded(PROMPTS, 6, pad_id=0), *right_padded(RESPONSES, 9, pad_id=0)
    for narrow, padded in zip(scored(*policy, batch), scored(*policy, wide), strict=True):
        np.testing.assert_allclose(narrow, padded[:, :7], atol=1e-5)
        assert (np.asarray(padded[:, 7:]) == 0.0).all()


def test_the_logits_of_a_whole_batch_are_never_held(policy, batch, chunked_gradient):
    limit = batch[2].size * VOCAB

    def largest(chunk_tokens: int) -> int:
        program = jax.make_jaxpr(partial(gradient, policy[0], chunk_tokens=chunk_tokens))(policy[1], batch)
        return max(float_sizes(program.jaxpr))

    assert largest(4096) >= limit, "without chunks the logits must show, or this test cannot fail"
    assert largest(CHUNK) < limit / 2
    shapes = re.findall(r"f32\[([\d,]+)\]", chunked_gradient.as_text())
    assert math.prod(batch[2].shape) in {math.prod(map(int, shape.split(","))) for shape in shapes}
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) < limit / 2


def float_sizes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[int]:
    """Number of elements of each float array that a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from float_sizes(inner)
