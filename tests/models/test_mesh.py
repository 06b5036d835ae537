"""Meshes from a configuration, and which are refused."""

import pytest
from jax.sharding import AxisType

from m2po_jax.config import ConfigError, MeshConfig
from m2po_jax.models.mesh import make_mesh, require_rows


def test_what_is_left_of_the_devices_are_copies(devices):
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), devices)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert dict(make_mesh(MeshConfig(data=8), devices).shape) == {"data": 8, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (MeshConfig(fsdp=3), "mesh.fsdp 3 times mesh.tensor 1 does not divide 8 devices"),
        (MeshConfig(fsdp=16), "mesh.fsdp 16 times mesh.tensor 1 does not divide 8 devices"),
        (MeshConfig(data=3, fsdp=2), "leave mesh.data out, or use 4"),
    ],
)
def test_parts_that_are_not_the_devices_are_refused(mesh, said, devices):
    with pytest.raises(ConfigError, match=said):
        make_mesh(mesh, devices)


def test_rows_must_divide(devices):
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), devices)
    require_rows(8, "rows", mesh)
    with pytest.raises(ConfigError, match="6 rows cannot be cut into the 4 parts of mesh.data 2 times mesh.fsdp 2"):
        require_rows(6, "rows", mesh)


def test_no_parts_are_refused():
    with pytest.raises(ConfigError, match="mesh.fsdp is 0: use 1 or more parts"):
        MeshConfig(fsdp=0)
