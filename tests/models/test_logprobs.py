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

from m2po_jax.models import logprobs as logprobs_module
from m2po_jax.models import packed_logprobs, response_logprobs
from m2po_jax.tasks import left_padded, right_padded
from tests.models import policies, reference

VOCAB = 131
PROMPTS = [[3, 1, 4], [2], [5, 9], [7, 7, 7]]
RESPONSES = [[1, 5, 9, 2, 6, 5, 3], [5], [0, 0, 8, 1], []]
CHUNK = 9
HELD = 8
"""Two tokens of each of 4 rows, which is what fits into a chunk; neither divides the 7 tokens of a row."""


@pytest.fixture(scope="module")
def policy():
    return policies.random_policy(VOCAB, layers=1)


@pytest.fixture(scope="module")
def batch():
    return *left_padded(PROMPTS, 4, pad_id=0), *right_padded(RESPONSES, 7, pad_id=0)


@partial(jax.jit, static_argnames=("model", "chunk_tokens"))
def _scored(model, params, batch, temperature, chunk_tokens=4096):
    """Log-probs and entropies, and the gradient of a sum that weighs each of them differently."""

    def loss(params):
        logprobs, entropy = response_logprobs(model, params, *batch, temperature, chunk_tokens)
        weights = jnp.arange(logprobs.size, dtype=jnp.float32).reshape(logprobs.shape) / 10.0
        return jnp.sum(weights * logprobs) + jnp.sum(jnp.cos(weights) * entropy), (logprobs, entropy)

    gradient, values = jax.grad(loss, has_aux=True)(params)
    return values, gradient


def scored(model, params, batch, temperature=1.0):
    return _scored(model, params, batch, np.float32(temperature))


@pytest.fixture(scope="module")
def chunked(policy, batch):
    """The compiled program, for its results and for its text."""
    return _scored.lower(*policy, batch, np.float32(1.0), chunk_tokens=CHUNK).compile()


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), a, b)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_and_entropies_agree_with_the_reference(policy, batch, temperature):
    (logprobs, entropy), _ = scored(*policy, batch, temperature)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = reference.response(*policy, prompt, tokens, temperature)
        np.testing.assert_allclose(logprobs[row, : len(tokens)], expected[0], atol=1e-5)
        np.testing.assert_allclose(entropy[row, : len(tokens)], expected[1], atol=2e-5)


def test_both_are_zero_off_the_mask_and_nowhere_else(policy, batch):
    for values in scored(*policy, batch)[0]:
        np.testing.assert_array_equal(np.asarray(values) != 0.0, batch[3])


def test_a_uniform_policy_has_the_entropy_of_its_vocabulary(policy, batch):
    model, params = policy
    (logprobs, entropy), _ = scored(model, params | {"embedding": jnp.zeros_like(params["embedding"])}, batch)
    np.testing.assert_allclose(np.asarray(entropy)[batch[3]], math.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(logprobs)[batch[3]], -math.log(VOCAB), rtol=1e-6)


def test_a_certain_policy_has_no_entropy_and_finite_values_and_gradient(policy, batch):
    model, params = policies.random_policy(VOCAB, layers=1, spread=1e5)
    (logprobs, entropy), gradient = scored(model, params, batch)
    assert logprobs.min() < -1e4
    assert np.isfinite(logprobs).all() and np.abs(entropy).max() < 1e-3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_chunks_change_neither_values_nor_gradient(policy, batch, chunked):
    values, gradient = scored(*policy, batch, 0.7)
    chunked_values, chunked_gradient = chunked(policy[1], batch, np.float32(0.7))
    assert_trees_close(values, chunked_values, atol=1e-6)
    assert_trees_close(gradient, chunked_gradient, atol=2e-5, rtol=1e-5)


def test_the_gradient_agrees_with_a_difference_quotient(policy, batch, rng):
    model, params = policy
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    def total(sign):
        moved = jax.tree.map(lambda x, d: np.float64(x) + sign * 1e-6 * d, params, direction)
        weights = np.arange(batch[2].size).reshape(batch[2].shape) / 10
        pairs = [reference.response(model, moved, *row) for row in zip(PROMPTS, RESPONSES, strict=True)]
        return sum(
            w[: len(logprobs)] @ logprobs + np.cos(w[: len(logprobs)]) @ entropy
            for w, (logprobs, entropy) in zip(weights, pairs, strict=True)
        )

    slopes = jax.tree.map(lambda g, d: np.sum(np.float64(g) * d), scored(model, params, batch)[1], direction)
    assert sum(jax.tree.leaves(slopes)) == pytest.approx((total(+1) - total(-1)) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("garbage", [1, -1, 10**6])
def test_what_padding_holds_changes_no_bit(policy, batch, garbage):
    prompts, prompt_valid, responses, mask = batch
    prompts = np.where(prompt_valid, prompts, garbage).astype(np.int32)
    responses = np.where(mask, responses, garbage).astype(np.int32)
    values, gradient = scored(*policy, batch)
    other_values, other_gradient = scored(*policy, (prompts, prompt_valid, responses, mask))
    jax.tree.map(np.testing.assert_array_equal, values, other_values)
    assert_trees_close(gradient, other_gradient, atol=1e-6)


def test_wider_padding_on_both_sides_changes_nothing(policy, batch):
    wide = *left_padded(PROMPTS, 6, pad_id=0), *right_padded(RESPONSES, 9, pad_id=0)
    widened = jax.jit(response_logprobs, static_argnums=0)(*policy, *wide)
    for narrow, padded in zip(scored(*policy, batch)[0], widened, strict=True):
        np.testing.assert_allclose(narrow, padded[:, :7], atol=1e-5)
        assert (np.asarray(padded[:, 7:]) == 0.0).all()


def packed_batch():
    """The sequences of `batch`, prompt and response, two or three to a row with padding between and around them."""
    members = [[0, 2], [1, 3]]
    tokens, segments = np.full((2, 18), 9, np.int32), np.zeros((2, 18), np.int32)
    places = {}
    for row, numbers in enumerate(members):
        slot = row
        for segment, number in enumerate(numbers, start=1):
            ids = PROMPTS[number] + RESPONSES[number]
            where = slice(slot, slot + len(ids))
            tokens[row, where], segments[row, where], places[number] = ids, segment, (row, where)
            slot = where.stop + row
    return tokens, segments, places


@pytest.mark.parametrize("chunk_tokens", [None, CHUNK])
def test_packed_rows_give_the_values_of_each_sequence_alone(policy, batch, chunk_tokens):
    tokens, segments, places = packed_batch()
    scored_packed = jax.jit(packed_logprobs, static_argnums=(0, 5))
    logprobs, entropy = map(np.asarray, scored_packed(*policy, tokens, segments, np.float32(0.7), chunk_tokens))
    for number, (row, where) in places.items():
        prompt, response = PROMPTS[number], RESPONSES[number]
        expected = reference.response(*policy, prompt[:1], prompt[1:] + response, 0.7)
        np.testing.assert_allclose(logprobs[row, where][1:], expected[0], atol=1e-5)
        np.testing.assert_allclose(entropy[row, where][1:], expected[1], atol=2e-5)
        assert logprobs[row, where][0] == entropy[row, where][0] == 0.0
    assert (logprobs[segments == 0] == 0.0).all() and (entropy[segments == 0] == 0.0).all()


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_logits_are_computed_where_they_are_asked_for(policy, chunk_tokens):
    """Some slots of each row in order, padded with 0; values, and gradients through every one of them."""
    tokens, segments, _ = packed_batch()
    slots = [np.flatnonzero(row > 0)[1::2] for row in segments]
    asked = np.array([np.pad(row, (0, 8 - len(row))) for row in slots], np.int32)
    weights = np.linspace(-1.0, 1.0, asked.size, dtype=np.float32).reshape(asked.shape)

    @partial(jax.jit, static_argnums=1)
    def of(params, some):
        values = packed_logprobs(
            policy[0], params, tokens, segments, 0.7, chunk_tokens, scored_BW=asked if some else None
        )
        picked = values if some else [jnp.take_along_axis(x, jnp.asarray(asked), axis=1) for x in values]
        return jnp.sum(weights * picked[0]) + jnp.sum(jnp.cos(weights) * picked[1]), tuple(picked)

    found, wanted = (jax.value_and_grad(of, has_aux=True)(policy[1], some) for some in (True, False))
    scored = np.asarray(found[0][1][0]) != 0
    assert scored.sum() > 5 and not scored[asked == 0].any() and (asked == 0).any()
    assert_trees_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_packed_and_padded_rows_give_one_gradient(policy, batch):
    tokens, segments, places = packed_batch()
    in_response = np.zeros_like(segments, bool)
    for number, (row, where) in places.items():
        in_response[row, where.start + len(PROMPTS[number]) : where.stop] = True

    def packed_loss(params):
        logprobs, entropy = packed_logprobs(policy[0], params, tokens, segments, chunk_tokens=CHUNK)
        return jnp.sum(jnp.where(in_response, logprobs + jnp.square(entropy), 0.0))

    def padded_loss(params):
        logprobs, entropy = response_logprobs(policy[0], params, *batch)
        return jnp.sum(logprobs + jnp.square(entropy))

    packed_gradient, padded_gradient = (jax.jit(jax.grad(loss))(policy[1]) for loss in (packed_loss, padded_loss))
    assert_trees_close(packed_gradient, padded_gradient, atol=2e-5, rtol=1e-5)


def test_a_large_vocabulary_makes_small_chunks(policy, batch, monkeypatch):
    monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", CHUNK * VOCAB + VOCAB - 1)
    program = jax.make_jaxpr(lambda params: response_logprobs(policy[0], params, *batch))(policy[1])
    assert HELD * VOCAB in set(float_sizes(program.jaxpr))
    assert max(float_sizes(program.jaxpr)) < batch[2].size * VOCAB


def test_the_logits_of_a_whole_batch_are_never_held(policy, batch, chunked):
    limit = batch[2].size * VOCAB

    def largest(chunk_tokens: int) -> int:
        program = jax.make_jaxpr(partial(_scored, policy[0], chunk_tokens=chunk_tokens))(policy[1], batch, 1.0)
        return max(float_sizes(program.jaxpr))

    assert largest(4096) >= limit, "without chunks the logits must show, or this test cannot fail"
    assert largest(CHUNK) < limit
    shapes = re.findall(r"f32\[([\d,]+)\]", chunked.as_text())
    sizes = {math.prod(map(int, shape.split(","))) for shape in shapes}
    assert HELD * VOCAB in sizes and max(sizes) < limit


def float_sizes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[int]:
    """Number of elements of each float array that a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from float_sizes(inner)
