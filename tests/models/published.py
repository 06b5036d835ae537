"""Random tiny models of the published families, made and saved by transformers, which shares no code with ours."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True},
    ),
    "llama-3": ("Llama", {"rope_parameters": _LLAMA_3, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
"""Name -> class prefix in transformers, and what differs from the sizes above."""


def make(family: str) -> Any:
    """A torch model whose every parameter is random, norms and biases too, so that each of them shows in the logits."""
    reason = "compares with transformers on torch: pip install 'm2po-jax[dev]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    prefix, changes = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **changes})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean, deviation = (1.0, 0.3) if parameter.ndim == 1 else (0.0, _SIZES["hidden_size"] ** -0.5)
            parameter.copy_(torch.from_numpy(rng.normal(mean, deviation, parameter.shape).astype(np.float32)))
    return model


def save(model: Any, directory: Path, dtype: str = "float32", max_shard_size: str = "20KB") -> Path:
    """Save it as `save_pretrained` does, in several files by default."""
    import torch

    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Next-token logits (T, V) after each of `tokens`, one sequence alone, float32."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def logprobs(model: Any, tokens: list[int]) -> np.ndarray:
    """Log-prob of each token but the first given those before it, float64 from float32 logits."""
    table = np.float64(logits(model, tokens))[:-1]
    table -= table.max(axis=-1, keepdims=True)
    table -= np.log(np.exp(table).sum(axis=-1, keepdims=True))
    return table[np.arange(len(table)), tokens[1:]]
