import hashlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from obstore.store import MemoryStore

from m2po_jax.config import UserError
from m2po_jax.rollouts import Store, bytes_digest

BAD, GOOD = b"bad", b"good"


@pytest.fixture(params=["local", "memory"])
def any_store(request, store) -> Store:
    """The local store, and obstore's in-memory one, which has the conditional writes of an object store."""
    return store if request.param == "local" else Store("memory://", MemoryStore(), None)


def test_objects_are_created_once(any_store):
    assert not any_store.exists("a/b")
    assert any_store.create("a/b", b"first")
    assert any_store.create("a/b", b"first"), "a refusal after a retried create is success when the object is ours"
    assert not any_store.create("a/b", b"second")
    assert any_store.get("a/b") == b"first"
    assert any_store.exists("a/b")


def test_replace_overwrites_and_delete_forgives(any_store):
    any_store.replace("pointer", b"1")
    any_store.replace("pointer", b"2")
    assert any_store.get("pointer") == b"2"
    any_store.delete("pointer")
    any_store.delete("pointer")
    with pytest.raises(FileNotFoundError):
        any_store.get("pointer")


def test_listing_is_sorted_and_below_whole_directories(any_store):
    for path in ("b/2", "b/10", "a/1", "bb/1", "b/deep/3"):
        any_store.create(path, b"x")
    assert any_store.list() == ["a/1", "b/10", "b/2", "b/deep/3", "bb/1"]
    assert any_store.list("b") == ["b/10", "b/2", "b/deep/3"]
    assert any_store.list("none") == []
    assert any_store.children("") == ["a", "b", "bb"]
    assert any_store.children("b") == ["deep"]
    any_store.delete_prefix("b")
    any_store.delete_prefix("b")
    assert any_store.list() == ["a/1", "bb/1"]


def test_unfinished_writes_are_not_listed(store):
    store.create("a/whole", b"x")
    (store.local_path / "a" / "half#1").write_bytes(b"x")
    assert store.list() == ["a/whole"]


def test_opening_what_is_not_there_names_it(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a directory"):
        Store.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot make the directory .*file"):
        Store.open(tmp_path / "file", create=True)
    with pytest.raises(UserError, match="nonsense://x is no store"):
        Store.open("nonsense://x")
    assert Store.open(f"file://{tmp_path}").local_path == tmp_path


def test_moving_aside_frees_the_name_and_keeps_the_bytes(any_store):
    any_store.create("a/b", BAD)
    aside = any_store.move_aside("a/b", bytes_digest(BAD))
    assert re.fullmatch(r"a/b\.bad-[0-9a-f]{8}", aside)
    assert any_store.get(aside) == BAD
    assert not any_store.exists("a/b")
    with pytest.raises(FileNotFoundError):
        any_store.get("a/b")
    assert any_store.list() == [aside]
    assert any_store.create("a/b", GOOD)
    assert any_store.create("a/b", GOOD)
    assert not any_store.create("a/b", BAD)
    assert any_store.get("a/b") == GOOD


def test_only_the_object_that_was_read_is_moved(any_store):
    assert any_store.move_aside("a/b", bytes_digest(BAD)) is None
    any_store.create("a/b", GOOD)
    assert any_store.move_aside("a/b", bytes_digest(BAD)) is None
    assert any_store.list() == ["a/b"]


@pytest.mark.parametrize("meanwhile", [GOOD, None])
def test_a_good_object_made_in_the_middle_of_a_move_is_not_lost(any_store, meanwhile):
    class Interrupted(Store):
        """Lets another reader move the bad object, and a producer make a good one, right after it was read."""

        def _digest_of(self, path):
            found = super()._digest_of(path)
            if found == bytes_digest(BAD) and not self.list("a")[0].endswith("other"):
                self.create("a/a.other", BAD)
                self.delete(path)
                if meanwhile is not None:
                    assert self.create(path, meanwhile)
            return found

    slow = Interrupted(any_store.url, any_store._objects, any_store.local_path)
    slow.create("a/b", BAD)
    assert slow.move_aside("a/b", bytes_digest(BAD)) is None
    assert any_store.list() == (["a/a.other", "a/b"] if meanwhile else ["a/a.other"])
    if meanwhile:
        assert any_store.get("a/b") == GOOD


def test_readers_that_race_to_move_and_producers_that_race_to_create(any_store):
    """Three readers and two producers at once, many times: one mover, one bad file, the good object in place."""
    barrier = threading.Barrier(5)

    def read(path):
        barrier.wait()
        return any_store.move_aside(path, bytes_digest(BAD))

    def produce(path):
        barrier.wait()
        while not any_store.create(path, GOOD):
            pass

    with ThreadPoolExecutor(5) as pool:
        for turn in range(40):
            path = f"{turn}/object"
            any_store.create(path, BAD)
            readers = [pool.submit(read, path) for _ in range(3)]
            producers = [pool.submit(produce, path) for _ in range(2)]
            moved = [aside for reader in readers if (aside := reader.result()) is not None]
            assert [producer.result() for producer in producers] == [None, None]
            assert len(moved) == 1
            assert any_store.get(moved[0]) == BAD
            assert any_store.list(str(turn)) == sorted([path, moved[0]])
            assert any_store.get(path) == GOOD


CREATE = """
import sys
from m2po_jax.rollouts.store import Store
store = Store.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print("".join("01"[store.create(f"race/{turn}", sys.argv[2].encode())] for turn in range(100)))
"""


def test_of_two_processes_that_create_one_path_exactly_one_wins(store, start):
    writers = {name: start(CREATE, store.local_path, name) for name in ("one", "two")}
    for writer in writers.values():
        assert writer.stdout.readline() == "ready\n"
    for writer in writers.values():
        writer.stdin.write("go\n")
        writer.stdin.flush()
    wins = {name: writer.communicate(timeout=30)[0].strip() for name, writer in writers.items()}
    for turn in range(100):
        won = [name for name in wins if wins[name][turn] == "1"]
        assert [store.get(f"race/{turn}").decode()] == won


KILLED = """
import hashlib, os, random, signal, sys, time
from m2po_jax.rollouts.store import Store

def write(turn):
    store, payload = Store.open(sys.argv[1]), os.urandom(2_000_000)
    body = hashlib.sha256(payload).digest() + payload
    for i in range(10_000):
        store.create(f"kill/{turn}-{i % 8}", body)
        store.delete(f"kill/{turn}-{i % 8}") if i >= 8 else None
        store.replace("kill/pointer", body)

def fell_into_a_write():
    return any("#" in name for _, _, names in os.walk(sys.argv[1]) for name in names)

for turn in range(400):  # 25 where there is a core to spare; a busy machine may not write before it is killed
    if turn >= 25 and fell_into_a_write():
        break
    child = os.fork()
    if child == 0:
        write(turn)
    time.sleep(random.uniform(0.02, 0.08) * (1 + turn // 25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_writer_killed_at_any_moment_leaves_no_half_object(store, start):
    assert start(KILLED, store.local_path).wait(timeout=240) == 0
    found = store.list("kill")
    assert found
    for path in found:
        body = store.get(path)
        assert hashlib.sha256(body[32:]).digest() == body[:32]
    on_disk = os.listdir(store.local_path / "kill")
    unfinished = {name.split("#")[0] for name in on_disk if "#" in name}
    assert unfinished, "no kill fell into a write: the test shows nothing"
    for name in unfinished:
        assert "pointer" in name or store.create(f"kill/{name}", b"new") or store.exists(f"kill/{name}")


def test_a_full_disk_is_named_and_leaves_nothing_half_written(small_disk):
    small_disk.create("kept", b"x" * 1000)
    for write in (small_disk.create, small_disk.replace):
        with pytest.raises(UserError, match="no space left to write .*/dir/large: free some space"):
            write("dir/large", os.urandom(500_000))
        assert small_disk.list() == ["kept"]
        assert [p.name for p in small_disk.local_path.rglob("*") if p.is_file()] == ["kept"]
    with pytest.raises(UserError, match="no space left"):
        small_disk.replace("kept", os.urandom(500_000))
    assert small_disk.get("kept") == b"x" * 1000
    assert small_disk.create("dir/small", b"y" * 1000)


LIMITED = """
import os, resource, signal, sys
from m2po_jax.config import UserError
from m2po_jax.rollouts.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
store = Store.open(sys.argv[1])
for write in (store.create, store.replace):
    try:
        write("large", os.urandom(50_000))
    except UserError as error:
        print(error)
"""


def test_a_file_size_limit_reads_the_same(store, start):
    output, _ = start(LIMITED, store.local_path).communicate(timeout=30)
    assert output.count(f"no space left to write {store.local_path}/large") == 2
    assert list(store.local_path.iterdir()) == []
