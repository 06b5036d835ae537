"""Finding configurations: in an experiment file, in a saved `config.json`, or in a run directory."""

import difflib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from m2po_jax import objectives
from m2po_jax.config import Config, ConfigError, UserError, from_json
from m2po_jax.models import huggingface
from m2po_jax.rollouts import open_run
from m2po_jax.tasks import ModelTokenizer, questions_sha256


def find_config(reference: str) -> Config:
    """The one configuration that `reference` names, with the objective's defaults filled in.

    Args:
        reference: `experiments/quickstart.py:m2po-s256`, a `config.json`, or a run directory.

    Raises:
        UserError: nothing is there, or the name is not among the experiment's (with the nearest one).
    """
    path, _, name = reference.rpartition(":") if ".py:" in reference else (reference, "", "")
    if path.endswith(".py"):
        configs = find_experiment(path)
        if not name:
            raise UserError(f"{path} holds several configurations, name one: {', '.join(_spell(path, configs))}")
        return _named(path, configs, name)
    if path.endswith(".json"):
        return resolved(from_json(_read(path), path))
    return resolved(open_run(path)[1].config)


def names_run(reference: str) -> bool:
    """Whether a reference is a run (a directory or URL), being neither an experiment nor a saved configuration."""
    return ".py:" not in reference and not reference.endswith((".py", ".json"))


def find_experiment(path: str) -> tuple[Config, ...]:
    """All configurations of an experiment file, from its `configs()`, with the objectives' defaults filled in."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no experiment file {path}: give a path such as experiments/quickstart.py")
    spec = importlib.util.spec_from_file_location(f"m2po_experiment_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(f"{path} cannot be loaded: {error}") from error
    if not hasattr(module, "configs"):
        raise UserError(f"{path} has no function configs() that returns configurations")
    made = tuple(module.configs())
    if not made or not all(isinstance(config, Config) for config in made):
        raise UserError(f"{path}: configs() must return one or more m2po_jax.config.Config")
    configs = tuple(resolved(config) for config in made)
    if len({config.name for config in configs}) != len(configs):
        raise UserError(f"{path}: two configurations have one name")
    return configs


def resolved(config: Config) -> Config:
    """The same configuration with everything its objective leaves open written out and checked."""
    name, given = config.objective.name, config.objective.hyperparameters
    objectives.get(name, **given)
    defaults = {key: value for key, value in objectives.defaults(name).items() if key != "length_constant"}
    objective = replace(
        config.objective,
        hyperparameters=defaults | given,
        normalize_advantages=config.objective.normalize_advantages or objectives.normalization(name),
    )
    return replace(config, objective=objective)


def with_sources(config: Config) -> Config:
    """The same configuration with what its files say written in: the model's sizes, the digest of the questions.

    Raises:
        UserError: a file is missing or cannot be read.
        ConfigError: the configuration says something else, such as the digest of other questions.
    """
    task = config.task
    if task.name == "questions" and task.questions is not None:
        digest = questions_sha256(task.questions)
        if task.questions_sha256 not in (None, digest):
            raise ConfigError(f"{task.questions} has changed: its SHA-256 is {digest}, not task.questions_sha256")
        task = replace(task, questions=os.path.abspath(task.questions), questions_sha256=digest)
    model = huggingface.resolved(config.model)
    if model.source is not None:
        digest = ModelTokenizer(model.source, task.template, task.chat).prompt_sha256
        if task.tokenizer_sha256 not in (None, digest):
            raise ConfigError(f"{model.source} has another tokenizer or chat template than the run was made with")
        task = replace(task, tokenizer_sha256=digest)
    return replace(config, task=task, model=model)


def with_objective(config: Config, name: str) -> Config:
    """The same configuration with another objective at its defaults; the one it has keeps its hyperparameters."""
    if name == config.objective.name:
        return config
    objective = replace(config.objective, name=name, hyperparameters={}, normalize_advantages=None)
    return resolved(replace(config, objective=objective))


def _named(path: str, configs: Sequence[Config], name: str) -> Config:
    for config in configs:
        if config.name == name:
            return config
    near = difflib.get_close_matches(name, [config.name for config in configs], n=1)
    hint = f"did you mean {path}:{near[0]}? " if near else ""
    raise ConfigError(f"{path} has no configuration {name!r}: {hint}It has {', '.join(_spell(path, configs))}")


def _spell(path: str, configs: Sequence[Config]) -> list[str]:
    return [f"{path}:{config.name}" for config in configs]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a saved configuration: it is no text") from error
