"""From run directories to data frames: a run in one frozen object, seeds of one name gathered into arms."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2po_jax.config import Config, UserError, differences
from m2po_jax.rollouts import paths
from m2po_jax.rollouts.metrics import read_diagnostics, read_segments
from m2po_jax.rollouts.run import open_run
from m2po_jax.rollouts.schema import UnitId
from m2po_jax.rollouts.shards import BadShard, decode
from m2po_jax.rollouts.store import Store

UPDATE_COLUMNS = (
    "version", "behavior_version", "staleness_updates", "mini_batch", "reward_mean", "response_length_mean",
    "truncated_frac", "loss", "masked_frac", "trust_region_frac", "m2_all", "m2_trust_region", "m2_kept",
    "ratio_mean", "ratio_max", "log_ratio_min", "log_ratio_max", "k1", "k3", "ess", "chi2", "saturated_frac",
    "nonfinite_tokens", "all_masked", "advantage_mean", "advantage_std", "no_signal_frac", "grad_norm",
    "learning_rate", "skipped", "wall_time_s", "updates_per_s", "update_s", "tokens_per_s", "flops_per_s", "mfu",
    "data_wait_frac", "checkpoint_wait_frac", "host_frac", "memory_bytes", "memory_peak_bytes",
)  # fmt: skip
"""Columns of `RunData.updates`, one row a model update: `version` is the version before it."""

EVALUATION_COLUMNS = ("version", "accuracy", "standard_error", "prompts")
"""Columns of `RunData.evaluations`: accuracy in 0..1 of the policy `version` on held-out prompts."""

DIAGNOSTIC_COLUMNS = (
    "version", "behavior_version", "staleness_updates", "group_id", "sample_index", "position", "token_id",
    "token_text", "policy_logprob", "behavior_logprob", "log_ratio", "advantage", "entropy", "kept",
)  # fmt: skip
"""Columns of `RunData.diagnostics`, one row a token of the sampled mini-batches."""


@dataclass(frozen=True)
class Sample:
    """One decoded rollout: `version` wrote it, `prompt_id` names its prompt, `reward` is the grader's."""

    version: int
    prompt_id: str
    response_text: str
    gold_answer: str
    reward: float
    finish_reason: str


@dataclass(frozen=True)
class RunData:
    """A run as it stands, finished or not. Frames hold NaN where a metric was not finite or not written."""

    path: str
    config: Config
    package_version: str
    updates: pd.DataFrame
    evaluations: pd.DataFrame

    @property
    def name(self) -> str:
        """Arm name; runs that share it and differ in seed are one arm."""
        return self.config.name

    @property
    def seed(self) -> int:
        """Seed of everything random in the run."""
        return self.config.seed

    @property
    def progress(self) -> int:
        """Model updates that the metrics tell of."""
        updates = int(self.updates["version"].max()) + 1 if len(self.updates) else 0
        evaluated = int(self.evaluations["version"].max()) if len(self.evaluations) else 0
        return max(updates, evaluated)

    @property
    def complete(self) -> bool:
        """True when the run has reached its configured number of model updates."""
        return self.progress >= self.config.learner.total_updates

    @cached_property
    def diagnostics(self) -> pd.DataFrame:
        """Token-level diagnostics, read at first use; empty when none were written."""
        store, _ = open_run(self.path)
        return _with_columns(read_diagnostics(store).to_pandas(), DIAGNOSTIC_COLUMNS)


def load(path: str | Path) -> RunData:
    """Read one run directory. UserError when `path` is no run."""
    store, info = open_run(str(path))
    lines = read_segments(store)
    return RunData(
        path=str(path),
        config=info.config,
        package_version=_package_version(store),
        updates=_frame([line for line in lines if line.get("event") == "update"], UPDATE_COLUMNS),
        evaluations=_frame([line for line in lines if line.get("event") == "evaluation"], EVALUATION_COLUMNS),
    )


def find_runs(locations: Iterable[str | Path]) -> list[str]:
    """Run directories among `locations` and, for local folders that are no run, up to two levels inside them.

    Raises UserError for a path in which there is no run.
    """
    found: list[str] = []
    for path in locations:
        inside = _runs_in(str(path))
        if not inside:
            raise UserError(f"{path} is no run and holds none: give a folder that `m2po train` or `m2po sweep` made")
        found += [run for run in inside if run not in found]
    return found


def arms(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Arm name -> its runs by seed, arms in order of first appearance."""
    grouped: dict[str, list[RunData]] = {}
    for run in runs:
        grouped.setdefault(run.name, []).append(run)
    return {name: sorted(members, key=lambda run: run.seed) for name, members in grouped.items()}


def rollout_samples(run: RunData, count: int) -> list[Sample]:
    """Up to `count` rollouts of the oldest stored version and as many of the newest, oldest first.

    Not chosen by content: the first response of each of the first groups of the version's first readable shard.
    """
    store, _ = open_run(run.path)
    units = stored_units(store)
    ends = sorted({units[0].version, units[-1].version}) if units else []
    return [sample for end in ends for sample in _first_readable(store, [u for u in units if u.version == end], count)]


def stored_units(store: Store) -> list[UnitId]:
    """The work units whose shards lie in a run, in order; shards set aside are not among them."""
    return sorted(unit for path in store.list(paths.ROLLOUTS) if (unit := paths.parse_shard_path(path)) is not None)


def notes(run: RunData) -> list[str]:
    """What a reader of the run's numbers should know, one sentence each; empty when all is well."""
    who, total = f"{run.name}, seed {run.seed}", run.config.learner.total_updates
    found = []
    if not run.complete:
        found.append(f"{who}: unfinished, {run.progress:,} of {total:,} model updates; drawn as far as it goes.")
    if run.evaluations.empty:
        found.append(f"{who}: no evaluation yet.")
    if run.diagnostics.empty:
        found.append(f"{who}: no token diagnostics, so it is missing from the histogram.")
    updates = run.updates
    nonfinite = int((~np.isfinite(updates[["loss", "grad_norm"]].to_numpy(float))).any(axis=1).sum())
    for count, meaning in (
        (nonfinite, "updates whose loss or gradient norm is not a finite number"),
        (int((updates["skipped"] > 0).sum()), "updates skipped for non-finite gradients"),
        (int((updates["all_masked"] > 0).sum()), "updates in which every token was masked"),
        (int((updates["saturated_frac"] > 0).sum()), "updates with log-ratios beyond the exponent's clamp"),
        (int(np.nansum(updates["nonfinite_tokens"].to_numpy(float))), "tokens whose log-prob was not finite"),
    ):
        if count:
            found.append(f"{who}: {count:,} {meaning}.")
    return found


def arm_notes(runs: Sequence[RunData]) -> list[str]:
    """Warnings about arms as wholes: one seed twice, or one name over different configurations."""
    found = []
    for name, members in arms(runs).items():
        seeds = [run.seed for run in members]
        if len(set(seeds)) < len(seeds):
            found.append(f"{name}: a seed appears more than once ({', '.join(map(str, seeds))}).")
        varied = sorted({key for run in members for key in differences(members[0].config, run.config)} - {"seed"})
        if varied:
            found.append(f"{name}: its runs differ in more than the seed ({', '.join(varied)}).")
    return found


def _runs_in(path: str) -> list[str]:
    if "://" in path:
        return [path]
    folder = Path(path)
    if (folder / paths.CONFIG).is_file():
        return [str(folder)]
    return sorted(str(file.parent) for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/{paths.CONFIG}"))


def _package_version(store: Store) -> str:
    return str(json.loads(store.get(paths.CONFIG)).get("package_version", "unknown"))


def _frame(lines: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    frame = _with_columns(pd.DataFrame.from_records(lines), columns)
    for column in columns:
        frame[column] = pd.to_numeric(frame[column], errors="coerce").astype(float)
    frame = frame.dropna(subset=["version"]).sort_values("version", ignore_index=True)
    return frame.astype({"version": int})


def _with_columns(frame: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    extra = [column for column in frame.columns if column not in columns and column != "event"]
    return frame.reindex(columns=[*columns, *extra])


def _first_readable(store: Store, units: list[UnitId], count: int) -> list[Sample]:
    for unit in units:
        path = paths.shard_path(unit)
        try:
            data = decode(store.get(path), path, None, unit).rollouts
        except (BadShard, FileNotFoundError):
            continue
        _, first_rows = np.unique(data.group_ids, return_index=True)
        return [
            Sample(
                version=unit.version,
                prompt_id=data.prompt_ids[row],
                response_text=data.response_texts[row],
                gold_answer=data.gold_answers[row],
                reward=float(data.rewards[row]),
                finish_reason=data.finish_reasons[row],
            )
            for row in sorted(first_rows)[:count]
        ]
    return []
