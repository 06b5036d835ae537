"""Names inside a run directory; every path the project stores under is made here and nowhere else."""

import re

from m2po_jax.rollouts.schema import UnitId

CONFIG = "config.json"
LOCK = ".learner.lock"
WEIGHTS = "weights"
LATEST = "weights/LATEST"
ROLLOUTS = "rollouts"
BATCHES = "batches"
POSITION = "batches/LATEST"
GENERATORS = "generators"
CHECKPOINTS = "checkpoints"
DIAGNOSTICS = "diagnostics"
METRICS = "metrics"

_SHARD = re.compile(r"(?:^|.*/)rollouts/(\d{8})/(\d{6})-(\d{4})\.parquet")
_VERSION = re.compile(r"\d{8}")


def shard_path(unit: UnitId) -> str:
    """Where the one shard of a work unit lives: `rollouts/<version:08d>/<batch:06d>-<unit:04d>.parquet`."""
    return f"{rollouts_path(unit.version)}/{unit.batch:06d}-{unit.unit:04d}.parquet"


def parse_shard_path(path: str) -> UnitId | None:
    """The work unit a path names, or None when it is no shard (set aside, staged, another kind of object)."""
    match = _SHARD.fullmatch(path)
    return UnitId(*map(int, match.groups())) if match else None


def rollouts_path(version: int) -> str:
    """Prefix of the shards that one version generated."""
    return f"{ROLLOUTS}/{version:08d}"


def weights_path(version: int) -> str:
    """Directory of one version's parameters."""
    return f"{WEIGHTS}/{version:08d}"


def parse_version(name: str) -> int | None:
    """The version an eight-digit directory name stands for, or None for any other name (temporary directories)."""
    return int(name) if _VERSION.fullmatch(name) else None


def batch_record_path(version: int) -> str:
    """Record of what the learner consumes at `version`."""
    return f"{BATCHES}/{version:08d}.json"


def checkpoint_path(version: int) -> str:
    """Directory of the full train state at `version`."""
    return f"{CHECKPOINTS}/{version:08d}"


def diagnostics_path(version: int) -> str:
    """Token-level sample of the batch consumed at `version`."""
    return f"{DIAGNOSTICS}/{version:08d}.parquet"


def metrics_path(first_version: int) -> str:
    """Metrics segment whose first line is about `first_version`."""
    return f"{METRICS}/{first_version:08d}.jsonl"


def generator_path(producer: str, segment: int) -> str:
    """Lines of what one generator did."""
    return f"{GENERATORS}/{producer}/{segment:06d}.jsonl"
