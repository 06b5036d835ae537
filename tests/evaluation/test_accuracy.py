"""Held-out accuracy: exact for policies whose answers are known, and a function of (seed, version)."""

import numpy as np
import pytest

from m2po_jax.config import ConfigError, SamplingConfig, TaskConfig
from m2po_jax.evaluation import Accuracy, HeldOut
from m2po_jax.generation import Sampler
from m2po_jax.tasks import ArithmeticTask
from tests.models import policies

TASK = ArithmeticTask(TaskConfig(min_operands=2, max_operands=3, held_out_fraction=0.7))
VOCAB, EOS = TASK.tokenizer.vocab_size, TASK.tokenizer.eos_id
PROMPTS = 600
"""More than one chunk, and no whole number of them."""
SAMPLING = SamplingConfig(max_new_tokens=2)


def one_digit(logit_of: dict[str, float]):
    """A policy that answers one of these digits whatever it is asked, then ends."""
    digits = TASK.tokenizer.encode("".join(logit_of))
    logits = np.full((VOCAB, VOCAB), policies.NEVER)
    logits[:, digits] = list(logit_of.values())
    logits[digits] = policies.NEVER
    logits[digits, EOS] = 0.0
    # The last token of a prompt is always `=`, so that a digit is followed by the end only after the prompt.
    return policies.markov_policy(logits)


def held_out(model, prompts=PROMPTS, seed=0):
    return HeldOut(Sampler(TASK, model, SAMPLING), prompts, seed)


@pytest.mark.parametrize("digit", ["9", "0"])
def test_a_policy_with_one_answer_is_right_where_it_is_the_gold_answer(digit):
    model, params = one_digit({digit: 0.0})
    accuracy = held_out(model).accuracy(params, version=0)
    right = sum(problem.gold_answer == digit for problem in TASK.held_out(PROMPTS))
    assert right > 0
    assert accuracy == Accuracy(right / PROMPTS, PROMPTS)


def test_the_draw_follows_from_seed_and_version():
    model, params = one_digit({str(digit): 0.0 for digit in range(10)})
    values = {
        (seed, version): held_out(model, seed=seed).accuracy(params, version).value
        for seed in (0, 1)
        for version in (0, 4, 8)
    }
    assert len(set(values.values())) > 2
    assert held_out(model, seed=1).accuracy(params, 4).value == values[1, 4]
    share = np.mean([len(problem.gold_answer) == 1 for problem in TASK.held_out(PROMPTS)])
    expected = Accuracy(0.1 * share, 6 * PROMPTS)
    assert np.mean(list(values.values())) == pytest.approx(expected.value, abs=4 * expected.standard_error)


def test_the_same_prompts_are_evaluated_for_every_seed_and_policy():
    model, _ = one_digit({"1": 0.0})
    assert held_out(model, 50, seed=0).problems == held_out(model, 50, seed=3).problems
    assert all(TASK.is_held_out(problem.prompt) for problem in held_out(model, 50).problems)


def test_too_few_held_out_prompts_are_refused():
    with pytest.raises(ConfigError, match="evaluation.prompts 5000 is more than the held-out prompts"):
        held_out(one_digit({"1": 0.0})[0], 5000)


def test_the_standard_error_is_binomial():
    assert Accuracy(0.5, 100).standard_error == pytest.approx(0.05)
    assert Accuracy(0.2, 400).standard_error == pytest.approx(0.02)
    assert Accuracy(1.0, 10).standard_error == Accuracy(0.0, 10).standard_error == 0.0
