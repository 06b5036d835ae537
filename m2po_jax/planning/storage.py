"""What a run costs its store, in closed form from the configuration and the time of an update."""

import math
from dataclasses import dataclass

from m2po_jax.config import Config
from m2po_jax.models.parameters import table

TOKEN_BYTES, LOGPROB_BYTES, TEXT_BYTES = 4, 4, 4
"""Bytes a token before compression: its id; its log-prob and its text, which responses have too."""
WEIGHTS_OBJECTS = 24
"""Objects of one published version, as Orbax writes it from one host; more hosts write more."""


@dataclass(frozen=True)
class StoreCost:
    """At the time of an update that is assumed; bytes before compression, every sequence at its full length."""

    update_s: float
    batches_per_hour: float
    rollout_bytes_per_batch: int
    rollout_bytes_per_hour: float
    weights_bytes: int
    """One published version, float32."""
    weights_bytes_per_hour: float
    """Written; each version is read by every generator too."""
    weights_kept: int
    """Versions at the end: those of the delay line, version 0, and every one that is kept for good."""
    weights_kept_bytes: int
    checkpoint_bytes: int
    """All checkpoints that are kept: parameters and two moments, float32."""
    objects_per_hour: float
    """Created: shards, batch records, segments of metrics, diagnostics, weights."""
    requests_per_hour: float
    """Of one generator and one learner: an existence check, a write and a read a shard; records; weights."""


def store_cost(config: Config, update_s: float) -> StoreCost:
    """The cost of the run of a configuration whose updates take `update_s` seconds each."""
    learner, rollouts = config.learner, config.rollouts
    batches = 3600.0 / (update_s * learner.updates_per_batch)
    published = 3600.0 / (update_s * learner.publish_interval)
    prompt, response = config.task.max_prompt_tokens, config.sampling.max_new_tokens
    row = TOKEN_BYTES * prompt + (TOKEN_BYTES + LOGPROB_BYTES + TEXT_BYTES) * response
    batch_bytes = rollouts.prompts_per_batch * rollouts.group_size * row
    weights = 4 * parameters(config)
    kept = versions_kept(config)
    checkpoints = 3600.0 / (update_s * learner.checkpoint_every)
    diagnosed = batches / learner.diagnostics_every if learner.diagnostics_every else 0.0
    units = batches * rollouts.units_per_batch
    objects = units + batches + diagnosed + checkpoints + published * (WEIGHTS_OBJECTS + 1)
    # A unit: is it there, whose weights, write, read. A batch: look for its record, write it. Weights: write, read.
    requests = 4 * units + 2 * batches + diagnosed + checkpoints + published * 2 * (WEIGHTS_OBJECTS + 1)
    return StoreCost(
        update_s=update_s,
        batches_per_hour=batches,
        rollout_bytes_per_batch=batch_bytes,
        rollout_bytes_per_hour=batches * batch_bytes,
        weights_bytes=weights,
        weights_bytes_per_hour=published * weights,
        weights_kept=kept,
        weights_kept_bytes=kept * weights,
        checkpoint_bytes=learner.keep_checkpoints * 3 * weights,
        objects_per_hour=objects,
        requests_per_hour=requests,
    )


def parameters(config: Config) -> int:
    """Parameters of the model."""
    return sum(math.prod(row.shape(config.model)) for row in table(config.model))


def versions_kept(config: Config) -> int:
    """Published versions in the store towards the end of a run, before the last checkpoints retire any."""
    learner, every = config.learner, config.rollouts.keep_weights_every
    last = learner.total_updates
    first = max(0, last - config.staleness.k - learner.keep_checkpoints * learner.checkpoint_every)
    published = range(0, last + 1, learner.publish_interval)
    return sum(1 for v in published if v == 0 or v >= first or (every is not None and v % every == 0))
