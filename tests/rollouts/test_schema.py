from dataclasses import replace

import numpy as np
import pytest

from m2po_jax.rollouts import concatenate


def test_concatenate_keeps_rows_in_order_and_pads_to_the_widest(make_rollouts, equal):
    a, b = make_rollouts(seed=1, longest=3), make_rollouts(seed=2, longest=9, first_group=7, rescored=False)
    both = concatenate([a, b])
    assert both.rows == a.rows + b.rows
    assert both.response_tokens.shape == (both.rows, 9)
    assert both.prompt_ids == a.prompt_ids + b.prompt_ids
    np.testing.assert_array_equal(both.group_ids, np.concatenate([a.group_ids, b.group_ids]))
    equal(concatenate([both]), both)
    first = [{name: value[: a.rows] if hasattr(value, "__len__") else value for name, value in vars(both).items()}]
    equal(replace(both, **first[0]), a)


def test_concatenate_refuses_what_does_not_belong_together(make_rollouts):
    a = make_rollouts()
    for other in (replace(a, temperature=1.0), replace(a, top_p=0.9), make_rollouts(rescored=True)):
        with pytest.raises(ValueError, match="differ"):
            concatenate([a, other])
    with pytest.raises(ValueError, match="nothing"):
        concatenate([])


def test_padded_never_cuts_a_row(make_rollouts):
    rollouts = make_rollouts(longest=6)
    longest = int(rollouts.response_lengths.max())
    wide = rollouts.padded(20, 30)
    assert wide.prompt_tokens.shape[1] == 20
    assert wide.behavior_logprobs.shape[1] == 30
    assert not wide.behavior_logprobs[:, longest:].any()
    with pytest.raises(ValueError, match=f"{longest} tokens"):
        rollouts.padded(20, longest - 1)


def test_units_order_by_version_batch_unit(unit):
    assert sorted([replace(unit, unit=2), replace(unit, version=0, unit=9), unit]) == [
        replace(unit, version=0, unit=9),
        unit,
        replace(unit, unit=2),
    ]
