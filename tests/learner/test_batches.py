from dataclasses import replace

import numpy as np
import pytest

from m2po_jax.config import Config, LearnerConfig, RolloutConfig, SamplingConfig
from m2po_jax.learner.batches import left_aligned_to_right, mini_batches, packing_of, padding_frac
from m2po_jax.learner.packing import Packing
from m2po_jax.rollouts import Rollouts


def rollouts(groups=4, size=2) -> Rollouts:
    rows = groups * size
    prompts = np.repeat(np.arange(groups), size)
    prompt_lengths = (1 + prompts % 3).astype(np.int32)
    response_lengths = (1 + np.arange(rows) % 4).astype(np.int32)
    ids = 10 * prompts[:, None] + np.arange(1, 4)
    return Rollouts(
        prompt_tokens=np.where(np.arange(3) < prompt_lengths[:, None], ids, 0).astype(np.int32),
        prompt_lengths=prompt_lengths,
        response_tokens=((np.arange(4) < response_lengths[:, None]) * 7).astype(np.int32),
        response_lengths=response_lengths,
        behavior_logprobs=np.where(np.arange(4) < response_lengths[:, None], -0.5, 0).astype(np.float32),
        rescored_logprobs=None,
        rewards=np.arange(rows, dtype=np.float32),
        prompt_ids=[f"p{i}" for i in prompts],
        group_ids=prompts.astype(np.int64),
        sample_indices=np.tile(np.arange(size), groups).astype(np.int32),
        finish_reasons=["length" if length == 4 else "stop" for length in response_lengths],
        response_texts=[""] * rows,
        gold_answers=["0"] * rows,
        temperature=1.0,
        top_p=1.0,
    )  # fmt: skip


def test_rows_are_cut_in_order_into_whole_groups_at_fixed_widths():
    source = rollouts()
    cut = mini_batches(source, 2, prompt_width=5, response_width=6, staleness_updates=256)
    assert len(cut) == 2
    np.testing.assert_array_equal(np.concatenate([batch.rewards for batch in cut]), source.rewards)
    for batch in cut:
        assert batch.prompt_tokens.shape == batch.prompt_valid.shape == (4, 5)
        assert batch.response_tokens.shape == batch.response_mask.shape == batch.behavior_logprobs.shape == (4, 6)
    np.testing.assert_array_equal(cut[0].response_mask.sum(axis=1), [1, 2, 3, 4])
    np.testing.assert_array_equal([batch.staleness for batch in cut], [[256] * 4, [257] * 4])
    np.testing.assert_array_equal(cut[0].response_tokens, 7 * cut[0].response_mask)
    np.testing.assert_array_equal(cut[0].behavior_logprobs, -0.5 * cut[0].response_mask)


def test_prompts_end_where_responses_begin():
    (batch,) = mini_batches(rollouts(), 1, prompt_width=4, response_width=4, staleness_updates=0)
    np.testing.assert_array_equal(
        batch.prompt_tokens[::2], [[0, 0, 0, 1], [0, 0, 11, 12], [0, 21, 22, 23], [0, 0, 0, 31]]
    )
    np.testing.assert_array_equal(batch.prompt_valid, batch.prompt_tokens > 0)


def test_truncation_is_what_the_record_says_not_what_the_width_suggests():
    source = rollouts()
    source.finish_reasons[0] = "length"  # of one token
    source.finish_reasons[3] = "stop"  # as long as the array
    (batch,) = mini_batches(source, 1, prompt_width=3, response_width=4, staleness_updates=0)
    np.testing.assert_array_equal(batch.truncated, [True, False, False, False, False, False, False, True])


@pytest.mark.parametrize(("count", "prompt", "response"), [(3, 5, 6), (2, 2, 6), (2, 5, 3)])
def test_what_does_not_fit_is_refused(count, prompt, response):
    with pytest.raises(ValueError, match="do not divide|does not fit"):
        mini_batches(rollouts(), count, prompt, response, 0)


PACKING = Packing(width=12, response_width=6, responses=4, row_parts=2, parts=2)


def test_packed_mini_batches_hold_the_same_responses():
    source = rollouts()
    plain = mini_batches(source, 2, 5, 6, 256)
    packed = mini_batches(source, 2, 5, 6, 256, PACKING)
    for ours, theirs in zip(packed, plain, strict=True):
        assert ours.prompt_tokens is None and ours.prompt_valid is None and theirs.packed is None
        for name in ("response_tokens", "response_mask", "behavior_logprobs", "rewards", "truncated", "staleness"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        rows = ours.packed
        assert rows.tokens.shape == (2, 12)
        assert (rows.segment_ids > 0).sum() == theirs.prompt_valid.sum() + theirs.response_mask.sum()
        np.testing.assert_array_equal(rows.row, [0, 0, 1, 1])
    assert padding_frac(packed[0]) == pytest.approx(1 - (1 + 1 + 2 + 2 + 1 + 2 + 3 + 4) / 24)
    assert padding_frac(plain[0]) == pytest.approx(1 - (1 + 1 + 2 + 2 + 1 + 2 + 3 + 4) / 44)


def test_hosts_that_agree_build_the_parts_of_one_packed_mini_batch():
    source = rollouts()
    whole = mini_batches(source, 2, 5, 6, 0, PACKING)
    needs = []

    def own(part, agree):
        rows = np.concatenate([np.arange(4)[part * 2 : part * 2 + 2] + start for start in (0, 4)])
        columns = {name: value[rows] for name, value in vars(source).items() if isinstance(value, np.ndarray)}
        texts = {name: [value[i] for i in rows] for name, value in vars(source).items() if isinstance(value, list)}
        return mini_batches(replace(source, **columns, **texts), 2, 5, 6, 0, PACKING, part, agree)

    for part in range(2):
        own(part, lambda needed: needs.append(needed) or needed)
    together = [own(part, lambda _: np.max(needs, axis=0)) for part in range(2)]
    for index, batch in enumerate(whole):
        for name, array in batch.packed._asdict().items():
            parts = [getattr(of_host[index].packed, name) for of_host in together]
            np.testing.assert_array_equal(np.concatenate(parts), array, err_msg=name)


def test_the_packing_of_a_run():
    config = Config(
        sampling=SamplingConfig(max_new_tokens=600),
        rollouts=RolloutConfig(prompts_per_batch=16, group_size=4),
        learner=LearnerConfig(updates_per_batch=4, micro_batches=2),
    )
    assert packing_of(config, 100, row_parts=8) == Packing(768, 600, 16, micro_batches=2, row_parts=8)
    assert packing_of(replace(config, learner=replace(config.learner, packing=False)), 100) is None


def test_padding_moves_from_right_to_left():
    tokens, valid = left_aligned_to_right(np.array([[5, 6, 9], [7, 9, 9], [1, 2, 3]], np.int32), np.array([2, 1, 3]))
    np.testing.assert_array_equal(tokens, [[0, 5, 6], [0, 0, 7], [1, 2, 3]])
    np.testing.assert_array_equal(valid, [[False, True, True], [False, False, True], [True, True, True]])
