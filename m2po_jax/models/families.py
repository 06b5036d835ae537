"""Hugging Face's `config.json` to our configuration and back: Llama, Qwen2 (and 2.5), Qwen3; all else is refused."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from m2po_jax.config import ConfigError, ModelConfig, UserError


@dataclass(frozen=True)
class Family:
    """What an architecture has, whatever its numbers."""

    model_type: str
    qkv_bias: bool
    qk_norm: bool
    kv_heads: int | None
    """Key/value heads where config.json does not say; None: one a query head."""
    head_dim: int | None
    """Width of a head where config.json does not say; None: the width's share."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", qkv_bias=False, qk_norm=False, kv_heads=None, head_dim=None),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, qk_norm=False, kv_heads=32, head_dim=None),
    "Qwen3ForCausalLM": Family("qwen3", qkv_bias=False, qk_norm=True, kv_heads=32, head_dim=128),
}

_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "auto_map": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
"""Fields that change the model's mathematics -> values that leave it as it is here; null does so too."""

_ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_positions",
}
"""Field of Llama 3's rotary scaling -> ours."""

_NAMES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "query_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_width",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Field of config.json -> ours, for those that are the same thing."""


def read_config(directory: str | Path) -> ModelConfig:
    """The configuration of the model in a Hugging Face directory, with float32 computation and no remat.

    Raises:
        UserError: there is no readable `config.json`.
        ConfigError: the architecture or a field in use is not supported, or a field is missing or of a wrong type.
    """
    path = Path(directory) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing = f"{path} is missing: give the directory of a Hugging Face model on this disk, nothing is downloaded"
        raise UserError(missing) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no JSON object")
    try:
        return config_of(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{path}: a field is of a wrong type ({error})") from error


def config_of(data: dict[str, Any]) -> ModelConfig:
    """The configuration that the fields of a `config.json` give; raises ConfigError naming the field."""
    family = _family(data)
    for name, allowed in _OFF.items():
        value = data.get(name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{name} {_short(value)} is not supported")
    _refuse_windows(data)
    heads = _number(data, "num_attention_heads", int)
    width = _number(data, "hidden_size", int)
    default_head_dim = family.head_dim or width // max(heads, 1)
    return ModelConfig(
        width=width,
        layers=_number(data, "num_hidden_layers", int),
        query_heads=heads,
        kv_heads=_number(data, "num_key_value_heads", int, family.kv_heads or heads),
        head_dim=_number(data, "head_dim", int, default_head_dim),
        mlp_width=_number(data, "intermediate_size", int),
        vocab_size=_number(data, "vocab_size", int),
        max_positions=_number(data, "max_position_embeddings", int),
        norm_eps=_number(data, "rms_norm_eps", float, 1e-6),
        tie_embeddings=_number(data, "tie_word_embeddings", bool, False),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        **_rope(data),
    )


def fields_of(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of a `config.json` for a model of this configuration, its weights stored in `dtype`.

    Raises:
        ConfigError: no architecture has both QK-norm and QKV biases, or the vocabulary's size is not set.
    """
    matching = [
        (architecture, family)
        for architecture, family in FAMILIES.items()
        if (family.qkv_bias, family.qk_norm) == (config.qkv_bias, config.qk_norm)
    ]
    if not matching:
        raise ConfigError("model.qk_norm with model.qkv_bias is no published architecture: it cannot be exported")
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size is None: set it to the rows of the embedding")
    (architecture, family), *_ = matching
    data: dict[str, Any] = {"architectures": [architecture], "model_type": family.model_type, "hidden_act": "silu"}
    data |= {theirs: getattr(config, ours) for theirs, ours in _NAMES.items()}
    data["max_position_embeddings"] = config.max_positions or config.rope_original_positions
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor is not None:
        rope |= {"rope_type": "llama3"} | {theirs: getattr(config, ours) for theirs, ours in _ROPE.items()}
    # Transformers 5 reads the first, older readers the other two.
    data |= {"rope_parameters": rope, "rope_theta": config.rope_theta}
    data["rope_scaling"] = None if config.rope_factor is None else {k: v for k, v in rope.items() if k != "rope_theta"}
    return data | {"torch_dtype": dtype}


def mathematics(config: ModelConfig) -> dict[str, Any]:
    """The fields that a model's outputs follow from, which two configurations of one model share."""
    free = {"source", "compute_dtype", "remat", "max_positions"}
    if config.rope_factor is None:
        free |= {"rope_low_factor", "rope_high_factor", "rope_original_positions"}
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in free}


def _family(data: dict[str, Any]) -> Family:
    architectures = data.get("architectures") or []
    for name, family in FAMILIES.items():
        if architectures == [name] or (not architectures and data.get("model_type") == family.model_type):
            return family
    found = ", ".join(map(str, architectures)) if architectures else f"model_type {data.get('model_type')}"
    raise ConfigError(f"architecture {found} is not supported: use one of {', '.join(FAMILIES)}")


def _refuse_windows(data: dict[str, Any]) -> None:
    """Qwen2 and Qwen3 name a window that is off unless `use_sliding_window`, and then only from a layer on."""
    others = {kind for kind in data.get("layer_types") or () if kind != "full_attention"}
    if others:
        raise ConfigError(f"layer_types {', '.join(sorted(map(str, others)))} is not supported: only full_attention")
    whole = data.get("max_window_layers")
    slides = whole is None or whole < data.get("num_hidden_layers", 0)
    if data.get("use_sliding_window") and data.get("sliding_window") is not None and slides:
        raise ConfigError(f"use_sliding_window (sliding_window {data['sliding_window']}) is not supported")


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Our rotary fields, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`."""
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    theta = _number(rope, "rope_theta", float, _number(data, "rope_theta", float, 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported")
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ConfigError(f"rope_type {_short(kind)} is not supported: use default or llama3")
    kinds = {"original_max_position_embeddings": int}
    return {"rope_theta": theta} | {
        ours: _number(rope, theirs, kinds.get(theirs, float)) for theirs, ours in _ROPE.items()
    }


def _number(data: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The field's value; null and absent give the default, and are refused where there is none."""
    value = data.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing")
    is_number = isinstance(value, int | float if kind is float else kind)
    if not is_number or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{name} is {_short(value)}: expected {kind.__name__}")
    return kind(value)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
