"""The decoder against its float64 double, and what padding, causality and the cache must not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.models import Cache, Transformer
from m2po_jax.models.transformer import positions, rotate
from m2po_jax.tasks import left_padded, right_padded
from tests.models import policies, reference

VOCAB = 11
ROWS = [[3, 1, 4, 1, 5, 9], [2, 6], [10], [5, 8, 9, 7, 9]]


@partial(jax.jit, static_argnums=0)
def hidden_and_logits(model, params, tokens_BT, valid_BT):
    hidden, _ = model.apply({"params": params}, tokens_BT, positions(valid_BT), valid_BT)
    return hidden, model.apply({"params": params}, hidden, method=Transformer.logits)


@pytest.fixture(scope="module")
def policy():
    return policies.random_policy(VOCAB)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_embeddings": False, "layers": 3, "kv_heads": 1, "norm_eps": 0.1},
        {"layers": 1, "kv_heads": 4, "head_dim": 6, "rope_theta": 50.0},
    ],
    ids=["tied-grouped", "untied-multi-query-odd-depth", "one-layer-multi-head"],
)
@pytest.mark.parametrize("padded", [left_padded, right_padded])
def test_logits_agree_with_the_reference(config, padded):
    model, params = policies.random_policy(VOCAB, **config)
    tokens, valid = padded(ROWS, 7, pad_id=0)
    _, logits = hidden_and_logits(model, params, tokens, valid)
    assert logits.dtype == jnp.float32 and logits.shape == (len(ROWS), 7, VOCAB)
    for row, ids in enumerate(ROWS):
        np.testing.assert_allclose(logits[row][valid[row]], reference.logits(model, params, ids), atol=1e-5, rtol=1e-5)


def test_no_position_sees_a_later_token(policy):
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)
    valid = np.ones_like(tokens, bool)
    hidden, _ = hidden_and_logits(*policy, tokens, valid)
    for t in range(1, tokens.shape[1]):
        changed = tokens.copy()
        changed[:, t] = 7
        other, _ = hidden_and_logits(*policy, changed, valid)
        np.testing.assert_array_equal(hidden[:, :t], other[:, :t])
        assert (np.abs(hidden[:, t:] - other[:, t:]).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("padded", [left_padded, right_padded])
@pytest.mark.parametrize("garbage", [9, -1, 10**6])
def test_what_padding_holds_changes_no_bit(policy, padded, garbage):
    tokens, valid = padded(ROWS, 7, pad_id=0)
    hidden, _ = hidden_and_logits(*policy, tokens, valid)
    other, _ = hidden_and_logits(*policy, np.where(valid, tokens, garbage).astype(np.int32), valid)
    np.testing.assert_array_equal(np.asarray(hidden)[valid], np.asarray(other)[valid])


def test_the_width_of_padding_changes_nothing(policy):
    narrow, narrow_valid = left_padded(ROWS, 6, pad_id=0)
    wide, wide_valid = np.pad(narrow, ((0, 0), (2, 1))), np.pad(narrow_valid, ((0, 0), (2, 1)))
    _, a = hidden_and_logits(*policy, narrow, narrow_valid)
    _, b = hidden_and_logits(*policy, wide, wide_valid)
    np.testing.assert_allclose(np.asarray(a)[narrow_valid], np.asarray(b)[wide_valid], atol=1e-5)


def test_a_row_of_padding_alone_is_finite_and_so_is_its_gradient(policy):
    model, params = policy
    tokens, valid = left_padded([[], [4, 2]], 3, pad_id=0)
    loss = lambda params: jnp.sum(jnp.square(hidden_and_logits(model, params, tokens, valid)[1]))  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_filling_the_cache_in_parts_gives_the_hidden_states_of_one_pass(policy):
    model, params = policy
    tokens, valid = left_padded(ROWS, 7, pad_id=0)
    where = positions(valid)
    whole, _ = hidden_and_logits(model, params, tokens, valid)
    step = jax.jit(lambda *inputs: model.apply({"params": params}, *inputs))
    cache = Cache.zeros(model.config, len(ROWS), 7)
    parts = []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
        seen = valid & (np.arange(7) < stop)
        hidden, cache = step(tokens[:, start:stop], where[:, start:stop], seen, cache, start)
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, axis=1)[valid], np.asarray(whole)[valid], atol=1e-5)


def test_a_repeated_cache_holds_each_sequence_in_a_row():
    keys = jnp.arange(2 * 3 * 4, dtype=jnp.float32).reshape(2, 3, 4, 1, 1)
    repeated = Cache(keys, -keys).repeat(2)
    np.testing.assert_array_equal(repeated.keys[:, [0, 2, 4]], keys)
    np.testing.assert_array_equal(repeated.keys[:, [1, 3, 5]], keys)
    np.testing.assert_array_equal(repeated.values, -repeated.keys)


def test_rotary_scores_depend_on_distance_alone(rng):
    q, k = rng.normal(size=(2, 1, 5, 1, 8)).astype(np.float32)
    where = np.arange(5, dtype=np.int32)[None]
    score = lambda shift: np.einsum(  # noqa: E731
        "bthd,bshd->bts", rotate(q, where + shift, 100.0), rotate(k, where + shift, 100.0)
    )
    np.testing.assert_allclose(score(0), score(31), atol=1e-4)
    np.testing.assert_array_equal(rotate(q, np.zeros_like(where), 100.0), q)


def test_positions_count_real_tokens():
    valid = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(positions(valid), expected)


def test_bfloat16_computes_in_bfloat16_and_gives_float32_logits():
    tokens, valid = left_padded(ROWS, 7, pad_id=0)
    _, exact = hidden_and_logits(*policies.random_policy(VOCAB), tokens, valid)
    model, params = policies.random_policy(VOCAB, compute_dtype="bfloat16")
    hidden, logits = hidden_and_logits(model, params, tokens, valid)
    assert (hidden.dtype, logits.dtype, Cache.zeros(model.config, 1, 1).keys.dtype) == ("bfloat16", "float32", "bfloat16")
    difference = np.abs(np.asarray(logits) - np.asarray(exact))[valid]
    assert 0.0 < difference.max() < 0.15


def test_initial_parameters_are_float32_and_of_the_declared_tree():
    for tied in (True, False):
        model, drawn = policies.random_policy(VOCAB, tie_embeddings=tied)
        params = jax.eval_shape(model.init_params, jax.random.key(0))
        assert ("unembedding" in params) is not tied
        assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), drawn)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
