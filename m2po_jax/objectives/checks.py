"""Shapes and dtypes of a public function's arguments, checked when it is called or traced; a fault is one line."""

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

Function = TypeVar("Function", bound=Callable[..., Any])

_LONGEST = 100


def checked(function: Function) -> Function:
    """The function with its jaxtyping annotations enforced.

    Raises:
      TypeError: an argument has another shape or dtype; one line that names it, what it is and what it should be.
    """
    strict = jaxtyped(typechecker=beartype)(function)
    name = function.__name__ if function.__name__ != "__call__" else "objective"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return strict(*args, **kwargs)
        except TypeCheckError as error:
            raise TypeError(f"{name}: {_one_line(str(error))}") from None

    return cast(Function, call)


def _one_line(text: str) -> str:
    name = _first(r"parameter '([^'\n]*)'", text)
    found, wanted = _first(r"Actual value: (.*)", text), _first(r"Expected type: (.*)", text)
    axes = re.findall(r"^([A-Za-z]\w*)=(\d+)$", text, re.MULTILINE)
    sizes = f", where {', '.join(f'{axis} = {size}' for axis, size in axes)}" if axes else ""
    found = found if len(found) <= _LONGEST else f"{found[:_LONGEST]}..."
    return f"parameter '{name}' is {found}: use {_in_words(wanted)}{sizes}"


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else "?"


def _in_words(annotation: str) -> str:
    """`Float[Array, "B #T"]` as `a float array (B, 1 or T)`."""
    match = re.search(r"(\w+)\[[^\['\"]*['\"]([^'\"]*)['\"]\]", annotation)
    if not match:
        return annotation
    axes = ", ".join(re.sub(r"^#", "1 or ", axis) for axis in match.group(2).split())
    kind = match.group(1).lower()
    return f"a{'n' if kind[0] in 'aeiou' else ''} {kind} array ({axes})"
