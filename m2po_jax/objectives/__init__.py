"""Objectives: pure functions from log-probs, advantages and a mask to a loss. A new one is a file and a row here."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from m2po_jax.config import ConfigError
from m2po_jax.objectives import grpo, gspo, m2po, m2po_clip
from m2po_jax.objectives.advantages import group_advantages
from m2po_jax.objectives.masks import second_moment_mask
from m2po_jax.objectives.objective import Definition, Objective
from m2po_jax.objectives.tokens import no_statistics, sequence_count, token_count

__all__ = ["Objective", "defaults", "get", "group_advantages", "names", "second_moment_mask"]

OBJECTIVES = {
    "m2po": Definition(m2po.M2POConfig, m2po.statistics, m2po.token_loss, token_count),
    "m2po_clip": Definition(m2po.M2POConfig, m2po_clip.statistics, m2po_clip.token_loss, token_count),
    "grpo": Definition(grpo.ClipConfig, no_statistics, grpo.token_loss, token_count),
    "grpo_no_tr": Definition(grpo.NoTrustRegionConfig, no_statistics, grpo.token_loss_no_trust_region, token_count),
    "gspo": Definition(gspo.SequenceClipConfig, no_statistics, gspo.token_loss, sequence_count),
}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(OBJECTIVES)


def defaults(name: str) -> dict[str, float]:
    """Hyperparameters of an objective with their default values; ConfigError for an unknown name."""
    return dataclasses.asdict(_definition(name).config())


def get(name: str, **hyperparameters: Any) -> Objective:
    """The objective of that name, its defaults overridden by `hyperparameters`.

    Raises:
      ConfigError: unknown name or hyperparameter (with the nearest known one), a value that is no finite number, or one
        out of range.
    """
    definition = _definition(name)
    known = defaults(name)
    for key, value in hyperparameters.items():
        if key not in known:
            raise ConfigError(_unknown(f"objective {name} has no hyperparameter", key, known))
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"objective.{key} is {value!r}: use a finite number")
    config = definition.config(**{key: float(value) for key, value in hyperparameters.items()})
    return Objective(name, config, definition)


def _definition(name: str) -> Definition:
    if name not in OBJECTIVES:
        raise ConfigError(_unknown("there is no objective", name, OBJECTIVES))
    return OBJECTIVES[name]


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{what} {name!r}{hint} (known: {', '.join(known) or 'none'})"
