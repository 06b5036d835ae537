"""A published model on stale data: SmolLM2-135M-Instruct on addition, and on questions in words.

Command:   m2po train experiments/smollm2.py:smollm2-arithmetic --model.source DIR
           m2po train experiments/smollm2.py:smollm2-questions --model.source DIR --task.questions FILE.jsonl
Hardware:  2 CPU cores, 7 GB; see README.md for the minutes.
Expect:    8 updates from data up to 4 updates old; it shows that all parts work, and is too short to learn from.

DIR is any Llama, Qwen2, Qwen2.5 or Qwen3 directory as Hugging Face's tools save it; a file of questions is JSON Lines
with `question` and `answer`, such as GSM8K's. Any field is a flag: `m2po train --help`.
"""

from m2po_jax.config import (
    Config,
    EvaluationConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
)

MODEL = "models/SmolLM2-135M-Instruct"
"""Where the model is looked for unless --model.source says otherwise."""

TEMPLATE = "{question}\nAnswer with the number alone."


def configs() -> tuple[Config, ...]:
    """The same small run on two tasks."""
    arithmetic = TaskConfig(min_operands=2, max_operands=3, template=TEMPLATE)
    questions = TaskConfig(
        name="questions", questions="data/gsm8k_train.jsonl", template=TEMPLATE, max_prompt_tokens=128
    )
    return _run("arithmetic", arithmetic), _run("questions", questions)


def _run(name: str, task: TaskConfig) -> Config:
    return Config(
        name=f"smollm2-{name}",
        task=task,
        model=ModelConfig(source=MODEL),
        sampling=SamplingConfig(temperature=0.7, max_new_tokens=16),
        rollouts=RolloutConfig(prompts_per_batch=8, group_size=4),
        staleness=StalenessConfig(k=4),
        learner=LearnerConfig(
            total_updates=8,
            updates_per_batch=2,
            micro_batches=4,
            checkpoint_every=4,
            learning_rate=1e-6,
            warmup_updates=0,
            decay_updates=None,
            diagnostics_every=1,
        ),
        evaluation=EvaluationConfig(every=8, prompts=64),
    )
