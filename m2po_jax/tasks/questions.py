"""Questions in words, from a JSON Lines file such as GSM8K's, whose answers are numbers."""

import hashlib
import json
from decimal import Decimal
from pathlib import Path

import numpy as np

from m2po_jax.config import ConfigError, TaskConfig, UserError
from m2po_jax.tasks.grading import Verdict, grade_number, last_number
from m2po_jax.tasks.task import Problem, Task
from m2po_jax.tasks.tokenizer import Tokenizer

_FINAL = "####"
"""Stands before the final answer in GSM8K's worked ones."""


class QuestionsTask(Task):
    """The questions of a file; each is held out or not by its own hash, and asked of a model with a tokenizer."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer):
        """Reads and encodes the file.

        Raises:
            UserError: the file is missing, or a line is no question.
            ConfigError: no question is left.
        """
        super().__init__(config, tokenizer)
        found = read_questions(str(config.questions))
        answered = [problem for problem in found if last_number(problem.gold_answer) is not None]
        lengths = {problem.prompt: len(self.prompt_tokens(problem)) for problem in answered}
        kept = [problem for problem in answered if 0 < lengths[problem.prompt] <= config.max_prompt_tokens]
        self.notes = tuple(
            f"{count} of the {len(found)} questions in {config.questions} left out: {why}"
            for count, why in (
                (len(found) - len(answered), "the answer is no number"),
                (len(answered) - len(kept), f"empty, or over task.max_prompt_tokens {config.max_prompt_tokens}"),
            )
            if count
        )
        self._training = [problem for problem in kept if not self.is_held_out(problem.prompt)]
        self._held_out = sorted(
            (problem for problem in kept if self.is_held_out(problem.prompt)), key=lambda problem: problem.prompt_id
        )
        if not self._training:
            why = "; ".join(self.notes) or "lower task.held_out_fraction, or give it more questions"
            raise ConfigError(f"{config.questions} leaves no question to train on: {why}")
        self._longest = max(lengths[problem.prompt] for problem in kept)

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest question that is not left out, in tokens."""
        return self._longest

    def draw(self, count: int, seed: tuple[int, ...]) -> list[Problem]:
        """`count` different training questions, or with repetition where there are fewer."""
        rows = len(self._training)
        picked = np.random.default_rng([*seed, 3]).choice(rows, count, replace=count > rows)
        return [self._training[row] for row in picked]

    def held_out(self, count: int) -> list[Problem]:
        """`count` different held-out questions, always the same ones; ConfigError if there are fewer."""
        if count > len(self._held_out):
            raise ConfigError(
                f"evaluation.prompts {count} is more than the {len(self._held_out)} held-out questions of"
                f" {self.config.questions}: lower it, or raise task.held_out_fraction"
            )
        return self._held_out[:count]

    def grade(self, response_text: str, gold_answer: str) -> Verdict:
        """The last number of the text counts; see `tasks.grade_number`."""
        return grade_number(response_text, gold_answer)


def read_questions(path: str) -> list[Problem]:
    """The questions of a file in order, a question that comes twice once.

    A line is a JSON object with `question` and `answer`, a number or a text. Where the text has `####`, as in GSM8K,
    the final answer is what comes after the last one.

    Raises:
        UserError: the file cannot be read, or a line is no question; it names the line.
    """
    problems: dict[str, Problem] = {}
    for number, line in enumerate(_text(path).split("\n"), start=1):  # other ends of lines may stand in a text
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_float=Decimal)
            question, answer = row["question"], row["answer"]
            f"{question}{answer}".encode()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} line {number} is no JSON object with question and answer: {error!r}") from error
        is_answer = isinstance(answer, str | int | float | Decimal) and not isinstance(answer, bool)
        if not isinstance(question, str) or not is_answer:
            raise UserError(f"{path} line {number}: question must be a text, and answer a text or a number")
        worked = f"{answer:f}" if isinstance(answer, Decimal) else str(answer)
        problems.setdefault(question, Problem(question, worked.rpartition(_FINAL)[-1].strip(), worked))
    if not problems:
        raise UserError(f"{path} holds no question")
    return list(problems.values())


def questions_sha256(path: str) -> str:
    """SHA-256 of the file's bytes; raises UserError if it cannot be read."""
    return hashlib.sha256(_bytes(path)).hexdigest()


def _text(path: str) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}") from error


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
