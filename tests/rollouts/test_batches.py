import json
from dataclasses import replace

import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import BatchRecord, read_batch_record, supersede_batch_record, write_batch_record

RECORD = BatchRecord(
    version=264,
    behavior_version=8,
    batch=0,
    staleness_updates=256,
    shards=(("rollouts/00000008/000000-0000.parquet", "aa"), ("rollouts/00000008/000000-0001.parquet", "bb")),
)


def test_a_record_round_trips_and_may_be_written_again(store):
    assert read_batch_record(store, 264) is None
    write_batch_record(store, RECORD)
    write_batch_record(store, RECORD)
    assert read_batch_record(store, 264) == RECORD
    assert json.loads(store.get("batches/00000264.json"))["staleness_updates"] == 256


def test_another_record_for_the_same_version_is_refused_and_the_first_stays(store):
    write_batch_record(store, RECORD)
    with pytest.raises(UserError, match=r"batches/00000264\.json .* version 264"):
        write_batch_record(store, replace(RECORD, batch=1))
    assert read_batch_record(store, 264) == RECORD


def test_superseding_keeps_what_was_there_with_the_reason(store):
    newer = replace(RECORD, shards=(RECORD.shards[0], (RECORD.shards[1][0], "cc")))
    newest = replace(RECORD, shards=(RECORD.shards[0], (RECORD.shards[1][0], "dd")))
    write_batch_record(store, RECORD)
    supersede_batch_record(store, newer, "content does not match its digest")
    supersede_batch_record(store, newest, "truncated")
    assert read_batch_record(store, 264) == newest
    write_batch_record(store, newest)
    history = json.loads(store.get("batches/00000264.json"))["superseded"]
    assert [(old["shards"][1][1], old["reason"]) for old in history] == [
        ("bb", "content does not match its digest"),
        ("cc", "truncated"),
    ]


@pytest.mark.parametrize("text", [b"", b'{"version": 264', b"{}", b"[]", b'{"version": null}'])
def test_a_damaged_record_is_named(store, text):
    write_batch_record(store, RECORD)
    store.replace("batches/00000264.json", text)
    with pytest.raises(UserError, match=r"batches/00000264\.json is no batch record"):
        read_batch_record(store, 264)
