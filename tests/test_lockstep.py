"""Whole lockstep runs in this process: what is consumed when, what is recorded, kept, made again and refused."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m2po_jax.config import ConfigError, StalenessConfig, UserError, WarmStartConfig
from m2po_jax.generation import service
from m2po_jax.learner import loop
from m2po_jax.rollouts import (
    Schedule,
    Store,
    UnitId,
    batch_record_path,
    read_batch_record,
    read_diagnostics,
    read_shard,
    shard_path,
    units,
    weights,
)
from tests import tiny

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOTAL, K, U = 16, 4, 2
CONFIG = tiny.with_learner(
    replace(tiny.TINY, rollouts=replace(tiny.TINY.rollouts, keep_weights_every=6)), diagnostics_every=2
)
ON_POLICY = replace(tiny.TINY, staleness=StalenessConfig(k=0))
POISONED = 5
"""Update of the on-policy run whose rewards are turned into NaN between the store and the update."""


class Observed(tiny.Watcher):
    """Also looks into the run after each batch."""

    def __init__(self, run: Path):
        super().__init__()
        self.run, self.latest, self.records_before_update, self.retired = run, [], [], []
        self.compiled: list[tuple[int, str]] = []

    @property
    def version(self) -> int:
        return self.versions[-1] if self.versions else 0

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        super().update(version, total, metrics)
        self.latest.append(weights.latest(Store.open(self.run))[0])


class Compilations(logging.Handler):
    def __init__(self, watcher: Observed):
        super().__init__(logging.DEBUG)
        self.watcher = watcher

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith("Compiling "):
            self.watcher.compiled.append((self.watcher.version, message.split(" with ")[0]))


def watch_updates(patch: pytest.MonkeyPatch, watcher: Observed, poisoned: int | None = None) -> None:
    make_update = loop.make_update

    def watched(*arguments: Any):
        update = make_update(*arguments)

        def wrapper(state, batch):
            version = int(state.version)
            if version % U == 0:
                watcher.records_before_update.append((version, (watcher.run / batch_record_path(version)).is_file()))
            if version == poisoned:
                batch = batch._replace(rewards=np.full_like(batch.rewards, np.nan))
            return update(state, batch)

        return wrapper

    patch.setattr(loop, "make_update", watched)


def watch_retirement(patch: pytest.MonkeyPatch, watcher: Observed) -> None:
    retire = weights.retire

    def watched(store, version):
        whole = [int(path.name) for path in (watcher.run / "checkpoints").iterdir() if path.name.isdecimal()]
        watcher.retired.append((version, max(whole)))
        retire(store, version)

    patch.setattr(weights, "retire", watched)


@pytest.fixture(scope="module")
def stale(tmp_path_factory, standard_promotion) -> Iterator[Observed]:
    """A finished run at staleness 4, observed, with every compilation it needed."""
    watcher = Observed(tmp_path_factory.mktemp("stale") / "run")
    handler, logger = Compilations(watcher), logging.getLogger("jax")
    with pytest.MonkeyPatch.context() as patch, jax.log_compiles():
        watch_updates(patch, watcher)
        watch_retirement(patch, watcher)
        base = tiny.base_run()
        logger.addHandler(handler)
        try:
            tiny.train(CONFIG, watcher.run, base, watcher)
        finally:
            logger.removeHandler(handler)
    return watcher


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory, standard_promotion) -> Observed:
    """A finished run at staleness 0, one of whose updates met rewards that are no number."""
    watcher = Observed(tmp_path_factory.mktemp("on-policy") / "run")
    with pytest.MonkeyPatch.context() as patch:
        watch_updates(patch, watcher, POISONED)
        tiny.train(ON_POLICY, watcher.run, tiny.base_run(), watcher)
    return watcher


def updates_of(watcher: Observed) -> list[dict[str, Any]]:
    return [line for line in tiny.lines(watcher.run) if line["event"] == "update"]


def records_of(run: Path):
    store = Store.open(run)
    return [read_batch_record(store, version) for version in range(0, TOTAL, U)]


def test_exactly_k_is_a_delay_line(stale):
    found = [(r.version, r.behavior_version, r.batch, r.staleness_updates) for r in records_of(stale.run)]
    assert found == [
        *[(0, 0, 0, 0), (2, 0, 1, 2), (4, 0, 2, 4)],  # version 0 serves k / U + 1 batches
        *[(n, n - K, 0, K) for n in range(6, TOTAL, U)],
    ]
    assert [path for r in records_of(stale.run) for path, _ in r.shards] == [
        shard_path(unit) for _, v, b, _ in found for unit in units(v, b, 2)
    ]


def test_staleness_0_reads_what_the_newest_policy_wrote(on_policy):
    found = [(r.version, r.behavior_version, r.batch, r.staleness_updates) for r in records_of(on_policy.run)]
    assert found == [(n, n, 0, 0) for n in range(0, TOTAL, U)]
    assert [line["staleness_updates"] for line in updates_of(on_policy)] == [0, 1] * (TOTAL // U)


def test_age_counts_optimiser_steps_and_is_told_for_each(stale):
    """REGRESSIONS 14: two updates on a batch age it by two, whatever was published between."""
    lines = updates_of(stale)
    assert [line["version"] for line in lines] == list(range(TOTAL))
    assert [line["mini_batch"] for line in lines] == [0, 1] * (TOTAL // U)
    for line in lines:
        n = line["version"]
        assert line["behavior_version"] == max(n - n % U - K, 0)
        assert line["staleness_updates"] == n - line["behavior_version"]


def test_a_record_stands_before_its_batch_is_trained_on(stale, on_policy):
    expected = [(version, True) for version in range(0, TOTAL, U)]
    assert stale.records_before_update == on_policy.records_before_update == expected


def test_each_group_is_trained_on_once(stale, on_policy):
    for watcher in (stale, on_policy):
        store = Store.open(watcher.run)
        groups = [
            group
            for record in records_of(watcher.run)
            for unit in units(record.behavior_version, record.batch, 2)
            for group in np.unique(read_shard(store, unit).rollouts.group_ids)
        ]
        assert len(groups) == len(set(groups)) == 4 * TOTAL // U


def test_old_data_meets_a_policy_that_has_moved(stale):
    """REGRESSIONS 16: behaviour log-probs are those of the shard; there is no option to compute them again."""
    lines = updates_of(stale)
    assert lines[0]["m2_all"] < 1e-8 and abs(lines[0]["ratio_mean"] - 1) < 1e-4, "version 0 wrote what it reads first"
    moved = [line for line in lines if line["staleness_updates"] >= K]
    assert min(line["m2_all"] for line in moved) > 1e-5
    assert all(line["ratio_max"] > 1.0 and line["log_ratio_min"] < 0.0 for line in moved)


def test_new_data_has_ratios_of_one(on_policy):
    for line in updates_of(on_policy):
        if line["staleness_updates"] == 0:
            assert line["m2_all"] < 1e-8 and line["masked_frac"] == 0.0


def test_a_skipped_update_consumes_its_data_counts_and_is_said(on_policy):
    lines = updates_of(on_policy)
    assert [line["version"] for line in lines if line["skipped"]] == [POISONED]
    assert lines[POISONED]["loss"] is None and lines[POISONED]["grad_norm"] is None
    assert [note for note in on_policy.notes if "update skipped" in note] == [
        f"update {POISONED}: loss or gradient is not finite; update skipped"
    ]
    assert len(lines) == TOTAL and all(np.isfinite(line["loss"]) for line in lines if not line["skipped"])


def test_weights_go_when_a_whole_checkpoint_no_longer_needs_them(stale):
    schedule = Schedule.of(CONFIG)
    consumed = {n: schedule.reads(n)[0].version for n in range(0, TOTAL, U)}
    assert [version for version, _ in stale.retired] == [2, 4]
    for version, checkpoint in stale.retired:
        assert all(n < checkpoint for n, behavior in consumed.items() if behavior == version)
    assert weights.versions(Store.open(stale.run)) == [0, 6, 8, 10, 12, TOTAL], (
        "the base, every sixth, the last, and what batches after checkpoint 12 need, should the last one be damaged"
    )


def test_the_final_policy_is_published_and_latest(stale):
    assert stale.latest == sorted(stale.latest)
    assert set(stale.latest) <= {0, 2, 4, 6, 8, 10, 12, TOTAL}, "14 is not served by anyone"
    assert all(seen <= version for seen, version in zip(stale.latest, range(2, TOTAL + 1, 2), strict=True))
    store = Store.open(stale.run)
    assert weights.latest(store) == (TOTAL, weights.read_digest(store, TOTAL))


def test_nothing_is_compiled_after_the_first_batches(stale):
    """Lengths differ from row to row and from batch to batch, and one program serves them all."""
    store = Store.open(stale.run)
    lengths = [read_shard(store, UnitId(v, 0, 0)).rollouts.response_lengths.tolist() for v in (0, 2, 4)]
    assert len(set(lengths[0])) > 1 and lengths[0] != lengths[1] != lengths[2]
    names = [name for _, name in stale.compiled]
    assert sum("update" in name for name in names) == 1
    late = [name for version, name in stale.compiled if version > 4]
    assert late == [], "diagnostics, evaluation and checkpoint have all run by version 4"


def test_evaluations_and_learning_rate_are_told(stale):
    assert sorted(stale.accuracies) == [0, 8, 16]
    evaluations = {line["version"]: line for line in tiny.lines(stale.run) if line["event"] == "evaluation"}
    assert {v: line["accuracy"] for v, line in evaluations.items()} == stale.accuracies
    assert all(line["prompts"] == 16 for line in evaluations.values())
    np.testing.assert_allclose([line["learning_rate"] for line in updates_of(stale)], [1.5e-3] + [3e-3] * 15, rtol=1e-5)


def test_diagnostics_say_what_the_update_saw(stale):
    table = read_diagnostics(Store.open(stale.run)).to_pandas()
    lines = {line["version"]: line for line in updates_of(stale)}
    assert sorted(table["version"].unique()) == [0, 4, 8, 12], "every second batch"
    np.testing.assert_allclose(table["log_ratio"], table["policy_logprob"] - table["behavior_logprob"], atol=1e-6)
    for version, tokens in table.groupby("version"):
        line = lines[version]
        assert len(tokens) == line["tokens"]
        assert (tokens["staleness_updates"] == line["staleness_updates"]).all()
        assert 1 - tokens["kept"].mean() == pytest.approx(line["masked_frac"], abs=1e-6)
        assert (tokens["log_ratio"] ** 2).mean() == pytest.approx(line["m2_all"], rel=1e-3, abs=1e-8)
        assert tokens["entropy"].mean() == pytest.approx(line["entropy_mean"], rel=1e-4)
        assert set(tokens["token_text"]) <= set("0123456789+=,") | {"<eos>", "<pad>"}


def test_damaged_shards_are_named_set_aside_and_made_again(stale, tmp_path, monkeypatch):
    """A lost block, a truncation and an empty file, as soon as each is written: the run ends with the same bits."""
    damages = {
        UnitId(0, 0, 1): lambda data: data[:300] + bytes(64) + data[364:],
        UnitId(2, 0, 0): lambda data: data[: len(data) // 2],
        UnitId(4, 0, 1): lambda data: b"",
    }
    names, write_shard = [shard_path(unit) for unit in damages], service.write_shard

    def damaging(store, rollouts, unit, *arguments):
        write_shard(store, rollouts, unit, *arguments)
        if (damage := damages.pop(unit, None)) is not None:
            path = store.local_path / shard_path(unit)
            path.write_bytes(damage(path.read_bytes()))

    monkeypatch.setattr(service, "write_shard", damaging)
    run = tmp_path / "run"
    watcher = tiny.train(CONFIG, run, tiny.base_run())
    bad = [note for note in watcher.notes if note.startswith("bad shard")]
    assert len(bad) == 3 and all(name in note for name, note in zip(names, bad, strict=True))
    assert all(list((run / name).parent.glob(f"{Path(name).name}.bad-*")) for name in names)
    assert tiny.weights_digest(run, TOTAL) == tiny.weights_digest(stale.run, TOTAL)
    assert tiny.lines(run) == tiny.lines(stale.run)


def test_a_shard_that_is_always_bad_ends_the_run(tmp_path, monkeypatch):
    write_shard = service.write_shard

    def damaging(store, rollouts, unit, *arguments):
        write_shard(store, rollouts, unit, *arguments)
        (store.local_path / shard_path(unit)).write_bytes(b"PAR1")

    monkeypatch.setattr(service, "write_shard", damaging)
    with pytest.raises(
        UserError, match=r"rollouts/00000000/000000-0000.parquet was bad 3 times in a row: check the disk"
    ):
        tiny.train(CONFIG, tmp_path / "run", tiny.base_run())


@pytest.fixture
def rewound(stale, tmp_path) -> Path:
    """The finished run as it was after version 12, with the records and shards of the batches since: a crash."""
    run = tmp_path / "run"
    shutil.copytree(stale.run, run)
    shutil.rmtree(run / "checkpoints" / f"{TOTAL:08d}")
    shutil.rmtree(run / "weights" / f"{TOTAL:08d}")
    (run / "metrics" / "00000012.jsonl").unlink()
    return run


def test_a_resumed_run_consumes_what_is_recorded_and_publishes_nothing_older(stale, rewound):
    (rewound / "weights" / "LATEST").write_text(json.dumps({"version": 12, "digest": "x"}))
    before = {path: path.stat().st_mtime_ns for path in (rewound / "rollouts").rglob("*.parquet")}
    watcher = Observed(rewound)
    tiny.train(CONFIG, rewound, None, watcher)
    assert watcher.notes == ["resumed from checkpoint 12"] and watcher.versions == [14, 16]
    assert min(watcher.latest) == 12
    assert {path: path.stat().st_mtime_ns for path in (rewound / "rollouts").rglob("*.parquet")} == before
    assert tiny.weights_digest(rewound, TOTAL) == tiny.weights_digest(stale.run, TOTAL)
    assert tiny.lines(rewound) == tiny.lines(stale.run)


def test_an_edited_shard_is_found_on_resume_and_made_again(stale, rewound):
    """Rewards turned around, with the metadata left as it was: a valid file with another content."""
    path = rewound / shard_path(UnitId(8, 0, 0))
    original = pq.read_table(path)
    rewards = pa.array(1 - original.column("reward").to_numpy())
    index = original.column_names.index("reward")
    pq.write_table(original.set_column(index, original.schema.field("reward"), rewards), path, compression="zstd")
    watcher = tiny.train(CONFIG, rewound, None)
    (bad,) = [note for note in watcher.notes if note.startswith("bad shard")]
    assert shard_path(UnitId(8, 0, 0)) in bad and "edited or damaged" in bad
    assert tiny.weights_digest(rewound, TOTAL) == tiny.weights_digest(stale.run, TOTAL)
    assert pq.read_table(path).equals(original)


def test_weights_that_are_gone_are_named(rewound):
    (rewound / shard_path(UnitId(8, 0, 0))).unlink()
    shutil.rmtree(rewound / "weights" / "00000008")
    with pytest.raises(UserError, match=r"no weights of version 8 at .*: the versions there are 0, 6, 10, 12"):
        tiny.train(CONFIG, rewound, None)


def test_what_cannot_run_leaves_no_directory(tmp_path):
    too_many = replace(CONFIG, evaluation=replace(CONFIG.evaluation, prompts=5000))
    with pytest.raises(ConfigError, match=r"evaluation.prompts 5000"):
        tiny.train(too_many, tmp_path / "run", None)
    assert not (tmp_path / "run").exists()


def test_a_base_of_another_model_is_refused(tmp_path):
    wider = replace(CONFIG, model=replace(CONFIG.model, mlp_width=8))
    with pytest.raises(UserError, match=r"weights of version 0 at .* cannot be used: .*this model has"):
        tiny.train(wider, tmp_path / "run", tiny.base_run())


def test_a_request_to_stop_is_heard_during_the_warm_start(tmp_path):
    endless = replace(CONFIG, warm_start=WarmStartConfig(target_accuracy=0.99, check_every=1, batch_size=64))
    watcher = tiny.Watcher(stop_at=-1)
    with pytest.raises(KeyboardInterrupt):
        tiny.train(endless, tmp_path / "run", None, watcher)
    assert len(watcher.warm_starts) == 1
    assert weights.versions(Store.open(tmp_path / "run")) == []
