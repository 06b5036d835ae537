"""Known runs -> known numbers."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.special import stdtrit

from m2po_jax import rollouts
from m2po_jax.analysis import table
from m2po_jax.analysis.frames import RunData, find_runs, load
from tests.analysis import synthetic

COLLAPSING = [0.3, 0.5, 0.7, 0.5, 0.3, 0.3, 0.3]


def evaluations(*accuracy: float) -> pd.DataFrame:
    return pd.DataFrame({"version": np.arange(len(accuracy)) * 8, "accuracy": accuracy})


def run_of(folder: Path, arm: str, accuracy: list[float], seed: int = 0, updates: int = 64) -> RunData:
    """A run evaluated every 16 of its 64 updates; masked and M2 are 0 in the first half of training."""
    store, _ = synthetic.start_run(folder / f"{arm}-{seed}", synthetic.config_of(arm, seed))
    lines = [
        synthetic.update_line(
            n,
            masked_frac=0.02 if n >= 32 else 0.0,
            m2_trust_region=0.08 if n >= 32 else 0.0,
            m2_kept=0.04 if n >= 32 else 0.0,
            updates_per_s=1000.0 if n == 0 else 12.0,
        )
        for n in range(updates)
    ]
    lines += [synthetic.evaluation_line(16 * place, value) for place, value in enumerate(accuracy)]
    rollouts.write_segment(store, 0, lines)
    return load(folder / f"{arm}-{seed}")


def test_first_peak_of_a_collapse_by_hand():
    peak = table.first_peak(evaluations(*COLLAPSING))
    highest = (0.5 + 0.7 + 0.5) / 3
    assert peak.accuracy == pytest.approx(highest)
    assert peak.version == 16
    assert peak.collapse_frac == pytest.approx((highest - 0.3) / highest)


def test_the_peak_before_the_largest_fall_counts_even_if_a_higher_one_follows():
    peak = table.first_peak(evaluations(0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7))
    assert (peak.accuracy, peak.collapse_frac) == (pytest.approx(0.4), pytest.approx(0.75))
    assert peak.version == 0


def test_a_curve_that_never_falls_peaks_at_its_maximum():
    peak = table.first_peak(evaluations(0.3, 0.4, 0.5, 0.6))
    assert (peak.accuracy, peak.version, peak.collapse_frac) == (pytest.approx(0.55), 24, 0.0)


@pytest.mark.parametrize("values", [(), (np.nan, np.nan)])
def test_no_evaluations_no_peak(values):
    assert np.isnan(table.first_peak(evaluations(*values)).accuracy)


def test_a_policy_that_solves_nothing_does_not_divide_by_zero():
    assert table.first_peak(evaluations(0.0, 0.0)) == table.Peak(0.0, 0.0, 0.0)


def test_summary_of_known_runs(tmp_path: Path):
    runs = [
        run_of(tmp_path, "grpo-s0", [0.3, 0.4, 0.5, 0.6, 0.7]),
        run_of(tmp_path, "grpo-s0", [0.3, 0.4, 0.5, 0.5, 0.6], seed=1),
        run_of(tmp_path, "m2po-s256", [0.3, 0.4, 0.5, 0.5, 0.7]),
    ]
    frame = table.summary(runs).set_index("arm")
    reference, m2po = frame.loc["grpo-s0"], frame.loc["m2po-s256"]
    assert (reference["seeds"], reference["unfinished"], m2po["seeds"]) == (2, 0, 1)
    assert reference["final_accuracy"] == pytest.approx((0.65 + 0.55) / 2)
    assert (reference["final_min"], reference["final_max"]) == (pytest.approx(0.55), pytest.approx(0.65))
    assert reference["best_accuracy"] == pytest.approx(0.65)
    assert reference["last_accuracy"] == pytest.approx(0.65)
    assert np.isnan(reference["vs_reference_points"])
    assert m2po["vs_reference_points"] == pytest.approx(-5.0), "over seed 0, which both have"
    assert m2po["masked_frac"] == pytest.approx(0.02), "second half only"
    assert (m2po["m2_before"], m2po["m2_after"]) == (pytest.approx(0.08), pytest.approx(0.04))
    assert m2po["updates_per_s"] == 12.0, "the median, which a slow or fast start does not move"


def test_unfinished_runs_do_not_count_beside_finished_ones(tmp_path: Path):
    runs = [
        run_of(tmp_path, "grpo-s0", [0.3, 0.4, 0.5, 0.6, 0.7]),
        run_of(tmp_path, "grpo-s0", [0.3, 0.2], seed=1, updates=16),
        run_of(tmp_path, "m2po-s256", [0.3, 0.2], updates=16),
        run_of(tmp_path, "m2po-s256", [0.3, 0.2], updates=16, seed=1),
    ]
    frame = table.summary(runs).set_index("arm")
    assert frame.loc["grpo-s0", ["seeds", "unfinished"]].tolist() == [1, 1]
    assert frame.loc["grpo-s0", "final_accuracy"] == pytest.approx(0.65)
    assert frame.loc["m2po-s256", ["seeds", "unfinished"]].tolist() == [2, 2]
    assert frame.loc["m2po-s256", "final_accuracy"] == pytest.approx(0.2), "the last quarter of what was done"
    pair = table.paired_differences(runs, [("m2po-s256", "grpo-s0")]).iloc[0]
    assert pair["n"] == 0 and np.isnan(pair["points"])


def test_paired_interval_by_hand(tmp_path: Path):
    runs = []
    for seed, gap in enumerate((0.01, 0.02, 0.03)):
        runs.append(run_of(tmp_path, "grpo-s0", [0.3, 0.3, 0.3, 0.5 + seed, 0.5 + seed], seed))
        runs.append(run_of(tmp_path, "m2po-s256", [0.3, 0.3, 0.3, 0.5 + seed + gap, 0.5 + seed + gap], seed))
    runs.append(run_of(tmp_path, "m2po-s256", [0.9] * 5, seed=3))
    row = table.paired_differences(runs, [("m2po-s256", "grpo-s0")]).iloc[0]
    assert (row["arm"], row["minus"], row["n"]) == ("m2po-s256", "grpo-s0", 3)
    assert row["points"] == pytest.approx(2.0)
    # Standard deviation 1, t = 4.3027 for 2 degrees of freedom: 4.3027 / sqrt(3) = 2.4842.
    assert row["low"] == pytest.approx(2.0 - 2.4842, abs=1e-3)
    assert row["high"] == pytest.approx(2.0 + 2.4842, abs=1e-3)


def test_one_shared_seed_has_a_difference_and_no_interval(sweep: Path):
    runs = [load(path) for path in find_runs([sweep])]
    one_each = [run for run in runs if run.seed == 0]
    row = table.paired_differences(one_each, [("m2po-s256", "grpo-s0")]).iloc[0]
    assert row["n"] == 1
    assert row["points"] == pytest.approx(-100 * 0.1 * 0.875)
    assert np.isnan(row["low"]) and np.isnan(row["high"])


@pytest.mark.parametrize("degrees", [*range(1, 41), 100, 1000])
def test_student_t_against_scipy(degrees: int):
    assert table.student_t(degrees) == pytest.approx(stdtrit(degrees, 0.975), abs=1e-3)


def test_default_pairs(tmp_path: Path):
    arms = ["grpo-s0", "grpo-s256", "no-tr-s256", "m2po-s256"]
    runs = [run_of(tmp_path, arm, [0.3]) for arm in arms]
    against_reference = [(arm, "grpo-s0") for arm in arms[1:]]
    assert table.default_pairs(runs) == [
        *against_reference,
        ("m2po-s256", "grpo-s256"),
        ("m2po-s256", "no-tr-s256"),
    ]
    assert table.default_pairs(runs[:1]) == []


def test_markdown_and_terminal_show_units_and_unknowns(sweep: Path):
    runs = [load(path) for path in find_runs([sweep])]
    frame = table.summary(runs)
    lines = table.markdown(frame).splitlines()
    assert lines[0].startswith("| arm | seeds | unfinished | final accuracy |")
    assert lines[1].startswith("| :--- | ---: |")
    assert "65.9%" in lines[2] and "–" in lines[2]
    assert "-8.7" in lines[3] and "0.100%" in lines[3]
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(table.render(frame, title="Arms"))
    text = console.export_text()
    assert all(word in text for word in ("Arms", "m2po-s256", "final accuracy", "-8.7"))


def test_speed_is_a_median_over_updates_and_only_of_what_was_told(tmp_path):
    told = {"tokens_per_s": 5000.0, "host_frac": 0.25, "mfu": 0.4, "memory_peak_bytes": 3.2e9}
    for seed, tokens in ((0, 1000.0), (1, 2000.0)):
        store, _ = synthetic.start_run(tmp_path / str(seed), synthetic.config_of("m2po-s256", seed))
        lines = [synthetic.update_line(n, **told | {"tokens_per_s": 9e9 if n == 0 else tokens}) for n in range(5)]
        rollouts.write_segment(store, 0, lines)
    frame = table.speed([load(tmp_path / "0"), load(tmp_path / "1")])
    assert frame.to_dict("records") == [
        {"arm": "m2po-s256", "tokens_per_s": 1500.0, "mfu": 0.4, "host_frac": 0.25, "memory_peak_bytes": 3.2e9}
    ]
    assert table.formatted(frame).values.tolist() == [["m2po-s256", "1,500", "40.0%", "25.0%", "3.2"]]


def test_a_run_that_told_no_speed_has_none(tmp_path):
    assert list(table.speed([run_of(tmp_path, "grpo-s0", [0.5])]).columns) == ["arm"]
