"""`config.json` to our configuration: the published models' numbers, and what is refused by name."""

import json

import pytest

from m2po_jax.config import ConfigError, ModelConfig, UserError
from m2po_jax.models.families import config_of, fields_of, mathematics, read_config

QWEN_2_5_MATH_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
}
LLAMA_3_2_3B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN_3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"qwen2.5-math-7b": QWEN_2_5_MATH_7B, "llama-3.2-3b": LLAMA_3_2_3B, "qwen3-8b": QWEN_3_8B}


def test_qwen_2_5_math():
    assert config_of(QWEN_2_5_MATH_7B) == ModelConfig(
        width=3584, layers=28, query_heads=28, kv_heads=4, head_dim=128, mlp_width=18944, vocab_size=152064,
        max_positions=4096, qk_norm=False, qkv_bias=True, tie_embeddings=False,
    )  # fmt: skip


def test_llama_3_2():
    assert config_of(LLAMA_3_2_3B) == ModelConfig(
        width=3072, layers=28, query_heads=24, kv_heads=8, head_dim=128, mlp_width=8192, vocab_size=128256,
        max_positions=131072, rope_theta=5e5, rope_factor=32.0, norm_eps=1e-5, qk_norm=False,
    )  # fmt: skip


def test_qwen_3():
    assert config_of(QWEN_3_8B) == ModelConfig(
        width=4096, layers=36, query_heads=32, kv_heads=8, head_dim=128, mlp_width=12288, vocab_size=151936,
        max_positions=40960, rope_theta=1e6, tie_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_as_it_was(name):
    config = config_of(PUBLISHED[name])
    assert config_of(json.loads(json.dumps(fields_of(config, "bfloat16")))) == config


def test_either_spelling_of_the_rotary_fields_is_read():
    new = {k: v for k, v in LLAMA_3_2_3B.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA_3_2_3B["rope_scaling"]}
    assert config_of(new) == config_of(LLAMA_3_2_3B)


def test_a_window_that_no_layer_uses_is_no_fault():
    config_of(QWEN_3_8B | {"use_sliding_window": True, "sliding_window": 4096})
    config_of(QWEN_3_8B | {"layer_types": ["full_attention"] * 36})


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN_3_8B, {"architectures": ["Qwen3MoeForCausalLM"]}, "architecture Qwen3MoeForCausalLM is not supported"),
        (QWEN_3_8B, {"architectures": None, "model_type": "gemma2"}, "architecture model_type gemma2"),
        (QWEN_3_8B, {"num_experts": 128}, "num_experts 128"),
        (QWEN_3_8B, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8}, "use_sliding_window"),
        (QWEN_3_8B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        (QWEN_3_8B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type "yarn"'),
        (QWEN_3_8B, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 'rope_type "linear"'),
        (QWEN_3_8B, {"attention_bias": True}, "attention_bias true"),
        (LLAMA_3_2_3B, {"mlp_bias": True}, "mlp_bias true"),
        (LLAMA_3_2_3B, {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        (LLAMA_3_2_3B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA_3_2_3B, {"quantization_config": {"bits": 4}}, 'quantization_config {"bits": 4}'),
        (LLAMA_3_2_3B, {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        (LLAMA_3_2_3B, {"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        (LLAMA_3_2_3B, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_3_2_3B, {"hidden_size": "3072"}, 'hidden_size is "3072": expected int'),
        (LLAMA_3_2_3B, {"hidden_size": True}, "hidden_size is true: expected int"),
        (LLAMA_3_2_3B, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1: expected bool"),
        (LLAMA_3_2_3B, {"num_key_value_heads": 7}, "model.kv_heads 7 does not divide"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, base, change, named):
    (tmp_path / "config.json").write_text(json.dumps(base | change))
    with pytest.raises(ConfigError) as raised:
        read_config(tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ") and named in message and "\n" not in message


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\xff"])
def test_no_configuration_is_said_in_a_line(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="config.json") as raised:
        read_config(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_mathematics_leaves_out_how_it_is_computed():
    config = config_of(LLAMA_3_2_3B)
    assert mathematics(config) != mathematics(config_of(LLAMA_3_2_3B | {"rope_theta": 1.0}))
    assert not {"compute_dtype", "remat", "max_positions"} & mathematics(config).keys()
    assert "rope_low_factor" in mathematics(config) and "rope_low_factor" not in mathematics(config_of(QWEN_3_8B))
