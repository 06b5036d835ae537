"""Where a run's generators may stand: a slice of their own, with copies of the policy cut over heads."""

import math
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from m2po_jax.config import Config, ConfigError
from m2po_jax.generation.sampler import slots_for
from m2po_jax.models import sharding
from m2po_jax.models.parameters import size
from m2po_jax.planning.chips import SLICES, Chip, chips_in
from m2po_jax.planning.storage import parameters

MATRIX_BYTES = 2
"""Bytes a number of what generators hold: matrices and cache, in bfloat16."""
ROOM = 0.6
"""Share of HBM that weights and cache may take; prefill and sampling need the rest."""


def smallest_slice(config: Config, chip: Chip) -> str:
    """Shape of the smallest slice of a chip that has room for the weights and the cache of a work unit.

    The largest one, if none has.
    """
    shapes = SLICES[chip.name]
    return next((shape for shape in shapes if _held(config, chips_in(shape)) <= ROOM * chip.hbm_bytes), shapes[-1])


def tensor_parts(config: Config, chips: int) -> int:
    """Into how many parts a copy of the policy is cut: as many as divide chips, heads, middle and vocabulary alike."""
    sizes = (size(config.model, letter) for letter in "HKFV")
    return math.gcd(chips, *sizes)


def require_copies(config: Config, topology: str, chips: int) -> None:
    """Raises ConfigError unless the copies of the policy on a slice get equal numbers of a work unit's prompts."""
    prompts, copies = config.rollouts.prompts_per_unit, chips // tensor_parts(config, chips)
    if prompts % copies:
        raise ConfigError(
            f"{prompts} prompts of a work unit (rollouts.units_per_batch) cannot be cut over the {copies} copies of the"
            f" policy on {topology}: use fewer units, or a smaller --generator-topology"
        )


def abstract_published(config: Config, mesh: Mesh) -> Any:
    """The parameters as generators read them, as shapes with their shardings: matrices bfloat16, vectors float32."""
    abstract = sharding.abstract_params(config.model, mesh)
    return sharding.published(abstract, replace(config.model, compute_dtype="bfloat16"))


def _held(config: Config, chips: int) -> float:
    model, rollouts, tensor = config.model, config.rollouts, tensor_parts(config, chips)
    prompt = config.task.max_prompt_tokens
    responses = rollouts.prompts_per_unit * rollouts.group_size
    slots = slots_for(config.sampling, responses, chips // tensor)
    tokens = slots * (prompt + config.sampling.max_new_tokens) + rollouts.prompts_per_unit * prompt
    cache = tokens * 2 * model.layers * model.kv_heads * model.head_dim
    return MATRIX_BYTES * (parameters(config) / tensor + cache / chips)
