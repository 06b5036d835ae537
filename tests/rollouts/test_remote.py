"""A store behind a network that fails: nothing is lost or half read, what cannot be mended is said at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import Shelf, Store, UnitId, remote, shard_path, staging, weights
from m2po_jax.rollouts.store import bytes_digest
from tests.gcs import BUCKET, serving
from tests.gcs.faults import KINDS
from tests.gcs.server import Server

PARAMS = {"w": jnp.arange(20_000, dtype=jnp.float32).reshape(100, 200), "b": {"c": jnp.ones(7)}}


@pytest.fixture(scope="module")
def server():
    with serving("forbidden-bucket") as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def store(server, request) -> Store:
    server.faults(share=0.0, reset=True)
    yield Store.open(f"gs://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}")
    server.faults(share=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_fifth_request_loses_nothing(store, server, kind):
    server.faults(share=0.2, kinds=[kind], hang_s=0.05, seed=3)
    data = [np.random.default_rng(i).bytes(50_000) for i in range(24)]
    for i, content in enumerate(data):
        assert store.create(f"a/{i:02d}", content), "ours, though the answer may have been lost"
        assert not store.create(f"a/{i:02d}", content + b"other"), "the first one wins"
        assert store.get(f"a/{i:02d}") == content
        store.replace("pointer", str(i).encode())
    assert store.get("pointer") == b"23"
    assert store.list("a") == [f"a/{i:02d}" for i in range(24)] and store.children("") == ["a"]
    aside = store.move_aside("a/03", bytes_digest(data[3]))
    assert aside is not None and not store.exists("a/03") and store.get(aside) == data[3]
    assert store.create("a/03", b"again") and store.get("a/03") == b"again"
    store.delete_prefix("a")
    assert store.list("a") == []
    assert server.requests()[kind] > 10


def test_of_several_that_create_one_object_one_wins_every_time(store, server):
    server.faults(share=0.1, kinds=["drop", "503"], seed=4)
    with ThreadPoolExecutor(4) as threads:
        for i in range(25):
            contents = [f"{i} by {k}".encode() for k in range(4)]
            won = list(threads.map(lambda content, i=i: store.create(f"r/{i}", content), contents))
            assert sum(won) == 1
            assert store.get(f"r/{i}") == contents[won.index(True)]


def test_a_store_that_is_away_for_a_while_is_waited_for_and_said(store, server, monkeypatch, caplog):
    monkeypatch.setattr(remote, "_SAY_AFTER_S", 0.0)
    monkeypatch.setattr(remote, "_client", lambda url, **_: _impatient(url))
    away = Store.open(store.url)
    server.faults(away_s=3.0)
    began = time.monotonic()
    away.replace("x", b"1")
    assert time.monotonic() - began > 2.5 and away.get("x") == b"1"
    assert "does not answer" in caplog.text
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    server.faults(away_s=60.0)
    with pytest.raises(UserError, match="does not answer since .* run the same command again"):
        away.get("x")
    server.faults(away_s=0.0)


def _impatient(url):
    from obstore.store import from_url

    return from_url(url, client_options={"allow_http": True}, retry_config={"max_retries": 0})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://no-such-bucket/run", "no-such-bucket/run: there is no such bucket"),
        ("gs://forbidden-bucket/run", "forbidden-bucket/run: no permission"),
        ("ftp://somewhere", "ftp://somewhere is no store"),
    ],
)
def test_what_cannot_be_mended_by_waiting_is_said_at_once(server, url, said):
    began = time.monotonic()
    with pytest.raises(UserError, match=said):
        Store.open(url)
    assert time.monotonic() - began < 5


def test_weights_are_there_when_they_are_whole_and_not_before(store, server):
    assert weights.publish(store, 4, PARAMS).created
    for path in ("manifest.ocdbt", "_METADATA"):
        store.replace(f"weights/00000008/{path}", store.get(f"weights/00000004/{path}"))  # a publisher that died
    assert weights.versions(store) == [4] and weights.find_digest(store, 8) is None
    with pytest.raises(UserError, match="no weights of version 8 .* the versions there are 4"):
        weights.load(store, 8, jax.eval_shape(lambda: PARAMS))
    server.faults(share=0.2, hang_s=0.05, seed=5)
    assert weights.publish(store, 8, PARAMS).created
    loaded, _ = weights.load(store, 8, jax.eval_shape(lambda: PARAMS))
    jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)
    assert weights.latest(store)[0] == 8 and not weights.publish(store, 8, PARAMS).created
    weights.retire(store, 4)
    assert weights.versions(store) == [8] and store.list("weights/00000004") == []


def test_a_flipped_bit_in_weights_is_found(store):
    weights.publish(store, 0, PARAMS)
    path = max(store.list("weights/00000000"), key=lambda path: len(store.get(path)))
    data = bytearray(store.get(path))
    data[len(data) // 2] ^= 1
    store.replace(path, bytes(data))
    with pytest.raises(UserError, match="version 0 .* is not what was uploaded"):
        weights.load(store, 0, jax.eval_shape(lambda: PARAMS))


def test_a_directory_is_whole_or_not_there(store, tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a").write_bytes(b"1")
    (tmp_path / "in" / "b").write_bytes(b"")
    staging.upload(store, tmp_path / "in", "d/one", {"version": 3})
    store.replace("d/two/a", b"1")
    assert staging.children(store, "d") == ["one"] and staging.committed(store, "d/two") is None
    assert staging.download(store, "d/one", tmp_path / "out")["version"] == 3
    assert (tmp_path / "out" / "deep" / "a").read_bytes() == b"1"
    with pytest.raises(FileNotFoundError):
        staging.download(store, "d/two", tmp_path / "none")
    staging.delete(store, "d/one")
    assert staging.children(store, "d") == []


@pytest.mark.parametrize("others", [100, 100_000])
def test_the_units_of_a_version_are_found_by_one_request_however_many_others_there_are(others, monkeypatch, tmp_path):
    server = Server(0, [BUCKET])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        account = tmp_path / "account.json"
        empty = '"private_key": "", "private_key_id": "", "client_email": ""'
        account.write_text(f'{{"gcs_base_url": "{server.url}", "disable_oauth": true, {empty}}}')
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        bucket = server.buckets[BUCKET]
        for i in range(others):
            bucket.put(f"run/{shard_path(UnitId(4 * (i // 2), 0, i % 2))}", b"x")
        wanted = [UnitId(4 * others, 3, unit) for unit in (0, 1)]
        for unit in wanted:
            bucket.put(f"run/{shard_path(unit)}", b"x")
        shelf = Shelf(Store.open(f"gs://{BUCKET}/run"))
        server.faults.requests.clear()
        shelf.look([4 * others])
        assert [shelf.first([unit]) for unit in wanted] == wanted
        assert server.faults.requests["list"] == sum(server.faults.requests[kind] for kind in ("list", "get", "head"))
        assert server.faults.requests["list"] == 1
    finally:
        server.shutdown()
        server.server_close()
