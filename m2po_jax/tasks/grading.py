"""Scoring a response: 1 if its last number is the right one, else 0."""

import re
from dataclasses import dataclass
from fractions import Fraction

_WHOLE_NUMBER = re.compile(r"[0-9]+\Z")
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?P<above>(?:(?<![\w)\]}}])-)?{_DIGITS})(?:/(?P<below>{_DIGITS}))?")
_LONGEST_NUMBER = 40


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


def grade_number(response_text: str, gold_answer: str) -> Verdict:
    """Compare the last number of a text with the gold number, as exact fractions: `$1,234.50.` is 1234.5.

    A minus sign counts where no digit, letter or bracket stands before it; `3/4` is one number.

    Args:
        response_text: the decoded response without its end token.
        gold_answer: a text whose last number is the right one; without a number, nothing is rewarded.
    """
    found, gold = last_number(response_text), last_number(gold_answer)
    if found is None:
        return Verdict(0.0, "no number")
    if gold is None:
        return Verdict(0.0, f"wrong: the gold answer {_shown(gold_answer)!r} is no number")
    if found != gold:
        return Verdict(0.0, f"wrong: {_shown(str(found))} is not {_shown(str(gold))}")
    return Verdict(1.0, "right")


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text; None if there is none, or if it is over 40 characters or divides by 0."""
    for found in reversed(list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))):
        if len(found.group()) > _LONGEST_NUMBER:
            return None
        above, below = (Fraction((part or "1").replace(",", "")) for part in found.group("above", "below"))
        return above / below if below else None
    return None
