"""One model update: its gradient by an independent computation, what must not change it, and what it guards against."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2po_jax import objectives
from m2po_jax.config import LearnerConfig
from m2po_jax.learner.state import init_state, make_optimizer
from m2po_jax.learner.update import make_update
from tests.learner import batches
from tests.learner.batches import SGD, gradient_of, mini_batch

pytestmark = pytest.mark.usefixtures("standard_promotion")

TEMPERATURE, THRESHOLD = 0.7, 0.04
UPDATE = make_update(batches.spec("m2po", TEMPERATURE), SGD)
"""Compiled once for the module; what it takes off the parameters is the gradient itself."""


def fresh(optimizer=SGD):
    return init_state(batches.params(), optimizer)


def rows_of(values, mask):
    return [row[inside] for row, inside in zip(np.asarray(values), mask, strict=True)]


def log_ratios(params, batch):
    """Each row alone, without any padding, straight from the definition of a log-prob."""
    model, found = batches.spec().model, []
    for row, behavior in enumerate(rows_of(batch.behavior_logprobs, batch.response_mask)):
        prompt = batch.prompt_tokens[row][batch.prompt_valid[row]]
        response = batch.response_tokens[row][batch.response_mask[row]]
        tokens = jnp.array(np.concatenate([prompt, response]))[None]
        steps = jnp.arange(tokens.shape[1])[None]
        hidden, _ = model.apply({"params": params}, tokens, steps, steps >= 0)
        logits = model.apply({"params": params}, hidden, method=type(model).logits)[0] / TEMPERATURE
        scored = logits[len(prompt) - 1 : -1]
        logprobs = scored[jnp.arange(len(response)), response] - jax.scipy.special.logsumexp(scored, axis=-1)
        found.append(logprobs - behavior)
    return found


def advantages_of(batch):
    rewards = batch.rewards.reshape(batches.GROUPS, batches.SIZE).astype(np.float64)
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    return (centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def algorithm_1(ratios, advantages):
    """Kept tokens by row, 1 or 0: the paper's loop, on float64."""
    trust_region = {
        (row, t): float(value) ** 2
        for row, values in enumerate(ratios)
        for t, value in enumerate(values)
        if float(value) * advantages[row] > 0
    }
    kept = dict(trust_region)
    while kept and np.mean(list(kept.values())) > THRESHOLD:
        del kept[max(kept, key=lambda token: kept[token])]
    dropped = trust_region.keys() - kept.keys()
    return [np.array([(row, t) not in dropped for t in range(len(v))], np.float32) for row, v in enumerate(ratios)]


def independent_loss(params, batch, advantages, kept):
    ratios = [jnp.exp(values) for values in log_ratios(params, batch)]
    terms = [jnp.sum(k * r) * a for k, r, a in zip(kept, ratios, advantages.tolist(), strict=True)]
    return -sum(terms) / batch.response_mask.sum()


def test_gradient_equals_an_independent_computation():
    batch = mini_batch()
    advantages = advantages_of(batch)
    kept = algorithm_1(log_ratios(batches.params(), batch), advantages)
    loss, expected = jax.value_and_grad(independent_loss)(batches.params(), batch, advantages, kept)
    found, metrics = gradient_of(UPDATE, fresh(), batch)
    masked_frac = sum(float((1 - k).sum()) for k in kept) / batch.response_mask.sum()
    assert 0 < masked_frac < 0.9, "the batch must put the mask to work"
    assert metrics["masked_frac"] == pytest.approx(masked_frac)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(expected)), rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected)


def test_metrics_of_the_batch():
    batch = mini_batch()
    _, metrics = gradient_of(UPDATE, fresh(), batch)
    assert metrics["reward_mean"] == 0.5
    assert metrics["response_length_mean"] == pytest.approx(batch.response_mask.sum() / len(batch.rewards))
    assert metrics["truncated_frac"] == pytest.approx(batch.truncated.mean())
    assert 0 < metrics["entropy_mean"] < np.log(batches.VOCABULARY)
    assert metrics["skipped"] == 0.0
    assert all(value.dtype == np.float32 and value.shape == () for value in metrics.values())


def test_what_padding_holds_changes_no_bit():
    clean = mini_batch()
    rng = np.random.default_rng(1)
    noise = lambda shape: rng.integers(0, batches.VOCABULARY, shape).astype(np.int32)  # noqa: E731
    dirty = clean._replace(
        prompt_tokens=np.where(clean.prompt_valid, clean.prompt_tokens, noise(clean.prompt_tokens.shape)),
        response_tokens=np.where(clean.response_mask, clean.response_tokens, noise(clean.response_tokens.shape)),
        behavior_logprobs=np.where(clean.response_mask, clean.behavior_logprobs, np.float32(-77.0)),
    )
    assert (clean.response_tokens != dirty.response_tokens).any() and (clean.prompt_tokens != dirty.prompt_tokens).any()
    expected, found = gradient_of(UPDATE, fresh(), clean), gradient_of(UPDATE, fresh(), dirty)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("objective", objectives.names())
def test_a_wider_padding_changes_only_rounding(objective):
    narrow = mini_batch()
    left = lambda x: np.pad(x, ((0, 0), (2, 0)))  # noqa: E731
    right = lambda x: np.pad(x, ((0, 0), (0, 3)))  # noqa: E731
    wide = narrow._replace(
        prompt_tokens=left(narrow.prompt_tokens),
        prompt_valid=left(narrow.prompt_valid),
        response_tokens=right(narrow.response_tokens),
        response_mask=right(narrow.response_mask),
        behavior_logprobs=right(narrow.behavior_logprobs),
    )
    update = make_update(batches.spec(objective), SGD)
    expected, found = gradient_of(update, fresh(), narrow), gradient_of(update, fresh(), wide)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected)


def test_why_a_response_ended_trains_nothing():
    batch = mini_batch()
    expected, _ = gradient_of(UPDATE, fresh(), batch)
    found, _ = gradient_of(UPDATE, fresh(), batch._replace(truncated=~batch.truncated))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_end_token_with_the_id_of_padding_still_counts():
    batch = mini_batch()
    last = batch.response_mask.sum(axis=1) - 1
    tokens = batch.response_tokens.copy()
    tokens[np.arange(len(last)), last] = 0
    _, metrics = gradient_of(UPDATE, fresh(), batch._replace(response_tokens=tokens))
    assert metrics["tokens"] == batch.response_mask.sum()


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_give_no_gradient(reward):
    batch = mini_batch()
    found, metrics = gradient_of(UPDATE, fresh(), batch._replace(rewards=np.full_like(batch.rewards, reward)))
    assert all((leaf == 0.0).all() for leaf in jax.tree.leaves(found))
    assert metrics["grad_norm"] == 0.0 and metrics["no_signal_frac"] == 1.0 and metrics["skipped"] == 0.0


def test_a_group_with_equal_rewards_adds_nothing_to_the_others():
    batch = mini_batch()
    group = slice(0, batches.SIZE)
    rewards, behavior = batch.rewards.copy(), batch.behavior_logprobs.copy()
    rewards[group] = 1.0
    behavior[group] -= 1.5 * batch.response_mask[group]
    expected, _ = gradient_of(UPDATE, fresh(), batch._replace(rewards=rewards))
    found, _ = gradient_of(UPDATE, fresh(), batch._replace(rewards=rewards, behavior_logprobs=behavior))
    assert any((leaf != 0.0).any() for leaf in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_log_prob_that_is_no_number_is_masked_and_counted():
    batch = mini_batch()
    behavior = batch.behavior_logprobs.copy()
    behavior[0, 0] = np.nan
    found, metrics = gradient_of(UPDATE, fresh(), batch._replace(behavior_logprobs=behavior))
    assert metrics["nonfinite_tokens"] == 1.0 and metrics["skipped"] == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_a_non_finite_update_is_skipped_but_counted():
    optimizer = make_optimizer(LearnerConfig(updates_per_batch=1))
    update = make_update(batches.spec(), optimizer)
    batch = mini_batch()
    state, _ = update(init_state(batches.params(), optimizer), batch)
    before = jax.tree.map(np.array, state)
    after, metrics = update(state, batch._replace(rewards=np.full_like(batch.rewards, np.nan)))
    assert metrics["skipped"] == 1.0
    assert int(after.version) == int(before.version) + 1 == 2
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    resumed, metrics = update(after, batch)
    assert metrics["skipped"] == 0.0 and int(resumed.version) == 3
    assert any(
        (np.array(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (resumed.params, before.params)), strict=True)
    )


def test_the_state_is_donated():
    state = fresh()
    after, _ = UPDATE(state, mini_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    np.testing.assert_array_equal(batches.params()["final_norm"]["scale"], 5.0), "the base policy is a copy"


def test_one_program_serves_all_lengths_and_nothing_moves_unasked(no_implicit_transfers):
    update = make_update(batches.spec("grpo"), SGD)
    with jax.transfer_guard("allow"):
        state = fresh()
        on_device = [jax.device_put(mini_batch(seed)) for seed in range(3)]
        state, _ = update(state, on_device[0])
    for batch in on_device[1:]:
        state, metrics = update(state, batch)
    assert update._cache_size() == 1
    assert jax.device_get(metrics)["skipped"] == 0.0 and int(jax.device_get(state.version)) == 3


def test_golden_update():
    """Three updates with AdamW, to be equal from one release to the next.

    After a change that is meant to change them: run this test, look at why, and copy the numbers it prints.
    """
    optimizer = make_optimizer(LearnerConfig(learning_rate=1e-2, warmup_updates=2, updates_per_batch=1))
    update = make_update(batches.spec(), optimizer)
    state, found = init_state(batches.params(), optimizer), []
    for seed in range(3):
        state, metrics = update(state, mini_batch(seed))
        found += [float(metrics[name]) for name in ("loss", "grad_norm", "m2_trust_region", "masked_frac")]
    found.append(float(optax.tree.norm(state.params)))
    np.testing.assert_allclose(found, GOLDEN, rtol=2e-4, err_msg=f"GOLDEN = {[round(x, 6) for x in found]}")


GOLDEN = [0.0] * 13
