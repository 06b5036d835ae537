"""The store on an object store like Google's, in memory, while that fails in every way it can."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import from_url

from m2po_jax.config import UserError
from m2po_jax.rollouts import Store, UnitId, bytes_digest, remote, shard_path
from m2po_jax.rollouts.shelf import Shelf
from tests.gcs.server import Server


@pytest.fixture
def bucket(gcs, request) -> Store:
    """A store of its own in the bucket."""
    return Store.open(f"gs://{gcs.bucket}/{request.node.name}")


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["429", "503", "drop", "truncate"])
def test_half_of_the_requests_fail_in_one_way(gcs, bucket, kind):
    payload = os.urandom(100_000)
    gcs.faults(share=0.5, kinds=[kind], seed=3)
    for turn in range(12):
        assert bucket.create(f"a/{turn:02d}", payload)
        assert bucket.get(f"a/{turn:02d}") == payload
        assert not bucket.create(f"a/{turn:02d}", b"other")
    assert bucket.list("a") == [f"a/{turn:02d}" for turn in range(12)]
    assert gcs.requests()[kind] > 12


@pytest.mark.slow
def test_a_fifth_of_the_requests_fail_in_every_way_and_nothing_is_lost(gcs, bucket):
    bodies = {f"a/{turn:03d}": os.urandom(20_000) for turn in range(60)}
    gcs.faults(share=0.2, kinds=["429", "503", "drop", "truncate"], seed=1)
    for path, body in bodies.items():
        assert bucket.create(path, body)
        bucket.replace("pointer", path.encode())
        assert bucket.get(path) == body
        assert bucket.get("pointer") == path.encode()
    requests = gcs.requests()
    assert min(requests[kind] for kind in ("429", "503", "drop", "truncate")) >= 3, requests
    assert bucket.list("a") == sorted(bodies)
    for path in bodies:
        bucket.delete(path)
    assert bucket.list("a") == []


@pytest.fixture
def full(gcs, monkeypatch, tmp_path):
    """A server in this process, with this many shards of each of many versions."""
    servers = []

    def full(versions: int, shards: int) -> tuple[Store, Server]:
        server = Server(0, ["m2po-tests"])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        bucket = server.buckets["m2po-tests"]
        for unit in (UnitId(version, batch, 0) for version in range(versions) for batch in range(shards)):
            bucket.put(f"run/{shard_path(unit)}", b"x")
        account = tmp_path / "account.json"
        empty = {"private_key": "", "private_key_id": "", "client_email": ""}
        account.write_text(json.dumps({"gcs_base_url": server.url, "disable_oauth": True, **empty}))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        return Store.open("gs://m2po-tests/run"), server

    yield full
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_long_listing_that_breaks_off_goes_on_where_it_was(full):
    store, server = full(17, 500)
    server.faults.set({"share": 0.5, "kinds": ["truncate"], "seed": 2, "reset": True})
    assert len(store.list("rollouts")) == 8500
    assert server.faults.requests["truncate"] >= 3
    assert server.faults.requests["list"] <= 9 + server.faults.requests["truncate"]


@pytest.mark.slow
def test_units_of_a_version_take_as_many_requests_among_100000_shards_as_among_100(full):
    taken = []
    for versions in (1, 1000):
        store, server = full(versions, 100)
        server.faults.set({"reset": True})
        shelf = Shelf(store)
        shelf.look([0])
        assert shelf.first([UnitId(0, 100, 0), UnitId(0, 99, 0)]) == UnitId(0, 99, 0)
        taken.append(dict(server.faults.requests))
    assert taken[0] == taken[1]
    assert taken[0]["list"] == 1


@pytest.mark.slow
def test_a_silent_store_is_asked_again(gcs, bucket, monkeypatch):
    client = remote._client
    monkeypatch.setattr(
        remote,
        "from_url",
        lambda url, client_options, **rest: from_url(
            url, client_options=client_options | {"read_timeout": "1s"}, **rest
        ),
    )
    bucket._objects = client(bucket.url, max_retries=2, patience_s=5.0)
    gcs.faults(share=0.4, kinds=["hang"], hang_s=2, seed=5)
    for turn in range(4):
        assert bucket.create(f"a/{turn}", b"x")
        assert bucket.get(f"a/{turn}") == b"x"
    assert gcs.requests()["hang"]


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_is_waited_for_and_that_is_said_once(gcs, bucket, caplog, monkeypatch):
    monkeypatch.setattr(remote, "_SAY_AFTER_S", 1.0)
    bucket._objects = remote._client(bucket.url, max_retries=1, patience_s=1.0)
    bucket.create("a", b"x")
    gcs.faults(away_s=5)
    with caplog.at_level(logging.WARNING):
        assert bucket.get("a") == b"x"
    assert len(caplog.records) == 1
    assert "does not answer (" in caplog.text


def test_patience_ends(gcs, bucket, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    bucket._objects = remote._client(bucket.url, max_retries=1, patience_s=1.0)
    gcs.faults(away_s=60)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"does not answer since \d s .*run the same command again when it does"):
        bucket.get("a")
    assert time.monotonic() - began < 8


def test_what_the_user_can_mend_is_said_at_once(gcs):
    for url, said in (
        ("gs://m2po-missing/run", "gs://m2po-missing/run: there is no such bucket"),
        ("gs://forbidden-bucket/run", "gs://forbidden-bucket/run: no permission"),
    ):
        began = time.monotonic()
        with pytest.raises(UserError, match=said):
            Store.open(url)
        assert time.monotonic() - began < 2


def test_missing_credentials_are_said(bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="gs://m2po-tests/run.*credentials"):
        Store.open("gs://m2po-tests/run")


CREATE = """
import sys
from m2po_jax.rollouts.store import Store
store = Store.open(sys.argv[1])
for turn in sys.stdin:
    print(int(store.create(f"race/{int(turn)}", sys.argv[2].encode())), flush=True)
"""


@pytest.mark.parametrize("share", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_of_two_processes_that_create_one_unit_exactly_one_wins(gcs, bucket, start, share):
    """Both are told at once, in turns one of them first."""
    gcs.faults(share=share, kinds=["429", "503", "drop"])
    writers = [start(CREATE, bucket.url, name) for name in ("0", "1")]
    won = []
    for turn in range(100):
        for writer in writers[:: 1 if turn % 2 else -1]:
            writer.stdin.write(f"{turn}\n")
            writer.stdin.flush()
        wins = [int(writer.stdout.readline()) for writer in writers]
        assert sum(wins) == 1
        won.append(wins.index(1))
    gcs.faults(share=0.0)
    assert [int(bucket.get(f"race/{turn}")) for turn in range(100)] == won
    assert set(won) == {0, 1}, "each won some"


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
        "m2po: gs://m2po-missing/run: there is no such bucket: make it, or name another one"
    ]
