"""Numbers of arms: one row an arm, and differences between arms paired by seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.table import Table
from scipy import stats

from m2po_jax.analysis.frames import RunData, arms

SMOOTHED_EVALUATIONS = 3
"""Width, in evaluations, of the centred mean in which peak and collapse are sought."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Peak:
    """The first peak of an accuracy curve and the fall after it.

    The curve is smoothed by a centred mean of three evaluations (of two at its ends). At every evaluation the
    fall is (running maximum - accuracy) / running maximum. The first peak is the running maximum that stands
    where this fall is largest: the height from which the curve fell furthest. A curve that never falls has its
    peak at its maximum and a collapse of 0.
    """

    accuracy: float
    version: float
    collapse_frac: float


def first_peak(evaluations: pd.DataFrame) -> Peak:
    """First peak and largest later fall of one run's evaluations; NaN when there are none."""
    known = evaluations.dropna(subset=["accuracy"])
    if known.empty:
        return Peak(np.nan, np.nan, np.nan)
    smooth = known["accuracy"].rolling(SMOOTHED_EVALUATIONS, center=True, min_periods=1).mean().to_numpy()
    highest = np.maximum.accumulate(smooth)
    fall = np.divide(highest - smooth, highest, out=np.zeros_like(smooth), where=highest > 0)
    peak = highest[fall.argmax()] if fall.max() > 0 else highest[-1]
    return Peak(float(peak), float(known["version"].to_numpy()[(smooth >= peak).argmax()]), float(fall.max()))


def final_accuracy(run: RunData) -> float:
    """Mean accuracy of the evaluations in the last quarter of training, its start included; NaN without any.

    The quarter is of the configured updates, or of the progress made when the run is unfinished.
    """
    evaluations = run.evaluations
    late = evaluations[evaluations["version"] >= 0.75 * _end(run)]
    return float(late["accuracy"].mean())


def run_summary(run: RunData) -> dict[str, float]:
    """The numbers of one run that `summary` averages over seeds."""
    accuracy = run.evaluations["accuracy"].dropna()
    second_half = run.updates[run.updates["version"] >= _end(run) / 2]
    peak = first_peak(run.evaluations)
    return {
        "final_accuracy": final_accuracy(run),
        "best_accuracy": float(accuracy.max()) if len(accuracy) else np.nan,
        "first_peak_accuracy": peak.accuracy,
        "first_peak_update": peak.version,
        "last_accuracy": float(accuracy.iloc[-1]) if len(accuracy) else np.nan,
        "collapse_frac": peak.collapse_frac,
        "masked_frac": float(second_half["masked_frac"].mean()),
        "m2_before": float(second_half["m2_trust_region"].mean()),
        "m2_after": float(second_half["m2_kept"].mean()),
        "updates_per_s": float(run.updates["updates_per_s"].median()),
    }


def summary(runs: Sequence[RunData], reference: str = "grpo-s0") -> pd.DataFrame:
    """One row an arm: means over its finished runs (over all of them, while none is finished).

    final_accuracy is the mean over the last quarter of training, with its smallest and largest seed;
    vs_reference_points its distance from the arm `reference` over the seeds both have, in points; see `Peak` for
    first_peak and collapse; masked_frac and the second moment of the trust-region tokens before and after masking
    are means over the second half; updates_per_s is the median of the run.
    """
    rows = []
    for name, members in arms(runs).items():
        used = _finished(members) or members
        numbers = pd.DataFrame([run_summary(run) for run in used])
        row: dict[str, object] = {"arm": name, "seeds": len(used), "unfinished": len(members) - len(_finished(members))}
        row["final_accuracy"] = numbers["final_accuracy"].mean()
        row["final_min"], row["final_max"] = numbers["final_accuracy"].min(), numbers["final_accuracy"].max()
        row["vs_reference_points"] = _difference(runs, (name, reference)).mean() if name != reference else np.nan
        row |= {column: numbers[column].mean() for column in numbers.columns if column != "final_accuracy"}
        rows.append(row)
    return pd.DataFrame(rows)


SPEEDS = (
    "update_s",
    "tokens_per_s",
    "flops_per_s",
    "mfu",
    "data_wait_frac",
    "checkpoint_wait_frac",
    "host_frac",
    "memory_peak_bytes",
)
"""Columns of `speed`."""


def speed(runs: Sequence[RunData]) -> pd.DataFrame:
    """One row an arm: medians over the updates, then means over its runs; only columns that some run has told."""
    rows = [
        {"arm": name} | {c: float(np.mean([run.updates[c].median() for run in members])) for c in SPEEDS}
        for name, members in arms(runs).items()
    ]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def paired_differences(runs: Sequence[RunData], pairs: Iterable[Pair]) -> pd.DataFrame:
    """Difference of final accuracy of arm minus other, in points, over the seeds that both have finished.

    A row a pair: n seeds, their mean difference, and its 95 % interval from Student's t with n - 1 degrees of
    freedom (NaN for n < 2). A seed shares its base policy between arms, which the pairing takes out.
    """
    rows = []
    for arm, other in pairs:
        gaps = _difference(runs, (arm, other)).to_numpy()
        mean = gaps.mean() if len(gaps) else np.nan
        half = _half_width(gaps)
        rows.append(
            {"arm": arm, "minus": other, "n": len(gaps), "points": mean, "low": mean - half, "high": mean + half}
        )
    return pd.DataFrame(rows, columns=["arm", "minus", "n", "points", "low", "high"])


def default_pairs(runs: Sequence[RunData], reference: str = "grpo-s0") -> list[Pair]:
    """Every arm against `reference`, then each M2PO arm against the others of its staleness."""
    grouped = {name: members[0].config for name, members in arms(runs).items()}
    pairs = [(name, reference) for name in grouped if name != reference and reference in grouped]
    for name, config in grouped.items():
        for other, other_config in grouped.items():
            rival = other_config.staleness == config.staleness and other_config.objective.name != "m2po"
            if config.objective.name == "m2po" and rival and (name, other) not in pairs:
                pairs.append((name, other))
    return pairs


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    return float(stats.t.ppf(0.975, degrees))


LABELS = {
    "arm": "arm",
    "seeds": "seeds",
    "unfinished": "unfinished",
    "final_accuracy": "final accuracy",
    "final_min": "lowest seed",
    "final_max": "highest seed",
    "vs_reference_points": "vs reference",
    "best_accuracy": "best",
    "first_peak_accuracy": "first peak",
    "first_peak_update": "at update",
    "last_accuracy": "last",
    "collapse_frac": "collapse",
    "masked_frac": "masked",
    "m2_before": "M2 before",
    "m2_after": "M2 after",
    "updates_per_s": "updates/s",
    "update_s": "s an update",
    "tokens_per_s": "tokens/s",
    "flops_per_s": "FLOP/s",
    "mfu": "MFU",
    "data_wait_frac": "waits for data",
    "checkpoint_wait_frac": "for checkpoints",
    "host_frac": "devices idle",
    "memory_peak_bytes": "peak memory, GB",
    "minus": "minus",
    "n": "n",
    "points": "points",
    "low": "95 % low",
    "high": "95 % high",
}
"""Column of `summary`, `speed` or `paired_differences` -> its heading."""


def formatted(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table as text, with headings and units; unknown numbers are an en dash."""
    text = pd.DataFrame({c: [_format(c, value) for value in frame[c]] for c in frame.columns}, dtype=object)
    return text.rename(columns=LABELS)


TERMINAL_COLUMNS = [
    "arm",
    "seeds",
    "final_accuracy",
    "vs_reference_points",
    "collapse_frac",
    "masked_frac",
    "m2_before",
]
"""Columns of `summary` that fit a terminal of 80 characters."""


def render(frame: pd.DataFrame, title: str | None = None) -> Table:
    """The table for a terminal, as a rich renderable; of `summary` the columns that fit."""
    text = formatted(frame[[c for c in TERMINAL_COLUMNS if c in frame]] if "seeds" in frame else frame)
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in text.columns:
        table.add_column(column, justify="left" if column in ("arm", "minus") else "right", no_wrap=column == "arm")
    for row in text.itertuples(index=False):
        table.add_row(*row)
    return table


def markdown(frame: pd.DataFrame) -> str:
    """The table as GitHub Markdown."""
    text = formatted(frame)
    rules = [":---" if column in ("arm", "minus") else "---:" for column in text.columns]
    rows = [list(text.columns), rules, *text.values.tolist()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _end(run: RunData) -> int:
    return run.config.learner.total_updates if run.complete else run.progress


def _finished(runs: Sequence[RunData]) -> list[RunData]:
    return [run for run in runs if run.complete]


def _difference(runs: Sequence[RunData], pair: Pair) -> pd.Series:
    grouped = arms(runs)
    first, second = (
        pd.Series({run.seed: final_accuracy(run) for run in _finished(grouped.get(name, []))}, dtype=float)
        for name in pair
    )
    return ((first - second) * 100).dropna()


def _half_width(values: np.ndarray) -> float:
    if len(values) < 2:
        return float("nan")
    return float(student_t(len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def _format(column: str, value: object) -> str:
    if isinstance(value, str):
        return value
    number = float(value)  # type: ignore[arg-type]
    if np.isnan(number):
        return "–"
    if column in ("seeds", "unfinished", "n", "first_peak_update"):
        return f"{number:,.0f}"
    if column in ("points", "low", "high", "vs_reference_points"):
        return f"{number:+.1f}"
    if column == "masked_frac":
        return f"{number:.3%}"
    if column == "memory_peak_bytes":
        return f"{number / 1e9:.1f}"
    if column == "tokens_per_s":
        return f"{number:,.0f}"
    if column == "mfu" or column.endswith(("accuracy", "_frac", "_min", "_max")):
        return f"{number:.1%}"
    return f"{number:.3g}"
