import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog

from m2po_jax.learner.metrics import MetricsLog, alarms
from m2po_jax.learner.speed import Speed
from m2po_jax.rollouts import Store, read_segments
from tests import tiny


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "run", create=True)


def batch(version: int, loss: float = 0.5):
    return [({"version": version + i, "mini_batch": i}, {"loss": jnp.float32(loss), "skipped": 0.0}) for i in (0, 1)]


def segments(store):
    return [path.removeprefix("metrics/") for path in store.list("metrics")]


def test_a_batch_is_fetched_when_the_next_one_comes(store):
    log = MetricsLog(store, 0, None, pytest.fail)
    log.updates(batch(0))
    assert log.latest == {}
    log.updates(batch(2))
    assert log.latest["version"] == 1 and log.latest["loss"] == 0.5
    assert log.latest["updates_per_s"] > 0 and log.latest["wall_time_s"] > 0


def test_the_speed_of_each_update_is_in_its_line(store):
    clock = Speed(tiny.TINY.model, jax.devices()[:1])
    log = MetricsLog(store, 0, None, pytest.fail, speed=clock)
    work = {"sequence_tokens": jnp.float32(300), "token_pairs": jnp.float32(900), "tokens": jnp.float32(100)}
    for start in (0, 2):
        done = []
        for facts, metrics in batch(start):
            with clock.updating(facts["version"]) as watched:
                watched.append(metrics["loss"])
            done.append((facts, {**metrics, **work}))
        log.updates(done)
    log.flush(4)
    log.flush(4)
    clock.close()
    lines = read_segments(store)
    assert [line["version"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["tokens_per_s"] * line["update_s"] == pytest.approx(300)
        assert {"flops_per_s", "data_wait_frac", "checkpoint_wait_frac", "host_frac"} <= set(line)
    assert set(log.latest) > {"tokens_per_s"}


def test_segments_hold_whole_intervals_and_every_line(store):
    log = MetricsLog(store, 0, None, pytest.fail)
    log.evaluation(0, {"accuracy": 0.25})
    for version in (0, 2, 4):
        log.updates(batch(version))
        if version == 2:
            log.flush(4)
    assert segments(store) == ["00000000.jsonl"], "nothing is written between flushes"
    log.flush(6)
    log.flush(6)
    assert segments(store) == ["00000000.jsonl", "00000004.jsonl"]
    lines = read_segments(store)
    assert [line["version"] for line in lines if line["event"] == "update"] == list(range(6))
    assert [(line["version"], line["accuracy"]) for line in lines if line["event"] == "evaluation"] == [(0, 0.25)]


def test_a_resumed_log_replaces_the_segment_it_begins(store):
    first = MetricsLog(store, 4, None, pytest.fail)
    first.updates(batch(4, loss=1.0))
    first.flush(6)
    second = MetricsLog(store, 4, None, pytest.fail)
    for version in (4, 6):
        second.updates(batch(version, loss=2.0))
    second.flush(8)
    assert segments(store) == ["00000004.jsonl"]
    assert [(line["version"], line["loss"]) for line in read_segments(store)] == [(v, 2.0) for v in (4, 5, 6, 7)]


def test_a_number_that_is_none_becomes_null(store):
    log = MetricsLog(store, 0, None, pytest.fail)
    log.updates(batch(0, loss=float("nan")))
    log.flush(2)
    assert [line["loss"] for line in read_segments(store)] == [None, None]


def events_in(directory) -> list[Event]:
    """Every event of the files there, with the checksums of the TFRecord format verified."""
    found = []
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body = data[12 : 12 + length]
            assert struct.unpack("<I", data[8:12]) == (masked(crc32c(data[:8])),)
            assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked(crc32c(body)),)
            found.append(Event.FromString(body))
            data = data[16 + length :]
    return found


def masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def test_events_are_written_for_tensorboard_as_they_come(store, tmp_path):
    log = MetricsLog(store, 0, tmp_path / "events", pytest.fail)
    log.evaluation(0, {"accuracy": 0.25})
    log.updates(batch(0))
    log.updates(batch(2))
    first, start, *events = events_in(tmp_path / "events")
    assert first.file_version == "brain.Event:2" and start.session_log.status == SessionLog.START
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert (0, "evaluation/accuracy", 0.25) in values
    assert [value for value in values if value[1] == "update/loss"] == [
        (0, "update/loss", 0.5),
        (1, "update/loss", 0.5),
    ]
    log.close()


def test_a_resumed_log_voids_the_events_it_writes_again(store, tmp_path):
    for first_version in (0, 4):
        log = MetricsLog(store, first_version, tmp_path / "events", pytest.fail)
        log.close()
    starts = [event.step for event in events_in(tmp_path / "events") if event.HasField("session_log")]
    assert starts == [0, 4]


def test_arrays_become_lists_and_stay_out_of_the_events(store, tmp_path):
    log = MetricsLog(store, 0, tmp_path / "events", pytest.fail)
    counts, means = jnp.asarray([[0.0, 3.0], [1.0, 2.0]]), jnp.asarray([0.5, jnp.nan])
    log.updates([({"version": 0, "mini_batch": 0}, {"loss": jnp.float32(0.5), "counts": counts, "means": means})])
    log.flush(1)
    log.close()
    (line,) = read_segments(store)
    assert line["counts"] == [[0, 3], [1, 2]] and line["means"] == [0.5, None]
    tags = {value.tag for event in events_in(tmp_path / "events") for value in event.summary.value}
    assert "update/loss" in tags and not any("counts" in tag or "means" in tag for tag in tags)


def test_what_went_wrong_is_said_by_name(store):
    said = []
    log = MetricsLog(store, 0, None, said.append)
    wrong = {
        "all_masked": 1.0,
        "skipped": 1.0,
        "saturated_frac": 0.25,
        "nonfinite_behavior": 2.0,
        "nonfinite_tokens": 2.0,
    }
    log.updates(
        [
            ({"version": v, "mini_batch": v}, {k: np.float32(x) for k, x in m.items()})
            for v, m in enumerate((dict.fromkeys(wrong, 0.0), wrong))
        ]
    )
    log.flush(2)
    assert len(said) == 4 and all(line.startswith("update 1: ") for line in said)
    assert any("2 tokens whose behavior log-prob is not finite" in line for line in said)
    assert any("every token is masked" in line for line in said)
    assert any("25.00% of the ratios are saturated" in line for line in said)
    assert any("update skipped" in line for line in said)
    assert alarms({"version": 3}) == []
