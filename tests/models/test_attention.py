"""Attention against softmax written out, whole and in chunks of queries, and what it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.models import attention as attention_module
from m2po_jax.models.attention import attention

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 11, 4, 2, 6
CHUNKED = 4
"""Queries of a chunk, which do not divide the length."""


@pytest.fixture
def inputs(rng):
    q, k, v = (
        rng.normal(size=(BATCH, LENGTH, heads, HEAD_DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    seen = rng.random((BATCH, LENGTH, LENGTH)) < 0.5
    return q, k, v, seen | np.eye(LENGTH, dtype=bool)


def expected(q, k, v, mask):
    k, v = (np.repeat(np.float64(x), HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", np.float64(q), k) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * mask[:, None]
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("queries", [CHUNKED, 256])
def test_it_is_softmax_attention(inputs, queries, monkeypatch):
    monkeypatch.setattr(attention_module, "QUERY_CHUNK", queries)
    np.testing.assert_allclose(attention(*inputs), expected(*inputs), atol=1e-6)


def test_chunks_of_queries_change_neither_values_nor_gradient(inputs, monkeypatch):
    *arrays, mask = inputs
    program = lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v, mask)))  # noqa: E731
    whole = jax.value_and_grad(program, (0, 1, 2))(*arrays)
    monkeypatch.setattr(attention_module, "QUERY_CHUNK", CHUNKED)
    chunked = jax.value_and_grad(program, (0, 1, 2))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, chunked)


def test_a_query_that_sees_nothing_is_finite_and_has_no_score(inputs):
    q, k, v, mask = inputs
    mask[1, 3] = False
    np.testing.assert_allclose(attention(q, k, v, mask)[1, 3, 0], v[1, :, 0].mean(axis=0), atol=1e-6)
    slopes = jax.grad(lambda q: jnp.sum(attention(q, k, v, mask)[1, 3]))(q)
    assert not np.asarray(slopes).any()


def test_bfloat16_stays_bfloat16(inputs):
    *arrays, mask = inputs
    found = attention(*(x.astype(jnp.bfloat16) for x in arrays), mask)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found), expected(*inputs), atol=0.05)


def test_a_long_sequence_holds_the_scores_of_few_queries_forwards_and_backwards():
    def held(length: int) -> int:
        one = jax.ShapeDtypeStruct((1, length, 2, 2), jnp.float32)
        mask = jax.ShapeDtypeStruct((1, length, length), jnp.bool_)
        program = jax.jit(jax.grad(lambda q, k, v, mask: jnp.sum(attention(q, k, v, mask)), (0, 1, 2)))
        return program.lower(one, one, one, mask).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 2 * 2048**2
    assert held(2048) < scores
    assert held(2048) < 2.5 * held(1024)
