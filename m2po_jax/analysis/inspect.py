"""`m2po inspect`: what a run directory holds, and whether every shard in it is what it claims to be. Writes nothing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from m2po_jax.analysis.figures import sparkline
from m2po_jax.analysis.frames import RunData, load
from m2po_jax.config import Config, UserError
from m2po_jax.rollouts import paths, weights
from m2po_jax.rollouts.batches import BatchRecord, read_batch_record
from m2po_jax.rollouts.run import RunInfo, open_run
from m2po_jax.rollouts.schema import UnitId
from m2po_jax.rollouts.shards import BadShard, Shard, decode
from m2po_jax.rollouts.store import Store

READERS = 4
"""Shards read at a time."""

SHOWN_AT_EACH_END = 5
"""Versions listed from the start and from the end of a long run."""

SPARKLINE_WIDTH = 32

Progress = Callable[[int, int], None]
"""Called with (shards verified so far, all shards)."""


@dataclass(frozen=True)
class ShardSummary:
    """One shard: what it holds when it is good (`fault` None), why not otherwise."""

    path: str
    unit: UnitId
    digest: str = ""
    weights_digest: str = ""
    tokenizer_fingerprint: str = ""
    size_bytes: int = 0
    rows: int = 0
    reward_sum: float = 0.0
    finish_reasons: tuple[tuple[str, int], ...] = ()
    fault: str | None = None


@dataclass(frozen=True)
class VersionSummary:
    """The shards of one version, and the ages at which learner steps began to train on them."""

    version: int
    batches: int
    units: int
    rows: int
    reward_mean: float
    finish_reasons: tuple[tuple[str, int], ...]
    ages: tuple[int, ...]
    size_bytes: int
    faults: int


@dataclass(frozen=True)
class InspectReport:
    """A run directory as found. Paths are relative to it."""

    path: str
    run_id: str
    config: Config
    run: RunData
    weights_versions: tuple[int, ...]
    latest_weights: tuple[int, str] | None
    versions: tuple[VersionSummary, ...]
    records: int
    missing: tuple[str, ...]
    """Recorded as consumed, and no longer (or not yet again) there: pruned or being made again."""
    set_aside: tuple[str, ...]
    """Bad shards that a reader has moved out of the way."""
    faults: tuple[tuple[str, str], ...]
    """(path, reason) of each shard that fails verification."""

    @property
    def well(self) -> bool:
        """True when every shard passes verification."""
        return not self.faults


def inspect(path: str | Path, progress: Progress | None = None) -> InspectReport:
    """Read and verify a run. UserError when `path` is no run or a shard is of a newer schema.

    Every shard is decoded (checksum, schema, lengths, log-probs, whole groups), and must carry the run's id, the
    digest of its version's weights while these are kept, the tokenizer of the others, and the digest that the
    learner recorded before it trained on it.
    """
    store, info = open_run(str(path))
    names = store.list(paths.ROLLOUTS)
    records = list(_records(store))
    shards = verified(store, info, names, records, progress)
    present = {shard.path for shard in shards}
    return InspectReport(
        path=str(path),
        run_id=info.run_id,
        config=info.config,
        run=load(path),
        weights_versions=tuple(weights.versions(store)),
        latest_weights=weights.latest(store),
        versions=_by_version(shards, records),
        records=len(records),
        missing=tuple(
            sorted({name for record in records if record.run is None for name, _ in record.shards} - present)
        ),
        set_aside=tuple(name for name in names if ".parquet.bad-" in name),
        faults=tuple((shard.path, shard.fault) for shard in shards if shard.fault is not None),
    )


def verified(
    store: Store, info: RunInfo, names: list[str], records: list[BatchRecord], progress: Progress | None = None
) -> list[ShardSummary]:
    """Every shard among the paths `names`, read and judged as `inspect` says; UserError for one of a newer schema."""
    return _judged(list(_verified(store, names, info, progress)), store, records)


def render(report: InspectReport, show_all: bool = False) -> Group:
    """The report as a rich renderable; long runs show their first and last versions unless `show_all`."""
    parts: list[RenderableType] = [_overview(report), "", _versions(report.versions, show_all)]
    if report.set_aside:
        parts += ["", _listed("Set aside as bad, their units made again:", report.set_aside)]
    if report.missing:
        shown = report.missing if show_all else report.missing[: 2 * SHOWN_AT_EACH_END]
        parts += ["", _listed(f"Recorded as consumed and not stored ({len(report.missing):,}):", shown)]
    if report.faults:
        parts += ["", _listed("Failed verification:", [f"{path}: {reason}" for path, reason in report.faults])]
    return Group(*parts, "", verdict(report))


def verdict(report: InspectReport) -> Text:
    """One line: are all shards well."""
    units, rows = sum(v.units for v in report.versions), sum(v.rows for v in report.versions)
    if report.well:
        return Text(f"All {units:,} shards verified: {rows:,} rollouts.", style="green")
    return Text(f"{len(report.faults):,} of {units:,} shards failed verification.", style="bold red")


def _verified(store: Store, names: list[str], info: RunInfo, progress: Progress | None) -> Iterator[ShardSummary]:
    units = [(name, unit) for name in names if (unit := paths.parse_shard_path(name)) is not None]
    with ThreadPoolExecutor(READERS) as readers:
        for done, shard in enumerate(readers.map(lambda item: _verify(store, item[0], item[1], info), units), start=1):
            if progress is not None:
                progress(done, len(units))
            if shard is not None:
                yield shard


def _verify(store: Store, path: str, unit: UnitId, info: RunInfo) -> ShardSummary | None:
    """The shard's summary; None when it was moved or pruned after the listing."""
    try:
        content = store.get(path)
    except FileNotFoundError:
        return None
    try:
        shard = decode(content, path, None, unit)
    except BadShard as error:
        return ShardSummary(path, unit, size_bytes=len(content), fault=error.reason)
    stranger = f"belongs to run {shard.provenance.run_id}, this is run {info.run_id}"
    known = shard.provenance.run_id in (info.run_id, *info.parents)
    return _summary(path, shard, len(content), None if known else stranger)


def _summary(path: str, shard: Shard, size_bytes: int, fault: str | None) -> ShardSummary:
    data = shard.rollouts
    return ShardSummary(
        path=path,
        unit=shard.unit,
        digest=shard.digest,
        weights_digest=shard.provenance.weights_digest,
        tokenizer_fingerprint=shard.provenance.tokenizer_fingerprint,
        size_bytes=size_bytes,
        rows=data.rows,
        reward_sum=float(data.rewards.sum(dtype=np.float64)),
        finish_reasons=tuple(sorted(Counter(data.finish_reasons).items())),
        fault=fault,
    )


def _records(store: Store) -> Iterator[BatchRecord]:
    for name in store.list(paths.BATCHES):
        version = paths.parse_version(Path(name).stem)
        record = read_batch_record(store, version) if version is not None else None
        if record is not None:
            yield record


def _recorded(records: list[BatchRecord]) -> dict[str, str]:
    """Path -> digest of the shards of this run that its learner recorded."""
    return {path: digest for record in records if record.run is None for path, digest in record.shards}


def _judged(shards: list[ShardSummary], store: Store, records: list[BatchRecord]) -> list[ShardSummary]:
    """The shards, with the faults that show only beside the rest of the run."""
    recorded = _recorded(records)
    sound = [shard for shard in shards if shard.fault is None]
    tokenizer = _most_common(shard.tokenizer_fingerprint for shard in sound)
    wrote = {
        version: _weights_digest(store, version)
        or _most_common(shard.weights_digest for shard in sound if shard.unit.version == version)
        for version in {shard.unit.version for shard in sound}
    }
    return [
        shard
        if shard.fault is not None
        else replace(shard, fault=_misfit(shard, wrote[shard.unit.version], tokenizer, recorded.get(shard.path)))
        for shard in shards
    ]


def _misfit(shard: ShardSummary, wrote: str, tokenizer: str, recorded: str | None) -> str | None:
    if shard.weights_digest != wrote:
        return f"written by weights {shard.weights_digest[:12]}, but version {shard.unit.version} is {wrote[:12]}"
    if shard.tokenizer_fingerprint != tokenizer:
        return f"tokenizer {shard.tokenizer_fingerprint[:12]}, but the run's other shards have {tokenizer[:12]}"
    if recorded is not None and shard.digest != recorded:
        return f"content digest {shard.digest[:12]}, but the learner recorded {recorded[:12]}"
    return None


def _weights_digest(store: Store, version: int) -> str | None:
    try:
        return weights.read_digest(store, version)
    except UserError:
        return None


def _most_common(values: Iterable[str]) -> str:
    return next((value for value, _ in Counter(values).most_common(1)), "")


def _by_version(shards: list[ShardSummary], records: list[BatchRecord]) -> tuple[VersionSummary, ...]:
    of_version: dict[int, list[ShardSummary]] = {}
    for shard in shards:
        of_version.setdefault(shard.unit.version, []).append(shard)
    ages: dict[int, set[int]] = {}
    for record in records:
        for unit, age in zip(record.units, record.ages, strict=True) if record.run is None else ():
            ages.setdefault(unit.version, set()).add(age)
    return tuple(
        _version_summary(version, members, tuple(sorted(ages.get(version, ()))))
        for version, members in sorted(of_version.items())
    )


def _version_summary(version: int, shards: list[ShardSummary], ages: tuple[int, ...]) -> VersionSummary:
    rows, reasons = sum(shard.rows for shard in shards), Counter[str]()
    for shard in shards:
        reasons.update(dict(shard.finish_reasons))
    return VersionSummary(
        version=version,
        batches=len({shard.unit.batch for shard in shards}),
        units=len(shards),
        rows=rows,
        reward_mean=sum(shard.reward_sum for shard in shards) / rows if rows else float("nan"),
        finish_reasons=tuple(sorted(reasons.items())),
        ages=ages,
        size_bytes=sum(shard.size_bytes for shard in shards),
        faults=sum(shard.fault is not None for shard in shards),
    )


def _overview(report: InspectReport) -> Table:
    config, run = report.config, report.run
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    total, state = config.learner.total_updates, "finished" if run.complete else "unfinished"
    hyperparameters = config.objective.hyperparameters.items()
    given = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in hyperparameters)
    rows = {
        "run": f"{escape(report.path)}  (id {report.run_id}, m2po-jax {escape(run.package_version)})",
        "arm": f"{config.name}, seed {config.seed}: {config.objective.name}{f' ({given})' if given else ''}",
        "staleness": f"{config.staleness}, {config.learner.updates_per_batch} updates"
        f" a batch of {config.rollouts.prompts_per_batch} x {config.rollouts.group_size}",
        "learner": f"{run.progress:,} of {total:,} updates, {state}; {report.records:,} batches recorded",
        "accuracy": _curve(run.evaluations["accuracy"].to_numpy(float)),
        "reward": _curve(run.updates["reward_mean"].to_numpy(float)),
        "weights": _weights(report),
    }
    for name, value in rows.items():
        grid.add_row(name, value)
    return grid


def _curve(values: np.ndarray) -> str:
    if not len(values):
        return "none yet"
    return f"{sparkline(values, SPARKLINE_WIDTH)}  {values[0]:.1%} -> {values[-1]:.1%}"


def _weights(report: InspectReport) -> str:
    if report.latest_weights is None:
        return "none published"
    version, digest = report.latest_weights
    return f"latest {version:,} ({digest[:12]}), {len(report.weights_versions):,} kept"


def _versions(versions: tuple[VersionSummary, ...], show_all: bool) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("version", "batches", "shards", "rollouts", "age", "reward", "ended by", "size"):
        table.add_column(name, justify="left" if name == "ended by" else "right", no_wrap=True)
    hidden = 0 if show_all else max(len(versions) - 2 * SHOWN_AT_EACH_END, 0)
    for place, version in enumerate(versions):
        if hidden and place == SHOWN_AT_EACH_END:
            table.add_row("...", f"{hidden:,} more", "", "", "", "", "--all lists them", "")
        if hidden and SHOWN_AT_EACH_END <= place < SHOWN_AT_EACH_END + hidden:
            continue
        table.add_row(*_cells(version), style="red" if version.faults else None)
    return table


def _cells(version: VersionSummary) -> list[str]:
    reasons = " ".join(f"{reason} {count / version.rows:.0%}" for reason, count in version.finish_reasons)
    return [
        f"{version.version:,}",
        f"{version.batches:,}",
        f"{version.units:,} ({version.faults:,} bad)" if version.faults else f"{version.units:,}",
        f"{version.rows:,}",
        _age_range(version.ages),
        f"{version.reward_mean:.3f}" if version.rows else "-",
        reasons,
        _size(version.size_bytes),
    ]


def _age_range(ages: tuple[int, ...]) -> str:
    if not ages:
        return "-"
    return f"{ages[0]:,}" if len(ages) == 1 else f"{ages[0]:,} to {ages[-1]:,}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.1f} kB"


def _listed(title: str, lines: Iterable[str]) -> Group:
    return Group(Text(title, style="bold"), *(Text(f"  {line}") for line in lines))
