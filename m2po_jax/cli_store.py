"""Commands about what a run has stored: `m2po verify`, `prune`, `copy` and `fork`."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from m2po_jax.cli_training import OBJECTIVE_FLAG, flag_of
from m2po_jax.config import Config, UserError
from m2po_jax.rollouts import (
    BatchRecord,
    Schedule,
    Store,
    bytes_digest,
    open_run,
    paths,
    read_batch_record,
    retention,
    staging,
)


@dataclass(frozen=True)
class VerifyOptions:
    """Which run to verify."""

    run: Positional[str]
    """Run directory or gs:// URL."""
    move_aside: bool = False
    """Rename each bad shard to NAME.bad-<8 hex>, so that its unit is made again."""


@dataclass(frozen=True)
class PruneOptions:
    """Which run to prune, and of what."""

    run: Positional[str]
    """Run directory or gs:// URL."""
    yes: bool = False
    """Delete; without it, what would be deleted is only said."""
    rollouts: bool = False
    """Only shards, and the other kinds that are named; without any of the three, all."""
    weights: bool = False
    """Only published weights, and the other kinds that are named."""
    diagnostics: bool = False
    """Only token diagnostics, and the other kinds that are named."""
    keep_rollouts_of_last: int | None = None
    """Keep the shards of this many versions behind the newest checkpoint too. Default: those that are needed only."""


@dataclass(frozen=True)
class CopyOptions:
    """From where to where."""

    source: Positional[str]
    """Run directory or gs:// URL."""
    target: Positional[str]
    """Where the copy goes: an empty place, or one that holds an earlier part of it."""


@dataclass(frozen=True)
class ForkOptions:
    """Which checkpoint, where to, and the configuration, each field of which is a flag."""

    version: int
    """Version of the checkpoint to start from."""
    run: str
    """The new run."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def verify(arguments: list[str]) -> int:
    """Read all of a run, on a disk or in a bucket: every shard, weights, records; exit 1 naming each bad object.

    Example: m2po verify gs://bucket/run
    """
    from m2po_jax.analysis import inspect as inspection

    options = tyro.cli(VerifyOptions, args=arguments, prog="m2po verify", description=verify.__doc__)
    store, info = open_run(options.run)
    records, bad = _records(store)
    shards = inspection.verified(store, info, store.list(paths.ROLLOUTS), records)
    faults = [(shard.path, shard.fault) for shard in shards if shard.fault is not None]
    print(f"{len(shards):,} shards, {len(records) + len(bad):,} batch records")
    if options.move_aside:
        for path, _ in faults:
            _move_aside(store, path)
    bad += faults + list(_bad_directories(store))
    for path, reason in bad:
        print(f"bad: {path}: {reason}")
    print(f"{len(bad):,} bad objects" if bad else "all is well")
    return 1 if bad else 0


def prune(arguments: list[str]) -> int:
    """Say what of a run nothing needs any more, by kind, and delete it with --yes.

    What the run's policy, its records and its checkpoints may still need always stays. Runs that read this one, by
    staleness.run, are not known here.

    Example: m2po prune runs/mine --rollouts --keep-rollouts-of-last 1024 --yes
    """
    from m2po_jax.rollouts import weights

    options = tyro.cli(PruneOptions, args=arguments, prog="m2po prune", description=prune.__doc__)
    store, info = open_run(options.run)
    kinds = tuple(kind for kind in retention.KINDS if getattr(options, kind)) or retention.KINDS
    run = retention.Run(
        config=info.config,
        schedule=Schedule.of(info.config),
        sizes=store.sizes(),
        records=tuple(record for v in _versions(store, paths.BATCHES) if (record := read_batch_record(store, v))),
        weights=tuple(weights.versions(store)),
        checkpoints=tuple(_whole(store, paths.CHECKPOINTS)),
    )
    gone = retention.removable(run, kinds, options.keep_rollouts_of_last)
    verb = "deleted" if options.yes else "would delete"
    for kind, (objects, size_bytes) in retention.totals(gone).items():
        print(f"{verb} {objects:,} objects of {kind}, {size_bytes:,} bytes")
    if not gone:
        print("nothing to delete: all of it may still be needed")
    elif not options.yes:
        print("nothing was deleted; with --yes it is")
    else:
        for removal in gone:
            if removal.kind == paths.WEIGHTS:
                weights.retire(store, int(removal.path.rpartition("/")[2]))
        _delete(store, [removal.path for removal in gone if removal.kind != paths.WEIGHTS])
    return 0


def copy(arguments: list[str]) -> int:
    """Copy a run between two places, disks or buckets; begun again it goes on, and nothing is overwritten.

    Example: m2po copy runs/mine gs://bucket/mine
    """
    from m2po_jax.rollouts import copying, weights

    options = tyro.cli(CopyOptions, args=arguments, prog="m2po copy", description=copy.__doc__)
    source, _ = open_run(options.source)
    target = Store.open(options.target, create=True)
    done = copying.copy_run(source, target, weights.commit_facts(source))
    print(f"copied {done.objects:,} objects, {done.size_bytes:,} bytes; {done.there_before:,} were there already")
    return 0


def fork(arguments: list[str]) -> int:
    """Start a new run from a checkpoint of another one, with what its policy needs of the other's weights and shards.

    Example: m2po fork runs/mine --version 512 --run runs/other --learner.learning-rate 1e-4
    """
    from m2po_jax import catalog
    from m2po_jax.rollouts import forking

    helps = bool({"-h", "--help"} & set(arguments))
    if not helps and (not arguments or arguments[0].startswith("-")):
        raise UserError("name a run: m2po fork runs/mine --version 512 --run runs/other")
    if helps:
        tyro.cli(ForkOptions, args=arguments, prog="m2po fork RUN", description=fork.__doc__)
    source, info = open_run(arguments[0])
    objective = flag_of(arguments, OBJECTIVE_FLAG)
    given = info.config if objective is None else catalog.with_objective(info.config, objective)
    default = ForkOptions(version=tyro.MISSING, run=tyro.MISSING, config=given)
    options = tyro.cli(ForkOptions, default=default, args=arguments[1:], prog="m2po fork RUN", description=fork.__doc__)
    target = Store.open(options.run, create=True)
    forking.fork(source, info, options.version, target, options.config, Schedule.of(options.config))
    print(f"{options.run} starts at version {options.version}; go on with: m2po train {options.run}")
    return 0


def _records(store: Store) -> tuple[list[BatchRecord], list[tuple[str, str]]]:
    """The batch records, and (path, reason) of those that cannot be read."""
    records, bad = [], []
    for version in _versions(store, paths.BATCHES):
        try:
            record = read_batch_record(store, version)
        except UserError as error:
            bad.append((paths.batch_record_path(version), str(error)))
        else:
            records += [record] if record else []
    return records, bad


def _bad_directories(store: Store) -> Iterator[tuple[str, str]]:
    """Weights and checkpoints that are not what was written; checkpoints on a disk are checked when one is restored."""
    from m2po_jax.rollouts import weights

    there = weights.versions(store)
    for version in there:
        if (fault := weights.fault(store, version)) is not None:
            yield paths.weights_path(version), fault
    try:
        newest, digest = weights.latest(store) or (-1, "")
        if newest in there and weights.read_digest(store, newest) != digest:
            yield paths.LATEST, f"names other weights than {paths.weights_path(newest)}"
    except UserError as error:
        yield paths.LATEST, str(error)
    checkpoints = _whole(store, paths.CHECKPOINTS)
    for version in checkpoints if store.local_path is None else ():
        try:
            with staging.scratch() as scratch:
                staging.download(store, paths.checkpoint_path(version), scratch)
        except OSError as error:
            yield paths.checkpoint_path(version), str(error)
    checked = "checkpoints" if store.local_path is None else "checkpoints, which are read when one is restored"
    print(f"{len(there):,} versions of weights, {len(checkpoints):,} {checked}")


def _move_aside(store: Store, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        print(f"moved {path} to {store.move_aside(path, bytes_digest(store.get(path)))}")


def _delete(store: Store, doomed: list[str]) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(store.delete, doomed))


def _versions(store: Store, directory: str) -> list[int]:
    names = (path.rpartition("/")[2].removesuffix(".json") for path in store.list(directory))
    return [version for name in names if (version := paths.parse_version(name)) is not None]


def _whole(store: Store, directory: str) -> list[int]:
    names = staging.children(store, directory) if store.local_path is None else store.children(directory)
    return [version for name in names if (version := paths.parse_version(name)) is not None]
