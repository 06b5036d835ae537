"""The store on an object store like Google's, in memory, while that fails in every way it can."""

import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import Store, bytes_digest
from m2po_jax.rollouts.remote import StoreAway


@pytest.fixture
def bucket(gcs, request) -> Store:
    """A store of its own in the bucket."""
    return Store.open(f"{gcs.bucket()}/{request.node.name}", patience_s=20)


def test_objects_are_created_once_replaced_listed_and_deleted(bucket):
    assert bucket.create("a/b", b"first")
    assert bucket.create("a/b", b"first")
    assert not bucket.create("a/b", b"second")
    bucket.replace("a/c", b"1")
    bucket.replace("a/c", b"2")
    assert (bucket.get("a/b"), bucket.get("a/c")) == (b"first", b"2")
    assert bucket.list() == ["a/b", "a/c"]
    assert bucket.children("") == ["a"]
    bucket.delete("a/c")
    bucket.delete("a/c")
    assert not bucket.exists("a/c")
    with pytest.raises(FileNotFoundError):
        bucket.get("a/c")
    bucket.delete_prefix("a")
    assert bucket.list() == []


def test_a_bad_object_is_moved_aside_and_its_name_is_free(bucket):
    bucket.create("a/b", b"bad")
    aside = bucket.move_aside("a/b", bytes_digest(b"bad"))
    assert bucket.get(aside) == b"bad"
    assert bucket.list() == [aside]
    assert bucket.move_aside("a/b", bytes_digest(b"bad")) is None
    assert bucket.create("a/b", b"good")
    assert bucket.get("a/b") == b"good"


@pytest.mark.parametrize("kind", ["429", "503", "drop", "truncate"])
def test_half_of_the_requests_fail_in_one_way(gcs, bucket, kind):
    payload = os.urandom(100_000)
    gcs.faults(**{kind: 0.5}, seed=3)
    for turn in range(12):
        assert bucket.create(f"a/{turn:02d}", payload)
        assert bucket.get(f"a/{turn:02d}") == payload
        assert not bucket.create(f"a/{turn:02d}", b"other")
    assert bucket.list("a") == [f"a/{turn:02d}" for turn in range(12)]
    assert gcs.counts()["faults"] > 12


@pytest.mark.slow
def test_a_fifth_of_the_requests_fail_in_every_way_and_nothing_is_lost(gcs, bucket):
    bodies = {f"a/{turn:03d}": os.urandom(20_000) for turn in range(60)}
    gcs.trouble(0.2, seed=1)
    for path, body in bodies.items():
        assert bucket.create(path, body)
        bucket.replace("pointer", path.encode())
        assert bucket.get(path) == body
        assert bucket.get("pointer") == path.encode()
    assert gcs.counts()["faults"] > 20
    assert bucket.list("a") == sorted(bodies)
    for path in bodies:
        bucket.delete(path)
    assert bucket.list("a") == []


def test_a_long_listing_that_breaks_off_goes_on_where_it_was(gcs, bucket):
    gcs.fill(bucket.url.removeprefix("gs://m2po-tests/") + "/many/{:06d}", 8500)
    gcs.faults(truncate=0.5, seed=2)
    gcs.counts()
    assert bucket.list("many") == [f"many/{number:06d}" for number in range(8500)]
    counts = gcs.counts()
    assert counts["faults"] >= 3
    assert counts["list"] <= 9 + counts["faults"]


def test_a_silent_store_is_asked_again(gcs, bucket, monkeypatch):
    from m2po_jax.rollouts import remote

    monkeypatch.setitem(remote._CLIENT, "read_timeout", "1s")
    impatient = Store.open(bucket.url, patience_s=30)
    gcs.faults(hang=0.5, hang_s=2, seed=5)
    for turn in range(3):
        assert impatient.create(f"a/{turn}", b"x")
        assert impatient.get(f"a/{turn}") == b"x"


def test_a_store_that_is_away_for_a_while_is_waited_for_and_that_is_said_once(gcs, bucket, caplog, monkeypatch):
    from m2po_jax.rollouts import remote

    monkeypatch.setattr(remote, "_WARN_AFTER_S", 1.0)
    bucket.create("a", b"x")
    gcs.faults(away_s=4)
    with caplog.at_level(logging.WARNING):
        assert bucket.get("a") == b"x"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "does not answer" in said[0] and "answers again" in said[1]


def test_patience_ends(gcs, bucket):
    gcs.faults(away_s=30)
    began = time.monotonic()
    with pytest.raises(StoreAway, match=r"/a did not answer for \d s"):
        Store.open(bucket.url, patience_s=1).get("a")
    assert time.monotonic() - began < 8


def test_what_the_user_can_mend_is_said_at_once(gcs, bucket):
    gcs.bucket("m2po-forbidden", forbidden=True)
    for url, said in (
        ("gs://m2po-missing/run", "gs://m2po-missing is not there"),
        ("gs://m2po-forbidden/run", "no permission for gs://m2po-forbidden/run"),
    ):
        store = Store.open(url)
        calls = (lambda s: s.get("a"), lambda s: s.create("a", b""), lambda s: s.list(), lambda s: s.children(""))
        began = time.monotonic()
        for call in calls:
            with pytest.raises(UserError, match=said):
                call(store)
        assert time.monotonic() - began < 2


def test_missing_credentials_are_said(bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="no usable Google credentials for gs://m2po-tests/run"):
        Store.open("gs://m2po-tests/run").get("a")


CREATE = """
import sys, time
from m2po_jax.rollouts.store import Store
store = Store.open(sys.argv[1])
print("ready", flush=True)
began = float(sys.stdin.readline())

def create(turn):
    time.sleep(max(0.0, began + turn * 0.01 - time.time()))
    return store.create(f"race/{turn}", sys.argv[2].encode())

print("".join("01"[create(turn)] for turn in range(200)))
"""


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_of_two_processes_that_create_one_unit_exactly_one_wins(gcs, bucket, start, share):
    gcs.faults(**{"429": share / 3, "503": share / 3, "drop": share / 3})
    writers = {name: start(CREATE, bucket.url, name) for name in ("one", "two")}
    for writer in writers.values():
        assert writer.stdout.readline() == "ready\n"
    began = time.time() + 0.1
    for writer in writers.values():
        writer.stdin.write(f"{began}\n")
        writer.stdin.flush()
    wins = {name: writer.communicate(timeout=120)[0].strip() for name, writer in writers.items()}
    gcs.faults()
    for turn in range(200):
        won = [name for name in wins if wins[name][turn] == "1"]
        assert [bucket.get(f"race/{turn}").decode()] == won
    assert {len(set(text)) for text in wins.values()} == {2}, "each won some"


def test_readers_that_race_to_move_and_producers_that_race_to_create(bucket):
    barrier = threading.Barrier(4)

    def read(path):
        barrier.wait()
        return bucket.move_aside(path, bytes_digest(b"bad"))

    def produce(path):
        barrier.wait()
        while not bucket.create(path, b"good"):
            pass

    with ThreadPoolExecutor(4) as pool:
        for turn in range(25):
            path = f"{turn}/object"
            bucket.create(path, b"bad")
            readers = [pool.submit(read, path) for _ in range(2)]
            producers = [pool.submit(produce, path) for _ in range(2)]
            moved = [aside for reader in readers if (aside := reader.result()) is not None]
            assert [producer.result() for producer in producers] == [None, None]
            assert [bucket.get(aside) for aside in moved] == [b"bad"]
            assert bucket.get(path) == b"good"


def test_a_command_says_a_wrong_bucket_in_one_line(gcs, user_env):
    command = [sys.executable, "-m", "m2po_jax", "inspect", "gs://m2po-missing/run"]
    done = subprocess.run(command, env={**user_env, **gcs.environment}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "m2po: gs://m2po-missing is not there: check the name, or make the bucket, e.g. gcloud storage buckets create"
    ]
