"""The mesh of devices that a configuration asks for."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from m2po_jax.config import ConfigError, MeshConfig
from m2po_jax.models.sharding import BATCH_AXES, MESH_AXES, batch_sharding


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of (data, fsdp, tensor) with Auto axes over all of `devices`.

    By default those are JAX's, or, with `mesh.data` set, and in one process, as many of them as are asked for.
    Neighbours in the mesh are neighbours in a TPU slice as far as its shape allows. Of several slices, which are joined
    by a slower network, each has copies of its own.

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
    shape = count, config.fsdp, config.tensor
    return Mesh(_arranged(shape, devices), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def _arranged(shape: tuple[int, int, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices as an array of this shape."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if shape[0] % slices:
        raise ConfigError(f"mesh.data is {shape[0]} on {slices} slices: each has copies of its own, so use a multiple")
    try:
        if slices == 1:
            return mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)
        each, across = (shape[0] // slices, *shape[1:]), (slices, 1, 1)
        return mesh_utils.create_hybrid_device_mesh(each, across, list(devices), allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"a mesh of data {shape[0]}, fsdp {shape[1]} and tensor {shape[2]} does not fit the shape of the slice"
            f" ({(str(error).splitlines() or ['no arrangement'])[0][:120]}): use other sizes"
        ) from error


def require_rows(rows: int, name: str, mesh: Mesh) -> None:
    """Raises ConfigError unless every part of the mesh that computes rows of its own gets as many of `rows`.

    `name` says what the rows are, and what to change.
    """
    parts = row_parts(mesh)
    if rows % parts:
        raise ConfigError(
            f"{rows} {name} cannot be cut into the {parts} parts of mesh.data {mesh.shape['data']} times mesh.fsdp"
            f" {mesh.shape['fsdp']}: use a mesh of fewer parts, such as mesh.data 1, or more rows"
        )


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of the rows of a batch lie on devices of this host, in order, int64 (R,)."""
    where = batch_sharding(mesh).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[index] for index in where.values()]))


def row_parts(mesh: Mesh) -> int:
    """Parts of the mesh that compute rows of their own."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def row_shares(mesh: Mesh) -> int:
    """Of how many equal shares of the rows this host has one; 1 where it has all of them."""
    parts = row_parts(mesh)
    return parts // len(local_rows(mesh, parts))


def placed(mesh: Mesh, batch: Any) -> Any:
    """A batch on the mesh, from numpy arrays of the `local_rows` of each host."""
    where, shares = batch_sharding(mesh), row_shares(mesh)
    put = lambda x: jax.make_array_from_process_local_data(where, x, (len(x) * shares, *x.shape[1:]))  # noqa: E731
    return jax.tree.map(put, batch)


def held(batch_array: Array) -> np.ndarray:
    """The `local_rows` of an array, on this host."""
    if batch_array.is_fully_addressable:
        return np.asarray(jax.device_get(batch_array))
    parts = {shard.index[0].start or 0: shard.data for shard in batch_array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
