"""Closed-form FLOPs of sequences of any lengths, and chips by the kinds of devices."""

import pytest

from m2po_jax.models import flops
from m2po_jax.models.chips import CHIPS, chip_of
from tests.planning.small import SMALL


def test_sums_of_sequences_are_what_one_pass_over_each_costs():
    whole = flops.forward(SMALL.model, flops.Work(tokens=5 + 9, pairs=15 + 45, responses=2 + 3))
    parts = [
        flops.forward(SMALL.model, flops.Work(tokens=n, pairs=n * (n + 1) / 2, responses=r))
        for n, r in ((5, 2), (9, 3))
    ]
    assert whole.total == sum(part.total for part in parts)


@pytest.mark.parametrize(("kind", "name"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e")])
def test_devices_are_of_chips(kind, name):
    assert chip_of(kind) is CHIPS[name]
    assert chip_of("cpu") is None
