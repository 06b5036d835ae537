"""A tiny policy and mini-batches of ragged responses for it."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from m2po_jax import objectives
from m2po_jax.learner.packing import Packing, Sequences, Size, joined
from m2po_jax.learner.update import MiniBatch, UpdateSpec
from tests.models import policies

GROUPS, SIZE, PROMPT, RESPONSE, VOCABULARY = 3, 4, 5, 6, 15


def spec(
    objective: str = "m2po", temperature: float = 0.7, micro_batches: int = 1, **hyperparameters: Any
) -> UpdateSpec:
    model, _ = policies.random_policy(VOCABULARY, layers=1)
    loss = objectives.get(objective, **hyperparameters)
    return UpdateSpec(model, loss, temperature, SIZE, "std", RESPONSE, micro_batches=micro_batches)


@functools.cache
def params() -> Any:
    """Parameters that the optimiser's tests start from; never donated."""
    return policies.random_policy(VOCABULARY, seed=3, spread=2.0, layers=1)[1]


def mini_batch(seed: int = 0, **changes: Any) -> MiniBatch:
    """Prompts of 1 to P tokens and responses of 1 to T, behaviour log-probs near -2.5, both rewards in every group."""
    rng = np.random.default_rng(seed)
    rows = GROUPS * SIZE
    prompt_valid = np.arange(PROMPT)[::-1] < rng.integers(1, PROMPT + 1, (rows, 1))
    response_mask = np.arange(RESPONSE) < rng.integers(1, RESPONSE + 1, (rows, 1))
    batch = MiniBatch(
        prompt_tokens=np.where(prompt_valid, rng.integers(2, VOCABULARY, (rows, PROMPT)), 0).astype(np.int32),
        prompt_valid=prompt_valid,
        prompt_lengths=np.sum(prompt_valid, axis=1, dtype=np.int32),
        response_tokens=np.where(response_mask, rng.integers(1, VOCABULARY, (rows, RESPONSE)), 0).astype(np.int32),
        response_mask=response_mask,
        behavior_logprobs=np.where(response_mask, rng.normal(-2.5, 0.6, response_mask.shape), 0).astype(np.float32),
        rewards=np.tile(np.array([1, 0, 0, 1], np.float32), GROUPS),
        truncated=rng.random(rows) < 0.5,
        staleness=np.full(rows, 256, np.int32),
    )
    return batch._replace(**changes)


def sequences(batch: MiniBatch) -> Sequences:
    """Prompts and responses of an unpacked mini-batch."""
    prompt_lengths, response_lengths = batch.prompt_valid.sum(axis=1), batch.response_mask.sum(axis=1)
    left = np.take_along_axis(batch.prompt_tokens, np.argsort(~batch.prompt_valid, axis=1, kind="stable"), axis=1)
    return Sequences(left, prompt_lengths, batch.response_tokens, response_lengths)


def packed(batch: MiniBatch, packing: Packing, size: Size | None = None) -> MiniBatch:
    """The same mini-batch, packed, in rows of the smallest size or of a given one."""
    columns = sequences(batch)
    parts = [Sequences(*part) for part in zip(*(np.split(x, packing.parts) for x in columns), strict=True)]
    size = size or packing.size(np.max([packing.rows_needed(part) for part in parts], axis=0))
    rows = joined([packing.pack(part, size, index) for index, part in enumerate(parts)])
    return batch._replace(prompt_tokens=None, prompt_valid=None, packed=rows)


def gradient_of(update: Any, state: Any, batch: MiniBatch) -> tuple[Any, dict[str, Any]]:
    """What an update with `optax.sgd(1.0)` took off the parameters, and its metrics; `state` is donated."""
    before = jax.tree.map(np.array, state.params)
    after, metrics = update(state, batch)
    return jax.tree.map(lambda a, b: a - np.array(b), before, after.params), jax.device_get(metrics)


SGD = optax.sgd(1.0)
