"""Where rollouts, weights, records and metrics live; the only package that knows file formats, paths and storage.

`weights` is imported as a module of its own (`from m2po_jax.rollouts import weights`): it brings JAX and Orbax.
"""

from m2po_jax.rollouts.batches import BatchRecord, read_batch_record, supersede_batch_record, write_batch_record
from m2po_jax.rollouts.metrics import read_diagnostics, read_segments, write_diagnostics, write_segment
from m2po_jax.rollouts.paths import (
    batch_record_path,
    checkpoint_path,
    diagnostics_path,
    metrics_path,
    parse_shard_path,
    rollouts_path,
    shard_path,
    weights_path,
)
from m2po_jax.rollouts.run import RunInfo, create_or_resume, open_run, sole_learner
from m2po_jax.rollouts.schema import SCHEMA_VERSION, Provenance, Rollouts, UnitId, concatenate
from m2po_jax.rollouts.shards import BadShard, Shard, decode, encode, read_shard, write_shard
from m2po_jax.rollouts.staleness import batches_of, exactly, served_after, units
from m2po_jax.rollouts.store import Store, bytes_digest

__all__ = [
    "SCHEMA_VERSION",
    "BadShard",
    "BatchRecord",
    "Provenance",
    "Rollouts",
    "RunInfo",
    "Shard",
    "Store",
    "UnitId",
    "batch_record_path",
    "bytes_digest",
    "batches_of",
    "checkpoint_path",
    "concatenate",
    "create_or_resume",
    "decode",
    "diagnostics_path",
    "encode",
    "exactly",
    "metrics_path",
    "open_run",
    "parse_shard_path",
    "read_batch_record",
    "read_diagnostics",
    "read_segments",
    "read_shard",
    "rollouts_path",
    "served_after",
    "shard_path",
    "sole_learner",
    "supersede_batch_record",
    "units",
    "weights_path",
    "write_batch_record",
    "write_diagnostics",
    "write_segment",
    "write_shard",
]
