"""From rollouts to the mini-batches of one batch."""

import jax
import numpy as np

from m2po_jax.learner.update import MiniBatch
from m2po_jax.rollouts import Rollouts


def mini_batches(
    rollouts: Rollouts, count: int, prompt_width: int, response_width: int, staleness_updates: int
) -> list[MiniBatch]:
    """Cut rollouts into `count` mini-batches of whole groups, in order, at fixed widths.

    `staleness_updates` is their age at the first update; each later one finds them an update older.

    Raises ValueError when a row does not fit the widths or the rows do not divide by `count`.
    """
    if rollouts.rows % count:
        raise ValueError(f"{rollouts.rows} responses do not divide into {count} mini-batches")
    rollouts = rollouts.padded(prompt_width, response_width)
    prompt_tokens, prompt_valid = left_aligned_to_right(rollouts.prompt_tokens, rollouts.prompt_lengths)
    whole = MiniBatch(
        prompt_tokens=prompt_tokens,
        prompt_valid=prompt_valid,
        prompt_lengths=rollouts.prompt_lengths,
        response_tokens=rollouts.response_tokens,
        response_mask=np.arange(response_width)[None, :] < rollouts.response_lengths[:, None],
        behavior_logprobs=rollouts.behavior_logprobs,
        rewards=rollouts.rewards,
        truncated=np.array([reason == "length" for reason in rollouts.finish_reasons]),
        staleness=staleness_updates + np.arange(rollouts.rows, dtype=np.int32) // (rollouts.rows // count),
    )
    size = rollouts.rows // count
    cut = lambda start: jax.tree.map(lambda x: x[start : start + size], whole)  # noqa: E731
    return [cut(start) for start in range(0, rollouts.rows, size)]


def left_aligned_to_right(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move padding from the right to the left: int32 (R, P) and lengths (R,) to tokens and validity (R, P)."""
    width = tokens.shape[1]
    source = np.arange(width)[None, :] - (width - lengths[:, None])
    valid = source >= 0
    return np.where(valid, np.take_along_axis(tokens, np.maximum(source, 0), axis=1), 0), valid
