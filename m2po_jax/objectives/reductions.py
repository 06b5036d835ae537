"""Sums and extremes over (B, T) arrays, taken a few columns at a time so that no statistic costs a token-sized array.

Dozens of reductions of one batch are dozens of passes over memory, unless they are taken together while a block of it
lies in cache. Blocks are of columns and what is carried from block to block is a number a row: rows are what a mesh
shards, so devices exchange nothing until the rows are added up at the end.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

_BLOCK_TOKENS = 2**16
_BLOCK_COLUMNS = (32, 128)
"""Fewest and most columns in a block; `row_counts` needs fewer than 2^8."""

Columns = TypeVar("Columns")


class Totals(NamedTuple):
    """Reductions by name: of the rows (B, ...), or of the whole batch (...)."""

    counts: dict[str, Array]
    """Tokens: float32 by rows, in which up to 2^24 are exact and vectorised; int32 of the batch."""
    sums: dict[str, Array]
    """Float32."""
    maxima: dict[str, Array]
    """Float32; -inf where there is nothing."""


def over_columns(reduce: Callable[[Columns], Totals], columns: Columns) -> Totals:
    """Reductions of the whole batch.

    Args:
      reduce: from a block of columns to its reductions by rows, (B, ...).
      columns: pytree of (B, T) arrays, or (B, 1) for one value a row.
    """
    rows, widths = len(jax.tree.leaves(columns)[0]), {x.shape[1] for x in jax.tree.leaves(columns)}
    width = max(widths) if min(widths) else 0
    fewest, most = _BLOCK_COLUMNS
    block = min(max(_BLOCK_TOKENS // max(rows, 1), fewest), most)
    whole, rest = divmod(width, block)
    by_rows = _empty(jax.eval_shape(reduce, columns))
    if whole:
        step = lambda i, totals: _combined(totals, reduce(_block(columns, i * block, block)))  # noqa: E731
        by_rows = lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, by_rows)
    if rest:
        by_rows = _combined(by_rows, reduce(_block(columns, whole * block, rest)))
    return Totals(
        counts=jax.tree.map(lambda x: jnp.sum(x.astype(jnp.int32), axis=0, dtype=jnp.int32), by_rows.counts),
        sums=jax.tree.map(lambda x: jnp.sum(x, axis=0), by_rows.sums),
        maxima=jax.tree.map(lambda x: jnp.max(x, axis=0, initial=-jnp.inf), by_rows.maxima),
    )


def row_counts(where: dict[str, Array]) -> dict[str, Array]:
    """How many are True in each row, by name, float32 (B,).

    Three are counted by one sum, with the weights 1, 2^8 and 2^16: a row of a block has fewer than 2^8 tokens.
    """
    names = list(where)
    found: dict[str, Array] = {}
    for i in range(0, len(names), 3):
        three = names[i : i + 3]
        weighted = [jnp.where(where[name], 2.0 ** (8 * j), 0.0) for j, name in enumerate(three)]
        packed = jnp.sum(functools.reduce(jnp.add, weighted), axis=1).astype(jnp.int32)
        found |= {name: ((packed >> (8 * j)) & 255).astype(jnp.float32) for j, name in enumerate(three)}
    return found


def row_sum(x_BT: Array, where_BT: Array) -> Array:
    """Sum of each row over the tokens of `where_BT`, float32 (B,)."""
    return jnp.sum(jnp.where(where_BT, x_BT, 0.0), axis=1)


def row_max(x_BT: Array, where_BT: Array) -> Array:
    """Maximum of each row over the tokens of `where_BT`, float32 (B,); -inf for none."""
    return jnp.max(jnp.where(where_BT, x_BT, -jnp.inf), axis=1, initial=-jnp.inf)


def _block(columns: Columns, start: Array | int, width: int) -> Columns:
    slice_of = lambda x: x if x.shape[1] == 1 else lax.dynamic_slice_in_dim(x, start, width, axis=1)  # noqa: E731
    return jax.tree.map(slice_of, columns)


def _combined(a: Totals, b: Totals) -> Totals:
    return Totals(
        jax.tree.map(jnp.add, a.counts, b.counts),
        jax.tree.map(jnp.add, a.sums, b.sums),
        jax.tree.map(jnp.maximum, a.maxima, b.maxima),
    )


def _empty(shapes: Totals) -> Totals:
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
    nothing = lambda x: jnp.full(x.shape, -jnp.inf, x.dtype)  # noqa: E731
    return Totals(
        jax.tree.map(zeros, shapes.counts), jax.tree.map(zeros, shapes.sums), jax.tree.map(nothing, shapes.maxima)
    )
