"""What makes a shard fit to train on: each check names the fault it finds, or returns None."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from m2po_jax.rollouts.columns import lengths
from m2po_jax.rollouts.schema import ARROW_SCHEMA, FINISH_REASONS, Rollouts

LOGPROB_TOLERANCE = 1e-4
"""Largest log-prob that counts as rounding above 0; anything larger is a fault."""


def table_fault(table: pa.Table) -> str | None:
    """The first fault in the columns themselves: names, types, nulls, lists of unequal length, constants that vary."""
    return _first(table, (_columns, _nulls, _list_lengths, _constants))


def rollouts_fault(rollouts: Rollouts) -> str | None:
    """The first fault in the values: shapes, lengths, log-probs, rewards, finish reasons, groups."""
    return _first(rollouts, (_shapes, _row_lengths, _behavior, _rescored, _rewards, _finish_reasons, _groups))


def _first(subject: Any, checks: tuple[Callable[..., str | None], ...]) -> str | None:
    return next((fault for check in checks if (fault := check(subject)) is not None), None)


def _columns(table: pa.Table) -> str | None:
    for field in ARROW_SCHEMA:
        if field.name not in table.column_names:
            return f"column {field.name} is missing"
        if (found := table.schema.field(field.name).type) != field.type:
            return f"column {field.name} is {found}, not {field.type}"
    extra = [name for name in table.column_names if name not in ARROW_SCHEMA.names]
    return f"unknown column {extra[0]}" if extra else None


def _nulls(table: pa.Table) -> str | None:
    for name in ARROW_SCHEMA.names:
        column = table.column(name)
        allowed = (0, table.num_rows) if name == "rescored_logprobs" else (0,)
        if column.null_count not in allowed:
            return f"column {name} has {column.null_count} nulls in {table.num_rows} rows"
        if pa.types.is_list(column.type) and any(chunk.flatten().null_count for chunk in column.chunks):
            return f"column {name} has a null token"
    return None


def _list_lengths(table: pa.Table) -> str | None:
    tokens = lengths(table.column("response_tokens"))
    for name in ("behavior_logprobs", "rescored_logprobs"):
        found = lengths(table.column(name))
        wrong = np.flatnonzero((found != tokens) & (found >= 0))
        if wrong.size:
            row = int(wrong[0])
            return f"row {row} has {tokens[row]} response tokens but {found[row]} {name}"
    return None


def _constants(table: pa.Table) -> str | None:
    if table.num_rows == 0:
        return "no rows"
    for name in ("policy_version", "batch_index", "unit", "temperature", "top_p"):
        values = table.column(name).to_numpy()
        if (values != values[0]).any():
            return f"column {name} is not the same in every row"
    return None


def _shapes(r: Rollouts) -> str | None:
    if r.rows == 0:
        return "no rows"
    for name, value in vars(r).items():
        if isinstance(value, (list, np.ndarray)) and len(value) != r.rows:
            return f"{name} has {len(value)} rows, rewards has {r.rows}"
    for name in ("behavior_logprobs", "rescored_logprobs"):
        value = getattr(r, name)
        if value is not None and value.shape != r.response_tokens.shape:
            return f"{name} has shape {value.shape}, response_tokens {r.response_tokens.shape}"
    return None


def _row_lengths(r: Rollouts) -> str | None:
    for name, tokens, counts in (
        ("prompt", r.prompt_tokens, r.prompt_lengths),
        ("response", r.response_tokens, r.response_lengths),
    ):
        if (counts < 0).any() or (counts > tokens.shape[1]).any():
            return f"a {name} length lies outside 0..{tokens.shape[1]}"
        if (tokens[_inside(tokens, counts)] < 0).any():
            return f"a {name} token is negative"
    return None


def _behavior(r: Rollouts) -> str | None:
    return _logprobs("behavior_logprobs", r.behavior_logprobs, r.response_lengths)


def _rescored(r: Rollouts) -> str | None:
    if r.rescored_logprobs is None:
        return None
    return _logprobs("rescored_logprobs", r.rescored_logprobs, r.response_lengths)


def _logprobs(name: str, values: np.ndarray, counts: np.ndarray) -> str | None:
    inside = _inside(values, counts)
    if (wrong := _where(inside & ~np.isfinite(values))) is not None:
        return f"{name} of row {wrong[0]}, token {wrong[1]} is {values[wrong]}: not a finite number"
    if (wrong := _where(inside & (values > LOGPROB_TOLERANCE))) is not None:
        return f"{name} of row {wrong[0]}, token {wrong[1]} is {values[wrong]:g}: no log-probability is above 0"
    return None


def _rewards(r: Rollouts) -> str | None:
    wrong = np.flatnonzero(~np.isfinite(r.rewards))
    return f"reward of row {wrong[0]} is {r.rewards[wrong[0]]}" if wrong.size else None


def _finish_reasons(r: Rollouts) -> str | None:
    unknown = sorted(set(r.finish_reasons) - set(FINISH_REASONS))
    return f"unknown finish reason {unknown[0]!r}" if unknown else None


def _groups(r: Rollouts) -> str | None:
    groups, sizes = np.unique(r.group_ids, return_counts=True)
    size = int(sizes.max())
    if (sizes != size).any():
        short = int(np.argmin(sizes))
        return f"group {groups[short]} has {sizes[short]} responses, others have {size}: not a whole group"
    samples = r.sample_indices[np.lexsort((r.sample_indices, r.group_ids))].reshape(-1, size)
    wrong = np.flatnonzero((samples != np.arange(size)).any(axis=1))
    return f"sample indices of group {groups[wrong[0]]} are not 0..{size - 1}" if wrong.size else None


def _inside(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.arange(values.shape[1]) < counts[:, None]


def _where(mask: np.ndarray) -> tuple[int, int] | None:
    if not mask.any():
        return None
    row, token = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return int(row), int(token)
