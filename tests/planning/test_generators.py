"""Slices of generators: room for the policy and a work unit, heads that divide."""

from dataclasses import replace

import pytest

from m2po_jax import catalog
from m2po_jax.config import ConfigError, MeshConfig
from m2po_jax.models.chips import CHIPS
from m2po_jax.models.mesh import make_mesh
from m2po_jax.planning.chips import SLICES
from m2po_jax.planning.generators import abstract_published, require_copies, smallest_slice, tensor_parts
from m2po_jax.planning.programs import device_bytes
from m2po_jax.planning.storage import parameters
from tests.planning.small import SMALL

PLANS = "experiments/plans.py"


def test_a_small_policy_needs_the_smallest_slice():
    assert [smallest_slice(SMALL, chip) for chip in CHIPS.values()] == [SLICES[name][0] for name in CHIPS]


def test_a_large_policy_needs_a_larger_slice_of_a_smaller_chip():
    large = catalog.find_config(f"{PLANS}:qwen2-5-32b")
    shapes = {name: smallest_slice(large, chip) for name, chip in CHIPS.items()}
    assert SLICES["v5e"].index(shapes["v5e"]) > SLICES["v6e"].index(shapes["v6e"]) > 0


def test_what_fits_nowhere_is_planned_on_the_largest_slice():
    endless = replace(SMALL, sampling=replace(SMALL.sampling, max_new_tokens=10**12))
    assert smallest_slice(endless, CHIPS["v5e"]) == "16x16"


def test_a_copy_is_cut_into_as_many_parts_as_divide_everything():
    assert tensor_parts(SMALL, 4) == 2  # two heads
    assert tensor_parts(catalog.find_config(f"{PLANS}:qwen2-5-math-7b"), 16) == 4  # four heads of keys and values
    assert tensor_parts(catalog.find_config(f"{PLANS}:qwen3-8b"), 4) == 4


def test_copies_that_get_unequal_parts_of_a_work_unit_are_refused():
    require_copies(SMALL, "v5e:2x4", 8)  # 8 prompts over 4 copies
    with pytest.raises(ConfigError, match="8 prompts of a work unit .* over the 16 copies .* on v5e:4x8"):
        require_copies(SMALL, "v5e:4x8", 32)


def test_matrices_are_published_in_half_the_bytes(devices):
    mesh = make_mesh(MeshConfig(tensor=2), devices[:4])
    found = device_bytes(abstract_published(SMALL, mesh))
    assert found == pytest.approx(2 * parameters(SMALL) / 2, rel=0.01)
