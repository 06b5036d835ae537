import jax
import numpy as np
import pytest

from m2po_jax.config import UserError, WarmStartConfig
from m2po_jax.learner.warm_start import warm_start
from m2po_jax.models import response_logprobs
from tests.learner import batches

pytestmark = pytest.mark.usefixtures("standard_promotion")

CONFIG = WarmStartConfig(target_accuracy=0.5, max_steps=40, check_every=10, learning_rate=3e-2)


def demonstrations(step: int):
    batch = batches.mini_batch(seed=0)
    return batch.prompt_tokens, batch.prompt_valid, batch.response_tokens, batch.response_mask


def likelihood(params) -> float:
    """Geometric mean of the probability of a demonstrated token."""
    logprobs, _ = response_logprobs(batches.spec().model, params, *demonstrations(0))
    return float(np.exp(logprobs.sum() / demonstrations(0)[3].sum()))


def run(accuracy, checks, config=CONFIG):
    model = batches.spec().model
    return warm_start(config, model, jax.random.key(0), demonstrations, accuracy, lambda *c: checks.append(c))


def test_it_imitates_until_the_first_check_that_reaches_the_target():
    checks = []
    params = run(lambda params, step: likelihood(params), checks)
    steps, reached = zip(*checks, strict=True)
    assert steps == tuple(range(0, 10 * len(steps), 10)) and len(steps) > 1
    assert reached[-1] >= 0.5 > max(reached[:-1])
    assert likelihood(params) == reached[-1]


def test_a_target_out_of_reach_is_an_error_that_says_what_was_reached():
    checks = []
    with pytest.raises(UserError, match=r"reached 0\.125 after 40 steps, below warm_start.target_accuracy 0\.5: raise"):
        run(lambda params, step: 0.125, checks)
    assert [step for step, _ in checks] == [0, 10, 20, 30, 40]


def test_a_target_of_zero_needs_no_step():
    params = run(lambda params, step: 0.0, [], WarmStartConfig(target_accuracy=0.0))
    fresh = batches.spec().model.init_params(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, fresh)
