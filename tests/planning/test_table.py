"""What a plan says of its numbers."""

from dataclasses import replace

import pytest

from m2po_jax.models.chips import CHIPS, GiB
from m2po_jax.planning.costs import Costs, Traffic
from m2po_jax.planning.plan import GeneratorPlan, Memory, Plan, ProgramPlan
from m2po_jax.planning.roofline import Roofline
from m2po_jax.planning.table import to_text
from tests.planning.small import SMALL


def planned(gathered: int, summed: int, peak: int = 4 * GiB, tensor: int = 2) -> Plan:
    """A plan whose update computes for a second and sends this many GB."""
    chip = CHIPS["v5e"]
    sent = {"all-gather": gathered, "all-reduce": summed}
    traffic = {kind: Traffic(1, size * 10**9, size * 10**9) for kind, size in sent.items() if size}
    update = ProgramPlan(
        name="update",
        compile_s=1.0,
        memory=Memory(GiB, GiB, 0, peak - 2 * GiB, 0, peak, chip.hbm_bytes),
        costs=Costs(197e12, 197e12, 1e9, traffic),
        useful_flops=6e14,
        executed_flops=1e15,
        first_pass_flops=2e14,
        bounds=Roofline(1.0, 0.1, (gathered + summed) * 1e9 / chip.ici_bytes_per_s),
        most_mfu=0.6,
    )
    return Plan(SMALL, "v5e:2x4", chip, 8, {"data": 1, "fsdp": 8 // tensor, "tensor": tensor}, update, None, None)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (planned(30, 10), "20%   of the time of compute, so that they can be hidden"),
        (planned(50, 10), "30%   of the time of compute, less with --learner.micro-batches 1"),
        (planned(50, 10, peak=14 * GiB), "30%   of the time of compute, less with more rows a chip, but"),
        (planned(10, 50), "30%   of the time of compute, most of it sums over tensor: try --mesh.tensor 1"),
        (planned(10, 50, tensor=1), "less with --learner.micro-batches 1"),
    ],
)
def test_the_share_of_collectives_and_what_lowers_it(plan, said):
    text = to_text(plan)
    assert said in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_mfu_does_not_count_is_named():
    said = to_text(planned(30, 10))
    assert "20%   of the FLOPs: the pass from which the mask is taken" in said
    assert "20%   of the FLOPs: computed again for the backward pass (--model.remat dots: less)" in said


def test_a_generator_is_said_with_its_slice_and_tokens():
    plan = planned(30, 10)
    unit = GeneratorPlan("v5e:2x2", 4, 2, tokens=5000, program=replace(plan.update, name="generate"))
    said = to_text(replace(plan, generator=unit))
    assert "generation of one work unit on v5e:2x2: policy copied 2 times, each cut in 2" in said
    assert "no more than                 5,000   tokens/s, a bound too" in said


def test_what_does_not_fit_has_no_costs_and_is_said_with_a_way_out():
    chip = CHIPS["v5e"]
    refused = Memory(GiB, 2 * GiB, 0, 0, 0, 20 * GiB, chip.hbm_bytes, "Used 20.00G of 15.75G hbm")
    plan = replace(planned(30, 10), update=ProgramPlan("update", 1.0, refused))
    said = to_text(plan)
    assert not plan.fits
    assert "update DOES NOT FIT: use more micro-batches (--learner.micro-batches 4); or take a larger slice" in said
    assert "125% of the 16 of a v5e" in said and "FLOPs" not in said
