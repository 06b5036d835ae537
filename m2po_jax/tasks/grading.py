"""Scoring a response: 1 if its last number is the right one, else 0."""

import re
from dataclasses import dataclass

_WHOLE_NUMBER = re.compile(r"[0-9]+\Z")


@dataclass(frozen=True)
class Verdict:
    """What the grader decided, and why."""

    score: float
    """1.0 or 0.0."""
    reason: str
    """`right`, `wrong: ...` or `no number`, for people and notebooks."""


def grade(response_text: str, gold_answer: str) -> Verdict:
    """Compare the last comma-separated item of a chain with the gold number; the steps before it are not scored.

    The last item must be a whole number and nothing else: `12,21,` and `12,21+` have no final answer.

    Args:
        response_text: the decoded response without its end token, e.g. `12,21,24`.
        gold_answer: the right number in decimal, e.g. `24`.
    """
    last = response_text.rsplit(",", 1)[-1]
    if not _WHOLE_NUMBER.match(last):
        return Verdict(0.0, "no number")
    if int(last) != int(gold_answer):
        return Verdict(0.0, f"wrong: {last} is not {gold_answer}")
    return Verdict(1.0, "right")
