"""Runs that die: by SIGKILL at named points and at random moments, and of a full disk. All end with the same bits."""

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from m2po_jax.analysis.inspect import inspect
from m2po_jax.rollouts import Store, parse_shard_path, read_batch_record, read_shard, weights
from tests import tiny
from tests.dying_run import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

TOTAL, KILLED = CONFIG.learner.total_updates, -9

DEATHS = [
    ("before the first weights", 1),
    ("between the shards of a batch", 1),
    ("after a batch record", 1),
    ("between the updates of a batch", 3),
    ("while weights are written", 2),
    ("between metrics and checkpoint", 1),
    ("while a checkpoint is written", 1),
    ("between weights and LATEST", 3),
    ("before weights are retired", 1),
    ("while weights are retired", 1),
]
"""Point and how often it is passed before. One run dies of all of them, one after the other."""


@pytest.fixture(scope="module")
def env(user_env: dict[str, str]) -> dict[str, str]:
    return tiny.subprocess_env(user_env)


@pytest.fixture(scope="module")
def base(standard_promotion) -> Path:
    return tiny.base_run()


@pytest.fixture(scope="module")
def reference(env, base, tmp_path_factory) -> Path:
    """The same run, uninterrupted."""
    run = tmp_path_factory.mktemp("reference") / "run"
    finished = tiny.run(env, "-m", "tests.dying_run", "train", run, base)
    assert finished.returncode == 0, finished.stderr
    return run


def same_end(run: Path | str, reference: Path) -> None:
    """Final parameters to the bit, every metric, each group trained on once, nothing left over, nothing made twice."""
    assert tiny.weights_digest(run, TOTAL) == tiny.weights_digest(reference, TOTAL)
    assert tiny.lines(run) == tiny.lines(reference)
    store = Store.open(run)
    records = [read_batch_record(store, version) for version in range(0, TOTAL, 2)]
    shards = [read_shard(store, parse_shard_path(path)) for record in records for path, _ in record.shards]
    groups = np.concatenate([np.unique(shard.rollouts.group_ids) for shard in shards])
    assert len(groups) == len(set(groups.tolist())) == 4 * TOTAL // 2
    assert not any("superseded" in json.loads(store.get(path)) for path in store.list("batches"))
    assert weights.versions(store) == weights.versions(Store.open(reference))
    assert weights.latest(store)[0] == TOTAL
    found = inspect(run)
    assert found.well and not found.set_aside and not found.missing


def test_a_run_that_is_killed_at_every_step_ends_with_the_same_bits(env, base, reference, tmp_path):
    run = tmp_path / "run"
    newest = []
    for point, nth in DEATHS:
        died = tiny.run(env, "-m", "tests.dying_run", "train", run, base, point, nth)
        assert died.returncode == KILLED, (point, died.stdout, died.stderr)
        newest.append(max((int(path.stem) for path in run.glob("batches/*.json")), default=-1))
    assert newest == sorted(newest) and len(set(newest)) >= 4, "the deaths are spread over the run"
    ended = tiny.run(env, "-m", "tests.dying_run", "train", run, base)
    assert ended.returncode == 0, ended.stderr
    assert "resumed from checkpoint" in ended.stdout and "bad shard" not in ended.stdout
    same_end(run, reference)


def test_a_command_that_is_killed_at_random_moments_ends_with_the_same_bits(env, base, reference, tmp_path):
    run, moments = tmp_path / "run", random.Random(20251)
    arguments = ["train", reference / "config.json", "--run", run, "--base", base]
    for _ in range(2):
        delay_s = moments.uniform(0.0, 0.7)
        killed = kill_soon(run, delay_s, env, arguments)
        assert killed in (KILLED, 0), f"exit code {killed} after {delay_s:.2f} s"
    resumed = tiny.run(env, "-m", "m2po_jax", "train", run)
    assert resumed.returncode == 0, resumed.stderr
    same_end(run, reference)


def kill_soon(run: Path, delay_s: float, env: dict[str, str], arguments: list) -> int:
    """Run the command, and kill it that long after it has begun a batch that it had not begun before; its exit code."""
    begun = len(list(run.glob("batches/*.json")))
    process = tiny.start(env, "-m", "m2po_jax", *arguments)
    try:
        deadline = time.monotonic() + 240
        while len(list(run.glob("batches/*.json"))) == begun and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay_s)
    finally:
        process.kill()
        process.communicate()
    return process.returncode


def test_a_run_on_a_full_disk_says_so_and_resumes_with_more_room(env, base, reference, small_disk):
    root, resize = small_disk
    run, full = root / "run", 0
    for size_kib in (200, 360, 520, 4096):
        assert resize(size_kib)
        ended = tiny.run(env, "-m", "tests.dying_run", "train", run, base)
        if ended.returncode == 0:
            break
        full += 1
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith("m2po: no space left to write ") and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.returncode == 0 and full >= 2
    same_end(run, reference)
