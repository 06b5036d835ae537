"""Tiny policies for the tests of models, generation and evaluation: random ones, and ones whose answers are known."""

from dataclasses import replace

import jax
import numpy as np

from m2po_jax.config import ModelConfig
from m2po_jax.models import Transformer

TINY = ModelConfig(width=16, layers=2, query_heads=4, kv_heads=2, head_dim=4, mlp_width=24)
NEVER = -40.0


def random_policy(
    tokenizer_size: int | None, /, seed: int = 0, spread: float = 1.0, **config
) -> tuple[Transformer, dict]:
    """A model and parameters drawn by NumPy, norm scales too; logits vary over a vocabulary by about `spread`."""
    model = Transformer(replace(TINY, **config), tokenizer_size)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name == "scale":
            return rng.normal(1.0, 0.3, leaf.shape).astype(np.float32)
        stddev = spread * model.config.width**-0.5 if name.endswith("embedding") else 0.3
        return rng.normal(0.0, stddev, leaf.shape).astype(np.float32)

    abstract = jax.eval_shape(model.init_params, jax.random.key(0))
    return model, jax.tree.map(jax.device_put, jax.tree_util.tree_map_with_path(draw, abstract))


def markov_policy(logits_VV: np.ndarray) -> tuple[Transformer, dict]:
    """A model and parameters whose next-token logits are `logits_VV[last token]`, exactly: its blocks add nothing."""
    vocab_size = len(logits_VV)
    sizes = {"width": vocab_size, "layers": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 2, "mlp_width": 2}
    model = Transformer(ModelConfig(**sizes, norm_eps=1e-12, tie_embeddings=False), vocab_size)
    abstract = jax.eval_shape(model.init_params, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract)
    params["embedding"] = np.eye(vocab_size, dtype=np.float32)
    params["unembedding"] = (logits_VV.T / np.sqrt(vocab_size)).astype(np.float32)
    params["final_norm"]["scale"] = np.ones(vocab_size, np.float32)
    return model, jax.tree.map(jax.device_put, params)


def always(token: int, then: int, vocab_size: int) -> tuple[Transformer, dict]:
    """A policy that says `token`, and after it `then`."""
    logits_VV = np.full((vocab_size, vocab_size), NEVER)
    logits_VV[:, token] = 0.0
    logits_VV[token] = NEVER
    logits_VV[token, then] = 0.0
    return markov_policy(logits_VV)
