"""Continuous batching: few slots, many responses, a mesh, a switch of weights; what is drawn stays what it is."""

from functools import partial

import jax
import numpy as np
import pytest

from m2po_jax.config import MeshConfig, SamplingConfig, TaskConfig
from m2po_jax.generation import Sampler, engine
from m2po_jax.generation.draw import Truncation
from m2po_jax.generation.engine import generate, sampling_keys
from m2po_jax.generation.sampler import prompt_width, slots_for
from m2po_jax.generation.slots import ladder
from m2po_jax.models import response_logprobs, sharding
from m2po_jax.models.mesh import make_mesh
from m2po_jax.models.transformer import forward, logits_of
from m2po_jax.tasks import ArithmeticTask, left_padded
from tests.models import policies, reference

VOCAB, PAD, EOS = 7, 0, 1
PROMPTS = [[3, 4, 5], [2], [6, 6, 2, 4], [3, 4, 5], [5, 5], [4, 2, 6], [2, 3], [6]]
SAMPLES, WIDTH, LENGTH = 3, 5, 8
ROWS = len(PROMPTS) * SAMPLES
STREAM = jax.random.key(5)


@pytest.fixture(scope="module")
def policy():
    return policies.random_policy(VOCAB)


def keys(prompts=8, version=0):
    groups = np.repeat(np.arange(prompts, dtype=np.uint32), SAMPLES)
    return sampling_keys(STREAM, np.uint32(version), groups, np.tile(np.arange(SAMPLES, dtype=np.uint32), prompts))


def sample(policy, prompts=PROMPTS, temperature=1.0, **static):
    tokens, valid = left_padded(prompts, WIDTH, PAD)
    options = {"samples_per_prompt": SAMPLES, "max_new_tokens": LENGTH, "stop_ids": (EOS,), "pad_id": PAD} | static
    row_keys = keys(len(prompts))
    return jax.device_get(
        generate(policy[1], tokens, valid, row_keys, np.float32(temperature), model=policy[0], **options)
    )


def same_draws(a, b, atol=1e-5) -> None:
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)


@pytest.fixture(scope="module")
def whole(policy):
    """All responses side by side."""
    return sample(policy)


@partial(jax.jit, static_argnums=0)
def next_logits(model, params, tokens_1S, length):
    """Of the first `length` tokens, by a whole forward pass without a cache."""
    slots = np.arange(tokens_1S.shape[1], dtype=np.int32)[None]
    hidden, _ = forward(model, params, tokens_1S, slots, slots < length)
    return logits_of(model, params, hidden)[0, length - 1]


def plainly(policy, prompt, key, temperature):
    """One response, token by token, drawn as the module says: first token whose running sum is above a number."""
    response = []
    while len(response) < LENGTH and response[-1:] != [EOS]:
        tokens = np.zeros((1, WIDTH + LENGTH), np.int32)
        tokens[0, : len(prompt) + len(response)] = [*prompt, *response]
        logits = np.float64(next_logits(*policy, tokens, np.int32(len(prompt) + len(response)))) / temperature
        sums = np.cumsum(np.exp(logits - logits.max()))
        number = float(jax.random.uniform(jax.random.fold_in(key, len(response)), (2,))[1])
        response.append(int(np.argmax(sums > number * sums[-1])))
    return response


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_responses_are_those_of_a_plain_loop_without_slots_or_cache(policy, temperature):
    out, row_keys = sample(policy, temperature=temperature, slots=5), keys()
    for row in range(ROWS):
        expected = plainly(policy, PROMPTS[row // SAMPLES], row_keys[row], temperature)
        assert out.tokens[row][out.mask[row]].tolist() == expected


@pytest.mark.parametrize("slots", [1, 2, 5, 23, 24, 100])
def test_slots_change_nothing_that_is_drawn(policy, whole, slots):
    out = sample(policy, slots=slots)
    same_draws(out, whole)
    assert out.mask.sum() <= out.slot_steps
    assert out.slot_steps % min(slots, ROWS) == 0
    if slots == 1:
        assert out.slot_steps == out.mask.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_frozen_policy_has_ratio_one_whatever_the_slots(policy, temperature):
    """REGRESSIONS 3, for responses that share their slots' rings with others before them."""
    out = sample(policy, temperature=temperature, slots=4)
    prompts, valid = (np.repeat(x, SAMPLES, axis=0) for x in left_padded(PROMPTS, WIDTH, PAD))
    score = jax.jit(response_logprobs, static_argnums=0)
    logprobs, _ = score(*policy, prompts, valid, out.tokens, out.mask, np.float32(temperature))
    np.testing.assert_allclose(np.exp(logprobs - out.logprobs), 1.0, atol=1e-5)


def test_truncated_draws_are_of_the_likeliest_and_scored_by_all(policy):
    """REGRESSIONS 3: with top-p the log-probs are those of the whole tempered softmax, as the learner's are."""
    out = sample(policy, slots=4, truncation=Truncation(0.6, 3), temperature=1.5)
    for row in range(0, ROWS, 5):
        prompt, response = PROMPTS[row // SAMPLES], out.tokens[row][out.mask[row]].tolist()
        table = reference.logprobs(*policy, [*prompt, *response], 1.5)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(out.logprobs[row][out.mask[row]], table[range(len(response)), response], atol=1e-5)
        for line, token in zip(np.exp(table), response, strict=True):
            above = np.sort(line)[::-1][:3]
            above = above[: int(np.argmax(np.cumsum(above) >= 0.6 * above.sum())) + 1]
            assert line[token] >= above[-1] - 1e-6


def test_one_shape_gives_the_same_bits_every_time(policy):
    one, again = sample(policy, slots=5), sample(policy, slots=5)
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_ends_are_real_in_slots_too(policy, pad_id):
    """REGRESSIONS 11 and 12: padding that is the end token, in slots that others used before."""
    out, usual = sample(policy, slots=3, pad_id=pad_id), sample(policy, slots=3)
    np.testing.assert_array_equal(out.mask, usual.mask)
    assert (out.tokens[~out.mask] == pad_id).all() and (out.logprobs[~out.mask] == 0.0).all()
    lengths = out.mask.sum(axis=1)
    last = out.tokens[np.arange(ROWS), lengths - 1]
    np.testing.assert_array_equal(out.stopped, last == EOS)
    assert ((lengths == LENGTH) | out.stopped).all() and (lengths == LENGTH).any() and (lengths < LENGTH).any()


def test_slots_that_are_never_idle_are_all_occupied():
    out = sample(policies.always(3, EOS, VOCAB), [[4], [5, 2]] * 4, slots=6)
    assert out.mask.sum() == 2 * ROWS == out.slot_steps


def test_many_prompts_go_through_few_slots(policy, rng):
    prompts = [rng.integers(2, VOCAB, rng.integers(1, WIDTH + 1)).tolist() for _ in range(40)]
    same_draws(sample(policy, prompts, slots=7), sample(policy, prompts))


def test_slots_are_halved_as_the_last_responses_end(policy):
    assert ladder(24, 40) == [24, 12] and ladder(64, 40) == [64, 32, 16, 8] and ladder(64, 10) == [64] == ladder(64, 32)
    halved, not_halved = (sample(policy, slots=slots, max_new_tokens=40) for slots in (24, 7))
    same_draws(halved, not_halved)
    assert 24 * halved.mask.sum(axis=1).max() > halved.slot_steps


@pytest.fixture(scope="module")
def cuttable():
    """A policy that tensor cuts in four, and its draws on one device."""
    policy = policies.random_policy(None, vocab_size=8, kv_heads=4)
    return policy, sample(policy)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_stack", [False, True], ids=["layer by layer", "stacked"])
@pytest.mark.parametrize(
    ("shape", "slots"), [((2, 1, 1), 2), ((1, 4, 1), 5), ((2, 2, 2), 8), ((1, 4, 2), 24), ((2, 1, 4), 3)]
)
def test_a_mesh_changes_nothing_that_is_drawn(cuttable, shape, slots, in_a_stack, monkeypatch):
    """Also with layers in a stack, as on TPUs."""
    monkeypatch.setattr(engine, "on_tpu", lambda: in_a_stack)
    generate.clear_cache()
    (model, params), expected = cuttable
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
    placed = jax.device_put(params, sharding.shardings(model.config, mesh))
    with jax.set_mesh(mesh):
        out = sample((model, placed), slots=slots)
    generate.clear_cache()
    same_draws(out, expected)


TASK = ArithmeticTask(TaskConfig(min_operands=2, max_operands=3))
PROBLEMS = TASK.held_out(12)


def sampler(**config):
    model, _ = policies.random_policy(TASK.tokenizer.vocab_size)
    return Sampler(TASK, model, SamplingConfig(max_new_tokens=6, **config))


def test_nothing_of_old_weights_is_served_after_a_switch():
    """REGRESSIONS 18: the log-probs of a sampler that has served others are those of a fresh one, bit for bit."""
    old, new = (policies.random_policy(TASK.tokenizer.vocab_size, seed=seed)[1] for seed in (0, 1))
    used, fresh = sampler(slots=5), sampler(slots=5)
    before = used.sample(old, PROBLEMS, keys(len(PROBLEMS)), SAMPLES)
    after, expected = (one.sample(new, PROBLEMS, keys(len(PROBLEMS)), SAMPLES) for one in (used, fresh))
    np.testing.assert_array_equal(after.tokens, expected.tokens)
    np.testing.assert_array_equal(after.logprobs, expected.logprobs)
    assert not np.array_equal(before.logprobs, after.logprobs)


def test_work_is_counted_over_everything_collected():
    one = sampler(slots=5)
    assert (one.work.occupancy, one.work.tokens_per_s) == (0.0, 0.0)
    _, params = policies.random_policy(TASK.tokenizer.vocab_size)
    made = [one.sample(params, PROBLEMS, keys(len(PROBLEMS), version), SAMPLES) for version in range(2)]
    assert one.work.tokens == sum(int(responses.lengths.sum()) for responses in made)
    assert 0.5 < one.work.occupancy <= 1.0 and one.work.seconds > 0.0
    assert one.work.tokens_per_s == pytest.approx(one.work.tokens / one.work.seconds)


def test_a_prompt_narrower_than_the_widest_gets_a_narrower_program():
    assert [prompt_width(n, 256) for n in (1, 64, 65, 128, 129, 256)] == [64, 64, 128, 128, 256, 256]
    assert [prompt_width(n, 100) for n in (1, 100)] == [100, 100]
    assert [prompt_width(n, 1001) for n in (60, 200, 251, 501, 502)] == [126, 251, 251, 501, 1001]


def test_slots_suit_the_responses():
    short, long = SamplingConfig(max_new_tokens=10), SamplingConfig(max_new_tokens=512)
    assert [slots_for(short, n, 1) for n in (8, 4096)] == [8, 4096]
    assert [slots_for(long, n, 1) for n in (8, 100, 4096)] == [8, 64, 1024]
    assert slots_for(long, 512, 4) == 256
    assert slots_for(SamplingConfig(slots=32), 512, 4) == 32 and slots_for(SamplingConfig(slots=32), 8, 1) == 8
