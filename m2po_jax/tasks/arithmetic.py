"""Procedural addition that needs a chain: `7+5+9+3=` is answered with its running sums, `12,21,24`."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from m2po_jax.config import ConfigError, TaskConfig
from m2po_jax.tasks.grading import Verdict, grade
from m2po_jax.tasks.tokenizer import CharTokenizer

_HASH_RANGE = 2**64
_MOST_REFUSED = 20_000
"""Draws in a row that bring nothing, after which there counts as nothing more to be found."""


@dataclass(frozen=True)
class Problem:
    """A prompt with its right answer and a worked response."""

    prompt: str
    """e.g. `7+5+9+3=`"""
    gold_answer: str
    """The final number, e.g. `24`."""
    demonstration: str
    """The running sums, e.g. `12,21,24`."""

    @property
    def prompt_id(self) -> str:
        """Stable id of the prompt: the first 16 hex digits of its SHA-256."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


class ArithmeticTask:
    """Draws training prompts, held-out prompts and demonstrations; every draw is a pure function of its seed."""

    def __init__(self, config: TaskConfig):
        self.config = config
        self.tokenizer = CharTokenizer("0123456789+=,")
        self._held_out_below = int(config.held_out_fraction * _HASH_RANGE)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: a digit and a sign for each operand."""
        return 2 * self.config.max_operands

    @property
    def max_response_tokens(self) -> int:
        """Longest worked response with its end token: the one to nines alone."""
        return len(make_problem([9] * self.config.max_operands).demonstration) + 1

    def draw(self, count: int, seed: tuple[int, ...]) -> list[Problem]:
        """`count` training problems, with repetition, none of them held out.

        Raises:
            ConfigError: the task has next to no training prompts.
        """
        stream = self._stream(seed, held_out=False)
        return [next(stream) for _ in range(count)]

    def demonstrations(self, count: int, slip_rate: float, seed: tuple[int, ...]) -> list[tuple[Problem, str]]:
        """`count` training problems, each with a worked response of a student who slips.

        Each running sum is off by one or two with probability `slip_rate`, and the chain goes on from the wrong one:
        a base policy that imitates this knows how to add, but samples the right answer only some of the time. A slip
        goes neither below zero nor to more digits than a right sum can have, so `max_response_tokens` holds.
        """
        rng = np.random.default_rng([*seed, 2])
        return [(problem, _slipped(problem, slip_rate, rng)) for problem in self.draw(count, seed)]

    def held_out(self, count: int) -> list[Problem]:
        """`count` different held-out problems, the same for every seed and run of one task configuration.

        Raises:
            ConfigError: the task has too few held-out prompts.
        """
        problems: dict[str, Problem] = {}
        repeated = 0
        for problem in self._stream((0x4E1D,), held_out=True):
            repeated = repeated + 1 if problem.prompt in problems else 0
            problems.setdefault(problem.prompt, problem)
            if len(problems) == count:
                return list(problems.values())
            if repeated > max(_MOST_REFUSED, 10 * len(problems)):
                break
        raise ConfigError(
            f"evaluation.prompts {count} is more than the held-out prompts of this task (about {len(problems)}):"
            " lower it, or raise task.max_operands or task.held_out_fraction"
        )

    def is_held_out(self, prompt: str) -> bool:
        """Whether training may never draw `prompt`, by the prompt's own hash."""
        return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") < self._held_out_below

    def grade(self, response_text: str, gold_answer: str) -> Verdict:
        """Score of a response; see `m2po_jax.tasks.grade`."""
        return grade(response_text, gold_answer)

    def _stream(self, seed: tuple[int, ...], held_out: bool) -> Iterator[Problem]:
        """Problems of one side of the split, without end; ConfigError if there are too few to be found."""
        refused = 0
        for problem in self._all_problems(np.random.default_rng([*seed, int(held_out)])):
            if self.is_held_out(problem.prompt) == held_out:
                refused = 0
                yield problem
            elif (refused := refused + 1) == _MOST_REFUSED:
                side = "held-out" if held_out else "training"
                raise ConfigError(
                    f"task.held_out_fraction {self.config.held_out_fraction} leaves next to no {side} prompts:"
                    " move it towards 0.5, or raise task.max_operands"
                )

    def _all_problems(self, rng: np.random.Generator) -> Iterator[Problem]:
        low, high = self.config.min_operands, self.config.max_operands
        while True:
            lengths = rng.integers(low, high, size=256, endpoint=True)
            digits = rng.integers(0, 9, size=(256, high), endpoint=True)
            for length, row in zip(lengths, digits, strict=True):
                yield make_problem(row[:length].tolist())


def _slipped(problem: Problem, slip_rate: float, rng: np.random.Generator) -> str:
    total, *others = (int(operand) for operand in problem.prompt[:-1].split("+"))
    sums = []
    for terms, operand in enumerate(others, start=2):
        slip = rng.choice([-2, -1, 1, 2]) if rng.random() < slip_rate else 0
        widest = 10 ** len(str(9 * terms)) - 1
        total = min(max(0, total + operand + int(slip)), widest)
        sums.append(total)
    return ",".join(map(str, sums))


def make_problem(operands: list[int]) -> Problem:
    """The problem of adding `operands`, two or more whole numbers."""
    sums = np.cumsum(operands)[1:]
    return Problem(
        prompt="+".join(map(str, operands)) + "=",
        gold_answer=str(sums[-1]),
        demonstration=",".join(map(str, sums)),
    )
