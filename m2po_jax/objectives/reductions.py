"""Sums and extremes over (B, T) arrays, taken a few columns at a time so that no statistic costs a token-sized array.

A hundred reductions of one batch are a hundred passes over memory, unless they are taken together while a block of it
lies in cache. Blocks are of columns, since rows are what a mesh shards: no block crosses devices, and what is added up
at the end are a few numbers.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

_BLOCK_TOKENS = 2**17
MAX_BLOCK_COLUMNS = 128
"""Most columns in a block; a row of a block has at most as many tokens."""

Columns = TypeVar("Columns")


class Totals(NamedTuple):
    """Reductions of a part of the batch; those of two parts combine into those of both."""

    sums: dict[str, Array]
    """float32 or int32, to be added over parts."""
    maxima: dict[str, Array]
    """float32, of which the maximum over parts is to be taken; -inf for an empty part."""


def combine(a: Totals, b: Totals) -> Totals:
    """The reductions of two disjoint parts of a batch, as if taken together."""
    return Totals(jax.tree.map(jnp.add, a.sums, b.sums), jax.tree.map(jnp.maximum, a.maxima, b.maxima))


def over_columns(reduce: Callable[[Columns], Totals], columns: Columns) -> Totals:
    """`reduce(columns)`, block by block. `columns` is a pytree of (B, T) arrays, or (B, 1) for one value a row."""
    shapes = {x.shape for x in jax.tree.leaves(columns)}
    rows, width = max(shapes, key=lambda shape: shape[1])
    block = min(max(_BLOCK_TOKENS // max(rows, 1), 16), MAX_BLOCK_COLUMNS)
    whole, rest = divmod(width, block)
    totals = jax.tree.map(_neutral, jax.eval_shape(reduce, columns), is_leaf=lambda x: isinstance(x, Totals))
    if whole:
        step = lambda i, totals: combine(totals, reduce(_block(columns, i * block, block)))  # noqa: E731
        totals = lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, totals)
    return combine(totals, reduce(_block(columns, whole * block, rest))) if rest else totals


def _block(columns: Columns, start: Array | int, width: int) -> Columns:
    return jax.tree.map(lambda x: x if x.shape[1] == 1 else lax.dynamic_slice_in_dim(x, start, width, axis=1), columns)


def _neutral(shapes: Totals) -> Totals:
    return Totals(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.sums),
        jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes.maxima),
    )


def total(x_BT: Array, where_BT: Array) -> Array:
    """Sum over the tokens of `where_BT`, rows first; float32."""
    return jnp.sum(jnp.sum(jnp.where(where_BT, x_BT, 0.0), axis=1))


def count(where_BT: Array) -> Array:
    """How many are True, int32; exact for up to 2^24 columns, as rows are counted in float32, which vectorises."""
    return jnp.sum(jnp.sum(jnp.where(where_BT, 1.0, 0.0), axis=1).astype(jnp.int32), dtype=jnp.int32)


def largest(x_BT: Array, where_BT: Array) -> Array:
    """Maximum over the tokens of `where_BT`; -inf for none."""
    return jnp.max(jnp.where(where_BT, x_BT, -jnp.inf), initial=-jnp.inf)
