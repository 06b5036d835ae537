"""What a learner step is about to consume, written before it does, so that a resumed run consumes the same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m2po_jax.config import UserError
from m2po_jax.rollouts.paths import POSITION, batch_record_path, parse_shard_path, shard_path
from m2po_jax.rollouts.schema import UnitId
from m2po_jax.rollouts.store import Store


@dataclass(frozen=True)
class BatchRecord:
    """The shards of one batch and the ages at which they are first trained on."""

    version: int
    """Learner version at the batch's first update."""
    behavior_version: int
    """Version that generated the batch; the oldest one, where its shards are of several."""
    batch: int
    """Index of the batch among those of its behaviour version."""
    staleness_updates: int
    """Age of the oldest shard: version - behavior_version; for another run's data the updates of this one, version."""
    shards: tuple[tuple[str, str], ...]
    """(path, content digest), in the order of reading."""
    run: str | None = None
    """The run that the shards are in; None: this one."""

    @property
    def units(self) -> tuple[UnitId, ...]:
        """The work units of the shards."""
        found = [parse_shard_path(path) for path, _ in self.shards]
        return tuple(unit for unit in found if unit is not None)

    @property
    def ages(self) -> tuple[int, ...]:
        """Age of each shard at the batch's first update."""
        return tuple(self.version if self.run else self.version - unit.version for unit in self.units)


def record_of(version: int, shards: Sequence[tuple[UnitId, str]], run: str | None = None) -> BatchRecord:
    """The record of a batch from its (work unit, content digest), in the order of reading."""
    oldest = min(unit.version for unit, _ in shards)
    return BatchRecord(
        version=version,
        behavior_version=oldest,
        batch=shards[0][0].batch,
        staleness_updates=version if run else version - oldest,
        shards=tuple((shard_path(unit), digest) for unit, digest in shards),
        run=run,
    )


def read_position(store: Store) -> int | None:
    """Learner version at which the next batch is consumed, from one small object; None before the first.

    It goes back where a learner resumes from a checkpoint; at the end of a run it is `learner.total_updates`.
    """
    try:
        return int(json.loads(store.get(POSITION))["version"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{store.location(POSITION)} is unreadable ({error!r}): delete it and resume the learner"
        ) from error


def write_position(store: Store, version: int) -> None:
    """Tell generators at which learner version the next batch is consumed."""
    store.replace(POSITION, (json.dumps({"version": version}) + "\n").encode())


def write_batch_record(store: Store, record: BatchRecord) -> None:
    """Record a batch once; writing the same record again is fine, another one at its version raises UserError."""
    path = batch_record_path(record.version)
    if store.create(path, _encode(record, [])):
        return
    if read_batch_record(store, record.version) != record:
        raise UserError(
            f"{store.location(path)} already records another batch for version {record.version}:"
            " resume the run that wrote it, or use another --run directory"
        )


def read_batch_record(store: Store, version: int) -> BatchRecord | None:
    """The record of the batch consumed at a learner version, or None; raises UserError when it cannot be read."""
    document = _read(store, version)
    return None if document is None else _decode(document, store.location(batch_record_path(version)))


def supersede_batch_record(store: Store, record: BatchRecord, reason: str) -> None:
    """Replace a record whose shard was found corrupted and made again with another digest; the old one is kept in it.

    The file's `superseded` list holds every earlier version of the record with the reason, oldest first.
    """
    document = _read(store, record.version)
    history: list[dict[str, Any]] = []
    if document is not None:
        history = document.pop("superseded", [])
        history.append({**document, "reason": reason})
    store.replace(batch_record_path(record.version), _encode(record, history))


def _encode(record: BatchRecord, superseded: list[dict[str, Any]]) -> bytes:
    document: dict[str, Any] = {**vars(record), "ages": record.ages}
    if superseded:
        document["superseded"] = superseded
    return (json.dumps(document, indent=1) + "\n").encode()


def _read(store: Store, version: int) -> dict[str, Any] | None:
    path = batch_record_path(version)
    try:
        return json.loads(store.get(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _unreadable(store.location(path), error) from error


def _decode(document: dict[str, Any], source: str) -> BatchRecord:
    try:
        return BatchRecord(
            version=int(document["version"]),
            behavior_version=int(document["behavior_version"]),
            batch=int(document["batch"]),
            staleness_updates=int(document["staleness_updates"]),
            shards=tuple((str(path), str(digest)) for path, digest in document["shards"]),
            run=None if document.get("run") is None else str(document["run"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: Exception) -> UserError:
    return UserError(f"{source} is no batch record ({error!r}): delete it to let the learner choose that batch again")
