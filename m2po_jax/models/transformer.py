"""The decoder of Llama, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, SwiGLU.

Axis letters: B sequence, T token, S cache slot, D width, H query head, K key/value head, F feed-forward, N layer,
V vocabulary. Layers are stacked on a leading N axis and scanned, so that depth costs no compile time.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from m2po_jax.config import ConfigError, ModelConfig, UserError
from m2po_jax.models.attention import attention, cached_attention
from m2po_jax.models.positions import frequencies, rotate, segment_positions
from m2po_jax.models.sharding import gathered, laid_out
from m2po_jax.models.splash import Segments, fits, on_tpu, splash_attention

_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_attended = jax.checkpoint_policies.save_only_these_names("attended")
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.save_from_both_policies(_products, _attended),
    "dots": _products,
    "full": None,
}
"""What the backward pass finds kept of a block beside its input, by `ModelConfig.remat`."""


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far, as `attention.cached_attention` wants them."""

    keys: Array
    """(N, B, K, head_dim, S)."""
    values: Array
    """(N, B, K, S, head_dim)."""

    @classmethod
    def zeros(cls, config: ModelConfig, batch: int, slots: int) -> "Cache":
        """An empty cache for `batch` sequences of up to `slots` tokens."""
        shape = (config.layers, batch, config.kv_heads, slots, config.head_dim)
        values = jnp.zeros(shape, config.compute_dtype)
        return cls(jnp.swapaxes(values, 3, 4), values)

    def written(self, layer: Array, index: Array | int, keys_BTKd: Array, values_BTKd: Array) -> "Cache":
        """With the keys and values of T tokens of a layer at slots index, index + 1, ..."""
        keys, values = _as_cached(keys_BTKd, values_BTKd)
        write = jax.lax.dynamic_update_slice
        return Cache(
            write(self.keys, keys[None], (layer, 0, 0, 0, index)),
            write(self.values, values[None], (layer, 0, 0, index, 0)),
        )

    def of(self, layer: Array) -> tuple[Array, Array]:
        """Keys (B, K, head_dim, S) and values (B, K, S, head_dim) of a layer."""
        keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in self)
        return keys, values

    def layers(self) -> tuple["LayerCache", ...]:
        """The same as a cache for each layer."""
        return tuple(LayerCache(keys, values) for keys, values in zip(self.keys, self.values, strict=True))


class LayerCache(NamedTuple):
    """The cache of one layer alone, so that nothing has to be taken out of a stack of layers."""

    keys: Array
    """(B, K, head_dim, S)."""
    values: Array
    """(B, K, S, head_dim)."""

    def written(self, layer: Array, index: Array | int, keys_BTKd: Array, values_BTKd: Array) -> "LayerCache":
        """As `Cache.written`, whatever `layer` is."""
        keys, values = _as_cached(keys_BTKd, values_BTKd)
        write = jax.lax.dynamic_update_slice
        return LayerCache(write(self.keys, keys, (0, 0, 0, index)), write(self.values, values, (0, 0, index, 0)))

    def of(self, layer: Array) -> tuple[Array, Array]:
        """Keys and values."""
        return self.keys, self.values


def _as_cached(keys_BTKd: Array, values_BTKd: Array) -> tuple[Array, Array]:
    return jnp.transpose(keys_BTKd, (0, 2, 3, 1)), jnp.transpose(values_BTKd, (0, 2, 1, 3))


def matrix_product(x: Array, kernel: Array, dimensions: Any, **options: Any) -> Array:
    """`jax.lax.dot_general` of (..., in axes) and (in axes, out axes) as a product of two matrices.

    XLA for CPUs transposes, slowly, the operands of a gradient that sums over more than one axis.
    """
    ((contracted, _), _) = dimensions
    inner = math.prod(kernel.shape[: len(contracted)])
    rows = jnp.reshape(x, (-1, inner))
    product = jax.lax.dot_general(rows, jnp.reshape(kernel, (inner, -1)), (((1,), (0,)), ((), ())), **options)
    return jnp.reshape(product, (*x.shape[: -len(contracted)], *kernel.shape[len(contracted) :]))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """`x` of any shape (..., D); returns the same shape and dtype."""
        scale_D = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        normalised = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (normalised * jnp.expand_dims(scale_D, range(x.ndim - 1))).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; with a cache, new keys and values are written at this layer, from slot `index` on."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        cache: Cache | LayerCache | None,
        layer: Array,
        positions_BT: Array,
        seen: Array | Segments,
        index: Array | int,
    ) -> tuple[Array, Cache | LayerCache | None]:
        """Returns the (B, T, D) output and the updated cache, or None."""
        c = self.config
        product: dict[str, Any] = {"dtype": c.compute_dtype, "dot_general": matrix_product}
        heads = lambda name, n: nn.DenseGeneral((n, c.head_dim), use_bias=c.qkv_bias, name=name, **product)  # noqa: E731
        q_BTHd = laid_out(heads("q", c.query_heads)(x_BTD), "BTHd")
        k_BTKd, v_BTKd = (laid_out(heads(name, c.kv_heads)(x_BTD), "BTKd") for name in "kv")
        if c.qk_norm:
            q_BTHd, k_BTKd = RMSNorm(c.norm_eps, name="q_norm")(q_BTHd), RMSNorm(c.norm_eps, name="k_norm")(k_BTKd)
        q_BTHd, k_BTKd = (rotate(x, positions_BT, frequencies(c)) for x in (q_BTHd, k_BTKd))
        if cache is not None:
            cache = cache.written(layer, index, k_BTKd, v_BTKd)
            out_BTHd = cached_attention(q_BTHd, *cache.of(layer), cast(Array, seen))
        elif isinstance(seen, Segments):
            out_BTHd = splash_attention(q_BTHd, k_BTKd, v_BTKd, seen)
        else:
            out_BTHd = attention(q_BTHd, k_BTKd, v_BTKd, seen)
        out_BTHd = checkpoint_name(laid_out(out_BTHd, "BTHd"), "attended")
        output = nn.DenseGeneral(c.width, axis=(-2, -1), use_bias=False, name="o", **product)
        return output(out_BTHd), cache


class Block(nn.Module):
    """Attention and SwiGLU, each on a normalised residual stream."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Array, Cache | LayerCache | None],
        layer: Array,
        positions_BT: Array,
        seen: Array | Segments,
        index: Array | int,
    ) -> tuple[tuple[Array, Cache | LayerCache | None], None]:
        """Takes and returns the residual stream (B, T, D) and the cache, which is written in place."""
        c, (x_BTD, cache) = self.config, carry
        product: dict[str, Any] = {"use_bias": False, "dtype": c.compute_dtype, "dot_general": matrix_product}
        dense = lambda name, n: nn.Dense(n, name=name, **product)  # noqa: E731
        normalised = RMSNorm(c.norm_eps, name="attention_norm")(x_BTD)
        attended, cache = Attention(c, name="attention")(normalised, cache, layer, positions_BT, seen, index)
        x_BTD = laid_out(x_BTD + attended, "BTD")
        h_BTD = RMSNorm(c.norm_eps, name="mlp_norm")(x_BTD)
        gate_BTF, up_BTF = (laid_out(dense(name, c.mlp_width)(h_BTD), "BTF") for name in ("gate", "up"))
        h_BTF = nn.silu(gate_BTF) * up_BTF
        return (laid_out(x_BTD + dense("down", c.width)(h_BTF), "BTD"), cache), None


class Transformer(nn.Module):
    """Token ids to hidden states, and hidden states to logits."""

    config: ModelConfig
    tokenizer_size: int | None = None
    """Ids that the tokenizer has; `config.vocab_size`, where it is set, must hold them."""

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding; raises ConfigError if nobody says how many, or if they are too few."""
        rows, ids = self.config.vocab_size, self.tokenizer_size
        if rows is None and ids is None:
            raise ConfigError("model.vocab_size is None: set it where there is no tokenizer")
        if rows is not None and ids is not None and rows < ids:
            raise ConfigError(f"model.vocab_size {rows} is below the tokenizer's {ids} ids")
        return cast(int, ids if rows is None else rows)

    @property
    def sized(self) -> ModelConfig:
        """The configuration with the vocabulary written in."""
        return replace(self.config, vocab_size=self.vocab_size)

    def require_room(self, tokens: int) -> None:
        """Raises UserError if a sequence of this many tokens, prompt and response together, is over the context."""
        most = self.config.max_positions
        if most is not None and tokens > most:
            raise UserError(f"a sequence of {tokens} tokens, prompt and response, is over model.max_positions {most}")

    def setup(self):
        """Declare the parameters: `embedding` (V, D), `blocks` (stacked on N), `final_norm`, maybe `unembedding`."""
        c = self.config
        table = nn.initializers.normal(stddev=c.width**-0.5)
        self.embedding = self.param("embedding", table, (self.vocab_size, c.width), jnp.float32)
        if not c.tie_embeddings:
            self.unembedding = self.param("unembedding", table, (self.vocab_size, c.width), jnp.float32)
        # Layers are scanned, so nothing of one can be computed once for several, which is what prevent_cse is against.
        self.blocks = nn.scan(
            nn.remat(Block, policy=REMAT_POLICIES[c.remat], prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.layers,
            unroll=1 if on_tpu() else 2,  # TPUs gain nothing from it, and compile twice as much
        )(c)
        self.final_norm = RMSNorm(c.norm_eps)

    def __call__(
        self,
        tokens_BT: Array,
        positions_BT: Array,
        valid_BS: Array,
        cache: Cache | None = None,
        index: Array | int = 0,
        segment_ids_BT: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Hidden states of `tokens_BT`, which stand in slots index, index + 1, ... of their sequences.

        Args:
            tokens_BT: int32 ids.
            positions_BT: int32 rotary positions, counted over real tokens (padding may hold anything).
            valid_BS: bool, True where a slot holds a real token; S = T without a cache.
            cache: keys and values of earlier slots, or None to attend within `tokens_BT` alone.
            index: slot of the first token; an int32 scalar.
            segment_ids_BT: int32; tokens attend to those of their own segment only, so that a row may hold several
                sequences. Without a cache.

        Returns:
            Final hidden states (B, T, D) in the compute dtype, and the cache with these tokens written.
        """
        seen = self._seen(tokens_BT.shape, valid_BS, cache is not None, index, segment_ids_BT)
        return self.attending(tokens_BT, positions_BT, seen, cache, index)

    def attending(
        self, tokens_BT: Array, positions_BT: Array, seen: Array | Segments, cache: Cache | None, index: Array | int
    ) -> tuple[Array, Cache | None]:
        """As a call, with `seen` to say what each query attends to: bool (B, T, S), or segments without a cache."""
        x_BTD, layers = embedded(self.config, self.embedding, tokens_BT), jnp.arange(self.config.layers)
        (x_BTD, written), _ = self.blocks((x_BTD, cache), layers, positions_BT, seen, index)
        return self.final_norm(x_BTD), cast(Cache | None, written)

    def _seen(
        self, shape_BT: tuple[int, ...], valid_BS: Array, cached: bool, index: Array | int, segment_ids_BT: Array | None
    ) -> Array | Segments:
        """What each query sees: a mask (B, T, S), or for the kernel of TPUs, where it can be used, segments."""
        c = self.config
        if not cached and on_tpu() and fits(shape_BT, c.query_heads, c.kv_heads, c.head_dim):
            return Segments(valid_BS.astype(jnp.int32) if segment_ids_BT is None else segment_ids_BT)
        query_slots = index + jnp.arange(shape_BT[1])
        causal_TS = jnp.arange(valid_BS.shape[1])[None, :] <= query_slots[:, None]
        mask_BTS = causal_TS[None] & valid_BS[:, None, :]
        if segment_ids_BT is not None:
            mask_BTS &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        return mask_BTS

    def logits(self, hidden_BTD: Array) -> Array:
        """Next-token logits (..., V) in float32 of hidden states (..., D)."""
        table_VD = self.embedding if self.config.tie_embeddings else self.unembedding
        table_VD = gathered(table_VD.astype(hidden_BTD.dtype), "VD")
        logits = jnp.einsum("...d,vd->...v", hidden_BTD, table_VD, preferred_element_type=jnp.float32)
        return laid_out(logits, "BTV" if logits.ndim == 3 else "BV")

    def init_params(self, key: Array) -> dict:
        """Fresh float32 parameters."""
        one = jnp.zeros((1, 1), jnp.int32)
        return self.init(key, one, one, one == 0)["params"]


def embedded(config: ModelConfig, table_VD: Array, tokens_BT: Array) -> Array:
    """Rows of the embedding (B, T, D) in the compute dtype."""
    return laid_out(gathered(table_VD, "VD")[tokens_BT].astype(config.compute_dtype), "BTD")


def forward(
    model: Transformer,
    params: Any,
    tokens_BT: Array,
    positions_BT: Array,
    valid_BS: Array,
    cache: Cache | None = None,
    index: Array | int = 0,
) -> tuple[Array, Cache | None]:
    """`Transformer.__call__` as a function of its parameters."""
    output = model.apply({"params": params}, tokens_BT, positions_BT, valid_BS, cache, index)
    return cast(tuple[Array, Cache | None], output)


def forward_packed(model: Transformer, params: Any, tokens_BS: Array, segment_ids_BS: Array) -> Array:
    """Final hidden states (B, S, D) of rows that hold several sequences each.

    Args:
        tokens_BS: int32 ids; sequences stand one after the other.
        segment_ids_BS: int32, a positive number for each sequence of a row, 0 on padding.
    """
    valid_BS, where_BS = segment_ids_BS > 0, segment_positions(segment_ids_BS)
    output = model.apply({"params": params}, tokens_BS, where_BS, valid_BS, segment_ids_BT=segment_ids_BS)
    return cast(tuple[Array, None], output)[0]


def output_table(model: Transformer, params: Any) -> Array:
    """The parameter (V, D), float32, whose products with hidden states are logits."""
    return cast(Array, params["embedding" if model.config.tie_embeddings else "unembedding"])


def logits_of(model: Transformer, params: Any, hidden: Array) -> Array:
    """`Transformer.logits` as a function of its parameters: float32 (..., V) of hidden states (..., D)."""
    return cast(Array, model.apply({"params": params}, hidden, method=Transformer.logits))
