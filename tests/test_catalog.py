"""Experiment files, saved configurations and run directories all lead to a resolved configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from m2po_jax import catalog, objectives
from m2po_jax.config import Config, ConfigError, ObjectiveConfig, SamplingConfig, UserError, to_json
from m2po_jax.learner.spec import objective_of
from m2po_jax.rollouts import Store, create_or_resume
from tests import tiny

EXPERIMENTS = sorted((tiny.ROOT / "experiments").glob("*.py"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_builds(path: Path):
    for config in catalog.find_experiment(str(path)):
        objectives.get(config.objective.name, **config.objective.hyperparameters)
        assert config.objective.hyperparameters.items() <= objectives.defaults(config.objective.name).items()
        assert catalog.find_config(f"{path}:{config.name}") == config


def test_the_quickstart_has_the_four_arms_with_one_setting():
    arms = catalog.find_experiment(str(tiny.ROOT / "experiments" / "quickstart.py"))
    assert {(arm.objective.name, arm.staleness.k) for arm in arms} == {
        ("grpo", 0), ("grpo", 256), ("grpo_no_tr", 256), ("m2po", 256)
    }  # fmt: skip
    first = arms[0]
    assert {
        replace(arm, name=first.name, objective=first.objective, staleness=first.staleness) == first for arm in arms
    } == {True}
    assert first.learner.total_updates >= 4 * 256
    assert first.evaluation.prompts >= 2048


def test_a_saved_configuration_and_a_run_are_references_too(tmp_path):
    config = catalog.resolved(replace(tiny.TINY, seed=3))
    file = tmp_path / "config.json"
    file.write_text(to_json(config, "abc"))
    assert catalog.find_config(str(file)) == config
    create_or_resume(Store.open(tmp_path / "run", create=True), config)
    assert catalog.find_config(str(tmp_path / "run")) == config


def test_names_that_are_not_there_are_refused_with_the_nearest(tmp_path):
    quickstart = str(tiny.ROOT / "experiments" / "quickstart.py")
    with pytest.raises(ConfigError, match="did you mean .*quickstart.py:m2po-s256"):
        catalog.find_config(f"{quickstart}:m2po-s255")
    with pytest.raises(UserError, match="several configurations, name one"):
        catalog.find_config(quickstart)
    with pytest.raises(UserError, match="no experiment file"):
        catalog.find_config("experiments/nothing.py:x")
    with pytest.raises(UserError, match="cannot read"):
        catalog.find_config(str(tmp_path / "nothing.json"))
    with pytest.raises(UserError):
        catalog.find_config(str(tmp_path / "no-run"))
    with pytest.raises(ConfigError, match="did you mean threshold"):
        catalog.resolved(Config(objective=ObjectiveConfig("m2po", {"treshold": 0.1})))


def test_a_file_without_configurations_is_refused(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(UserError, match="no function configs"):
        catalog.find_experiment(str(empty))
    twice = tmp_path / "twice.py"
    twice.write_text("from tests.tiny import TINY\n\n\ndef configs():\n    return TINY, TINY\n")
    with pytest.raises(UserError, match="two configurations have one name"):
        catalog.find_experiment(str(twice))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def configs(:\n", "cannot be loaded"),
        ("import no_such_module\n", "cannot be loaded"),
        ("def configs():\n    return ()\n", "one or more"),
        ("def configs():\n    return [1]\n", "one or more"),
    ],
)
def test_an_experiment_that_makes_no_configuration_is_refused(tmp_path, content, said):
    file = tmp_path / "experiment.py"
    file.write_text(content)
    with pytest.raises(UserError, match=said) as refusal:
        catalog.find_experiment(str(file))
    assert str(file) in str(refusal.value)


def test_bytes_are_no_configuration(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is no text"):
        catalog.find_config(str(file))


def test_another_objective_starts_from_its_own_defaults():
    config = catalog.resolved(Config(objective=ObjectiveConfig("m2po", {"threshold": 0.1})))
    assert catalog.with_objective(config, "m2po") == config
    other = catalog.with_objective(config, "dr_grpo").objective
    assert other.hyperparameters.items() < objectives.defaults("dr_grpo").items()
    assert (config.objective.normalize_advantages, other.normalize_advantages) == ("std", "none")


def test_the_objective_says_how_advantages_are_normalised_unless_the_run_does():
    config = Config(objective=ObjectiveConfig("dr_grpo"))
    assert catalog.resolved(config).objective.normalize_advantages == "none"
    given = replace(config, objective=ObjectiveConfig("dr_grpo", normalize_advantages="std"))
    assert catalog.resolved(given).objective.normalize_advantages == "std"


def test_the_length_constant_of_a_run_is_its_longest_response_unless_given():
    config = catalog.resolved(Config(objective=ObjectiveConfig("dr_grpo")))
    longer = replace(config, sampling=SamplingConfig(max_new_tokens=20))
    assert objective_of(longer).config.length_constant == 20.0
    given = replace(longer, objective=replace(config.objective, length_constant=7.0))
    assert objective_of(given).config.length_constant == 7.0
    with pytest.raises(ConfigError, match="length_constant is a field of ObjectiveConfig"):
        ObjectiveConfig("dr_grpo", {"length_constant": 7.0})
