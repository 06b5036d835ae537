"""Prompts, demonstrations and right answers: the only package that knows what a right answer is."""

from m2po_jax.config import TaskConfig
from m2po_jax.tasks.arithmetic import ArithmeticTask
from m2po_jax.tasks.grading import Verdict, grade, grade_number
from m2po_jax.tasks.questions import QuestionsTask, questions_sha256
from m2po_jax.tasks.task import Problem, Task
from m2po_jax.tasks.tokenizer import CharTokenizer, ModelTokenizer, Tokenizer, left_padded, right_padded

__all__ = [
    "ArithmeticTask",
    "CharTokenizer",
    "ModelTokenizer",
    "Problem",
    "QuestionsTask",
    "Task",
    "Tokenizer",
    "Verdict",
    "grade",
    "grade_number",
    "left_padded",
    "make_task",
    "questions_sha256",
    "right_padded",
]


def make_task(config: TaskConfig, source: str | None = None) -> Task:
    """The task of a run; `source` is the directory of a model that brings its own tokenizer, None for characters.

    Raises:
        UserError: the tokenizer or the questions cannot be read.
        ConfigError: no prompt is left, or the tokenizer has no chat template.
    """
    tokenizer = None if source is None else ModelTokenizer(source, config.template, config.chat)
    if config.name == "questions" and tokenizer is not None:
        return QuestionsTask(config, tokenizer)
    return ArithmeticTask(config, tokenizer)
