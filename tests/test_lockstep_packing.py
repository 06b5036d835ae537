"""A run whose short responses are packed: the same one but for rounding, with less padding, and resumed to the bit."""

from dataclasses import replace

import numpy as np
import pytest

from tests import tiny
from tests.test_lockstep_mesh import BASE, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
LONG = replace(BASE, sampling=replace(BASE.sampling, max_new_tokens=24))
"""Responses take few of the tokens that they may take."""


def padding(run) -> float:
    return float(np.mean([line["padding_frac"] for line in tiny.lines(run) if line["event"] == "update"]))


@pytest.fixture(scope="module")
def packed(standard_promotion, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "packed"
    tiny.train(LONG, run, None)
    return run


def test_packing_changes_nothing_but_rounding(packed, tmp_path):
    run = tmp_path / "run"
    tiny.train(tiny.with_learner(LONG, packing=False), run, packed)
    assert_same(run, packed, 8)
    assert padding(packed) < 0.5 * padding(run)


def test_a_packed_run_is_resumed_to_the_bit(packed, tmp_path):
    run = tmp_path / "run"
    tiny.train(LONG, run, packed, tiny.Watcher(stop_at=4))
    tiny.train(LONG, run, None)
    assert tiny.weights_digest(run, 8) == tiny.weights_digest(packed, 8)
    assert tiny.lines(run) == tiny.lines(packed)
