"""The words of the store: work units, provenance, and rollouts as columns."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 1

FINISH_REASONS = ("stop", "length")

_INTS = pa.list_(pa.field("element", pa.int32()))
_FLOATS = pa.list_(pa.field("element", pa.float32()))

ARROW_SCHEMA = pa.schema(
    [
        ("policy_version", pa.int64()),
        ("batch_index", pa.int32()),
        ("unit", pa.int32()),
        ("prompt_id", pa.string()),
        ("group_id", pa.int64()),
        ("sample_index", pa.int32()),
        ("prompt_tokens", _INTS),
        ("response_tokens", _INTS),
        ("behavior_logprobs", _FLOATS),
        ("rescored_logprobs", _FLOATS),
        ("reward", pa.float32()),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("response_text", pa.string()),
        ("gold_answer", pa.string()),
    ]
)
"""Columns of a shard, one row a response; only `rescored_logprobs` may be null."""


@dataclass(frozen=True, order=True)
class UnitId:
    """A work unit: a fixed part of one batch of one version; its shard's name follows from these numbers."""

    version: int
    batch: int
    unit: int


@dataclass(frozen=True)
class Provenance:
    """What a shard is bound to: the run, the weights that wrote it, the tokenizer that gives its ids meaning."""

    run_id: str
    weights_digest: str
    tokenizer_fingerprint: str


@dataclass(frozen=True)
class Rollouts:
    """R responses as numpy columns; prompts are padded to P tokens and responses to T, both on the right with 0."""

    prompt_tokens: np.ndarray
    """int32 (R, P)."""
    prompt_lengths: np.ndarray
    """int32 (R,)."""
    response_tokens: np.ndarray
    """int32 (R, T)."""
    response_lengths: np.ndarray
    """int32 (R,)."""
    behavior_logprobs: np.ndarray
    """float32 (R, T), zero beyond the length; `[:, t]` scores response token t given all tokens before it."""
    rescored_logprobs: np.ndarray | None
    """float32 (R, T) like behavior_logprobs, by the learner's own forward pass; None when nobody rescored."""
    rewards: np.ndarray
    """float32 (R,)."""
    prompt_ids: list[str]
    group_ids: np.ndarray
    """int64 (R,), unique per draw of a prompt."""
    sample_indices: np.ndarray
    """int32 (R,), 0..G-1 within a group."""
    finish_reasons: list[str]
    """`stop` or `length`."""
    response_texts: list[str]
    gold_answers: list[str]
    temperature: float
    top_p: float

    @property
    def rows(self) -> int:
        """Number of responses R."""
        return len(self.rewards)

    def padded(self, prompt_width: int, response_width: int) -> "Rollouts":
        """The same rollouts at the given padded widths; raises ValueError when a row would not fit."""
        return replace(
            self,
            prompt_tokens=_at_width(self.prompt_tokens, self.prompt_lengths, prompt_width),
            response_tokens=_at_width(self.response_tokens, self.response_lengths, response_width),
            behavior_logprobs=_at_width(self.behavior_logprobs, self.response_lengths, response_width),
            rescored_logprobs=None
            if self.rescored_logprobs is None
            else _at_width(self.rescored_logprobs, self.response_lengths, response_width),
        )

    def at(self, index: np.ndarray) -> "Rollouts":
        """The rows with these numbers, int (R',), in this order."""
        columns: dict[str, Any] = {name: getattr(self, name)[index] for name in _array_columns(self)}
        texts: dict[str, Any] = {name: [getattr(self, name)[i] for i in index] for name in _TEXT_COLUMNS}
        return replace(self, **columns, **texts)


def concatenate(parts: list[Rollouts]) -> Rollouts:
    """One Rollouts with the rows of all parts in order, padded to the widest.

    Raises ValueError when there are no parts, when sampling parameters differ, or when only some are rescored.
    """
    if not parts:
        raise ValueError("nothing to concatenate")
    if len({(part.temperature, part.top_p, part.rescored_logprobs is None) for part in parts}) > 1:
        raise ValueError("rollouts to concatenate differ in temperature, top_p or in being rescored")
    prompt_width = max(part.prompt_tokens.shape[1] for part in parts)
    response_width = max(part.response_tokens.shape[1] for part in parts)
    wide = [part.padded(prompt_width, response_width) for part in parts]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in wide]) for name in _array_columns(wide[0])
    }
    texts: dict[str, Any] = {name: [text for part in wide for text in getattr(part, name)] for name in _TEXT_COLUMNS}
    return replace(wide[0], **columns, **texts)


_TEXT_COLUMNS = ("prompt_ids", "finish_reasons", "response_texts", "gold_answers")


def _array_columns(rollouts: Rollouts) -> list[str]:
    return [name for name, value in vars(rollouts).items() if isinstance(value, np.ndarray)]


def _at_width(values: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    if lengths.size and int(lengths.max()) > width:
        raise ValueError(f"a row of {int(lengths.max())} tokens does not fit a width of {width}")
    if values.shape[1] >= width:
        return values[:, :width]
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))
