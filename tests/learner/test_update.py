"""One model update: its gradient by an independent computation, what must not change it, and what it guards against."""

import jax
import numpy as np
import optax
import pytest

from m2po_jax.config import LearnerConfig
from m2po_jax.learner.state import init_state, make_optimizer
from m2po_jax.learner.update import advantages, make_update
from tests.learner import batches
from tests.learner.batches import SGD, gradient_of, mini_batch
from tests.models import reference

pytestmark = pytest.mark.usefixtures("standard_promotion")

TEMPERATURE, THRESHOLD = 0.7, 0.04
UPDATE = make_update(batches.spec("m2po", TEMPERATURE), SGD)
"""Compiled once for the module; what it takes off the parameters is the gradient itself."""

ADAM = make_optimizer(LearnerConfig(learning_rate=1e-2, warmup_updates=2, updates_per_batch=1))
ADAM_UPDATE = make_update(batches.spec("m2po", TEMPERATURE), ADAM)


def fresh(optimizer=SGD):
    return init_state(batches.params(), optimizer)


def rows_of(values, mask):
    return [row[inside] for row, inside in zip(np.asarray(values), mask, strict=True)]


def log_ratios(params, batch):
    """Each row alone, without any padding, in float64 NumPy: the policy's log-prob minus the behaviour's."""
    found = []
    for row, behavior in enumerate(rows_of(batch.behavior_logprobs, batch.response_mask)):
        prompt = batch.prompt_tokens[row][batch.prompt_valid[row]].tolist()
        response = batch.response_tokens[row][batch.response_mask[row]].tolist()
        logprobs, _ = reference.response(batches.spec().model, params, prompt, response, TEMPERATURE)
        found.append(logprobs - behavior)
    return found


def advantages_of(batch):
    rewards = batch.rewards.reshape(batches.GROUPS, batches.SIZE).astype(np.float64)
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    return (centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def algorithm_1(ratios, advantages):
    """Kept tokens by row, 1 or 0: the paper's loop."""
    trust_region = {
        (row, t): value**2
        for row, values in enumerate(ratios)
        for t, value in enumerate(values)
        if value * advantages[row] > 0
    }
    kept = dict(trust_region)
    while kept and np.mean(list(kept.values())) > THRESHOLD:
        del kept[max(kept, key=lambda token: kept[token])]
    dropped = trust_region.keys() - kept.keys()
    return [np.array([(row, t) not in dropped for t in range(len(values))]) for row, values in enumerate(ratios)]


def independent_loss(params, batch, advantages, kept):
    terms = [np.sum(k * np.exp(r)) * a for k, r, a in zip(kept, log_ratios(params, batch), advantages, strict=True)]
    return -sum(terms) / batch.response_mask.sum()


def test_gradient_equals_an_independent_computation():
    """Loss, mask and slopes along random directions, by central differences of a float64 double."""
    batch, params = mini_batch(), jax.tree.map(np.float64, batches.params())
    advantages = advantages_of(batch)
    kept = algorithm_1(log_ratios(params, batch), advantages)
    found, metrics = gradient_of(UPDATE, fresh(), batch)
    masked_frac = sum((~k).sum() for k in kept) / batch.response_mask.sum()
    assert 0 < masked_frac < 0.9, "the batch must put the mask to work"
    assert metrics["masked_frac"] == pytest.approx(masked_frac)
    assert metrics["loss"] == pytest.approx(independent_loss(params, batch, advantages, kept), rel=1e-4)
    rng, step = np.random.default_rng(5), 1e-5
    for _ in range(6):
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
        ahead, behind = (
            independent_loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction), batch, advantages, kept)
            for s in (step, -step)
        )
        slope = sum(np.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (found, direction)), strict=True))
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-3, abs=1e-3 * float(metrics["grad_norm"]))


def test_metrics_of_the_batch():
    batch = mini_batch()
    _, metrics = gradient_of(UPDATE, fresh(), batch)
    assert metrics["reward_mean"] == 0.5
    assert metrics["response_length_mean"] == pytest.approx(batch.response_mask.sum() / len(batch.rewards))
    assert metrics["truncated_frac"] == pytest.approx(batch.truncated.mean())
    assert 0 < metrics["entropy_mean"] < np.log(batches.VOCABULARY)
    assert metrics["skipped"] == 0.0
    arrays = {"log_ratio_histogram": (7, 3, 31), "entropy_by_ratio": (7,), "tokens_by_ratio": (7,)}
    assert all(value.dtype == np.float32 and value.shape == arrays.get(key, ()) for key, value in metrics.items())
    assert metrics["log_ratio_histogram"][5].sum() == batch.response_mask.sum(), "all of age 256"
    assert metrics["no_signal_groups_frac"] == 0.0


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


def test_a_wider_padding_changes_only_rounding():
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
    expected, found = gradient_of(UPDATE, fresh(), narrow), gradient_of(UPDATE, fresh(), wide)
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
    assert metrics["no_signal_groups_frac"] == 1.0


def test_a_long_response_may_lose_reward():
    """T = 6, a cache of 4: lengths 1 to 6 lose 0, 0, 1/4, 2/4, 3/4, 1 before the advantages are taken."""
    batch = mini_batch()
    spec = batches.spec()._replace(overlong_cache=4, normalize_advantages="none")
    lengths = batch.response_mask.sum(axis=1)
    assert len(set(lengths)) > 3
    shaped = batch.rewards - np.maximum(lengths - 2, 0) / 4
    groups = shaped.reshape(batches.GROUPS, batches.SIZE)
    np.testing.assert_allclose(
        advantages(spec, batch), (groups - groups.mean(axis=1, keepdims=True)).ravel(), atol=1e-6
    )


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
    batch = mini_batch()
    state, _ = ADAM_UPDATE(fresh(ADAM), batch)
    before = jax.tree.map(np.array, state)
    after, metrics = ADAM_UPDATE(state, batch._replace(rewards=np.full_like(batch.rewards, np.nan)))
    assert metrics["skipped"] == 1.0
    assert int(after.version) == int(before.version) + 1 == 2
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    resumed, metrics = ADAM_UPDATE(after, batch)
    assert metrics["skipped"] == 0.0 and int(resumed.version) == 3
    assert any(
        (np.array(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (resumed.params, before.params)), strict=True)
    )


def test_the_state_is_donated():
    state = fresh()
    after, _ = UPDATE(state, mini_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batches.params())), "the base policy is a copy"


def test_one_program_serves_responses_of_all_lengths():
    state, _ = ADAM_UPDATE(fresh(ADAM), mini_batch())
    programs = ADAM_UPDATE._cache_size()
    for seed in range(1, 4):
        state, _ = ADAM_UPDATE(state, mini_batch(seed))
    assert ADAM_UPDATE._cache_size() == programs


def test_nothing_moves_between_host_and_device_unasked(no_implicit_transfers):
    with jax.transfer_guard("allow"):
        state = fresh(ADAM)
        on_device = [jax.device_put(mini_batch(seed)) for seed in range(2)]
    for batch in on_device:
        state, metrics = ADAM_UPDATE(state, batch)
    assert jax.device_get(metrics)["skipped"] == 0.0 and int(jax.device_get(state.version)) == 2


def test_golden_update():
    """Three updates with AdamW, to be equal from one release to the next.

    After a change that is meant to change them: run this test, look at why, and copy the numbers it prints.
    """
    state, found = fresh(ADAM), []
    for seed in range(3):
        state, metrics = ADAM_UPDATE(state, mini_batch(seed))
        found += [float(metrics[name]) for name in ("loss", "grad_norm", "m2_trust_region", "masked_frac")]
    found.append(float(optax.tree.norm(state.params)))
    np.testing.assert_allclose(found, GOLDEN, rtol=2e-4, err_msg=f"GOLDEN = {[round(x, 6) for x in found]}")


GOLDEN = [
    *(0.149771, 4.271083, 17.820089, 0.46),
    *(0.125346, 2.235256, 15.502829, 0.604651),
    *(0.137503, 1.829922, 10.87175, 0.388889),
    17.060898,
]
