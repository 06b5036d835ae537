"""Configurations and the plain data of a JSON file: strict reading, flat names, differences."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import cattrs

T = TypeVar("T")


def structured(data: Any, kind: type[T], refusal: type[ValueError]) -> T:
    """A dataclass of nested dataclasses from nested dicts, without conversions and unknown keys.

    Args:
        refusal: what the dataclasses raise when they check themselves; its text is given as it is.

    Raises:
        ValueError: with everything that is wrong, in one line.
    """
    try:
        return _converter().structure(data, kind)
    except refusal:
        raise
    except Exception as error:  # cattrs raises groups of many types; all of them mean bad input
        explain = partial(_explain_leaf, refusal=refusal)
        raise ValueError("; ".join(cattrs.transform_error(error, format_exception=explain))) from error


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted field -> (value in a, value in b), for the fields of two configurations that differ."""
    flat_a, flat_b = flatten(a), flatten(b)
    return {
        key: (flat_a.get(key), flat_b.get(key))
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key)
    }


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted field -> value of a (nested) dataclass or dict."""
    items = (
        config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    )
    flat: dict[str, Any] = {}
    for key, value in items.items():
        if isinstance(value, tuple) and any(dataclasses.is_dataclass(part) for part in value):
            value = {str(index): part for index, part in enumerate(value)}
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, str, bool):
        converter.register_structure_hook(kind, _strictly(kind))
    converter.register_structure_hook(float | bool | str, _hyperparameter)
    converter.register_structure_hook(float, lambda value, _: float(_strictly((int, float))(value, float)))
    return converter


def _strictly(kind: type | tuple[type, ...]) -> Callable[[Any, type], Any]:
    def structure(value: Any, _: type) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{value!r} is a {type(value).__name__}")
        return value

    return structure


def _hyperparameter(value: Any, _: Any) -> float | bool | str:
    if isinstance(value, bool | str):
        return value
    return float(_strictly((int, float))(value, float))


def _explain_leaf(error: BaseException, kind: type | None, refusal: type[ValueError]) -> str:
    if isinstance(error, refusal):
        return str(error)
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"unknown key {', '.join(sorted(error.extra_fields))}"
    wanted = getattr(kind, "__name__", str(kind))
    return f"expected {wanted}, but {error}"
