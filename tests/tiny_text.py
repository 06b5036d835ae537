"""The smallest model with a tokenizer of its own, random, as a Hugging Face directory, and runs that start from it.

As an experiment file, `tests/tiny_text.py:arithmetic`, it also serves the tests that start real processes.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from m2po_jax import catalog
from m2po_jax.config import (
    Config,
    EvaluationConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
)
from m2po_jax.models import huggingface
from m2po_jax.tasks import ModelTokenizer
from tests import tiny
from tests.models import policies
from tests.tasks import texts

VOCAB_SIZE = 320
"""20 more than the tokenizer has."""
MODEL = {"qk_norm": False, "max_positions": 128, "vocab_size": VOCAB_SIZE}
BASE = Config(
    task=TaskConfig(min_operands=2, max_operands=2, template="{question} Answer with the number alone."),
    model=ModelConfig(source="no/such/model"),
    sampling=SamplingConfig(max_new_tokens=6),
    rollouts=RolloutConfig(prompts_per_batch=4, group_size=4, units_per_batch=2),
    staleness=StalenessConfig(k=2),
    objective=ObjectiveConfig(overlong_cache=3),  # a random model is never right, but some of its answers are shorter
    learner=LearnerConfig(
        total_updates=6, updates_per_batch=2, checkpoint_every=2, learning_rate=1e-3, warmup_updates=0,
        decay_updates=None, diagnostics_every=1,
    ),
    evaluation=EvaluationConfig(every=6, prompts=8),
    mesh=MeshConfig(data=1),
)  # fmt: skip


def configs() -> tuple[Config, ...]:
    """Addition, and questions in words."""
    words = replace(BASE.task, name="questions", questions="no/such/questions.jsonl", template="{question}")
    return replace(BASE, name="arithmetic"), replace(BASE, name="questions", task=words)


def save_model(directory: Path, **changes) -> Path:
    """Config, random weights in float32, tokenizer and chat template; digits come often, and 2 ends a response."""
    tokenizer = texts.save_tokenizer(directory.with_name(f"{directory.name}-tokenizer"))
    model, params = policies.random_policy(None, **(MODEL | changes))
    digits = [ids[0] for ids in map(ModelTokenizer(str(tokenizer), chat=False).prompt, "0123456789")]
    often = [*digits, model.config.vocab_size - 1]
    params["embedding"] = params["embedding"].at[np.array(often)].multiply(4.0)
    ends = {"eos_token_id": [texts.END_OF_TURN, digits[2]]}
    (tokenizer / "generation_config.json").write_text(json.dumps(ends) + "\n")
    huggingface.export(params, model.config, tokenizer, directory, "float32")
    return directory


def at(config: Config, model: Path, questions: Path | None = None) -> Config:
    """The configuration with its files where they are."""
    task = config.task if questions is None else replace(config.task, questions=str(questions))
    return replace(config, model=replace(config.model, source=str(model)), task=task)


def train(config: Config, run: Path, watcher: tiny.Watcher | None = None) -> tiny.Watcher:
    """Run in this process."""
    return tiny.train(catalog.with_sources(config), run, None, watcher)
