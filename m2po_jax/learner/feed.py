"""The rollouts of each batch that a learner consumes: read, verified, recorded; on several hosts each its own rows."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from m2po_jax.config import Config, UserError
from m2po_jax.learner.hosts import Hosts
from m2po_jax.learner.position import Position
from m2po_jax.rollouts import (
    BadShard,
    BatchRecord,
    Provenance,
    Rollouts,
    Schedule,
    Shard,
    Store,
    UnitId,
    concatenate,
    read_batch_record,
    read_foreign_shard,
    read_shard,
    record_of,
    shard_path,
    supersede_batch_record,
    write_batch_record,
)

_ATTEMPTS = 3
_Found = dict[UnitId, Shard | BadShard]

Supply = Callable[[Sequence[tuple[UnitId, ...]]], tuple[UnitId, ...] | None]
"""For each unit of a batch the work units that will do, best first -> those that are there now, one each.

It makes them, or waits until somebody has; None: to stop was asked for. Called on all hosts, with the same answer.
"""


class Feed:
    """Takes batches in order of their version, and reads the next one while the learner is busy with this one."""

    def __init__(
        self,
        store: Store,
        schedule: Schedule,
        config: Config,
        hosts: Hosts,
        rows: np.ndarray,
        supply: Supply,
        expected: Callable[[int], Provenance | None],
        note: Callable[[str], None],
        others: Mapping[str, tuple[Store, Provenance]] | None = None,
        parents: Sequence[str] = (),
    ):
        """For one learner.

        Args:
            store: the run's.
            schedule: the run's; says what is read when.
            config: the run's.
            hosts: those of the learner.
            rows: which rows of a batch this host needs, in the order that it needs them in.
            supply: makes units, or waits for them.
            expected: version -> what its shards must state, or None if nobody knows any more.
            note: told of each bad shard in a line.
            others: other run that the schedule reads -> its store, and what its shards must state, weights apart.
            parents: runs that this one was forked from, whose shards in the store are good too.
        """
        self._store, self._config, self._hosts, self._note = store, config, hosts, note
        self._parents = parents
        self._schedule, self._supply, self._expected, self._others = schedule, supply, expected, others or {}
        self._unit_rows = config.rollouts.prompts_per_unit * config.rollouts.group_size
        self._needed = np.unique(rows // self._unit_rows)
        place = np.searchsorted(self._needed, rows // self._unit_rows)
        self._index = place * self._unit_rows + rows % self._unit_rows
        self._is_all = np.array_equal(self._index, np.arange(len(self._needed) * self._unit_rows))
        self._shard_of_row = rows // self._unit_rows
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="feed")
        self._position = Position(store)
        self._ahead: dict[int, Future[_Found]] = {}

    def read_ahead(self, version: int) -> None:
        """Begin to read the batch of a version, if all shards that this host needs of it are there."""
        if version not in self._ahead:
            self._ahead[version] = self._threads.submit(self._read_if_there, version)

    def take(self, version: int) -> tuple[BatchRecord, Rollouts] | None:
        """The verified rollouts, this host's rows, that the batch at `version` consumes, recorded before they are used.

        What was recorded for it before is what it consumes again. A bad shard is set aside, said, and made again.
        None: to stop was asked for while the batch was waited for.

        Raises:
            UserError: a shard is bad again and again, or one of another run is; as `Hosts.gather` does.
        """
        if self._hosts.first:
            self._position.tell(version)
        ahead = self._read_ahead(version)  # to its end, so that what it moved aside is made again
        run, options = self._options(version, self._recorded(version))
        for _ in range(_ATTEMPTS):
            wanted = self._supply(options) if run is None else tuple(unit for unit, *_ in options)
            if wanted is None:
                return None
            mine = [wanted[i] for i in self._needed]
            found = ahead if list(ahead) == mine else self._read(mine, run)
            ahead = {}
            shards, digests = self._verified(found, wanted)
            if None not in digests:
                break
            worst = wanted[digests.index(None)]
        else:
            raise UserError(
                f"{self._store.location(shard_path(worst))} was bad {_ATTEMPTS} times in a row: check the disk"
                " and that nothing else writes to this run"
            )
        record = record_of(version, [(unit, str(digest)) for unit, digest in zip(wanted, digests, strict=True)], run)
        if self._hosts.first:
            self._write(record)
        rollouts = concatenate([shard.rollouts for shard in shards])
        return record, rollouts if self._is_all else rollouts.at(self._index)

    def ages(self, record: BatchRecord) -> np.ndarray:
        """Age at the batch's first update of each row that this host needs, in order, int32 (R,)."""
        return np.array(record.ages, np.int32)[self._shard_of_row]

    def end(self, version: int) -> None:
        """Tell generators that nothing is consumed at `version` or later."""
        if self._hosts.first:
            self._position.tell(version)

    def close(self) -> None:
        """Stop reading ahead, and have the position written."""
        self._threads.shutdown(cancel_futures=True)
        self._position.close()

    def _options(
        self, version: int, recorded: BatchRecord | None = None
    ) -> tuple[str | None, list[tuple[UnitId, ...]]]:
        """The run that a batch is read from, and the work units that will do for each of its units."""
        count, sources = self._config.rollouts.units_per_batch, self._schedule.reads(version)
        if recorded is None:
            return sources[0].run, [tuple(UnitId(v, b, unit) for v, b, _ in sources) for unit in range(count)]
        if recorded.run is not None:
            return recorded.run, [(unit,) for unit in recorded.units]
        others = [[UnitId(v, b, unit.unit) for v, b, _ in sources] for unit in recorded.units]
        return None, [tuple(dict.fromkeys([unit, *them])) for unit, them in zip(recorded.units, others, strict=True)]

    def _recorded(self, version: int) -> BatchRecord | None:
        """The record of a batch that an earlier learner wrote, as the first host reads it."""
        known = read_batch_record(self._store, version) if self._hosts.first else None
        told = self._hosts.gather("the record of a batch", known and vars(known))[0]
        if told is None or self._hosts.first:
            return known
        shards = tuple((str(path), str(digest)) for path, digest in told["shards"])
        return BatchRecord(**told | {"shards": shards})

    def _there(self, options: Sequence[UnitId]) -> UnitId | None:
        return next((unit for unit in options if self._store.exists(shard_path(unit))), None)

    def _read_if_there(self, version: int) -> _Found:
        run, options = self._options(version)
        there = self._there if run is None else min  # those of another run are there
        units = [there(options[i]) for i in self._needed]
        return {} if None in units else self._read([unit for unit in units if unit is not None], run)

    def _read(self, wanted: Sequence[UnitId], run: str | None) -> _Found:
        """Shards of one run, as they are."""
        if run is not None:
            return {unit: self._read_other(unit, run) for unit in wanted}
        found: _Found = {}
        expected = {version: self._expected(version) for version in {unit.version for unit in wanted}}
        for unit in wanted:
            try:
                found[unit] = read_shard(self._store, unit, expected[unit.version], self._parents)
            except BadShard as bad:
                self._note(f"bad shard {bad}; making its unit again")
                found[unit] = bad
            except FileNotFoundError as gone:  # another reader has moved it aside
                found[unit] = BadShard(shard_path(unit), str(gone))
        return found

    def _read_other(self, unit: UnitId, run: str) -> Shard:
        store, expected = self._others[run]
        return read_foreign_shard(store, unit, expected)

    def _read_ahead(self, version: int) -> _Found:
        """What was read ahead of a batch, if all of it is good."""
        ahead = self._ahead.pop(version, None)
        found = ahead.result() if ahead else {}
        return found if all(isinstance(value, Shard) for value in found.values()) else {}

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
