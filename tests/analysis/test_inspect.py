"""`inspect` finds what is there and what is wrong with it."""

import io
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from m2po_jax import rollouts
from m2po_jax.analysis.inspect import VersionSummary, inspect, render, verdict
from m2po_jax.config import UserError
from m2po_jax.rollouts import weights
from tests.analysis import synthetic
from tests.analysis.synthetic import make_run

SHARD = "rollouts/00000004/000000-0001.parquet"


def text_of(renderable, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def store(tmp_path: Path) -> rollouts.Store:
    return make_run(tmp_path / "run", "m2po-s256")


def test_a_sound_run(store: rollouts.Store):
    report = inspect(store.local_path)
    assert report.well and report.faults == () and report.set_aside == () and report.missing == ()
    assert [version.version for version in report.versions] == [0, 4, 8]
    first, written = report.versions[0], [synthetic.make_rollouts(3, 4, seed=0)] * 2
    assert (first.batches, first.units, first.rows) == (1, 2, 24)
    assert first.reward_mean == pytest.approx(sum(data.rewards.sum() for data in written) / 24)
    assert dict(first.finish_reasons) == {
        reason: sum(data.finish_reasons.count(reason) for data in written) for reason in ("stop", "length")
    }
    shards = [store.get(path) for path in store.list("rollouts/00000000")]
    assert first.size_bytes == sum(map(len, shards))
    assert "All 6 shards verified: 72 rollouts." in text_of(render(report))


def test_it_writes_nothing(store: rollouts.Store):
    before = {path: store.get(path) for path in store.list("")}
    store.replace(SHARD, b"broken")
    inspect(store.local_path)
    assert {path: store.get(path) for path in store.list("")} == before | {SHARD: b"broken"}


@pytest.mark.parametrize("place", [0.1, 0.2, 0.9])
def test_a_flipped_byte_is_found_by_name(store: rollouts.Store, place: float):
    """In values and in what says where they are; one in statistics, which nobody reads, changes nothing."""
    content = bytearray(store.get(SHARD))
    content[int(place * len(content))] ^= 0xFF
    store.replace(SHARD, bytes(content))
    report = inspect(store.local_path)
    assert not report.well
    assert [path for path, _ in report.faults] == [SHARD]
    assert [version.faults for version in report.versions] == [0, 1, 0]
    shown = text_of(render(report))
    assert "1 of 6 shards failed verification." in shown and SHARD in shown


def test_a_shard_of_another_run(store: rollouts.Store):
    synthetic.write_shard(store, "f" * 32, rollouts.UnitId(12, 0, 0), synthetic.make_rollouts(3, 4))
    ((path, reason),) = inspect(store.local_path).faults
    assert path == "rollouts/00000012/000000-0000.parquet"
    assert "belongs to run ffff" in reason


def test_a_shard_by_other_weights_than_its_version_s(store: rollouts.Store, tmp_path: Path):
    published = weights.publish(store, 12, {"w": jnp.ones(3)})
    run_id = rollouts.open_run(store.local_path)[1].run_id
    synthetic.write_shard(store, run_id, rollouts.UnitId(12, 0, 0), synthetic.make_rollouts(3, 4), published.digest)
    assert inspect(store.local_path).well
    synthetic.write_shard(store, run_id, rollouts.UnitId(12, 0, 1), synthetic.make_rollouts(3, 4), "impostor")
    report = inspect(store.local_path)
    assert report.faults == (
        (
            "rollouts/00000012/000000-0001.parquet",
            f"written by weights impostor, but version 12 is {published.digest[:12]}",
        ),
    )
    assert report.weights_versions == (12,)
    assert report.latest_weights == (12, published.digest)
    assert f"latest 12 ({published.digest[:12]}), 1 kept" in text_of(render(report))


def test_retired_weights_leave_the_majority_to_judge(store: rollouts.Store):
    run_id = rollouts.open_run(store.local_path)[1].run_id
    synthetic.write_shard(store, run_id, rollouts.UnitId(4, 0, 2), synthetic.make_rollouts(3, 4), "impostor")
    assert [path for path, _ in inspect(store.local_path).faults] == ["rollouts/00000004/000000-0002.parquet"]


def record(store: rollouts.Store, version: int, k: int, shards: tuple[tuple[str, str], ...]) -> rollouts.BatchRecord:
    made = rollouts.BatchRecord(version, version - k, 0, k, shards)
    rollouts.write_batch_record(store, made)
    return made


def test_ages_come_from_the_batch_records(store: rollouts.Store):
    digest = "0" * 64
    for version, k in ((0, 0), (4, 4), (8, 8), (36, 32)):
        path = rollouts.shard_path(rollouts.UnitId(version - k, version // 4, 0))
        record(store, version, k, ((path, digest),))
    other = rollouts.BatchRecord(40, 32, 0, 40, ((SHARD, digest),), run="elsewhere")
    rollouts.write_batch_record(store, other)
    report = inspect(store.local_path)
    assert [version.ages for version in report.versions] == [(0, 4, 8), (32,), ()]
    assert report.records == 5, "that of another run's data says nothing of this one's"
    assert "0 to 8" in text_of(render(report))


def test_a_shard_that_is_not_the_one_trained_on(store: rollouts.Store):
    digest = rollouts.decode(store.get(SHARD), SHARD).digest
    record(store, 36, 32, ((SHARD, digest),))
    assert inspect(store.local_path).well
    record(store, 40, 36, ((SHARD, "0" * 64),))
    assert inspect(store.local_path).faults == (
        (SHARD, f"content digest {digest[:12]}, but the learner recorded 000000000000"),
    )


def test_recorded_and_pruned_shards_are_listed_and_no_fault(store: rollouts.Store):
    record(store, 36, 32, ((SHARD, "0" * 64),))
    store.delete(SHARD)
    report = inspect(store.local_path)
    assert report.well and report.missing == (SHARD,)
    assert SHARD in text_of(render(report))


def test_shards_set_aside_are_listed_and_not_verified(store: rollouts.Store):
    store.replace(f"{SHARD}.bad-0123abcd", b"broken")
    report = inspect(store.local_path)
    assert report.well and report.set_aside == (f"{SHARD}.bad-0123abcd",)
    assert f"{SHARD}.bad-0123abcd" in text_of(render(report))


def test_progress_is_told_of_every_shard(store: rollouts.Store):
    calls: list[tuple[int, int]] = []
    inspect(store.local_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n, 6) for n in range(1, 7)]


def test_a_run_that_has_only_begun(tmp_path: Path):
    synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0"))
    report = inspect(tmp_path / "run")
    assert report.well
    shown = text_of(render(report))
    assert "0 of 64 updates, unfinished" in shown and "none published" in shown and "none yet" in shown


def test_no_run(tmp_path: Path):
    with pytest.raises(UserError, match="is not a run"):
        inspect(tmp_path)


def test_long_runs_show_their_ends_unless_all_is_asked_for(store: rollouts.Store):
    some = VersionSummary(0, 1, 2, 24, 0.5, (("stop", 24),), (256,), 9000, 0)
    versions = tuple(replace(some, version=4 * place) for place in range(30))
    report = replace(inspect(store.local_path), versions=versions)
    shown = text_of(render(report))
    assert "20 more" in shown and "--all lists them" in shown
    listed = [int(line.split()[0]) for line in shown.splitlines() if line.rstrip().endswith("kB")]
    assert listed == [0, 4, 8, 12, 16, 100, 104, 108, 112, 116]
    everything = text_of(render(report, show_all=True))
    assert " 56 " in everything and "more" not in everything
    assert "All 60 shards verified: 720 rollouts." in verdict(report).plain
