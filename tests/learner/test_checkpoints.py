import shutil

import jax
import numpy as np
import optax
import pytest

from m2po_jax.config import UserError
from m2po_jax.learner.checkpoints import Checkpoints, Cursor
from m2po_jax.learner.state import TrainState, init_state
from m2po_jax.rollouts import Store, staging

ADAM = optax.adam(1e-3)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "run", create=True)


@pytest.fixture
def checkpoints(store):
    opened = Checkpoints(store, keep=2)
    yield opened
    opened.close()


def state_at(version: int, width: int = 3) -> TrainState:
    rng = np.random.default_rng(version)
    state = init_state({"w": rng.normal(size=(2, width)).astype(np.float32)}, ADAM)
    return state._replace(version=state.version + version)


def cursor_at(version: int) -> Cursor:
    return Cursor(version, max(version - 4, 0), 0)


def equal(found: TrainState, expected: TrainState) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_restored_is_what_was_saved(checkpoints):
    assert checkpoints.latest() is None
    checkpoints.save(state_at(4), cursor_at(4))
    checkpoints.wait()
    assert checkpoints.latest() == 4
    found, cursor = checkpoints.restore(4, state_at(0))
    equal(found, state_at(4))
    assert cursor == cursor_at(4)


def test_the_state_may_be_donated_once_save_returns(checkpoints):
    state = state_at(4)
    checkpoints.save(state, cursor_at(4))
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    checkpoints.wait()
    equal(checkpoints.restore(4, state_at(0))[0], state_at(4))


def test_the_newest_are_kept_and_a_whole_one_is_not_written_again(store, checkpoints):
    for version in (4, 8, 12):
        checkpoints.save(state_at(version), cursor_at(version))
    checkpoints.save(state_at(99), cursor_at(12))
    checkpoints.wait()
    assert sorted(path.name for path in (store.local_path / "checkpoints").iterdir()) == ["00000008", "00000012"]
    equal(checkpoints.restore(12, state_at(0))[0], state_at(12))


def test_an_unfinished_one_does_not_count(store, checkpoints):
    checkpoints.save(state_at(4), cursor_at(4))
    checkpoints.wait()
    root = store.local_path / "checkpoints"
    shutil.copytree(root / "00000004", root / "00000008.orbax-checkpoint-tmp")
    resumed = Checkpoints(store, keep=2)
    assert resumed.latest() == 4
    resumed.save(state_at(8), cursor_at(8))
    resumed.wait()
    equal(resumed.restore(8, state_at(0))[0], state_at(8))
    resumed.close()


def test_a_damaged_one_is_named_with_the_way_out(store, checkpoints):
    checkpoints.save(state_at(4), cursor_at(4))
    checkpoints.wait()
    for path in (store.local_path / "checkpoints" / "00000004" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UserError, match=r"(?s)checkpoint 4 in .*/checkpoints cannot be restored.*delete its directory"):
        checkpoints.restore(4, state_at(0))


def test_one_of_another_model_is_refused(checkpoints):
    checkpoints.save(state_at(4, width=5), cursor_at(4))
    checkpoints.wait()
    with pytest.raises(UserError, match="checkpoint 4 in .* cannot be restored"):
        checkpoints.restore(4, state_at(0))


def test_some_are_kept_beside_the_newest(store):
    checkpoints = Checkpoints(store, keep=1, keep_every=8)
    for version in range(4, 24, 4):
        checkpoints.save(state_at(version), cursor_at(version))
        checkpoints.wait()
    checkpoints.close()
    kept = sorted(path.name for path in (store.local_path / "checkpoints").iterdir())
    assert kept == ["00000008", "00000016", "00000020"]


def test_a_checkpoint_of_another_model_is_refused_in_a_line(checkpoints):
    checkpoints.save(state_at(4), cursor_at(4))
    checkpoints.wait()
    with pytest.raises(UserError, match=r"checkpoint 4 in .* cannot be restored \(.*shape.*\)") as refused:
        checkpoints.restore(4, state_at(0, width=5))
    assert len(str(refused.value).splitlines()) == 1


@pytest.fixture
def bucket(gcs, request) -> Store:
    return Store.open(f"gs://{gcs.bucket}/{request.node.name}")


@pytest.mark.slow
def test_checkpoints_in_a_bucket_that_fails(gcs, bucket):
    """Saved, kept and restored as on a disk, by a process that has none of them on its own."""
    gcs.faults(share=0.2, kinds=["429", "503", "drop", "truncate"], seed=1)
    saved = Checkpoints(bucket, keep=1, keep_every=8)
    for version in (4, 8, 12, 16, 20):
        saved.save(state_at(version), cursor_at(version))
    saved.save(state_at(99), cursor_at(20))
    saved.close()
    resumed = Checkpoints(bucket, keep=1, keep_every=8)
    assert resumed.latest() == 20
    assert bucket.children("checkpoints") == ["00000008", "00000016", "00000020"]
    for version in (8, 20):
        found, cursor = resumed.restore(version, state_at(0))
        equal(found, state_at(version))
        assert cursor == cursor_at(version)
    resumed.save(state_at(24), cursor_at(24))
    resumed.wait()
    assert resumed.latest() == 24
    resumed.close()


def test_an_unfinished_one_in_a_bucket_does_not_count(bucket):
    first = Checkpoints(bucket, keep=2)
    first.save(state_at(4), cursor_at(4))
    first.wait()
    for path in bucket.list("checkpoints/00000004"):
        if not path.endswith(staging.COMMITTED):
            bucket.replace(path.replace("00000004", "00000008"), b"half")
    assert first.latest() == 4
    with pytest.raises(UserError, match=r"checkpoint 8 in gs://.*/checkpoints cannot be restored"):
        first.restore(8, state_at(0))
    first.save(state_at(8), cursor_at(8))
    first.wait()
    equal(first.restore(8, state_at(0))[0], state_at(8))
    first.close()
