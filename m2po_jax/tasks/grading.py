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

    The last item must be a whole number and nothing else: `12,21,` and `12,21+` have no final answer. Numbers are
    compared digit by digit without their leading zeros, so that no length is too long.

    Args:
        response_text: the decoded response without its end token, e.g. `12,21,24`.
        gold_answer: the right number in decimal, e.g. `24`; anything else is never rewarded.
    """
    last = response_text.rsplit(",", 1)[-1]
    if not _WHOLE_NUMBER.match(last):
        return Verdict(0.0, "no number")
    if not _WHOLE_NUMBER.match(gold_answer):
        return Verdict(0.0, f"wrong: the gold answer {_shown(gold_answer)!r} is no whole number")
    if _significant(last) != _significant(gold_answer):
        return Verdict(0.0, f"wrong: {_shown(last)} is not {_shown(gold_answer)}")
    return Verdict(1.0, "right")


def _significant(digits: str) -> str:
    return digits.lstrip("0") or "0"


def _shown(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:20]}... ({len(text)} characters)"
