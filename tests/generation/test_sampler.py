"""The sampler: decoded as sampled, graded by group, finish reasons as the engine has them."""

import jax
import numpy as np
import pytest

from m2po_jax.config import SamplingConfig, TaskConfig, UserError
from m2po_jax.generation import Sampler
from m2po_jax.generation.engine import Generated, sampling_keys
from m2po_jax.tasks import ArithmeticTask, Problem
from tests.models import policies

TASK = ArithmeticTask(TaskConfig(min_operands=2, max_operands=3))
VOCAB = TASK.tokenizer.vocab_size
PROBLEMS = [Problem("1+2=", "3", "3"), Problem("9+9+1=", "19", "18,19")]
LENGTH = 6


def sampler(model, **config):
    return Sampler(TASK, model, SamplingConfig(max_new_tokens=LENGTH, **config))


def keys(rows):
    index = np.arange(rows, dtype=np.uint32)
    return sampling_keys(jax.random.key(0), np.uint32(0), index, np.zeros_like(index))


def generated(responses: list[str], stopped: list[bool]) -> Generated:
    """What the engine gives for these responses: `.` is the end token, `_` a sampled padding id."""
    ids = {"_": 0, ".": 1}
    tokens = np.zeros((len(responses), LENGTH), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, text in enumerate(responses):
        tokens[row, : len(text)] = [ids[c] if c in ids else TASK.tokenizer.encode(c)[0] for c in text]
        mask[row, : len(text)] = True
    logprobs = np.where(mask, np.float32(-1.0), np.float32(0.0))
    return Generated(tokens, logprobs, mask, np.array(stopped), np.int32(mask.size))


def collect(responses, stopped):
    return sampler(policies.random_policy(VOCAB)[0]).collect(generated(responses, stopped), PROBLEMS)


def test_finish_reasons_are_the_engines_and_never_a_width():
    """REGRESSIONS 12: of two responses as long as the array, one ended and one was cut."""
    responses = collect(["18,19.", "18,190", "3.", "19."], [True, False, True, True])
    assert responses.finish_reasons == ["stop", "length", "stop", "stop"]
    assert responses.lengths.tolist() == [6, 6, 2, 3]


def test_rows_are_graded_against_the_gold_answer_of_their_own_group():
    responses = collect(["3.", "19.", "18,19.", "3."], [True] * 4)
    assert responses.scores.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert responses.scores.dtype == np.float32
    assert responses.texts == ["3", "19", "18,19", "3"]


def test_an_empty_response_and_one_with_padding_inside_score_nothing_and_keep_their_tokens():
    responses = collect([".", "_3.", "18,_19", "1_9."], [True, True, False, True])
    assert responses.scores.tolist() == [0.0] * 4
    assert responses.lengths.tolist() == [1, 3, 6, 4]
    assert responses.texts == ["", "<pad>3", "18,<pad>19", "1<pad>9"]
    assert responses.tokens[3].tolist() == [3, 0, 11, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_sampling_follows_a_known_policy_at_the_configured_temperature(temperature):
    """Any of two digits, then the end: the log-probs are those of the tempered choice."""
    three, four = TASK.tokenizer.encode("34")
    logits = np.full((VOCAB, VOCAB), policies.NEVER)
    logits[:, [three, four]] = [1.0, 0.0]
    logits[[three, four]] = policies.NEVER
    logits[[three, four], TASK.tokenizer.eos_id] = 0.0
    model, params = policies.markov_policy(logits)
    drawn = sampler(model, temperature=temperature)
    responses = drawn.collect(drawn.dispatch(params, PROBLEMS, keys(400), samples_per_prompt=200), PROBLEMS)
    chance = 1 / (1 + np.exp(-1 / temperature))
    is_three = np.array([text == "3" for text in responses.texts])
    assert set(responses.texts) == {"3", "4"}
    assert is_three.mean() == pytest.approx(chance, abs=4 * np.sqrt(chance * (1 - chance) / 400))
    np.testing.assert_allclose(responses.logprobs[:, 0], np.log(np.where(is_three, chance, 1 - chance)), atol=1e-5)
    np.testing.assert_allclose(responses.logprobs[:, 1:], 0.0, atol=1e-6)
    np.testing.assert_array_equal(responses.scores, is_three & (np.arange(400) < 200))
    assert responses.finish_reasons == ["stop"] * 400


def test_a_prompt_longer_than_the_context_is_refused():
    longest = max(len(TASK.tokenizer.encode(problem.prompt)) for problem in PROBLEMS)
    model, params = policies.random_policy(VOCAB, max_positions=longest + LENGTH - 1)
    with pytest.raises(UserError) as raised:
        sampler(model).dispatch(params, PROBLEMS, keys(2), 1)
    assert str(raised.value) == (
        f"a sequence of {longest + LENGTH} tokens, prompt and response, is over model.max_positions"
        f" {longest + LENGTH - 1}"
    )
    model, params = policies.random_policy(VOCAB, max_positions=longest + LENGTH)
    sampler(model).dispatch(params, PROBLEMS, keys(2), 1)
