"""A run that starts from a checkpoint of another one, and carries the ids of the runs that its data may be of."""

import json
import uuid
from typing import Any

from m2po_jax.config import Config, UserError, differences, to_json
from m2po_jax.rollouts import weights
from m2po_jax.rollouts.copying import copy_directory, copy_object
from m2po_jax.rollouts.metrics import read_segments, write_segment
from m2po_jax.rollouts.paths import CONFIG, LATEST, ROLLOUTS, checkpoint_path, parse_shard_path, weights_path
from m2po_jax.rollouts.retention import needed_batches
from m2po_jax.rollouts.run import RunInfo
from m2po_jax.rollouts.staleness import Schedule
from m2po_jax.rollouts.store import Store

_FIXED = ("model.", "task.", "rollouts.", "sampling.", "staleness.", "warm_start.", "seed")
_FIXED_LEARNER = ("learner.updates_per_batch", "learner.publish_every")


def fork(source: Store, info: RunInfo, version: int, target: Store, config: Config, schedule: Schedule) -> RunInfo:
    """Make a run of a checkpoint: full train state, metrics until then, and the weights and shards that it still needs.

    Shards keep the id of the run that made them; `config.json` names the runs whose shards are good, and comes last.

    Raises:
        UserError: there is no such checkpoint, the target is a run already, or `config` differs in what the checkpoint
            and the shards depend on.
    """
    _require(info.config, config)
    if target.exists(CONFIG):
        raise UserError(f"{target.url} is a run already: name another --run directory")
    facts = weights.commit_facts(source)
    try:
        copy_directory(source, target, checkpoint_path(version), facts)
    except FileNotFoundError as error:
        raise UserError(
            f"{source.url} has no whole checkpoint {version}: name one of those in its directory checkpoints"
        ) from error
    there = weights.versions(source)
    needed = {0, version} | schedule.served(version)
    copied = [v for v in there if v <= version and v in needed]
    for each in copied:
        copy_directory(source, target, weights_path(each), facts)
    batches = needed_batches(schedule, version, config)
    for path in source.list(ROLLOUTS):
        unit = parse_shard_path(path)
        if unit is not None and unit.version <= version and (unit.version, unit.batch) in batches:
            copy_object(source, target, path)
    _copy_metrics(source, target, version)
    newest = max(copied)
    pointer = {"version": newest, "digest": weights.read_digest(source, newest)}
    target.replace(LATEST, (json.dumps(pointer) + "\n").encode())
    document = json.loads(to_json(config, uuid.uuid4().hex))
    document |= {"parents": [info.run_id, *info.parents], "forked_from": {"run": source.url, "version": version}}
    target.create(CONFIG, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    return RunInfo(document["run_id"], config, tuple(document["parents"]))


def _require(old: Config, new: Config) -> None:
    changed = {
        name: values
        for name, values in differences(old, new).items()
        if name.startswith(_FIXED) or name in _FIXED_LEARNER
    }
    if changed:
        fields = ", ".join(f"{name} ({values[0]!r} to {values[1]!r})" for name, values in changed.items())
        raise UserError(f"a fork cannot change what its checkpoint and shards depend on: {fields}")


def _copy_metrics(source: Store, target: Store, version: int) -> None:
    def is_before(line: dict[str, Any]) -> bool:
        return line["version"] < version or (line["event"] == "evaluation" and line["version"] == version)

    write_segment(target, 0, [line for line in read_segments(source) if is_before(line)])
