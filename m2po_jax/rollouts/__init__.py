"""Where rollouts, weights, records and metrics live; the only package that knows file formats, paths and storage.

`weights` is imported as a module of its own (`from m2po_jax.rollouts import weights`): it brings JAX and Orbax.
"""

from m2po_jax.rollouts.batches import (
    BatchRecord,
    read_batch_record,
    read_position,
    record_of,
    supersede_batch_record,
    write_batch_record,
    write_position,
)
from m2po_jax.rollouts.metrics import (
    read_diagnostics,
    read_generator_lines,
    read_segments,
    write_diagnostics,
    write_generator_lines,
    write_segment,
)
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
from m2po_jax.rollouts.run import RunInfo, create_or_resume, held, open_run, sole_learner
from m2po_jax.rollouts.schema import SCHEMA_VERSION, Provenance, Rollouts, UnitId, concatenate
from m2po_jax.rollouts.shards import BadShard, Shard, decode, encode, read_foreign_shard, read_shard, write_shard
from m2po_jax.rollouts.shelf import Shelf, whole_batches
from m2po_jax.rollouts.staleness import Schedule, Source, exactly, inventory_key, units
from m2po_jax.rollouts.store import Store, bytes_digest

__all__ = [
    "SCHEMA_VERSION",
    "BadShard",
    "BatchRecord",
    "Provenance",
    "Rollouts",
    "RunInfo",
    "Schedule",
    "Shard",
    "Shelf",
    "Source",
    "Store",
    "UnitId",
    "batch_record_path",
    "bytes_digest",
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
    "inventory_key",
    "read_batch_record",
    "read_diagnostics",
    "read_foreign_shard",
    "read_generator_lines",
    "read_position",
    "read_segments",
    "read_shard",
    "record_of",
    "rollouts_path",
    "shard_path",
    "held",
    "sole_learner",
    "supersede_batch_record",
    "units",
    "weights_path",
    "whole_batches",
    "write_batch_record",
    "write_diagnostics",
    "write_generator_lines",
    "write_position",
    "write_segment",
    "write_shard",
]
