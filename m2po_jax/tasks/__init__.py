"""Prompts, demonstrations and right answers: the only package that knows what a right answer is."""

from m2po_jax.tasks.arithmetic import ArithmeticTask, Problem
from m2po_jax.tasks.grading import Verdict, grade
from m2po_jax.tasks.tokenizer import CharTokenizer, left_padded, right_padded

__all__ = ["ArithmeticTask", "CharTokenizer", "Problem", "Verdict", "grade", "left_padded", "right_padded"]
