"""Topologies by name, and what is said of those that do not exist."""

import importlib.util

import pytest

from m2po_jax.config import ConfigError, MeshConfig, UserError
from m2po_jax.models.chips import chip_of
from m2po_jax.models.mesh import make_mesh
from m2po_jax.planning import chips


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5q:2x4", "did you mean v5e:2x4"),
        ("", "Chips are v5e, v5p, v6e"),
        ("v5p:4x4", "v5p has 3 axes, as in v5p:2x2x1"),
        ("v5e:0x4", "v5e has 2 axes"),
        ("v5e", "v5e has 2 axes"),
    ],
)
def test_a_name_that_is_none_is_refused_in_one_line(name, said):
    with pytest.raises(UserError, match=said) as refusal:
        chips.topology(name)
    assert "\n" not in str(refusal.value)


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jax\[tpu\]==\d+\.\d+\.\d+"'):
        chips.topology("v5e:2x4")


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_devices_of_a_slice_are_known_as_its_chip(name):
    found = chips.topology(name)
    assert {chip_of(device.device_kind) for device in found.devices} == {found.chip}


@pytest.mark.tpu
def test_a_slice_has_its_chips():
    found = chips.topology("v5p:2x2x2")
    assert len(found.devices) == 8
    assert found.chip.name == "v5p"
    with pytest.raises(UserError, match="there is no topology v5e:3x5: use one of v5e:2x2"):
        chips.topology("v5e:3x5")


def test_every_chip_has_a_source_and_slices_in_order():
    for name, chip in chips.CHIPS.items():
        assert chip.source.startswith("https://")
        counts = [chips.chips_in(shape) for shape in chips.SLICES[name]]
        assert counts == sorted(counts)
        assert all(shape.count("x") == chip.dimensions - 1 for shape in chips.SLICES[name])


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=2, tensor=2), MeshConfig(fsdp=16), MeshConfig(tensor=2)])
def test_meshes_that_do_not_follow_the_shape_of_a_slice_are_made(mesh):
    devices = chips.topology("v6e:4x8").devices
    made = make_mesh(mesh, devices)
    assert dict(made.shape) == {"data": 32 // mesh.fsdp // mesh.tensor, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    assert {device.id for device in made.devices.flat} == {device.id for device in devices}


@pytest.mark.tpu
def test_each_of_several_slices_has_copies_of_its_own():
    from jax.experimental import topologies

    chips.topology("v5e:2x4")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=2).devices
    made = make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    for copy in made.devices:
        assert len({device.slice_index for device in copy.flat}) == 1
    with pytest.raises(ConfigError, match="mesh.data is 1 on 2 slices"):
        make_mesh(MeshConfig(fsdp=16), devices)
