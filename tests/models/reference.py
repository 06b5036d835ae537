"""The decoder again, in float64 NumPy, one unpadded sequence at a time: no cache, no mask, no stacked heads."""

import numpy as np

from m2po_jax.models import Transformer


def logits(model: Transformer, params: dict, tokens: list[int]) -> np.ndarray:
    """Next-token logits (T, V) after each of `tokens`."""
    config, length = model.config, len(tokens)
    table = np.float64(params["embedding"])
    x_TD = table[tokens]
    for layer in range(config.layers):
        block = _layer(params["blocks"], layer)
        x_TD = x_TD + _attention(config, block["attention"], _norm(config, block["attention_norm"], x_TD), length)
        h_TD = _norm(config, block["mlp_norm"], x_TD)
        gate_TF = h_TD @ block["gate"]["kernel"]
        h_TF = gate_TF / (1 + np.exp(-gate_TF)) * (h_TD @ block["up"]["kernel"])
        x_TD = x_TD + h_TF @ block["down"]["kernel"]
    output = table if config.tie_embeddings else np.float64(params["unembedding"])
    return _norm(config, _layer({"n": params["final_norm"]}, None)["n"], x_TD) @ output.T


def logprobs(model: Transformer, params: dict, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs (T, V) of the next token after each of `tokens`."""
    scaled = logits(model, params, tokens) / temperature
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def response(model, params, prompt: list[int], tokens: list[int], temperature=1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log-prob of each of `tokens` after `prompt` and the tokens before it, and the entropy there; (T,) each."""
    table = logprobs(model, params, [*prompt, *tokens], temperature)[len(prompt) - 1 : -1]
    return table[np.arange(len(tokens)), tokens], -(np.exp(table) * table).sum(axis=-1)


def _layer(tree: dict, layer: int | None) -> dict:
    return {
        name: _layer(value, layer) if isinstance(value, dict) else np.float64(value if layer is None else value[layer])
        for name, value in tree.items()
    }


def _norm(config, norm: dict, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * norm["scale"]


def _attention(config, attention: dict, x_TD: np.ndarray, length: int) -> np.ndarray:
    """Each query head by itself; query heads h*G ... h*G + G - 1 share key/value head h."""
    out_TD = np.zeros_like(x_TD)
    for head in range(config.query_heads):
        shared = head // (config.query_heads // config.kv_heads)
        q_Td, k_Td, v_Td = (
            _projected(config, attention, name, x_TD, h) for name, h in (("q", head), ("k", shared), ("v", shared))
        )
        q_Td, k_Td = _turned(config, q_Td), _turned(config, k_Td)
        for t in range(length):
            scores = k_Td[: t + 1] @ q_Td[t] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            out_TD[t] += (weights / weights.sum()) @ v_Td[: t + 1] @ attention["o"]["kernel"][head]
    return out_TD


def _projected(config, attention: dict, name: str, x_TD: np.ndarray, head: int) -> np.ndarray:
    out_Td = x_TD @ attention[name]["kernel"][:, head]
    if config.qkv_bias:
        out_Td = out_Td + attention[name]["bias"][head]
    return _norm(config, attention[f"{name}_norm"], out_Td) if config.qk_norm and name != "v" else out_Td


def _turn(config, i: int) -> float:
    """Radians a position of dimension i: theta^(-2i/d), and what Llama 3 makes of it by its wave length."""
    turn = config.rope_theta ** (-2 * i / config.head_dim)
    if config.rope_factor is None:
        return turn
    wave_length, context = 2 * np.pi / turn, config.rope_original_positions
    if wave_length < context / config.rope_high_factor:
        return turn
    if wave_length > context / config.rope_low_factor:
        return turn / config.rope_factor
    share = (context / wave_length - config.rope_low_factor) / (config.rope_high_factor - config.rope_low_factor)
    return (1 - share) * turn / config.rope_factor + share * turn


def _turned(config, x_Td: np.ndarray) -> np.ndarray:
    """Rotary embedding as complex numbers: dimension i pairs with i + d/2."""
    half = config.head_dim // 2
    angles = np.arange(len(x_Td))[:, None] * np.array([_turn(config, i) for i in range(half)])
    turned = (x_Td[:, :half] + 1j * x_Td[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)
