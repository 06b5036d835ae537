"""A token-level sample of what an update sees: log-ratios, advantages, entropies and what the objective keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from m2po_jax.learner.update import MiniBatch, UpdateSpec, advantages, look
from m2po_jax.rollouts import BatchRecord, Rollouts


@partial(jax.jit, static_argnames="spec")
def token_view(params: Any, spec: UpdateSpec, batch: MiniBatch) -> dict[str, Array]:
    """Per-token (B, T) arrays of one mini-batch under `params`: what its update is about to use."""
    seen = look(params, spec, batch)
    return {
        "policy_logprob": seen.logprobs,
        "behavior_logprob": jnp.asarray(batch.behavior_logprobs),
        "log_ratio": seen.logprobs - batch.behavior_logprobs,
        "advantage": jnp.broadcast_to(advantages(spec, batch)[:, None], seen.kept.shape),
        "entropy": seen.entropy,
        "kept": seen.kept,
    }


def token_columns(
    view: dict[str, np.ndarray],
    batch: MiniBatch,
    rollouts: Rollouts,
    record: BatchRecord,
    token_text: Callable[[int], str],
) -> dict[str, np.ndarray]:
    """One row a response token of the batch's first mini-batch, as the columns of a diagnostics object.

    `token_text` is the tokenizer's: the text of an id.
    """
    mask = np.asarray(batch.response_mask)
    rows, positions = np.nonzero(mask)
    tokens = np.asarray(batch.response_tokens)[mask]
    texts = {token: token_text(token) for token in np.unique(tokens).tolist()}
    age = np.asarray(batch.staleness, np.int64)[rows]
    return {
        "version": np.full(len(rows), record.version, np.int64),
        "behavior_version": np.full(len(rows), record.behavior_version) if record.run else record.version - age,
        "staleness_updates": age,
        "group_id": rollouts.group_ids[rows],
        "sample_index": rollouts.sample_indices[rows],
        "position": positions.astype(np.int32),
        "token_id": tokens,
        "token_text": np.array([texts[token] for token in tokens.tolist()]),
        **{name: values[mask] for name, values in view.items()},
    }
