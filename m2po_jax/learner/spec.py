"""What an update computes with, from the configuration of a run."""

from m2po_jax import objectives
from m2po_jax.config import Config
from m2po_jax.learner.update import UpdateSpec
from m2po_jax.models import Transformer


def update_spec(config: Config, model: Transformer) -> UpdateSpec:
    """The spec of a run's updates; ConfigError for a hyperparameter that its objective does not have."""
    return UpdateSpec(
        model,
        objective_of(config),
        config.sampling.temperature,
        config.rollouts.group_size,
        config.objective.normalize_advantages or objectives.normalization(config.objective.name),
        config.sampling.max_new_tokens,
        config.objective.overlong_cache,
        config.learner.micro_batches,
    )


def objective_of(config: Config) -> objectives.Objective:
    """The objective of a run; ConfigError for a hyperparameter that it does not have."""
    constant = config.objective.length_constant or float(config.sampling.max_new_tokens)
    return objectives.get(config.objective.name, length_constant=constant, **config.objective.hyperparameters)
