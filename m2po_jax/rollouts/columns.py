"""Rollouts to Arrow columns and back, without a Python loop over tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from m2po_jax.rollouts.schema import ARROW_SCHEMA, Rollouts, UnitId


def to_table(rollouts: Rollouts, unit: UnitId) -> pa.Table:
    """The rows of a shard, with ARROW_SCHEMA's columns."""
    r, rows = rollouts, rollouts.rows
    values: dict[str, Any] = {
        "policy_version": np.full(rows, unit.version, np.int64),
        "batch_index": np.full(rows, unit.batch, np.int32),
        "unit": np.full(rows, unit.unit, np.int32),
        "prompt_id": r.prompt_ids,
        "group_id": np.asarray(r.group_ids, np.int64),
        "sample_index": np.asarray(r.sample_indices, np.int32),
        "prompt_tokens": _lists(r.prompt_tokens, r.prompt_lengths, pa.int32()),
        "response_tokens": _lists(r.response_tokens, r.response_lengths, pa.int32()),
        "behavior_logprobs": _lists(r.behavior_logprobs, r.response_lengths, pa.float32()),
        "rescored_logprobs": _lists(r.rescored_logprobs, r.response_lengths, pa.float32()),
        "reward": np.asarray(r.rewards, np.float32),
        "finish_reason": r.finish_reasons,
        "temperature": np.full(rows, r.temperature, np.float64),
        "top_p": np.full(rows, r.top_p, np.float64),
        "response_text": r.response_texts,
        "gold_answer": r.gold_answers,
    }
    columns = [pa.array(values[field.name], field.type) for field in ARROW_SCHEMA]
    return pa.table(columns, schema=ARROW_SCHEMA)


def to_rollouts(table: pa.Table) -> Rollouts:
    """The inverse of `to_table`, padded to the longest row; the table has passed `checks.table_fault`."""
    prompts, prompt_lengths = _padded(table, "prompt_tokens", np.int32)
    responses, response_lengths = _padded(table, "response_tokens", np.int32)
    rescored = table.column("rescored_logprobs").null_count == 0
    return Rollouts(
        prompt_tokens=prompts,
        prompt_lengths=prompt_lengths,
        response_tokens=responses,
        response_lengths=response_lengths,
        behavior_logprobs=_padded(table, "behavior_logprobs", np.float32)[0],
        rescored_logprobs=_padded(table, "rescored_logprobs", np.float32)[0] if rescored else None,
        rewards=table.column("reward").to_numpy(),
        prompt_ids=table.column("prompt_id").to_pylist(),
        group_ids=table.column("group_id").to_numpy(),
        sample_indices=table.column("sample_index").to_numpy(),
        finish_reasons=table.column("finish_reason").to_pylist(),
        response_texts=table.column("response_text").to_pylist(),
        gold_answers=table.column("gold_answer").to_pylist(),
        temperature=table.column("temperature")[0].as_py(),
        top_p=table.column("top_p")[0].as_py(),
    )


def value_bytes(column: pa.ChunkedArray) -> Iterator[bytes]:
    """A column's values as bytes that depend on nothing but the values.

    Numbers are little-endian; lists and strings are their lengths (int64, -1 for null) and then their values.
    """
    if pa.types.is_list(column.type):
        yield lengths(column).astype("<i8").tobytes()
        yield from value_bytes(pc.list_flatten(column))
    elif pa.types.is_string(column.type):
        texts = [text.encode() for text in column.to_pylist()]
        yield np.array([len(text) for text in texts], "<i8").tobytes()
        yield b"".join(texts)
    else:
        values = column.to_numpy()
        yield values.astype(values.dtype.newbyteorder("<")).tobytes()


def lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Items in each list of a column, int64 (R,); -1 for a null."""
    return pc.fill_null(pc.list_value_length(column), -1).to_numpy().astype(np.int64)


def _lists(values: np.ndarray | None, row_lengths: np.ndarray, kind: pa.DataType) -> pa.Array:
    list_type = pa.list_(pa.field("element", kind))
    if values is None:
        return pa.nulls(len(row_lengths), list_type)
    inside = np.arange(values.shape[1]) < row_lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(row_lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values[inside], kind), type=list_type)


def _padded(table: pa.Table, name: str, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    column = table.column(name)
    row_lengths = lengths(column)
    padded: np.ndarray = np.zeros((len(row_lengths), int(row_lengths.max(initial=0))), dtype)
    padded[np.arange(padded.shape[1]) < row_lengths[:, None]] = pc.list_flatten(column).to_numpy()
    return padded, row_lengths.astype(np.int32)
