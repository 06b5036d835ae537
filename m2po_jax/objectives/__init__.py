"""Objectives: pure functions from log-probs, advantages and a mask to a loss. A new one is a file and a row here."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, get_args, get_type_hints

from m2po_jax.config import ConfigError
from m2po_jax.objectives import (
    cispo,
    dapo,
    decoupled_ppo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    icepop,
    m2po,
    m2po_all_tokens,
    m2po_clip,
    sapo,
    tis,
    topr,
)
from m2po_jax.objectives.advantages import Normalization, group_advantages, overlong_penalty
from m2po_jax.objectives.masks import second_moment_mask
from m2po_jax.objectives.objective import Definition, Objective

__all__ = [
    "Objective",
    "defaults",
    "get",
    "group_advantages",
    "names",
    "normalization",
    "overlong_penalty",
    "second_moment_mask",
]

Value = float | str | bool

OBJECTIVES = {
    "m2po": Definition(m2po.M2POConfig, m2po.token_loss, m2po.statistics),
    "m2po_clip": Definition(m2po.M2POConfig, m2po_clip.token_loss, m2po_clip.statistics),
    "m2po_all_tokens": Definition(
        m2po_all_tokens.M2POAllTokensConfig, m2po_all_tokens.token_loss, m2po_all_tokens.statistics, proximal=True
    ),
    "grpo": Definition(grpo.GRPOConfig, grpo.token_loss),
    "grpo_no_tr": Definition(grpo.NoTrustRegionConfig, grpo.token_loss_no_trust_region),
    "gspo": Definition(gspo.GSPOConfig, gspo.token_loss),
    "dapo": Definition(dapo.DAPOConfig, dapo.token_loss),
    "dr_grpo": Definition(dr_grpo.DrGRPOConfig, dr_grpo.token_loss, normalize_advantages="none"),
    "cispo": Definition(cispo.CISPOConfig, cispo.token_loss),
    "decoupled_ppo": Definition(decoupled_ppo.DecoupledPPOConfig, decoupled_ppo.token_loss, proximal=True),
    "tis": Definition(tis.TISConfig, tis.token_loss, proximal=True),
    "icepop": Definition(icepop.IcePopConfig, icepop.token_loss, proximal=True),
    "sapo": Definition(sapo.SAPOConfig, sapo.token_loss),
    "topr": Definition(topr.TOPRConfig, topr.token_loss),
    "gmpo": Definition(gmpo.GMPOConfig, gmpo.token_loss),
}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(OBJECTIVES)


def defaults(name: str) -> dict[str, Value]:
    """Hyperparameters of an objective with their default values; ConfigError for an unknown name."""
    return dataclasses.asdict(_definition(name).config())


def normalization(name: str) -> Normalization:
    """How the paper that defines an objective normalises group advantages: `std` or `none`."""
    return _definition(name).normalize_advantages


def get(name: str, **hyperparameters: Any) -> Objective:
    """The objective of that name, its defaults overridden by `hyperparameters`.

    Raises:
      ConfigError: unknown name or hyperparameter (with the nearest known one), a value of the wrong kind, or one out
        of range.
    """
    definition = _definition(name)
    kinds = get_type_hints(definition.config)
    known = defaults(name)
    for key in hyperparameters:
        if key not in known:
            raise ConfigError(_unknown(f"objective {name} has no hyperparameter", key, known))
    values: dict[str, Any] = {key: _checked(key, kinds[key], value) for key, value in hyperparameters.items()}
    return Objective(name, definition.config(**values), definition)


def _checked(key: str, kind: Any, value: Any) -> Value:
    """The value as its field's type; ConfigError where it is none."""
    if choices := get_args(kind):
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"objective.{key} is {value!r}: use one of {', '.join(choices)}")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"objective.{key} is {value!r}: use True or False")
        return value
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"objective.{key} is {value!r}: use a finite Python number")
    return number


def _definition(name: str) -> Definition:
    if not isinstance(name, str):
        raise ConfigError(f"the name of an objective is a string, not {name!r} (known: {', '.join(OBJECTIVES)})")
    if name not in OBJECTIVES:
        raise ConfigError(_unknown("there is no objective", name, OBJECTIVES))
    return OBJECTIVES[name]


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{what} {name!r}{hint} (known: {', '.join(known) or 'none'})"
