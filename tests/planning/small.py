"""A model small enough to be compiled for a TPU in a moment, with heads that its attention kernel takes."""

from dataclasses import replace

from m2po_jax.config import (
    Config,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
)

SMALL = Config(
    name="small",
    task=TaskConfig(max_prompt_tokens=128),
    model=ModelConfig(
        width=256, layers=3, query_heads=2, kv_heads=2, head_dim=128, mlp_width=512, vocab_size=1024,
        compute_dtype="bfloat16", remat="full",
    ),
    sampling=SamplingConfig(max_new_tokens=128),
    rollouts=RolloutConfig(prompts_per_batch=16, group_size=4, units_per_batch=2),
    learner=LearnerConfig(updates_per_batch=2, micro_batches=2),
    mesh=MeshConfig(fsdp=4, tensor=2),
)  # fmt: skip


def configs() -> tuple[Config, ...]:
    """As an experiment file: one that fits anything, and one whose state alone is too large for four small chips."""
    large = replace(SMALL.model, width=8192, layers=64, query_heads=64, kv_heads=8, mlp_width=32_768)
    return SMALL, replace(SMALL, name="large", model=large)
