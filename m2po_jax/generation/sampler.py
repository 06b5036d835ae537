"""Problems in, graded responses out, on the decode engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from m2po_jax.config import SamplingConfig
from m2po_jax.generation.engine import Generated, generate
from m2po_jax.models import Transformer
from m2po_jax.tasks import Problem, Task, left_padded


@dataclass(frozen=True)
class Responses:
    """Graded responses as host arrays, a row each, in the order of their keys."""

    tokens: np.ndarray
    """int32 (B, T), padded on the right."""
    logprobs: np.ndarray
    """float32 (B, T), zero beyond the length."""
    lengths: np.ndarray
    """int32 (B,), the end token included."""
    finish_reasons: list[str]
    """`stop` or `length`."""
    texts: list[str]
    """Decoded, without the token that ends it."""
    scores: np.ndarray
    """float32 (B,), 1.0 or 0.0."""


class Sampler:
    """Draws responses from a policy; one compiled program for each (prompts, samples) shape."""

    def __init__(self, task: Task, model: Transformer, config: SamplingConfig):
        """`task` gives tokenizer, prompt width and grader; `config` temperature and length."""
        self.task, self.model, self.config = task, model, config

    def dispatch(self, params: Any, problems: Sequence[Problem], keys: Array, samples_per_prompt: int) -> Generated:
        """Start sampling and return at once; `keys` holds len(problems) * samples_per_prompt rows.

        Raises:
            UserError: a prompt and the longest response to it are over the model's context.
        """
        tokenizer = self.task.tokenizer
        rows = [self.task.prompt_tokens(problem) for problem in problems]
        self.model.require_room(max(map(len, rows)) + self.config.max_new_tokens)
        tokens, valid = left_padded(rows, self.task.max_prompt_tokens, tokenizer.pad_id)
        return generate(
            params,
            tokens,
            valid,
            keys,
            np.float32(self.config.temperature),
            model=self.model,
            samples_per_prompt=samples_per_prompt,
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            pad_id=tokenizer.pad_id,
        )

    def collect(self, generated: Generated, problems: Sequence[Problem]) -> Responses:
        """Wait for `dispatch`'s result, decode and grade it."""
        tokens, logprobs, mask, stopped = jax.device_get(generated)
        lengths = mask.sum(axis=1, dtype=np.int32)
        samples_per_prompt = len(tokens) // len(problems)
        rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
        texts = [self.task.tokenizer.decode(row[:length]) for row, length in rows]
        golds = [problem.gold_answer for problem in problems for _ in range(samples_per_prompt)]
        scores = [self.task.grade(text, gold).score for text, gold in zip(texts, golds, strict=True)]
        reasons = ["stop" if ended else "length" for ended in stopped.tolist()]
        return Responses(tokens, logprobs, lengths, reasons, texts, np.array(scores, np.float32))
