"""The decoder against its float64 double, and what padding, causality and the cache must not change."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.config import ConfigError, ModelConfig
from m2po_jax.models import Cache, Transformer, decoding
from m2po_jax.models.positions import frequencies, positions, rotate, segment_positions
from m2po_jax.models.transformer import forward_packed, logits_of
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
        {"qk_norm": False, "qkv_bias": True, "vocab_size": 13},
        {"qk_norm": False, "head_dim": 12, "rope_theta": 8.0, "rope_factor": 4.0, "rope_original_positions": 16},
    ],
    ids=["tied-grouped", "untied-multi-query-odd-depth", "one-layer-multi-head", "qwen2-more-rows", "llama-3"],
)
@pytest.mark.parametrize("padded", [left_padded, right_padded])
def test_logits_agree_with_the_reference(config, padded):
    model, params = policies.random_policy(VOCAB, **config)
    tokens, valid = padded(ROWS, 7, pad_id=0)
    _, logits = hidden_and_logits(model, params, tokens, valid)
    assert logits.dtype == jnp.float32 and logits.shape == (len(ROWS), 7, config.get("vocab_size", VOCAB))
    for row, ids in enumerate(ROWS):
        np.testing.assert_allclose(logits[row][valid[row]], reference.logits(model, params, ids), atol=1e-5, rtol=1e-5)


def test_no_position_sees_a_later_token(policy, rng):
    tokens = rng.integers(0, 7, (4, 7)).astype(np.int32)
    valid = np.ones_like(tokens, bool)
    hidden, _ = hidden_and_logits(*policy, tokens, valid)
    for t in range(tokens.shape[1]):
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


def test_where_a_sequence_stands_between_padding_changes_nothing(policy):
    tokens, valid = np.zeros((4, 7), np.int32), np.zeros((4, 7), bool)
    for row, start in enumerate((0, 1, 3, 4)):
        tokens[row, start : start + 3], valid[row, start : start + 3] = [5, 8, 9], True
    _, logits = hidden_and_logits(*policy, tokens, valid)
    placed = np.asarray(logits)[valid].reshape(4, 3, VOCAB)
    np.testing.assert_allclose(placed, placed[[0, 0, 0, 0]], atol=1e-5)


def test_a_row_of_padding_alone_is_finite_and_changes_no_other(policy):
    tokens, valid = left_padded(ROWS, 7, pad_id=0)
    hidden, _ = hidden_and_logits(*policy, tokens, valid)
    valid[2] = False
    emptied, logits = hidden_and_logits(*policy, tokens, valid)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(np.asarray(hidden)[valid], np.asarray(emptied)[valid])


def test_filling_the_cache_in_parts_gives_the_hidden_states_of_one_pass(policy):
    model, params = policy
    tokens, valid = left_padded(ROWS, 7, pad_id=0)
    where = positions(valid)
    whole, _ = hidden_and_logits(model, params, tokens, valid)
    step = jax.jit(lambda *inputs: model.apply({"params": params}, *inputs))
    cache = Cache.zeros(model.config, len(ROWS), 7)
    parts = []
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        seen = valid & (np.arange(7) < stop)
        hidden, cache = step(tokens[:, start:stop], where[:, start:stop], seen, cache, np.int32(start))
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, axis=1)[valid], np.asarray(whole)[valid], atol=1e-5)


def test_layers_one_by_one_say_what_layers_in_a_stack_say(policy):
    """A token a step, in any free slot of the cache: what a query sees is up to the mask alone."""
    model, params = policy
    whole, _ = hidden_and_logits(model, params, np.array(ROWS[:1], np.int32), np.ones((1, 6), bool))
    for in_a_stack in (True, False):
        cache = Cache.zeros(model.config, 1, 7)
        cache = cache if in_a_stack else cache.layers()
        weights = params if in_a_stack else decoding.by_layer(params, model.config.layers)
        step = jax.jit(partial(decoding.decode, model))
        seen = np.zeros((1, 7), bool)
        for t, slot in enumerate((4, 5, 6, 0, 1, 2)):
            seen[0, slot] = True
            inputs = np.array([ROWS[0][t]], np.int32), np.array([t], np.int32), seen, cache, np.int32(slot)
            hidden, cache = step(weights, *inputs)
            np.testing.assert_allclose(hidden, whole[:, t], atol=1e-5)


def test_rotary_scores_depend_on_distance_alone(rng):
    q, k = rng.normal(size=(2, 1, 5, 1, 8)).astype(np.float32)
    where = np.arange(5, dtype=np.int32)[None]
    turns = frequencies(ModelConfig(head_dim=8, rope_theta=100.0))
    score = lambda shift: np.einsum(  # noqa: E731
        "bthd,bshd->bts", rotate(q, where + shift, turns), rotate(k, where + shift, turns)
    )
    np.testing.assert_allclose(score(0), score(31), atol=1e-4)
    np.testing.assert_array_equal(rotate(q, np.zeros_like(where), turns), q)


def test_llama_3_keeps_fast_turns_divides_slow_ones_and_blends_between():
    config = ModelConfig(head_dim=12, rope_theta=8.0, rope_factor=4.0, rope_original_positions=16)
    plain = frequencies(replace(config, rope_factor=None))
    ratios = np.asarray(frequencies(config) / plain)
    turns = 16 / (2 * np.pi) * np.asarray(plain)
    assert turns.max() < 4.0 and turns.min() < 1.0 < turns[1]
    np.testing.assert_allclose(ratios, 0.25 + 0.75 * np.clip((turns - 1) / 3, 0, 1), rtol=1e-6)
    for unscaled in (replace(config, rope_factor=1.0), replace(config, rope_original_positions=10**9)):
        np.testing.assert_allclose(frequencies(unscaled), plain, rtol=1e-6)
    np.testing.assert_allclose(frequencies(replace(config, rope_original_positions=1)), plain / 4)


def test_positions_start_again_in_each_segment():
    segments = np.array([[0, 1, 1, 1, 2, 2, 0], [3, 3, 1, 2, 2, 2, 2]], np.int32)
    np.testing.assert_array_equal(segment_positions(segments), [[0, 0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2, 3]])


def test_packing_changes_no_sequence_and_no_sequence_sees_another(policy):
    tokens, valid = left_padded(ROWS, 7, pad_id=0)
    _, logits = hidden_and_logits(*policy, tokens, valid)
    packed = np.array([[*ROWS[0], *ROWS[1], 0, 0, 0], [0, *ROWS[2], *ROWS[3], *ROWS[1], 0, 0]], np.int32)
    segments = np.array([[1] * 6 + [2] * 2 + [0] * 3, [0, 5, *[7] * 5, 2, 2, 0, 0]], np.int32)
    score = jax.jit(lambda *inputs: logits_of(*policy, forward_packed(*policy, *inputs)))
    found = np.asarray(score(packed, segments))
    for (row, where), ids in {(0, 0): 0, (0, 6): 1, (1, 1): 2, (1, 2): 3, (1, 7): 1}.items():
        expected = np.asarray(logits[ids])[valid[ids]]
        np.testing.assert_allclose(found[row, where : where + len(expected)], expected, atol=1e-5)
    changed = np.where(segments == 7, 3, packed)
    other = np.asarray(score(changed, segments))
    others = (segments > 0) & (segments != 7)
    np.testing.assert_array_equal(found[others], other[others])


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_neither_values_nor_gradient_and_keeps_less(remat):
    model, params = policies.random_policy(VOCAB, layers=4)
    tokens, valid = left_padded(ROWS, 7, pad_id=0)

    def loss(params, kind):
        remade = Transformer(replace(model.config, remat=kind), VOCAB)
        hidden, _ = remade.apply({"params": params}, tokens, positions(valid), valid)
        return jnp.sum(jnp.square(logits_of(remade, params, hidden)))

    value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (value, grads), (expected, expected_grads) = value_and_grad(params, remat), value_and_grad(params, "none")
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), grads, expected_grads)
    kept = {kind: kept_bytes(partial(loss, kind=kind), params) for kind in ("none", "dots", "full")}
    assert kept["full"] < kept["dots"] < kept["none"]


def kept_bytes(loss, params) -> int:
    """What the forward pass leaves for the backward pass."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(loss, params)[1]))


def test_rows_of_the_embedding_are_the_tokenizers_unless_set():
    assert Transformer(ModelConfig(), 11).vocab_size == 11
    assert Transformer(ModelConfig(vocab_size=16), 11).vocab_size == Transformer(ModelConfig(vocab_size=16)).vocab_size
    with pytest.raises(ConfigError, match="model.vocab_size 8 is below the tokenizer's 11 ids"):
        _ = Transformer(ModelConfig(vocab_size=8), 11).vocab_size
    with pytest.raises(ConfigError, match="model.vocab_size is None"):
        _ = Transformer(ModelConfig()).vocab_size


def test_positions_count_real_tokens():
    valid = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(positions(valid), expected)


def test_bfloat16_computes_in_bfloat16_and_gives_float32_logits():
    tokens, valid = left_padded(ROWS, 7, pad_id=0)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes bfloat16 to float32
        model, params = policies.random_policy(VOCAB, compute_dtype="bfloat16")
        hidden, logits = hidden_and_logits(model, params, tokens, valid)
    dtypes = hidden.dtype, logits.dtype, Cache.zeros(model.config, 1, 1).keys.dtype
    assert dtypes == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    exact = np.concatenate([reference.logits(model, params, ids) for ids in ROWS])
    error = np.abs(np.asarray(logits)[valid] - exact)
    assert 1e-4 < error.max() < 0.15


def test_initial_parameters_are_float32_and_of_the_declared_tree():
    for tied in (True, False):
        model, drawn = policies.random_policy(VOCAB, tie_embeddings=tied)
        params = jax.eval_shape(model.init_params, jax.random.key(0))
        assert ("unembedding" in params) is not tied
        assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), drawn)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
