"""The paper's six models, to be planned before a TPU is hired: `m2po plan`, no weights needed.

Paper:     arXiv 2510.01161, Table 2: batches of 2,048 responses, prompts of up to 1,536 and responses of up to 2,560
           tokens, mini-batches of 512, hence 4 model updates a batch.
Command:   m2po plan experiments/plans.py:qwen3-8b --topology v5e:4x8
Hardware:  any CPU; minutes of compilation, a few GB.

Sizes are those of each model's config.json on Hugging Face. Products are in bfloat16; master weights and AdamW's
moments are float32, cut over all devices (fsdp). A work unit is 64 responses, whose keys and values a small slice can
hold. Any field is a flag, `--learner.micro-batches 8`.
"""

from typing import Any

from m2po_jax.config import (
    Config,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
)

_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6, "max_positions": 40_960}
_QWEN25 = {"head_dim": 128, "qk_norm": False, "qkv_bias": True, "vocab_size": 152_064, "tie_embeddings": False}
_LLAMA32 = {
    "head_dim": 128,
    "qk_norm": False,
    "vocab_size": 128_256,
    "norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_factor": 32.0,
    "max_positions": 131_072,
}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {**_QWEN3, "width": 2048, "layers": 28, "query_heads": 16, "mlp_width": 6144},
    "meta-llama/Llama-3.2-3B": {
        **_LLAMA32, "width": 3072, "layers": 28, "query_heads": 24, "kv_heads": 8, "mlp_width": 8192,
    },
    "Qwen/Qwen3-4B": {**_QWEN3, "width": 2560, "layers": 36, "query_heads": 32, "mlp_width": 9728},
    "Qwen/Qwen2.5-Math-7B": {
        **_QWEN25, "width": 3584, "layers": 28, "query_heads": 28, "kv_heads": 4, "mlp_width": 18_944,
        "rope_theta": 1e4, "max_positions": 4096,
    },
    "Qwen/Qwen3-8B": {
        **_QWEN3, "width": 4096, "layers": 36, "query_heads": 32, "mlp_width": 12_288, "tie_embeddings": False,
    },
    "Qwen/Qwen2.5-32B": {
        **_QWEN25, "width": 5120, "layers": 64, "query_heads": 40, "kv_heads": 8, "mlp_width": 27_648,
        "norm_eps": 1e-5, "rope_theta": 1e6, "max_positions": 131_072,
    },
}  # fmt: skip
"""Hugging Face's name -> sizes as published."""


def configs() -> tuple[Config, ...]:
    """The paper's run of each model, at staleness 256."""
    return tuple(plan(name) for name in MODELS)


def plan(model: str) -> Config:
    """The run of one model, by its name on Hugging Face."""
    return Config(
        name=model.split("/")[1].lower().replace(".", "-"),
        task=TaskConfig(max_prompt_tokens=1536),
        model=ModelConfig(**MODELS[model], compute_dtype="bfloat16", remat="full"),
        sampling=SamplingConfig(max_new_tokens=2560),
        rollouts=RolloutConfig(prompts_per_batch=256, group_size=8, units_per_batch=32),
        staleness=StalenessConfig(k=256),
        learner=LearnerConfig(updates_per_batch=4, micro_batches=16, learning_rate=1e-6, decay_updates=None),
    )
