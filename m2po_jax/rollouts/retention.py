"""What of a run nothing needs any more: pure arithmetic on what is stored, its records and its schedule."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from m2po_jax.config import Config
from m2po_jax.rollouts.batches import BatchRecord
from m2po_jax.rollouts.paths import DIAGNOSTICS, ROLLOUTS, WEIGHTS, parse_shard_path, parse_version
from m2po_jax.rollouts.staleness import Schedule

KINDS = (ROLLOUTS, WEIGHTS, DIAGNOSTICS)


@dataclass(frozen=True)
class Run:
    """What a run holds, as far as pruning is concerned."""

    config: Config
    schedule: Schedule
    sizes: Mapping[str, int]
    """Path -> bytes of every object."""
    records: tuple[BatchRecord, ...]
    weights: tuple[int, ...]
    """Versions whose weights are there."""
    checkpoints: tuple[int, ...]
    """Versions with a whole checkpoint."""

    @property
    def horizon(self) -> int:
        """Nothing is ever consumed again at an older learner version: that of the oldest checkpoint."""
        return min(self.checkpoints, default=0)


@dataclass(frozen=True)
class Removal:
    """Objects that can go."""

    kind: str
    path: str
    """An object, or a version's directory of weights."""
    objects: int
    size_bytes: int


def removable(run: Run, kinds: Collection[str] = KINDS, keep_last: int | None = None) -> tuple[Removal, ...]:
    """What can go, oldest first.

    Shards stay that a batch at the oldest checkpoint or later reads or has recorded; weights stay that generators
    still need for such a batch, those that are kept on purpose, version 0 and all since that checkpoint; diagnostics
    stay since that checkpoint. `keep_last` keeps the shards of this many versions behind the newest checkpoint too.
    """
    found: list[Removal] = []
    if ROLLOUTS in kinds:
        found += _shards(run, needed_batches(run.schedule, run.horizon, run.config), keep_last)
    if WEIGHTS in kinds:
        needed = needed_weights(run)
        found += [_directory(run, f"{WEIGHTS}/{version:08d}") for version in run.weights if version not in needed]
    if DIAGNOSTICS in kinds:
        for path, size in sorted(run.sizes.items()):
            version = parse_version(path.removeprefix(f"{DIAGNOSTICS}/").removesuffix(".parquet"))
            if path.startswith(f"{DIAGNOSTICS}/") and version is not None and version < run.horizon:
                found.append(Removal(DIAGNOSTICS, path, 1, size))
    return tuple(found)


def needed_batches(schedule: Schedule, horizon: int, config: Config) -> frozenset[tuple[int, int]]:
    """The (behaviour version, batch) of this run that batches consumed at `horizon` or later may be made of."""
    learner = config.learner
    consumed = range(horizon, learner.total_updates, learner.updates_per_batch)
    return frozenset((s.version, s.batch) for n in consumed for s in schedule.reads(n) if s.run is None)


def needed_weights(run: Run) -> frozenset[int]:
    """Versions whose weights are to stay."""
    every = run.config.rollouts.keep_weights_every
    kept = {v for v in run.weights if v == 0 or v >= run.horizon or (every is not None and v % every == 0)}
    return frozenset(kept) | run.schedule.served(run.horizon)


def totals(removals: Iterable[Removal]) -> dict[str, tuple[int, int]]:
    """Kind -> (objects, bytes)."""
    objects: Counter[str] = Counter()
    size_bytes: Counter[str] = Counter()
    for removal in removals:
        objects[removal.kind] += removal.objects
        size_bytes[removal.kind] += removal.size_bytes
    return {kind: (objects[kind], size_bytes[kind]) for kind in sorted(objects)}


def _shards(run: Run, needed: frozenset[tuple[int, int]], keep_last: int | None) -> list[Removal]:
    recorded = {path for record in run.records if record.version >= run.horizon for path, _ in record.shards}
    newest = None if keep_last is None else max(run.checkpoints, default=0) - keep_last
    found = []
    for path, size in sorted(run.sizes.items()):
        unit = parse_shard_path(path.partition(".bad-")[0])
        if unit is None or not path.startswith(f"{ROLLOUTS}/"):
            continue
        stays = (unit.version, unit.batch) in needed or (newest is not None and unit.version >= newest)
        if ".bad-" in path or not (stays or path in recorded):
            found.append(Removal(ROLLOUTS, path, 1, size))
    return found


def _directory(run: Run, path: str) -> Removal:
    inside = [size for name, size in run.sizes.items() if name.startswith(f"{path}/")]
    return Removal(WEIGHTS, path, len(inside), sum(inside))
