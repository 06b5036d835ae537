"""The mesh of devices that a configuration asks for."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from m2po_jax.config import ConfigError, MeshConfig
from m2po_jax.models.sharding import BATCH_AXES, MESH_AXES


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of (data, fsdp, tensor) with Auto axes over all of `devices`.

    By default those are JAX's, or, with `mesh.data` set, and in one process, as many of them as are asked for.

    Raises:
        ConfigError: the devices do not divide into the parts asked for.
    """
    copy = config.fsdp * config.tensor
    if devices is None:
        asked_for = config.data * copy if config.data is not None and jax.process_count() == 1 else None
        devices = jax.devices()[:asked_for]
    count, left = divmod(len(devices), copy)
    if left or not count:
        raise ConfigError(
            f"mesh.fsdp {config.fsdp} times mesh.tensor {config.tensor} does not divide {len(devices)} devices"
        )
    if config.data not in (None, count):
        raise ConfigError(
            f"mesh.data {config.data} times mesh.fsdp {config.fsdp} times mesh.tensor {config.tensor} is not"
            f" {len(devices)}, the number of devices: leave mesh.data out, or use {count}"
        )
    return jax.make_mesh(
        (count, config.fsdp, config.tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def require_rows(rows: int, name: str, mesh: Mesh) -> None:
    """Raises ConfigError unless every part of the mesh that computes rows of its own gets as many of `rows`.

    `name` says what the rows are, and what to change.
    """
    parts = 1
    for axis in BATCH_AXES:
        parts *= mesh.shape[axis]
    if rows % parts:
        raise ConfigError(
            f"{rows} {name} cannot be cut into the {parts} parts of mesh.data {mesh.shape['data']} times mesh.fsdp"
            f" {mesh.shape['fsdp']}"
        )
