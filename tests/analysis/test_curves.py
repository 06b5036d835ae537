"""Binning over updates and gathering over seeds."""

from pathlib import Path

import numpy as np

from m2po_jax import rollouts
from m2po_jax.analysis.curves import bin_width, seed_curve
from m2po_jax.analysis.frames import RunData, load
from tests.analysis import synthetic


def runs_of(folder: Path, *rewards: list[float]) -> list[RunData]:
    runs = []
    for seed, values in enumerate(rewards):
        store, _ = synthetic.start_run(folder / str(seed), synthetic.config_of("grpo-s0", seed))
        rollouts.write_segment(store, 0, [synthetic.update_line(n, reward_mean=v) for n, v in enumerate(values)])
        runs.append(load(folder / str(seed)))
    return runs


def test_bins_are_averaged_then_seeds(tmp_path: Path):
    curve = seed_curve(runs_of(tmp_path, [1, 3, 5, 7], [3, 5, 7, 9]), "reward_mean", width=2)
    np.testing.assert_array_equal(curve.x, [0.5, 2.5])
    np.testing.assert_array_equal(curve.mean, [3, 7])
    np.testing.assert_array_equal(curve.low, [2, 6])
    np.testing.assert_array_equal(curve.high, [4, 8])


def test_what_is_not_finite_is_left_out(tmp_path: Path):
    nan = float("nan")
    curve = seed_curve(runs_of(tmp_path, [1, nan, nan, nan, 5, 6]), "reward_mean", width=2)
    np.testing.assert_array_equal(curve.x, [0.5, 4.5])
    np.testing.assert_array_equal(curve.mean, [1, 5.5])


def test_a_seed_that_came_further_goes_on_alone(tmp_path: Path):
    curve = seed_curve(runs_of(tmp_path, [1, 1], [3, 3, 3, 3]), "reward_mean", width=2)
    np.testing.assert_array_equal(curve.mean, [2, 3])


def test_no_runs_and_no_updates_are_empty_curves(tmp_path: Path):
    assert len(seed_curve([], "reward_mean")) == 0
    assert len(seed_curve(runs_of(tmp_path, []), "reward_mean")) == 0


def test_bin_width_is_a_power_of_two_that_keeps_curves_short(tmp_path: Path):
    assert bin_width([]) == bin_width(runs_of(tmp_path / "short", [0.5] * 64)) == 4
    assert bin_width(runs_of(tmp_path / "long", [0.5] * 1000)) == 16
