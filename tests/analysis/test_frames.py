"""Runs on disk -> frames."""

from pathlib import Path

import numpy as np
import pytest

from m2po_jax import rollouts
from m2po_jax.analysis import frames
from m2po_jax.config import UserError
from tests.analysis import synthetic
from tests.analysis.synthetic import make_run


def test_load_reads_what_was_written(sweep: Path):
    run = frames.load(sweep / "m2po-s256-seed1")
    assert (run.name, run.seed, run.progress, run.complete) == ("m2po-s256", 1, 64, True)
    assert list(run.updates["version"]) == list(range(64))
    assert list(run.evaluations["version"]) == [0, 16, 32, 48, 64]
    np.testing.assert_allclose(run.evaluations["accuracy"], 0.3 + 0.32 * np.arange(5) / 4)
    assert set(frames.UPDATE_COLUMNS) <= set(run.updates.columns)
    assert len(run.diagnostics) == 400
    assert list(run.diagnostics.columns) == list(frames.DIAGNOSTIC_COLUMNS)


def test_diagnostics_are_read_once(sweep: Path):
    run = frames.load(sweep / "grpo-s0-seed0")
    assert run.diagnostics is run.diagnostics


def test_numbers_that_are_not_finite_are_nan(tmp_path: Path):
    store, _ = synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0"))
    lines = [synthetic.update_line(0, loss=float("nan"), grad_norm=float("inf")), synthetic.update_line(1)]
    rollouts.write_segment(store, 0, lines)
    run = frames.load(tmp_path / "run")
    assert run.updates["loss"].isna().tolist() == [True, False]
    assert run.updates["grad_norm"].dtype == float
    assert any("1 updates whose loss or gradient norm is not a finite number" in note for note in frames.notes(run))


def test_a_metric_of_a_newer_learner_is_kept_and_one_of_an_older_is_nan(tmp_path: Path):
    store, _ = synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0"))
    line = synthetic.update_line(0, invented_metric=7.0)
    del line["chi2"]
    rollouts.write_segment(store, 0, [line])
    updates = frames.load(tmp_path / "run").updates
    assert updates["invented_metric"].tolist() == [7.0]
    assert updates["chi2"].isna().all()


def test_a_run_that_has_only_begun(tmp_path: Path):
    synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0"))
    run = frames.load(tmp_path / "run")
    assert (run.progress, run.complete, len(run.updates), len(run.evaluations)) == (0, False, 0, 0)
    assert run.diagnostics.empty and "log_ratio" in run.diagnostics
    assert frames.rollout_samples(run, 3) == []
    assert len(frames.notes(run)) == 3


def test_an_unfinished_run_says_how_far_it_came(tmp_path: Path):
    make_run(tmp_path / "run", "grpo-s0", updates=40)
    run = frames.load(tmp_path / "run")
    assert (run.progress, run.complete) == (40, False)
    assert frames.notes(run) == ["grpo-s0, seed 0: unfinished, 40 of 64 model updates; drawn as far as it goes."]


def test_alarms_are_counted_in_the_notes(tmp_path: Path):
    store, _ = synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0", total_updates=4))
    bad = {"skipped": 1.0, "all_masked": 1.0, "saturated_frac": 0.01, "nonfinite_tokens": 3}
    lines = [synthetic.update_line(n, **(bad if n < 2 else {})) for n in range(4)]
    rollouts.write_segment(store, 0, [*lines, synthetic.evaluation_line(4, 0.5)])
    rollouts.write_diagnostics(store, 0, synthetic.diagnostics(0, 0, 10, 0.1))
    assert frames.notes(frames.load(tmp_path / "run")) == [
        "grpo-s0, seed 0: 2 updates skipped for non-finite gradients.",
        "grpo-s0, seed 0: 2 updates in which every token was masked.",
        "grpo-s0, seed 0: 2 updates with log-ratios beyond the exponent's clamp.",
        "grpo-s0, seed 0: 6 tokens whose log-prob was not finite.",
    ]


def test_find_runs_takes_runs_and_folders_of_runs(sweep: Path):
    names = ["grpo-s0-seed0", "grpo-s0-seed1", "m2po-s256-seed0", "m2po-s256-seed1"]
    assert frames.find_runs([sweep]) == [str(sweep / name) for name in names]
    assert frames.find_runs([sweep.parent]) == frames.find_runs([sweep]), "two levels down"
    one = sweep / names[0]
    assert frames.find_runs([one, sweep, one]) == frames.find_runs([sweep])
    assert frames.find_runs(["gs://bucket/run"]) == ["gs://bucket/run"]


@pytest.mark.parametrize("missing", ["empty", "absent"])
def test_a_folder_without_runs_is_refused_by_name(tmp_path: Path, missing: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{missing} is no run and holds none"):
        frames.find_runs([tmp_path / missing])


def test_arms_gather_seeds_in_order(sweep: Path):
    runs = [frames.load(path) for path in reversed(frames.find_runs([sweep]))]
    assert {name: [run.seed for run in members] for name, members in frames.arms(runs).items()} == {
        "m2po-s256": [0, 1],
        "grpo-s0": [0, 1],
    }
    assert frames.arm_notes(runs) == []


def test_arm_notes_tell_of_mixed_configurations_and_repeated_seeds(tmp_path: Path):
    for folder, total in (("a", 64), ("b", 32)):
        synthetic.start_run(tmp_path / folder, synthetic.config_of("grpo-s0", total_updates=total))
    runs = [frames.load(path) for path in frames.find_runs([tmp_path])]
    assert frames.arm_notes(runs) == [
        "grpo-s0: a seed appears more than once (0, 0).",
        "grpo-s0: its runs differ in more than the seed (learner.total_updates).",
    ]


def test_samples_are_the_first_of_each_group_of_the_oldest_and_newest_version(sweep: Path):
    samples = frames.rollout_samples(frames.load(sweep / "grpo-s0-seed0"), 2)
    assert [sample.version for sample in samples] == [0, 0, 8, 8]
    assert [sample.response_text for sample in samples] == ["12,21,20", "12,21,24"] * 2
    assert [sample.prompt_id for sample in samples[:2]] == ["7+5+9+0=", "7+5+9+1="]
    assert all(sample.finish_reason == ("stop" if sample.reward else "length") for sample in samples)


def test_samples_step_over_a_broken_shard(tmp_path: Path):
    store = make_run(tmp_path / "run", "grpo-s0")
    store.replace(rollouts.shard_path(rollouts.UnitId(8, 0, 0)), b"not parquet")
    samples = frames.rollout_samples(frames.load(tmp_path / "run"), 3)
    assert [sample.version for sample in samples] == [0] * 3 + [8] * 3
