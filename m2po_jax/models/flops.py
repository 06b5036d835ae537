"""FLOPs of a forward pass in closed form, from the sizes of the model and of what it reads; 2 a multiply-add."""

from typing import NamedTuple

from m2po_jax.config import ModelConfig

TRAINING = 3
"""Passes that training one costs: forward once, backward twice as much. What is computed again does not count."""


class Work(NamedTuple):
    """What a pass has to do, over all of its sequences."""

    tokens: float
    """Of prompts and responses, without padding."""
    pairs: float
    """Of each token with itself and those before it: n (n + 1) / 2 for a sequence of n."""
    responses: float
    """Response tokens: only these have logits."""


class Forward(NamedTuple):
    """FLOPs of one forward pass."""

    blocks: float
    """Products with the weights of the blocks."""
    attention: float
    """Scores and sums over values, of each query with the keys up to it."""
    logits: float
    """Products with the output embedding."""

    @property
    def total(self) -> float:
        """Their sum."""
        return sum(self)


def forward(model: ModelConfig, work: Work) -> Forward:
    """One pass over some sequences."""
    heads = model.query_heads * model.head_dim
    attention_weights = model.width * (2 * heads + 2 * model.kv_heads * model.head_dim)
    weights = model.layers * (attention_weights + 3 * model.width * model.mlp_width)
    return Forward(
        blocks=2.0 * weights * work.tokens,
        attention=4.0 * model.layers * heads * work.pairs,
        logits=2.0 * model.width * (model.vocab_size or 0) * work.responses,
    )
