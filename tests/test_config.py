"""Configurations check themselves, survive the file, and say in one line what is wrong."""

import json
from dataclasses import replace

import pytest

from m2po_jax.config import (
    Config,
    ConfigError,
    EvaluationConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
    WarmStartConfig,
    differences,
    flatten,
    from_json,
    run_id_of,
    to_json,
)


def test_a_saved_configuration_is_read_back_equal():
    config = Config(
        name="arm",
        seed=7,
        objective=ObjectiveConfig("m2po", {"threshold": 0.02}),
        rollouts=RolloutConfig(keep_weights_every=8),
    )
    text = to_json(config, "abc")
    assert from_json(text) == config
    assert run_id_of(text) == "abc"
    assert json.loads(text)["package_version"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learner.learning_rate", "fast", r"expected float, but 'fast' is a str @ \$.learner.learning_rate"),
        ("learner.total_updates", 2.5, "expected int, but 2.5 is a float"),
        ("learner.total_updates", True, "expected int, but True is a bool"),
        ("model.tie_embeddings", 1, "expected bool, but 1 is a int"),
        ("learner.lerning_rate", 1.0, r"unknown key lerning_rate @ \$.learner"),
        ("staleness.k", -1, "staleness.k is -1"),
        ("staleness.policy", "sometimes", "sometimes"),
        ("rollouts.keep_weights_every", "3", "int | None"),
    ],
)
def test_a_saved_configuration_with_a_fault_is_refused_by_field(field, value, message):
    document = json.loads(to_json(Config(), "abc"))
    part, name = field.split(".")
    document["config"][part][name] = value
    with pytest.raises(ConfigError, match=message) as refusal:
        from_json(json.dumps(document), "here.json")
    assert str(refusal.value).startswith("here.json")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": 3}', "not json"])
def test_something_else_is_no_configuration(text):
    with pytest.raises(ConfigError, match="here.json"):
        from_json(text, "here.json")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StalenessConfig(k=-4), "staleness.k"),
        (lambda: Config(staleness=StalenessConfig(k=3)), "staleness.k"),
        (lambda: Config(learner=LearnerConfig(updates_per_batch=3, total_updates=9, checkpoint_every=9)), "does not"),
        (lambda: Config(seed=-1), "seed"),
        (lambda: Config(name="a/b"), "name"),
        (lambda: Config(evaluation=EvaluationConfig(every=6)), "evaluation.every"),
        (lambda: Config(sampling=SamplingConfig(max_new_tokens=5)), "sampling.max_new_tokens"),
        (lambda: LearnerConfig(total_updates=10), "learner.total_updates"),
        (lambda: LearnerConfig(publish_every=6), "learner.publish_every"),
        (lambda: LearnerConfig(learning_rate=0.0), "learner.learning_rate"),
        (lambda: LearnerConfig(final_learning_rate_share=2.0), "learner.final_learning_rate_share"),
        (lambda: LearnerConfig(decay_updates=0), "learner.decay_updates"),
        (lambda: ModelConfig(kv_heads=3), "model.kv_heads"),
        (lambda: ModelConfig(head_dim=5), "model.head_dim"),
        (lambda: ModelConfig(vocab_size=0), "model.vocab_size"),
        (lambda: ModelConfig(max_positions=0), "model.max_positions"),
        (lambda: ModelConfig(rope_theta=0.0), "model.rope_theta"),
        (lambda: ModelConfig(rope_factor=0.5), "model.rope_factor"),
        (lambda: ModelConfig(rope_low_factor=4.0), "model.rope_high_factor"),
        (lambda: ModelConfig(rope_original_positions=0), "model.rope_original_positions"),
        (lambda: RolloutConfig(prompts_per_batch=10, units_per_batch=4), "rollouts.units_per_batch"),
        (lambda: SamplingConfig(temperature=0.0), "sampling.temperature"),
        (lambda: SamplingConfig(top_p=0.0), "sampling.top_p is 0.0"),
        (lambda: SamplingConfig(top_p=1.1), "sampling.top_p is 1.1"),
        (lambda: SamplingConfig(top_k=0), "sampling.top_k is 0"),
        (lambda: SamplingConfig(slots=0), "sampling.slots is 0"),
        (lambda: Config(sampling=SamplingConfig(top_k=20)), "sampling.top_k is 20: a shard cannot state it"),
        (lambda: Config(sampling=SamplingConfig(top_p=0.9)), "sampling.top_p is 0.9: .*train-on-truncated"),
        (lambda: TaskConfig(min_operands=1), "task.min_operands"),
        (lambda: TaskConfig(min_operands=5), "task.max_operands"),
        (lambda: TaskConfig(held_out_fraction=1.0), "task.held_out_fraction"),
        (lambda: WarmStartConfig(target_accuracy=1.0), "warm_start.target_accuracy"),
        (lambda: WarmStartConfig(slip_rate=1.0), "warm_start.slip_rate"),
        (lambda: Config(learner=LearnerConfig(learning_rate=float("inf"))), "learner.learning_rate is inf"),
        (lambda: Config(sampling=SamplingConfig(temperature=float("inf"))), "sampling.temperature is inf"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_the_name_of_the_field(make, field):
    with pytest.raises(ConfigError, match=field) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_training_on_truncated_draws_has_to_be_asked_for():
    """REGRESSIONS 3: ratios of the whole softmax on tokens drawn from a part of it compare two distributions."""
    config = Config(sampling=SamplingConfig(top_p=0.9, train_on_truncated=True))
    assert from_json(to_json(config, "run")) == config


def test_differences_name_dotted_fields_with_both_values():
    changed = replace(Config(), seed=5, objective=ObjectiveConfig("m2po", {"threshold": 0.1}))
    assert differences(Config(), changed) == {"seed": (0, 5), "objective.hyperparameters.threshold": (None, 0.1)}
    assert differences(changed, changed) == {}
    assert flatten(changed)["learner.total_updates"] == changed.learner.total_updates
