"""Curves of an arm: one column against model updates, averaged in bins and then over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from m2po_jax.analysis.frames import RunData

BINS = 96
"""Most points on a curve of per-update metrics."""


@dataclass(frozen=True)
class Curve:
    """Mean over seeds with the smallest and largest seed, float64 (points,) each, against model updates `x`."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def __len__(self) -> int:
        return len(self.x)


def bin_width(runs: Sequence[RunData]) -> int:
    """Updates that one point of a binned curve stands for, the same for all runs: a power of 2, 4 or more."""
    longest = max((run.progress for run in runs), default=0)
    return max(4, 2 ** int(np.ceil(np.log2(max(longest / BINS, 1)))))


def seed_curve(
    runs: Sequence[RunData], column: str, *, table: Literal["updates", "evaluations"] = "updates", width: int = 1
) -> Curve:
    """The curve of one arm's runs: means over `width` updates, drawn at their middle; NaN and inf are left out.

    Where some seeds have not come as far as others, mean and band are over the seeds that have.
    """
    binned = [_binned(getattr(run, table), column, width) for run in runs]
    together = pd.concat(binned, axis=1).dropna(how="all").sort_index() if binned else pd.DataFrame()
    x = together.index.to_numpy(float) * width + (width - 1) / 2
    return Curve(x, *(getattr(together, how)(axis=1).to_numpy(float) for how in ("mean", "min", "max")))


def _binned(frame: pd.DataFrame, column: str, width: int) -> pd.Series:
    values = frame[column].where(np.isfinite(frame[column]))
    return values.groupby(frame["version"] // width).mean()
