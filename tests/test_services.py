"""A learner and generators as processes of their own, which die at every step: all end with the bits of lockstep."""

import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from m2po_jax import catalog, services
from m2po_jax.analysis.inspect import inspect
from m2po_jax.config import MeshConfig, StalenessConfig, UserError, to_json
from m2po_jax.rollouts import (
    Store,
    UnitId,
    parse_shard_path,
    read_batch_record,
    read_generator_lines,
    read_shard,
    shard_path,
)
from tests import tiny
from tests.dying_run import CONFIG
from tests.gcs import serving
from tests.gcs.faults import KINDS
from tests.test_resume import KILLED, same_end

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

TOTAL, U = CONFIG.learner.total_updates, CONFIG.learner.updates_per_batch

DEATHS = [
    ("learn", "before the first weights", 1),
    ("generate", "while weights are loaded", 1),
    ("learn", "before the position is written", 1),
    ("learn", "after the position is written", 1),
    ("learn", "while waiting for units", 1),
    ("generate", "while decoding", 1),
    ("generate", "while a shard is written", 1),
    ("generate", "between the shards of a batch", 1),
    ("learn", "while a shard is read", 2),
    ("learn", "after a batch record", 1),
    ("generate", "before a shard is written", 3),
    ("learn", "between the updates of a batch", 3),
    ("learn", "while weights are written", 2),
    ("generate", "while weights are loaded", 2),
    ("learn", "between metrics and checkpoint", 1),
    ("learn", "while a checkpoint is written", 1),
    ("learn", "between weights and LATEST", 2),
    ("learn", "before weights are retired", 1),
    ("learn", "while weights are retired", 1),
    ("generate", "while generators' lines are written", 1),
]
"""Whose death, at which point, and how often the point is passed before; one run has them all, one after the other."""


@pytest.fixture(scope="module")
def env(user_env: dict[str, str]) -> dict[str, str]:
    return tiny.subprocess_env(user_env)


@pytest.fixture(scope="module")
def base(standard_promotion) -> Path:
    return tiny.base_run()


@pytest.fixture(scope="module")
def reference(env, base, tmp_path_factory) -> Path:
    """The same run in lockstep, uninterrupted."""
    run = tmp_path_factory.mktemp("reference") / "run"
    finished = tiny.run(env, "-m", "tests.dying_run", "train", run, base)
    assert finished.returncode == 0, finished.stderr
    return run


def start(env, role, run, base, *death):
    return tiny.start(env, "-m", "tests.dying_run", role, run, base, *death)


def ended(process, timeout_s=240.0) -> int:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode in (0, KILLED), (process.returncode, out, err)
    return process.returncode


def stop(*processes) -> None:
    for process in processes:
        process.kill()
        print(process.pid, process.returncode, *process.communicate())  # pytest shows it where a test fails


@pytest.mark.parametrize("k", [0, 4])
def test_separate_programs_end_with_the_bits_of_lockstep(env, base, k, tmp_path):
    """REGRESSIONS 15, and at staleness 4 too."""
    config = replace(catalog.resolved(tiny.TINY), staleness=StalenessConfig(k=k))
    tiny.train(config, tmp_path / "lockstep", base)
    run = tmp_path / "apart"
    generators = [tiny.start(env, "-m", "m2po_jax", "generate", run, "--mesh.data", 1) for _ in range(2)]
    try:
        watcher = tiny.Watcher()
        services.learn(config, str(run), watcher, str(base))
        said = [process.communicate(timeout=120) for process in generators]
    finally:
        stop(*generators)
    assert [process.returncode for process in generators] == [0, 0], said
    assert all("finished" in out and "made" in out for out, _ in said)
    assert tiny.weights_digest(run, 16) == tiny.weights_digest(tmp_path / "lockstep", 16)
    assert tiny.lines(run) == tiny.lines(tmp_path / "lockstep")
    lines = read_generator_lines(Store.open(run))
    made = {parse_shard_path(path) for path in Store.open(run).list("rollouts")}
    assert {UnitId(line["version"], line["batch"], line["unit"]) for line in lines} == made
    assert len({line["producer"] for line in lines}) == 2, "both had work to do"


@pytest.mark.extra
def test_programs_that_are_killed_at_every_step_end_with_the_bits_of_lockstep(env, base, reference, tmp_path):
    """REGRESSIONS 20 and 21."""
    run = tmp_path / "run"
    for role, point, nth in DEATHS:
        other = start(env, {"learn": "generate", "generate": "learn"}[role], run, base)
        dying = start(env, role, run, base, point, nth)
        try:
            assert ended(dying) == KILLED, (role, point)
        finally:
            stop(other)
    last = [start(env, "generate", run, base), start(env, "learn", run, base)]
    assert [ended(process) for process in last] == [0, 0]
    same_end(run, reference)


def test_programs_that_are_killed_at_random_moments_end_with_the_bits_of_lockstep(env, base, reference, tmp_path):
    run, moments = tmp_path / "run", random.Random(20256)
    running = {}
    for role in ("learn", "generate", "generate", "learn", "generate", "learn"):
        for each in ("learn", "generate", "second"):
            if each not in running or running[each].poll() is not None:
                running[each] = start(env, each.replace("second", "generate"), run, base)
        begun = progress(run)
        deadline = time.monotonic() + 120
        while progress(run) == begun and any(process.poll() is None for process in running.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.5))
        stop(running[role])
    stop(*running.values())
    last = [start(env, "generate", run, base), start(env, "learn", run, base)]
    assert [ended(process) for process in last] == [0, 0]
    same_end(run, reference)


@pytest.mark.extra
def test_through_a_bucket_that_fails_at_every_fifth_request_it_is_the_same(env, base, reference, tmp_path):
    """429, 503, time-outs, lost connections, truncated answers; processes that are killed; a clock an hour ahead."""
    with serving() as server:
        server.faults(share=0.2, hang_s=0.3, seed=1)
        run, moments = f"gs://{server.bucket}/run", random.Random(7)
        ahead = {**env, **server.environment, "M2PO_TEST_CLOCK_AHEAD_S": "3600"}
        there = {"learn": {**env, **server.environment}, "generate": ahead, "second": {**env, **server.environment}}

        def begin(role):
            return start(there[role], role.replace("second", "generate"), run, base)

        running = {role: begin(role) for role in there}
        for victim in ("generate", "learn", "second", "learn"):
            time.sleep(moments.uniform(6.0, 12.0))
            if running["learn"].poll() is None:
                stop(running[victim])
                running[victim] = begin(victim)
        server.faults(away_s=5.0)
        assert [ended(process, 400) for process in running.values()] == [0, 0, 0]
        found = server.requests()
        assert all(found[kind] > 5 for kind in KINDS), found
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            server.faults(share=0.0)
            same_end(run, reference)


def progress(run: Path) -> int:
    return len(list(run.glob("batches/*.json"))) + len(list(run.glob("rollouts/*/*.parquet")))


@pytest.mark.parametrize(
    "staleness",
    [StalenessConfig(policy="at_most", k=5), StalenessConfig(policy="uniform", low=2, high=6)],
    ids=["at_most", "uniform"],
)
def test_other_policies_keep_their_bounds_when_the_learner_is_killed(env, base, staleness, tmp_path):
    run = tmp_path / "run"
    config = replace(catalog.resolved(CONFIG), staleness=staleness)
    (tmp_path / "config.json").write_text(to_json(config, "run"))
    arguments = ["-m", "m2po_jax", "learn", tmp_path / "config.json", "--run", run, "--base", base]
    learner, moments = tiny.start(env, *arguments), random.Random(5)
    generators = [tiny.start(env, "-m", "m2po_jax", "generate", run, "--mesh.data", 1) for _ in range(2)]
    for _ in range(2):
        begun = progress(run)
        while progress(run) < begun + 4 and learner.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.5))
        stop(learner)
        learner = tiny.start(env, *arguments)
    assert [ended(process) for process in (learner, *generators)] == [0, 0, 0]
    store = Store.open(run)
    records = [read_batch_record(store, version) for version in range(0, TOTAL, U)]
    ages = [age for record in records for age in record.ages]
    if staleness.policy == "at_most":
        assert max(ages) + U - 1 <= staleness.k
    else:
        assert max(ages) <= staleness.high
        assert all(age >= staleness.low for r in records if r.version >= staleness.high for age in r.ages)
    groups = [np.unique(read_shard(store, unit).rollouts.group_ids) for record in records for unit in record.units]
    assert len(np.unique(np.concatenate(groups))) == 4 * len(records), "each group is trained on once"
    assert inspect(run).well


def test_a_bad_shard_is_made_again_by_a_generator_while_the_learner_waits(env, base, tmp_path):
    run = tmp_path / "run"
    tiny.train(tiny.with_learner(tiny.TINY, total_updates=8), tmp_path / "made", base)
    unit = parse_shard_path(Store.open(tmp_path / "made").list("rollouts")[0])
    first = start(env, "generate", run, base)
    learner = start(env, "learn", run, base, "after the position is written", 1)
    assert ended(learner) == KILLED
    file = run / shard_path(unit)
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    file.write_bytes(file.read_bytes()[:-9])
    learner = start(env, "learn", run, base)
    assert [ended(learner), ended(first)] == [0, 0]
    assert len(list(run.glob("rollouts/*/*.bad-*"))) == 1
    assert inspect(run).well


@pytest.mark.extra
def test_a_generator_on_a_full_disk_ends_with_a_line_and_nothing_is_lost(env, base, reference, small_disk):
    """The learner's own full disk is in test_resume.py."""
    root, resize = small_disk
    run = root / "run"
    assert resize(8192)
    learner = start(env, "learn", run, base)
    while not (run / "weights" / "LATEST").exists() and learner.poll() is None:
        time.sleep(0.05)
    stop(learner)
    assert resize(shutil.disk_usage(root).used // 1024 + 4)
    out, said = start(env, "generate", run, base).communicate(timeout=240)
    assert said.splitlines()[-1].startswith("m2po: no space left to write ") and "Traceback" not in said, (out, said)
    assert resize(8192)
    programs = [start(env, role, run, base) for role in ("learn", "generate")]
    assert [ended(program) for program in programs] == [0, 0]
    same_end(run, reference)


def test_offline_reads_what_there_is_and_names_what_is_not(base, tmp_path, reference):
    config = catalog.resolved(CONFIG)
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"rollouts/00000000/000000-0000.parquet is not there, and --offline"):
        services.learn(config, str(run), tiny.Watcher(), str(base), offline=True)
    frozen = replace(config, staleness=StalenessConfig(policy="frozen", run=str(reference)))
    watcher = tiny.Watcher()
    outcome = services.learn(frozen, str(tmp_path / "offline"), watcher, str(base), offline=True)
    assert outcome.finished
    store = Store.open(tmp_path / "offline")
    records = [read_batch_record(store, version) for version in range(0, TOTAL, U)]
    assert [record.units for record in records] == [
        read_batch_record(Store.open(reference), version).units for version in range(0, TOTAL, U)
    ]
    assert store.list("rollouts") == [] and {record.run for record in records} == {str(reference)}


def test_there_is_nothing_to_generate_for_a_run_that_reads_others(base, tmp_path, reference):
    frozen = StalenessConfig(policy="frozen", run=str(reference))
    tiny.train(replace(tiny.TINY, staleness=frozen), tmp_path / "run", base, tiny.Watcher(stop_at=0))
    with pytest.raises(UserError, match="there is nothing to generate"):
        services.generate(str(tmp_path / "run"), tiny.Watcher(), MeshConfig(data=1))


def test_a_learner_that_waits_can_be_stopped(base, tmp_path):
    class Stopping(tiny.Watcher):
        def stopping(self) -> bool:
            return any("waiting for 2 units of version 0" in doing for doing in self.doings)

    outcome = services.learn(catalog.resolved(CONFIG), str(tmp_path / "run"), Stopping(), str(base))
    assert not outcome.finished and outcome.version == 0
