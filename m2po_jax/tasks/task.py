"""What every task is: prompts to train on, prompts held out, and a right answer to each."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

from m2po_jax.config import TaskConfig
from m2po_jax.tasks.grading import Verdict
from m2po_jax.tasks.tokenizer import Tokenizer

_HASH_RANGE = 2**64


@dataclass(frozen=True)
class Problem:
    """A prompt with its right answer and a worked response."""

    prompt: str
    """e.g. `7+5+9+3=`, or a question in words."""
    gold_answer: str
    """The final number, e.g. `24`."""
    demonstration: str
    """A worked response, e.g. the running sums `12,21,24`."""

    @property
    def prompt_id(self) -> str:
        """Stable id of the prompt: the first 16 hex digits of its SHA-256."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


class Task(ABC):
    """Draws training prompts and held-out prompts; every draw is a pure function of its seed."""

    notes: tuple[str, ...] = ()
    """What the user should know about the prompts, a line each."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self._held_out_below = int(config.held_out_fraction * _HASH_RANGE)

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt in tokens."""

    @abstractmethod
    def draw(self, count: int, seed: tuple[int, ...]) -> list[Problem]:
        """`count` training problems, none of them held out.

        Raises:
            ConfigError: the task has next to no training prompts.
        """

    @abstractmethod
    def held_out(self, count: int) -> list[Problem]:
        """`count` different held-out problems, the same for every seed and run of one task configuration.

        Raises:
            ConfigError: the task has too few held-out prompts.
        """

    @abstractmethod
    def grade(self, response_text: str, gold_answer: str) -> Verdict:
        """Score of a response."""

    def prompt_tokens(self, problem: Problem) -> list[int]:
        """Token ids of the problem's prompt, at most `max_prompt_tokens` of them."""
        return self.tokenizer.prompt(problem.prompt)

    def is_held_out(self, prompt: str) -> bool:
        """Whether training may never draw `prompt`, by the prompt's own hash."""
        return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") < self._held_out_below
