"""Problems in, graded responses out, on the decode engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax import Array

from m2po_jax.config import SamplingConfig
from m2po_jax.generation.draw import Truncation
from m2po_jax.generation.engine import Generated, generate
from m2po_jax.generation.slots import SHORT_TOKENS
from m2po_jax.models import Transformer
from m2po_jax.models.sharding import parts
from m2po_jax.tasks import Problem, Task, left_padded

NARROWEST = 64
"""Prompts are not cut to fewer tokens than this."""
USUAL_SLOTS = 64
"""Slots of each part of a mesh that computes rows of its own, where responses are long; fewer read weights in vain."""


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


@dataclass(frozen=True)
class Work:
    """What sampling has cost so far."""

    tokens: int = 0
    """Sampled, end tokens included."""
    slot_steps: int = 0
    """Tokens that the slots had time for."""
    seconds: float = 0.0
    """Time in which the devices had responses to sample; with what else they did meanwhile."""

    @property
    def occupancy(self) -> float:
        """Share of the slots' time in which they sampled a token that was wanted; 0 before the first."""
        return self.tokens / self.slot_steps if self.slot_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Sampling(Protocol):
    """What a generator asks of whatever draws responses: the decode engine here, or a server."""

    work: Work
    model: Transformer

    def prepare(self, version: int, digest: str, params: Any) -> None:
        """Get ready to sample from a version's weights, whose digest is given; what was dispatched is not touched."""

    def dispatch(self, params: Any, problems: Sequence[Problem], keys: Array, samples_per_prompt: int) -> Any:
        """Start to sample and return what `collect` takes."""

    def collect(self, begun: Any, problems: Sequence[Problem]) -> Responses:
        """Wait for the responses, decode and grade them."""


class Sampler:
    """Draws responses from a policy; one compiled program for each (prompts, samples, width of prompts) shape."""

    def __init__(self, task: Task, model: Transformer, config: SamplingConfig):
        """`task` gives tokenizer, prompt width and grader; `config` temperature, truncation, length and slots."""
        self.task, self.model, self.config = task, model, config
        self.work = Work()
        """Of everything that was collected."""
        self._since = 0.0
        self._newest: Generated | None = None

    def sample(self, params: Any, problems: Sequence[Problem], keys: Array, samples_per_prompt: int) -> Responses:
        """Responses in the order of `keys`, which has len(problems) * samples_per_prompt rows.

        Raises:
            UserError: a prompt and the longest response to it are over the model's context.
        """
        return self.collect(self.dispatch(params, problems, keys, samples_per_prompt), problems)

    def prepare(self, version: int, digest: str, params: Any) -> None:
        """Nothing is to be done: parameters come with each call."""

    def dispatch(self, params: Any, problems: Sequence[Problem], keys: Array, samples_per_prompt: int) -> Generated:
        """Start `sample` and return at once, with what `collect` takes."""
        tokenizer, config = self.task.tokenizer, self.config
        rows = [self.task.prompt_tokens(problem) for problem in problems]
        longest = max(map(len, rows))
        self.model.require_room(longest + config.max_new_tokens)
        tokens, valid = left_padded(rows, prompt_width(longest, self.task.max_prompt_tokens), tokenizer.pad_id)
        if self._newest is None or cast(Any, self._newest.tokens).is_ready():
            self._since = time.perf_counter()  # the devices were idle until now
        self._newest = generate(
            params,
            tokens,
            valid,
            keys,
            np.float32(config.temperature),
            model=self.model,
            samples_per_prompt=samples_per_prompt,
            max_new_tokens=config.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            pad_id=tokenizer.pad_id,
            slots=slots_for(config, len(keys), parts("B")),
            truncation=Truncation.of(config),
        )
        return self._newest

    def collect(self, generated: Generated, problems: Sequence[Problem]) -> Responses:
        """Wait for `dispatch`'s result, decode and grade it."""
        tokens, logprobs, mask, stopped, slot_steps = jax.device_get(generated)
        now, before = time.perf_counter(), self.work
        self.work = Work(
            before.tokens + int(mask.sum()), before.slot_steps + int(slot_steps), before.seconds + now - self._since
        )
        self._since = now
        return graded(self.task, problems, tokens, logprobs, mask.sum(axis=1, dtype=np.int32), stopped.tolist())


def graded(
    task: Task,
    problems: Sequence[Problem],
    tokens: np.ndarray,
    logprobs: np.ndarray,
    lengths: np.ndarray,
    stopped: Sequence[bool],
) -> Responses:
    """Responses with their texts and scores; rows (B, T) are of the problems in order, as many of each."""
    samples_per_prompt = len(tokens) // len(problems)
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    texts = [task.tokenizer.decode(row[:length]) for row, length in rows]
    golds = [problem.gold_answer for problem in problems for _ in range(samples_per_prompt)]
    scores = [task.grade(text, gold).score for text, gold in zip(texts, golds, strict=True)]
    reasons = ["stop" if ended else "length" for ended in stopped]
    return Responses(tokens, logprobs, lengths, reasons, texts, np.array(scores, np.float32))


def prompt_width(longest: int, widest: int) -> int:
    """Width for prompts of up to `longest` tokens: `widest`, or a half, a quarter ... of it, but not below 64.

    So few programs are compiled, and short prompts do not take the room of long ones.
    """
    width = widest
    while width >= 2 * NARROWEST and (width + 1) // 2 >= longest:
        width = (width + 1) // 2
    return width


def slots_for(config: SamplingConfig, responses: int, cut: int) -> int:
    """Slots for so many responses on a mesh with `cut` parts of the rows: as configured, or as many as suit.

    All responses at once where they are short or few. Otherwise a quarter of them, so that the slots stay busy with the
    others while some go on for long, and their cache takes less room.
    """
    if config.slots is not None:
        return min(config.slots, responses)
    if config.max_new_tokens <= SHORT_TOKENS:
        return responses
    return min(responses, max(USUAL_SLOTS * cut, -(-responses // 4)))
