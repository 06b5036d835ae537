"""Metrics segments (JSON lines) and token-level diagnostics (Parquet) of a run."""

import io
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from m2po_jax.config import UserError
from m2po_jax.rollouts.paths import DIAGNOSTICS, GENERATORS, METRICS, diagnostics_path, generator_path, metrics_path
from m2po_jax.rollouts.store import Store


def write_segment(store: Store, first_version: int, lines: list[dict[str, Any]]) -> None:
    """Write one segment as a whole object, one JSON line each, over an earlier one of the same first version.

    Every line needs `event` and `version`. Numbers that are not finite become null, as JSON has no word for them;
    numpy and JAX scalars become numbers. `pandas.read_json(path, lines=True)` reads it. No lines, no object.
    """
    for line in lines:
        if "event" not in line or "version" not in line:
            raise ValueError(f"a metrics line needs event and version: {line}")
    if not lines:
        return
    text = "".join(json.dumps({k: _plain(v) for k, v in line.items()}, allow_nan=False) + "\n" for line in lines)
    store.replace(metrics_path(first_version), text.encode())


def write_generator_lines(store: Store, producer: str, segment: int, lines: list[dict[str, Any]]) -> None:
    """Write what a generator did, one JSON line a unit, as the segment of this number."""
    text = "".join(json.dumps({k: _plain(v) for k, v in line.items()}, allow_nan=False) + "\n" for line in lines)
    store.replace(generator_path(producer, segment), text.encode())


def read_generator_lines(store: Store) -> list[dict[str, Any]]:
    """All lines of all generators of a run, in order of time, each with its `producer`."""
    lines = []
    for path in store.list(GENERATORS):
        lines += [{"producer": path.split("/")[-2], **line} for line in _parse(store, path)]
    return sorted(lines, key=lambda line: line["time"])


def read_segments(store: Store) -> list[dict[str, Any]]:
    """All lines in order of version; of lines with the same (event, version) the last segment's wins.

    A run that has no metrics yet reads as an empty list. Raises UserError for a segment that is not JSON lines.
    """
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for path in store.list(METRICS):
        if path.endswith(".jsonl"):
            for line in _parse(store, path):
                lines[line["event"], line["version"]] = line
    return sorted(lines.values(), key=lambda line: line["version"])


def write_diagnostics(store: Store, version: int, columns: dict[str, np.ndarray]) -> None:
    """Write the token-level sample of the batch consumed at `version`: columns (N,) of one length, as Parquet."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    store.replace(diagnostics_path(version), sink.getvalue())


def read_diagnostics(store: Store) -> pa.Table:
    """All token-level samples, in order of version, as one table; empty when there are none."""
    paths = [path for path in store.list(DIAGNOSTICS) if path.endswith(".parquet")]
    tables = [pq.read_table(pa.BufferReader(store.get(path))) for path in paths]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})


def _parse(store: Store, path: str) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in store.get(path).splitlines() if line.strip()]
        return [line for line in lines if (line["event"], line["version"])]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store.location(path)} is not a metrics segment ({error!r}): delete it") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
