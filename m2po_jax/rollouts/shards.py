"""Shards: the one immutable Parquet file of a work unit, made in memory and verified when read."""

import hashlib
import io
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from m2po_jax.config import UserError
from m2po_jax.rollouts.checks import rollouts_fault, table_fault
from m2po_jax.rollouts.columns import to_rollouts, to_table, value_bytes
from m2po_jax.rollouts.paths import shard_path
from m2po_jax.rollouts.schema import ARROW_SCHEMA, SCHEMA_VERSION, Provenance, Rollouts, UnitId
from m2po_jax.rollouts.store import Store, bytes_digest

_PREFIX = "m2po_jax."
_CORE = ("run_id", "weights_digest", "tokenizer_fingerprint")
_KEYS = ("schema_version", *_CORE, "rows", "content_digest", "producer", "created_at")

_REPEATED = [field.name for field in ARROW_SCHEMA if not pa.types.is_list(field.type) and field.name != "response_text"]
"""Columns whose values repeat; a dictionary of log-probs or texts would make the file larger, and slower to write."""


class BadShard(Exception):
    """A shard that must not be trained on; its unit is to be made again."""

    def __init__(self, source: str, reason: str):
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason


@dataclass(frozen=True)
class Shard:
    """A verified shard."""

    rollouts: Rollouts
    unit: UnitId
    provenance: Provenance
    digest: str
    """sha256 of the content; two producers of one unit agree on it."""
    producer: str
    created_at: str
    """ISO 8601, UTC; outside the digest, as is the producer."""


def encode(rollouts: Rollouts, unit: UnitId, provenance: Provenance, producer: str) -> bytes:
    """The Parquet bytes (zstd) of a unit's shard; raises BadShard when reading would refuse the rollouts."""
    if (fault := rollouts_fault(rollouts)) is not None:
        raise BadShard(shard_path(unit), fault)
    table = to_table(rollouts, unit)
    metadata = _core(provenance, table.num_rows) | {
        "content_digest": content_digest(table, provenance),
        "producer": producer,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    table = table.replace_schema_metadata({_PREFIX + key: str(value) for key, value in metadata.items()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, use_dictionary=_REPEATED)
    return sink.getvalue()


def decode(
    data: bytes,
    source: str,
    expected: Provenance | None = None,
    unit: UnitId | None = None,
    parents: Collection[str] = (),
) -> Shard:
    """Read and verify a shard.

    `source` names it in messages; `expected` and `unit`, where given, must be what the shard was made for, by the run
    expected or one of `parents`. Log-probs in (0, 1e-4] are clipped to 0. Raises BadShard naming the fault, and
    UserError for a newer schema.
    """
    try:
        return _decode(data, source, expected, unit, parents)
    except (BadShard, UserError):
        raise
    except Exception as error:  # damaged bytes surface as errors of any type, in any later look at the table
        raise BadShard(source, f"cannot be read as Parquet: {_first_line(error)}") from error


def write_shard(store: Store, rollouts: Rollouts, unit: UnitId, provenance: Provenance, producer: str) -> bool:
    """Create a unit's shard unless there is one; True when the one there has this content, whoever made it.

    False means that another producer was first with other content, which stands. Raises BadShard like `encode`.
    """
    path, data = shard_path(unit), encode(rollouts, unit, provenance, producer)
    if store.create(path, data):
        return True
    try:
        return decode(store.get(path), store.location(path)).digest == decode(data, path).digest
    except (FileNotFoundError, BadShard):
        return False


def read_shard(store: Store, unit: UnitId, expected: Provenance | None = None, parents: Collection[str] = ()) -> Shard:
    """Read and verify a unit's shard; a bad one is moved aside, so that the unit can be made again.

    A shard of one of the runs `parents` is as good as one of the run expected.

    Raises FileNotFoundError when there is none, BadShard naming the fault and where the file went, UserError for a
    newer schema.
    """
    path = shard_path(unit)
    data = store.get(path)
    try:
        return decode(data, store.location(path), expected, unit, parents)
    except BadShard as bad:
        aside = store.move_aside(path, bytes_digest(data))
        where = f"moved to {aside.rsplit('/', 1)[-1]}" if aside else "already moved aside"
        raise BadShard(bad.source, f"{bad.reason}; {where}") from bad


def read_foreign_shard(store: Store, unit: UnitId, expected: Provenance) -> Shard:
    """Read and verify a shard of a run that is not ours to mend, whatever weights of that run wrote it.

    Raises UserError when it is missing, bad, or of another run or tokenizer than `expected`.
    """
    source = store.location(shard_path(unit))
    try:
        shard = decode(store.get(shard_path(unit)), source, None, unit)
        wanted = replace(expected, weights_digest=shard.provenance.weights_digest)
        _require_expected(shard.unit, unit, shard.provenance, wanted, source)
        return shard
    except FileNotFoundError as error:
        raise UserError(f"{source} is not there any more: name another run or version with staleness.run") from error
    except BadShard as bad:
        raise UserError(f"{bad}: mend that run (m2po verify), or name another one with staleness.run") from bad


def content_digest(table: pa.Table, provenance: Provenance) -> str:
    """sha256 over the core metadata and the values of every column; independent of compression and library versions."""
    core = json.dumps(_core(provenance, table.num_rows), sort_keys=True)
    state = hashlib.sha256(core.encode())
    for name in ARROW_SCHEMA.names:
        state.update(f"\n{name}\n".encode())
        for part in value_bytes(table.column(name)):
            state.update(part)
    return state.hexdigest()


def _decode(
    data: bytes, source: str, expected: Provenance | None, unit: UnitId | None, parents: Collection[str]
) -> Shard:
    table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True, use_threads=False)
    metadata = _metadata(table, source)
    _require_no_fault(table_fault(table), source)
    found = UnitId(*(table.column(name)[0].as_py() for name in ("policy_version", "batch_index", "unit")))
    provenance = Provenance(*(metadata[key] for key in _CORE))
    _require_content(table, metadata, provenance, source)
    if expected is not None and provenance.run_id in parents:
        expected = replace(expected, run_id=provenance.run_id)
    _require_expected(found, unit, provenance, expected, source)
    rollouts = to_rollouts(table)
    _require_no_fault(rollouts_fault(rollouts), source)
    return Shard(
        rollouts=_clipped(rollouts),
        unit=found,
        provenance=provenance,
        digest=metadata["content_digest"],
        producer=metadata["producer"],
        created_at=metadata["created_at"],
    )


def _core(provenance: Provenance, rows: int) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **vars(provenance), "rows": rows}


def _metadata(table: pa.Table, source: str) -> dict[str, str]:
    raw = {key.decode(errors="replace"): value for key, value in (table.schema.metadata or {}).items()}
    metadata = {key: raw[_PREFIX + key].decode(errors="replace") for key in _KEYS if _PREFIX + key in raw}
    _require_version(metadata.get("schema_version", ""), source)
    missing = [key for key in _KEYS if key not in metadata]
    _require_no_fault(f"metadata {missing[0]} is missing" if missing else None, source)
    return metadata


def _require_version(text: str, source: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise BadShard(source, f"schema version {text!r} is not a version")
    if int(text) > SCHEMA_VERSION:
        raise UserError(
            f"{source} has schema version {text}, this package reads up to {SCHEMA_VERSION}: upgrade m2po-jax"
        )


def _require_content(table: pa.Table, metadata: dict[str, str], provenance: Provenance, source: str) -> None:
    if metadata["rows"] != str(table.num_rows):
        raise BadShard(source, f"{table.num_rows} rows where its metadata says {metadata['rows']}")
    if metadata["content_digest"] != content_digest(table, provenance):
        raise BadShard(source, "content does not match its digest: the file was edited or damaged")


def _require_expected(
    found: UnitId, unit: UnitId | None, provenance: Provenance, expected: Provenance | None, source: str
) -> None:
    pairs = [(name, value, vars(expected)[name]) for name, value in vars(provenance).items()] if expected else []
    if unit is not None:
        pairs += [(name, value, vars(unit)[name]) for name, value in vars(found).items()]
    for name, value, wanted in pairs:
        if value != wanted:
            raise BadShard(source, f"{name.replace('_', ' ')} is {value}, expected {wanted}")


def _require_no_fault(fault: str | None, source: str) -> None:
    if fault is not None:
        raise BadShard(source, fault)


def _clipped(rollouts: Rollouts) -> Rollouts:
    behavior, rescored = rollouts.behavior_logprobs, rollouts.rescored_logprobs
    return replace(
        rollouts,
        behavior_logprobs=np.minimum(behavior, 0),
        rescored_logprobs=None if rescored is None else np.minimum(rescored, 0),
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
