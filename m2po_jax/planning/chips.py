"""Slices of TPU chips by name, such as v5p:4x4x4, without a TPU."""

import difflib
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from m2po_jax.config import UserError
from m2po_jax.models.chips import CHIPS, Chip

SLICES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
"""Shapes of slices that are offered, from small to large."""


@dataclass(frozen=True)
class Topology:
    """A slice of chips."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    """Descriptions of its devices, for which programs can be compiled."""


def topology(name: str) -> Topology:
    """The slice of this name; nothing of it needs to be there.

    Raises:
        UserError: there is no such chip or slice, or libtpu, which holds the compiler, is not installed.
    """
    chip, shape = _parsed(name)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f'libtpu, the TPU compiler, is missing: pip install "jax[tpu]=={jax.__version__}" (0.7 GB)')
    # Without these, libtpu looks for a TPU machine's metadata server, and for other processes that use a TPU.
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{shape}")
    except Exception as error:  # JAX raises several types, all of which mean that it knows no such slice
        said = (str(error).splitlines() or [repr(error)])[0]
        raise UserError(f"there is no topology {name}: use one of {_offered(chip)} ({said})") from error
    return Topology(f"{chip.name}:{shape}", chip, tuple(described.devices))


_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _parsed(name: str) -> tuple[Chip, str]:
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        near = difflib.get_close_matches(name, [f"{chip}:{s}" for chip, shapes in SLICES.items() for s in shapes], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"there is no topology {name!r}: {hint}Chips are {', '.join(CHIPS)}, as in v5p:4x4x4")
    chip = CHIPS[kind]
    sizes = shape.split("x")
    if len(sizes) != chip.dimensions or not all(re.fullmatch("[1-9][0-9]*", size) for size in sizes):
        raise UserError(f"there is no topology {name!r}: {kind} has {chip.dimensions} axes, as in {_offered(chip)}")
    return chip, shape


def _offered(chip: Chip) -> str:
    return ", ".join(f"{chip.name}:{shape}" for shape in SLICES[chip.name])


def chips_in(shape: str) -> int:
    """Chips of a slice of this shape: 64 for 4x4x4."""
    return math.prod(int(size) for size in shape.split("x"))
