"""Every parameter of the decoder in one table: its axes here, its name and layout in Hugging Face's files.

Axis letters: N layer, D width, H query head, K key/value head, d head_dim, F feed-forward, V vocabulary.
"""

import math
from typing import Any, NamedTuple

from m2po_jax.config import ConfigError, ModelConfig

SIZES = {
    "N": "layers",
    "D": "width",
    "H": "query_heads",
    "K": "kv_heads",
    "d": "head_dim",
    "F": "mlp_width",
    "V": "vocab_size",
}
"""Axis letter -> field of ModelConfig that holds its size."""


class Parameter(NamedTuple):
    """A leaf of the parameter tree."""

    path: str
    """Keys in the tree, joined by slashes."""
    axes: str
    """A letter an axis; layers, where there are any, are stacked first."""
    stored_name: str
    """Name of the tensor in the files, with `{}` for the layer."""
    stored_axes: tuple[str, ...]
    """The tensor's axes, the output first; `Hd` is one axis that holds heads, each with its dimensions in order."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The path as keys."""
        return tuple(self.path.split("/"))

    @property
    def stacked(self) -> bool:
        """Whether it has a leading layer axis, hence a tensor for each layer."""
        return self.axes.startswith("N")

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Its shape in the tree."""
        return tuple(size(config, letter) for letter in self.axes)

    def stored_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """The shape of its tensor, or of each of its tensors, in the files."""
        return tuple(math.prod(size(config, letter) for letter in letters) for letters in self.stored_axes)

    def stored_names(self, config: ModelConfig) -> list[str]:
        """The names of its tensors in the files, by layer."""
        return (
            [self.stored_name.format(layer) for layer in range(config.layers)] if self.stacked else [self.stored_name]
        )


_LAYER = "model.layers.{}."
_ATTENTION = _LAYER + "self_attn."

_ALWAYS = (
    Parameter("embedding", "VD", "model.embed_tokens.weight", ("V", "D")),
    Parameter("final_norm/scale", "D", "model.norm.weight", ("D",)),
    Parameter("blocks/attention_norm/scale", "ND", _LAYER + "input_layernorm.weight", ("D",)),
    Parameter("blocks/attention/q/kernel", "NDHd", _ATTENTION + "q_proj.weight", ("Hd", "D")),
    Parameter("blocks/attention/k/kernel", "NDKd", _ATTENTION + "k_proj.weight", ("Kd", "D")),
    Parameter("blocks/attention/v/kernel", "NDKd", _ATTENTION + "v_proj.weight", ("Kd", "D")),
    Parameter("blocks/attention/o/kernel", "NHdD", _ATTENTION + "o_proj.weight", ("D", "Hd")),
    Parameter("blocks/mlp_norm/scale", "ND", _LAYER + "post_attention_layernorm.weight", ("D",)),
    Parameter("blocks/gate/kernel", "NDF", _LAYER + "mlp.gate_proj.weight", ("F", "D")),
    Parameter("blocks/up/kernel", "NDF", _LAYER + "mlp.up_proj.weight", ("F", "D")),
    Parameter("blocks/down/kernel", "NFD", _LAYER + "mlp.down_proj.weight", ("D", "F")),
)
_QKV_BIAS = (
    Parameter("blocks/attention/q/bias", "NHd", _ATTENTION + "q_proj.bias", ("Hd",)),
    Parameter("blocks/attention/k/bias", "NKd", _ATTENTION + "k_proj.bias", ("Kd",)),
    Parameter("blocks/attention/v/bias", "NKd", _ATTENTION + "v_proj.bias", ("Kd",)),
)
_QK_NORM = (
    Parameter("blocks/attention/q_norm/scale", "Nd", _ATTENTION + "q_norm.weight", ("d",)),
    Parameter("blocks/attention/k_norm/scale", "Nd", _ATTENTION + "k_norm.weight", ("d",)),
)
_UNTIED = (Parameter("unembedding", "VD", "lm_head.weight", ("V", "D")),)


def table(config: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of a model of this configuration."""
    return (
        *_ALWAYS,
        *(_QKV_BIAS if config.qkv_bias else ()),
        *(_QK_NORM if config.qk_norm else ()),
        *(() if config.tie_embeddings else _UNTIED),
    )


def size(config: ModelConfig, letter: str) -> int:
    """Length of the axis; raises ConfigError if the vocabulary's is left to a tokenizer."""
    value = getattr(config, SIZES[letter])
    if value is None:
        raise ConfigError(f"model.{SIZES[letter]} is None: set it to the rows of the embedding")
    return value


def tree(leaves: dict[Parameter, Any]) -> dict[str, Any]:
    """The parameter tree with a value at each leaf."""
    root: dict[str, Any] = {}
    for parameter, value in leaves.items():
        node = root
        for key in parameter.keys[:-1]:
            node = node.setdefault(key, {})
        node[parameter.keys[-1]] = value
    return root


def leaf(params: Any, parameter: Parameter) -> Any:
    """The value of a parameter in a tree."""
    for key in parameter.keys:
        params = params[key]
    return params
