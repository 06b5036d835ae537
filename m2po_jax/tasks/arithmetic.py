"""Procedural addition that needs a chain: `7+5+9+3=` is answered with its running sums, `12,21,24`."""

from collections.abc import Iterator

import numpy as np

from m2po_jax.config import ConfigError, TaskConfig
from m2po_jax.tasks.grading import Verdict, grade, grade_number
from m2po_jax.tasks.task import Problem, Task
from m2po_jax.tasks.tokenizer import CharTokenizer, Tokenizer

_MOST_REFUSED = 20_000
"""Draws in a row that bring nothing, after which there counts as nothing more to be found."""


class ArithmeticTask(Task):
    """Addition in characters for a model of our own, or asked of a model with a tokenizer of its own."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer | None = None):
        """`tokenizer` is the model's; without one, a token a character.

        Raises:
            ConfigError: the longest prompt is over `task.max_prompt_tokens`.
        """
        super().__init__(config, tokenizer or CharTokenizer("0123456789+=,"))
        self._in_characters = tokenizer is None
        alike = [make_problem([digit] * config.max_operands) for digit in range(10)]
        self._longest = max(len(self.tokenizer.prompt(problem.prompt)) for problem in alike)
        if not self._in_characters and self._longest > config.max_prompt_tokens:
            raise ConfigError(f"task.max_prompt_tokens {config.max_prompt_tokens} is below a prompt of {self._longest}")

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt: in characters, a digit and a sign for each operand."""
        return self._longest

    def prompt_tokens(self, problem: Problem) -> list[int]:
        """Token ids of the problem's prompt; ConfigError if it is longer than those of equal digits."""
        tokens = super().prompt_tokens(problem)
        if len(tokens) > self._longest:
            raise ConfigError(
                f"{problem.prompt} has {len(tokens)} tokens, more than the {self._longest} of equal digits"
            )
        return tokens

    @property
    def max_response_tokens(self) -> int:
        """Longest worked response in characters with its end token: the one to nines alone."""
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

    def grade(self, response_text: str, gold_answer: str) -> Verdict:
        """The last item of a chain in characters (`tasks.grade`), the last number of a text (`tasks.grade_number`)."""
        return (grade if self._in_characters else grade_number)(response_text, gold_answer)

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
