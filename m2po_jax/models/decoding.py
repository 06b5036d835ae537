"""One more token of every sequence, against a cache; axis letters as in `models.transformer`."""

from operator import itemgetter
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from m2po_jax.models.transformer import Block, Cache, LayerCache, RMSNorm, Transformer, embedded

AnyCache = Cache | tuple[LayerCache, ...]
"""Of all layers in a stack, or of each by itself."""


class ByLayer(NamedTuple):
    """Parameters with those of each block by themselves.

    XLA for CPUs copies the weights of a layer out of their stack whenever it comes to that layer, with every token.
    """

    rest: dict[str, Any]
    blocks: tuple[Any, ...]


def by_layer(params: dict[str, Any], layers: int) -> ByLayer:
    """Parameters of each of the blocks taken out of their stack."""
    blocks = tuple(jax.tree.map(itemgetter(layer), params["blocks"]) for layer in range(layers))
    return ByLayer({name: value for name, value in params.items() if name != "blocks"}, blocks)


def decode(
    model: Transformer,
    params: dict[str, Any] | ByLayer,
    tokens_B: Array,
    positions_B: Array,
    seen_BS: Array,
    cache: AnyCache,
    index: Array,
) -> tuple[Array, AnyCache]:
    """Hidden states (B, D) of one token of each sequence, and the cache with it written at slot `index`.

    Args:
        params: the model's, `by_layer` if the cache is of each layer by itself.
        tokens_B: int32; positions_B int32, their rotary positions.
        seen_BS: bool, True on the slots of the cache that a token attends to, its own included.
        index: int32 scalar.
    """
    rows = tokens_B[:, None], positions_B[:, None], seen_BS[:, None]
    if isinstance(params, ByLayer):
        return _layer_by_layer(model, params, *rows, cast(tuple[LayerCache, ...], cache), index)
    output = model.apply({"params": params}, *rows, cache, index, method=Transformer.attending)
    hidden_B1D, written = cast(tuple[Array, Cache], output)
    return hidden_B1D[:, 0], written


def _layer_by_layer(
    model: Transformer,
    params: ByLayer,
    tokens_B1: Array,
    positions_B1: Array,
    seen_B1S: Array,
    caches: tuple[LayerCache, ...],
    index: Array,
) -> tuple[Array, tuple[LayerCache, ...]]:
    config, written = model.config, []
    x_B1D = embedded(config, params.rest["embedding"], tokens_B1)
    for layer, (block, cache) in enumerate(zip(params.blocks, caches, strict=True)):
        rest = jnp.int32(layer), positions_B1, seen_B1S, index
        (x_B1D, new), _ = Block(config).apply({"params": block}, (x_B1D, cache), *rest)
        written.append(new)
    normalised = RMSNorm(config.norm_eps).apply({"params": params.rest["final_norm"]}, x_B1D)
    return cast(Array, normalised)[:, 0], tuple(written)
