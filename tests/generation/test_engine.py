"""The decode engine: the learner's log-probs, the right distribution, keys that know no batch, ends that are real."""

from functools import partial

import jax
import numpy as np
import pytest

from m2po_jax.generation.engine import generate, sampling_keys
from m2po_jax.models import response_logprobs
from m2po_jax.tasks import left_padded
from tests.models import policies, reference

VOCAB, PAD, EOS = 7, 0, 1
PROMPTS = [[3, 4, 5], [2], [6, 6, 2, 4], [3, 4, 5]]
SAMPLES, WIDTH, LENGTH = 6, 5, 6
ROWS = len(PROMPTS) * SAMPLES
STREAM = jax.random.key(5)


@pytest.fixture(scope="module")
def policy():
    return policies.random_policy(VOCAB, layers=1)


def keys(version=0, groups=(0, 1, 2, 3)):
    """Keys of the samples 0..SAMPLES-1 of each group."""
    groups = np.repeat(np.array(groups, np.uint32), SAMPLES)
    samples = np.tile(np.arange(SAMPLES, dtype=np.uint32), len(groups) // SAMPLES)
    return sampling_keys(STREAM, np.uint32(version), groups, samples)


def sample(policy, prompts=PROMPTS, row_keys=None, temperature=1.0, filler=PAD, **static):
    """Host arrays of one call; `filler` stands in the prompts' padding."""
    tokens, valid = left_padded(prompts, WIDTH, filler)
    row_keys = keys() if row_keys is None else row_keys
    shape = {"samples_per_prompt": SAMPLES, "max_new_tokens": LENGTH, "stop_ids": (EOS,), "pad_id": PAD} | static
    return jax.device_get(
        generate(policy[1], tokens, valid, row_keys, np.float32(temperature), model=policy[0], **shape)
    )


def equal(a, b, rows_a=slice(None), rows_b=slice(None)) -> bool:
    """Whether rows of two results hold the same draws; log-probs may differ in their last bits."""
    np.testing.assert_allclose(a.logprobs[rows_a], b.logprobs[rows_b], atol=1e-6)
    return all(
        (x[rows_a] == y[rows_b]).all() for x, y in ((a.tokens, b.tokens), (a.mask, b.mask), (a.stopped, b.stopped))
    )


@partial(jax.jit, static_argnums=0)
def learner_logprobs(model, params, prompts, valid, tokens, mask, temperature):
    return response_logprobs(model, params, prompts, valid, tokens, mask, temperature)[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_frozen_policy_has_ratio_one_at_every_token(policy, temperature):
    """REGRESSIONS 3: what the sampler recorded is what the learner computes, cached or not."""
    out = sample(policy, temperature=temperature)
    prompts, valid = (np.repeat(x, SAMPLES, axis=0) for x in left_padded(PROMPTS, WIDTH, PAD))
    logprobs = learner_logprobs(*policy, prompts, valid, out.tokens, out.mask, np.float32(temperature))
    assert out.logprobs.dtype == np.float32
    np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-5)
    np.testing.assert_allclose(np.exp(logprobs - out.logprobs), 1.0, atol=1e-5)
    assert (out.logprobs[out.mask] < 0.0).all()
    for row in range(0, ROWS, 5):
        response = out.tokens[row][out.mask[row]].tolist()
        expected, _ = reference.response(*policy, PROMPTS[row // SAMPLES], response, temperature)
        np.testing.assert_allclose(out.logprobs[row][out.mask[row]], expected, atol=1e-5)


def test_at_temperature_zero_the_likeliest_token_is_taken(policy):
    out = sample(policy, temperature=1e-6)
    for row in range(0, ROWS, SAMPLES):
        tokens = list(PROMPTS[row // SAMPLES])
        for token in out.tokens[row][out.mask[row]]:
            assert token == reference.logits(*policy, tokens)[-1].argmax()
            tokens.append(token)
        assert (out.tokens[row : row + SAMPLES] == out.tokens[row]).all()
    np.testing.assert_allclose(out.logprobs, 0.0, atol=1e-6)


def test_pairs_of_tokens_are_drawn_from_their_distribution():
    """Pearson's statistic over (first, second) tokens; noise shared between steps or rows would show."""
    count, temperature = 4096, 1.5
    model, params = policies.random_policy(5, layers=1)
    row_keys = sampling_keys(STREAM, np.uint32(0), np.arange(count, dtype=np.uint32), np.zeros(count, np.uint32))
    out = sample(
        (model, params), [[3, 4]], row_keys, temperature, samples_per_prompt=count, max_new_tokens=2, stop_ids=(EOS,)
    )
    first = np.exp(reference.logprobs(model, params, [3, 4], temperature)[-1])
    expected = {(EOS, PAD): first[EOS]}
    for a in set(range(5)) - {EOS}:
        second = np.exp(reference.logprobs(model, params, [3, 4, a], temperature)[-1])
        expected |= {(a, b): first[a] * second[b] for b in range(5)}
    assert sum(expected.values()) == pytest.approx(1.0)
    assert min(expected.values()) * count > 5
    pairs = [tuple(pair) for pair in out.tokens.tolist()]
    statistic = sum((pairs.count(pair) - share * count) ** 2 / (share * count) for pair, share in expected.items())
    assert statistic < 45.3  # the 99.9th percentile at 20 degrees of freedom


def test_any_of_several_end_tokens_ends_a_response(policy):
    ends = {EOS, 4}
    out = sample(policy, stop_ids=tuple(ends))
    responses = [row[mask].tolist() for row, mask in zip(out.tokens, out.mask, strict=True)]
    assert not any(ends & set(response[:-1]) for response in responses)
    assert [response[-1] in ends for response in responses] == out.stopped.tolist()
    assert {response[-1] for response in responses} >= ends


def test_a_draw_depends_on_its_key_and_prompt_and_on_no_other_row(policy):
    out = sample(policy)
    order = [2, 0, 3, 1]
    shuffled = sample(policy, [PROMPTS[i] for i in order], keys(groups=order))
    for place, group in enumerate(order):
        rows, places = (slice(i * SAMPLES, (i + 1) * SAMPLES) for i in (group, place))
        assert equal(out, shuffled, rows, places)
    among_others = sample(policy, [[5, 5, 5, 5], [4], PROMPTS[2], [2, 2]], keys(groups=[17, 40, 2, 99]))
    assert equal(out, among_others, slice(2 * SAMPLES, 3 * SAMPLES), slice(2 * SAMPLES, 3 * SAMPLES))
    assert equal(out, sample(policy))


def test_a_prompt_drawn_twice_gets_different_responses(policy):
    """Groups 0 and 3 have one prompt; so have the samples of a group."""
    out = sample(policy)
    assert not (out.tokens[:SAMPLES] == out.tokens[-SAMPLES:]).all()
    assert len({tuple(row) for row in out.tokens[[*range(SAMPLES), *range(ROWS - SAMPLES, ROWS)]].tolist()}) > SAMPLES
    other_version = sample(policy, row_keys=keys(version=1))
    assert not (out.tokens == other_version.tokens).all()


def test_no_two_keys_are_alike():
    grid = np.stack(np.meshgrid(range(3), range(4), range(5), indexing="ij"), axis=-1).reshape(-1, 3).astype(np.uint32)
    every = [
        jax.random.key_data(sampling_keys(stream, version, *grid[grid[:, 0] == version, 1:].T))
        for stream in (STREAM, jax.random.key(6))
        for version in np.arange(3, dtype=np.uint32)
    ]
    words = np.concatenate(every)
    assert len(np.unique(words, axis=0)) == len(words) == 2 * len(grid)


def test_garbage_in_the_padding_of_prompts_changes_nothing(policy):
    for filler in (6, -1, 10**6):
        assert equal(sample(policy), sample(policy, filler=filler))


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_ends_are_real_and_nothing_follows_them(policy, pad_id):
    """REGRESSIONS 11 and 12, with a padding id that a policy samples too, and with one that is the end token."""
    kinds = set()
    for version in range(4):
        out = sample(policy, row_keys=keys(version), temperature=2.0, pad_id=pad_id)
        for tokens, logprobs, mask, stopped in zip(*out[:4], strict=True):
            response = tokens[mask].tolist()
            assert mask.tolist() == [True] * len(response) + [False] * (LENGTH - len(response))
            assert EOS not in response[:-1]
            assert stopped == (response[-1] == EOS)
            assert stopped or len(response) == LENGTH
            assert (tokens[~mask] == pad_id).all()
            assert (logprobs[mask] < 0.0).all() and (logprobs[~mask] == 0.0).all()
            kinds.add((bool(stopped), len(response) == LENGTH, PAD in response))
        usual = sample(policy, row_keys=keys(version), temperature=2.0)
        np.testing.assert_array_equal(out.mask, usual.mask)
        np.testing.assert_array_equal(out.tokens[out.mask], usual.tokens[usual.mask])
        np.testing.assert_array_equal(out.logprobs, usual.logprobs)
    every = {(True, False), (True, True), (False, True)}
    assert kinds == {(*kind, padding) for kind in every for padding in (True, False)}, "draw more responses"


def test_when_every_row_ends_early_the_rest_is_padding(policy):
    out = sample(policy)
    short = int(np.flatnonzero(out.stopped[:SAMPLES] & ~out.mask[:SAMPLES, -2])[0])
    prompts, row_keys = [PROMPTS[0]] * len(PROMPTS), jax.numpy.repeat(keys()[short][None], ROWS)
    ended = sample(policy, prompts, row_keys)
    assert ended.stopped.all()
    assert equal(ended, out, slice(None), np.full(ROWS, short))


def test_a_policy_that_never_ends_is_cut_and_one_that_ends_is_not():
    for then, length, stopped in ((3, LENGTH, False), (EOS, 2, True)):
        out = sample(policies.always(3, then, VOCAB))
        assert (out.stopped == stopped).all()
        assert (out.mask.sum(axis=1) == length).all()
        assert (out.tokens[:, :2] == [3, then]).all()


def test_one_program_serves_every_version_temperature_and_prompt(policy):
    sample(policy)
    before = generate._cache_size()
    other = policies.random_policy(VOCAB, seed=1, layers=1)
    assert other[0] == policy[0] and other[0] is not policy[0]
    sample(other, PROMPTS[::-1], keys(version=7), temperature=0.3)
    assert generate._cache_size() == before > 0
