"""Whole lockstep runs with what objectives ask for beyond two policies: a proximal or reference one, micro-batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m2po_jax.config import ObjectiveConfig, StalenessConfig
from m2po_jax.models import Transformer
from m2po_jax.rollouts import Store, open_run, weights
from m2po_jax.tasks import ArithmeticTask
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

ON_POLICY = replace(tiny.TINY, staleness=StalenessConfig(k=0))


def updates(run: Path) -> list[dict[str, Any]]:
    return [line for line in tiny.lines(run) if line["event"] == "update"]


def published(run: Path, version: int) -> Any:
    config = open_run(run)[1].config
    model = Transformer(config.model, ArithmeticTask(config.task).tokenizer.vocab_size)
    params, _ = weights.load(Store.open(run), version, jax.eval_shape(model.init_params, jax.random.key(0)))
    return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("objective", ["decoupled_ppo", "m2po_all_tokens"])
def test_a_proximal_policy_is_that_of_the_batchs_first_update(tmp_path, objective):
    config = replace(tiny.TINY, objective=ObjectiveConfig(objective))
    short = tiny.with_learner(config, total_updates=8, checkpoint_every=8, diagnostics_every=1)
    tiny.train(short, tmp_path / "run", tiny.base_run())
    lines = updates(tmp_path / "run")
    assert all(line["nonfinite_proximal"] == 0 for line in lines)
    # The first batches were sampled by version 0, which is the proximal policy at update 0 only.
    assert lines[0]["m2_all"] == pytest.approx(0.0, abs=1e-9) and lines[6]["m2_all"] > 1e-6


def test_a_kl_penalty_pulls_towards_the_base_policy(tmp_path):
    distances = {}
    for coefficient in (0.0, 10.0):
        objective = ObjectiveConfig("grpo", {"kl_coefficient": coefficient})
        config = tiny.with_learner(replace(ON_POLICY, objective=objective), total_updates=16, learning_rate=1e-2)
        run = tmp_path / str(coefficient)
        tiny.train(config, run, tiny.base_run())
        moved = jax.tree.map(lambda a, b: np.sum((a - b) ** 2), published(run, 0), published(run, 16))
        distances[coefficient] = sum(jax.tree.leaves(moved))
        kls = [line.get("reference_kl") for line in updates(run)]
        assert all(kl is None for kl in kls) if coefficient == 0.0 else kls[0] == 0.0 and max(kls) > 0.0
    assert distances[10.0] < 0.9 * distances[0.0]


def test_micro_batches_change_nothing_but_rounding(tmp_path):
    whole = tiny.with_learner(ON_POLICY, total_updates=4, checkpoint_every=4)
    lines = {}
    for count in (1, 3):
        tiny.train(tiny.with_learner(whole, micro_batches=count), tmp_path / str(count), tiny.base_run())
        lines[count] = updates(tmp_path / str(count))[:2]
    for one, three in zip(*lines.values(), strict=True):
        assert one["log_ratio_histogram"] == three["log_ratio_histogram"] or one["version"] > 0
        assert three["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert three["entropy_mean"] == pytest.approx(one["entropy_mean"], rel=1e-3)
