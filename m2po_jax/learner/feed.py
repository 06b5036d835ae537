"""The rollouts of each batch that a learner consumes: read, verified, recorded; on several hosts each its own rows."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from m2po_jax.config import Config, UserError
from m2po_jax.learner.hosts import Hosts
from m2po_jax.rollouts import (
    BadShard,
    BatchRecord,
    Provenance,
    Rollouts,
    Shard,
    Store,
    UnitId,
    concatenate,
    exactly,
    read_batch_record,
    read_shard,
    shard_path,
    supersede_batch_record,
    units,
    write_batch_record,
)

_ATTEMPTS = 3
_Found = dict[UnitId, Shard | BadShard]


class Feed:
    """Takes batches in order of their version, and reads the next one while the learner is busy with this one."""

    def __init__(
        self,
        store: Store,
        config: Config,
        hosts: Hosts,
        rows: np.ndarray,
        make: Callable[[Sequence[UnitId]], object],
        expected: Callable[[int], Provenance | None],
        note: Callable[[str], None],
    ):
        """For one learner.

        Args:
            store: the run's.
            config: the run's.
            hosts: those of the learner.
            rows: which rows of a batch this host needs, in the order that it needs them in.
            make: makes those of some units that are not there, or waits until somebody has; called on all hosts.
            expected: version -> what its shards must state, or None if nobody knows any more.
            note: told of each bad shard in a line.
        """
        self._store, self._config, self._hosts, self._note = store, config, hosts, note
        self._make, self._expected = make, expected
        self._unit_rows = config.rollouts.prompts_per_unit * config.rollouts.group_size
        self._needed = np.unique(rows // self._unit_rows)
        place = np.searchsorted(self._needed, rows // self._unit_rows)
        self._index = place * self._unit_rows + rows % self._unit_rows
        self._is_all = np.array_equal(self._index, np.arange(len(self._needed) * self._unit_rows))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="feed")
        self._ahead: dict[int, Future[_Found]] = {}

    def cursor(self, version: int) -> tuple[int, int]:
        """The (behaviour version, batch) that is consumed at a learner version."""
        learner = self._config.learner
        return exactly(version, self._config.staleness.k, learner.updates_per_batch, learner.publish_interval)

    def read_ahead(self, version: int) -> None:
        """Begin to read the batch of a version, if all shards that this host needs of it are there."""
        mine = [self._units(version)[i] for i in self._needed]
        if version not in self._ahead and all(self._store.exists(shard_path(unit)) for unit in mine):
            self._ahead[version] = self._threads.submit(self._read, mine)

    def take(self, version: int) -> tuple[BatchRecord, Rollouts]:
        """The verified rollouts, this host's rows, that the batch at `version` consumes, recorded before they are used.

        A bad shard is set aside, said, and made again.

        Raises:
            UserError: a shard is bad again and again; as `Hosts.gather` does.
        """
        wanted = self._units(version)
        behavior_version, batch = self.cursor(version)
        found = self._read_ahead(version)
        for _ in range(_ATTEMPTS):
            self._make(wanted)
            shards, digests = self._verified(found or self._read([wanted[i] for i in self._needed]), wanted)
            if None not in digests:
                break
            found = None
        else:
            bad = wanted[digests.index(None)]
            raise UserError(
                f"{self._store.location(shard_path(bad))} was bad {_ATTEMPTS} times in a row: check the disk"
                " and that nothing else writes to this run"
            )
        record = BatchRecord(
            version=version,
            behavior_version=behavior_version,
            batch=batch,
            staleness_updates=version - behavior_version,
            shards=tuple((shard_path(unit), str(digest)) for unit, digest in zip(wanted, digests, strict=True)),
        )
        if self._hosts.first:
            self._write(record)
        rollouts = concatenate([shard.rollouts for shard in shards])
        return record, rollouts if self._is_all else rollouts.at(self._index)

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.shutdown(cancel_futures=True)

    def _units(self, version: int) -> tuple[UnitId, ...]:
        return units(*self.cursor(version), self._config.rollouts.units_per_batch)

    def _read(self, wanted: Sequence[UnitId]) -> _Found:
        """Shards, all of one version, as they are."""
        found: _Found = {}
        expected = self._expected(wanted[0].version)
        for unit in wanted:
            try:
                found[unit] = read_shard(self._store, unit, expected)
            except BadShard as bad:
                self._note(f"bad shard {bad}; making its unit again")
                found[unit] = bad
        return found

    def _read_ahead(self, version: int) -> _Found | None:
        """What was read ahead of a batch, if all of it is good."""
        ahead = self._ahead.pop(version, None)
        found = None if ahead is None else ahead.result()
        return found if found and all(isinstance(value, Shard) for value in found.values()) else None

    def _verified(self, found: _Found, wanted: Sequence[UnitId]) -> tuple[list[Shard], list[str | None]]:
        """This host's shards of a batch, and the digests of all of them; None where one is bad."""
        shards = {unit: value for unit, value in found.items() if isinstance(value, Shard)}
        said = {
            str(i): shards[unit].digest if unit in shards else None for i, unit in enumerate(wanted) if unit in found
        }
        heard = self._hosts.gather("the shards of a batch", said)
        digests = [{answer[str(i)] for answer in heard if str(i) in answer} for i in range(len(wanted))]
        return list(shards.values()), [digest.pop() if len(digest) == 1 else None for digest in digests]

    def _write(self, record: BatchRecord) -> None:
        recorded = read_batch_record(self._store, record.version)
        if recorded is None:
            write_batch_record(self._store, record)
        elif recorded != record:
            self._note(f"batch {record.version} was made again with other content; its record keeps both")
            supersede_batch_record(self._store, record, "a recorded shard was missing or damaged")
