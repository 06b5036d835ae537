"""What a learner reads, on one host and as one of several, ahead of time or not, with shards that are damaged."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from m2po_jax.config import StalenessConfig, UserError
from m2po_jax.learner import feed as feed_module
from m2po_jax.learner.feed import Feed
from m2po_jax.learner.hosts import Hosts
from m2po_jax.rollouts import (
    Provenance,
    Schedule,
    Store,
    UnitId,
    read_batch_record,
    read_position,
    shard_path,
    units,
    whole_batches,
    write_shard,
)
from tests import tiny
from tests.rollouts.conftest import _make_rollouts

CONFIG = tiny.TINY
ROWS = CONFIG.rollouts.prompts_per_batch * CONFIG.rollouts.group_size
PROVENANCE = Provenance("run", "weights", "tokenizer")


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "run", create=True)


def rollouts_of(unit: UnitId):
    seed = 1000 * unit.version + 10 * unit.batch + unit.unit
    return _make_rollouts(CONFIG.rollouts.prompts_per_unit, CONFIG.rollouts.group_size, seed)


class Maker:
    """Makes the best of what will do where nothing is there, and remembers which."""

    def __init__(self, store: Store):
        self.store, self.made = store, []

    def __call__(self, options):
        return tuple(self.there(units) or self.make(units[0]) for units in options)

    def there(self, options):
        return next((unit for unit in options if self.store.exists(shard_path(unit))), None)

    def make(self, unit):
        self.made.append(unit)
        write_shard(self.store, rollouts_of(unit), unit, PROVENANCE, "test")
        return unit


def feed_of(store, rows=None, make=None, notes=None, config=CONFIG, others=None, inventory=None):
    rows = np.arange(ROWS) if rows is None else rows
    note = (lambda message: None) if notes is None else notes.append
    schedule = Schedule.of(config, inventory)
    supply = make or Maker(store)
    return Feed(store, schedule, config, Hosts(), rows, supply, lambda version: PROVENANCE, note, others)


def damage(store, unit):
    file = store.local_path / shard_path(unit)
    file.write_bytes(file.read_bytes()[:-9])


def test_batches_are_those_of_the_delay_line_and_recorded(store):
    feed = feed_of(store)
    for version, behavior, batch in ((0, 0, 0), (2, 0, 1), (4, 0, 2), (6, 2, 0)):
        record, rollouts = feed.take(version)
        assert (record.behavior_version, record.batch, record.staleness_updates) == (
            behavior,
            batch,
            version - behavior,
        )
        assert read_batch_record(store, version) == record
        wanted = [rollouts_of(unit) for unit in units(behavior, batch, 2)]
        np.testing.assert_array_equal(rollouts.rewards, np.concatenate([part.rewards for part in wanted]))
    feed.close()


def test_a_host_reads_the_shards_of_its_rows_alone_in_their_order(store):
    """Rows of two mini-batches of 8, each host the halves of both; the first unit has rows 0 to 7."""
    whole = feed_of(store).take(0)[1]
    for rows in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15], [9, 1, 8], [1, 15]):
        feed = feed_of(store, np.array(rows))
        _, own = feed.take(0)
        assert own.rows == len(rows)
        assert own.response_texts == [whole.response_texts[row] for row in rows]
        for row, theirs in enumerate(rows):
            length = whole.response_lengths[theirs]
            np.testing.assert_array_equal(own.behavior_logprobs[row, :length], whole.behavior_logprobs[theirs, :length])
        feed.close()


def test_what_is_read_ahead_is_what_is_read(store, monkeypatch):
    plain = feed_of(store)
    expected = plain.take(2)
    readers = []
    read_shard = feed_module.read_shard

    def watched(*arguments):
        readers.append(threading.current_thread().name)
        return read_shard(*arguments)

    monkeypatch.setattr(feed_module, "read_shard", watched)
    ahead = feed_of(store)
    ahead.read_ahead(2)
    record, rollouts = ahead.take(2)
    assert record == expected[0]
    np.testing.assert_array_equal(rollouts.response_tokens, expected[1].response_tokens)
    assert len(readers) == 2
    assert all(name.startswith("feed") for name in readers), "and not by the learner"
    ahead.close()


def test_nothing_is_read_ahead_that_is_not_there(store):
    maker = Maker(store)
    feed = feed_of(store, make=maker)
    feed.read_ahead(2)
    assert not maker.made
    feed.take(2)
    assert maker.made == list(units(0, 1, 2))
    feed.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_damaged_shard_is_said_set_aside_and_made_again(store, ahead):
    notes: list[str] = []
    maker = Maker(store)
    whole = feed_of(store, make=maker).take(0)
    (first, second), maker.made = maker.made, []
    damage(store, second)
    feed = feed_of(store, make=maker, notes=notes)
    if ahead:
        feed.read_ahead(0)
    record, rollouts = feed.take(0)
    assert maker.made == [second]
    assert record == whole[0]
    assert rollouts.response_texts == whole[1].response_texts
    assert len(notes) == 1 and shard_path(second) in notes[0]
    assert len(store.list("rollouts")) == 3, "the bad one is kept aside"
    assert store.exists(shard_path(first))
    feed.close()


def test_a_disk_that_damages_every_shard_is_named(store):
    class Damaging(Maker):
        def __call__(self, options):
            wanted = super().__call__(options)
            damage(store, wanted[1])
            return wanted

    feed = feed_of(store, make=Damaging(store))
    with pytest.raises(UserError, match=r"000000-0001.parquet was bad 3 times in a row"):
        feed.take(0)
    assert read_batch_record(store, 0) is None
    feed.close()


def test_a_batch_made_again_with_other_content_keeps_both_records(store):
    notes: list[str] = []
    first, _ = feed_of(store).take(0)
    unit = units(0, 0, 2)[0]
    store.delete(shard_path(unit))
    write_shard(store, rollouts_of(replace(unit, unit=9)), unit, PROVENANCE, "other")
    second, _ = feed_of(store, notes=notes).take(0)
    assert second.shards != first.shards
    assert read_batch_record(store, 0) == second
    assert notes == ["batch 0 was made again with other content; its record keeps both"]


def test_what_is_bad_is_said_before_it_is_made_again(store):
    said: list[str] = []
    maker = Maker(store)
    feed_of(store, make=maker).take(0)
    damage(store, units(0, 0, 2)[1])

    def make(options):
        said.append("made" if any(maker.there(units) is None for units in options) else "there")
        return maker(options)

    feed = feed_of(store, make=make, notes=said)
    feed.read_ahead(0)
    feed.take(0)
    assert [line.split(" ")[0] for line in said] == ["bad", "made"]
    feed.close()


AT_MOST = replace(CONFIG, staleness=StalenessConfig(policy="at_most", k=5))


def test_a_batch_may_be_of_several_versions_and_says_their_ages(store):
    """At most 5 behind at the second of two updates: version 4 reads 4, 2 or 0, unit by unit, the newest first."""
    maker = Maker(store)
    for unit in (UnitId(0, 2, 0), UnitId(2, 2, 0), UnitId(2, 2, 1)):
        maker.make(unit)
    feed = feed_of(store, make=maker, config=AT_MOST)
    record, rollouts = feed.take(4)
    assert record.units == (UnitId(2, 2, 0), UnitId(2, 2, 1)) and record.ages == (2, 2)
    maker.make(UnitId(0, 3, 1)), maker.make(UnitId(4, 3, 0))
    maker.made.clear()
    record, rollouts = feed.take(6)
    assert record.units == (UnitId(4, 3, 0), UnitId(6, 3, 1)), "version 0 is 6 behind: too old"
    assert maker.made == [UnitId(6, 3, 1)]
    assert (record.behavior_version, record.staleness_updates, record.ages) == (4, 2, (2, 0))
    np.testing.assert_array_equal(feed.ages(record), np.repeat([2, 0], ROWS // 2))
    feed.close()


def test_what_was_recorded_is_consumed_again_though_something_newer_is_there(store):
    maker = Maker(store)
    maker.make(UnitId(0, 2, 0)), maker.make(UnitId(2, 2, 1))
    first = feed_of(store, make=maker, config=AT_MOST).take(4)
    maker.make(UnitId(4, 2, 0)), maker.make(UnitId(4, 2, 1))
    feed = feed_of(store, make=maker, config=AT_MOST)
    again = feed.take(4)
    feed.close()
    assert again[0] == first[0] and again[0].units == (UnitId(0, 2, 0), UnitId(2, 2, 1))
    assert again[1].response_texts == first[1].response_texts
    assert read_position(store) == 4


def test_another_run_is_read_in_order_and_again_from_the_beginning(store, tmp_path):
    other = Store.open(tmp_path / "other", create=True)
    theirs = Provenance("theirs", "their weights", "tokenizer")
    made = [UnitId(8, 0, 0), UnitId(8, 0, 1), UnitId(8, 1, 0), UnitId(8, 1, 1), UnitId(8, 2, 0)]
    for unit in made:
        write_shard(other, rollouts_of(unit), unit, theirs, "them")
    config = replace(CONFIG, staleness=StalenessConfig(policy="frozen", run="elsewhere", version=8))
    inventory = {"elsewhere 8": whole_batches(other, 8, 2)}
    assert inventory == {"elsewhere 8": ((8, 0), (8, 1))}, "the third is not whole"
    others = {"elsewhere": (other, Provenance("theirs", "", "tokenizer"))}
    feed = feed_of(store, make=refusing, config=config, others=others, inventory=inventory)
    feed.read_ahead(2)
    records = [feed.take(version)[0] for version in (0, 2, 4)]
    assert [record.units for record in records] == [tuple(made[:2]), tuple(made[2:4]), tuple(made[:2])]
    assert [(record.run, record.ages) for record in records] == [("elsewhere", (v, v)) for v in (0, 2, 4)]
    assert read_batch_record(store, 2) == records[1]
    file = other.local_path / shard_path(made[0])
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="000000-0000.parquet: .*m2po verify"):
        feed.take(8)
    assert len(other.list("rollouts")) == 5, "another run's files are not moved"
    strangers = {"elsewhere": (other, Provenance("mine", "", "tokenizer"))}
    with pytest.raises(UserError, match="run id is theirs, expected mine"):
        feed_of(store, config=config, others=strangers, inventory=inventory).take(2)
    feed.close()


def test_to_be_asked_to_stop_while_waiting_takes_nothing(store):
    assert feed_of(store, make=lambda options: None).take(0) is None
    assert read_batch_record(store, 0) is None


def refusing(options):
    raise AssertionError(f"asked to make {options}")
