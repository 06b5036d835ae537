"""Whole responses in rows: each once, no row overfull, few sizes, little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2po_jax.config import UserError
from m2po_jax.learner.packing import Packed, Packing, Sequences, Size, joined, micro_batches_of, row_width

PROMPT, RESPONSE = 9, 12


def sequences(prompt_lengths, response_lengths, prompt_width=PROMPT, response_width=RESPONSE) -> Sequences:
    """Every token of its own, so that none can stand for another."""
    prompt_lengths, response_lengths = (np.asarray(x, np.int32) for x in (prompt_lengths, response_lengths))
    rows, width = len(prompt_lengths), prompt_width + response_width
    tokens = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    inside = lambda lengths, width: np.arange(width) < lengths[:, None]  # noqa: E731
    return Sequences(
        np.where(inside(prompt_lengths, prompt_width), tokens[:, :prompt_width], 0),
        prompt_lengths,
        np.where(inside(response_lengths, response_width), tokens[:, prompt_width:], 0),
        response_lengths,
    )


def packed(packing: Packing, whole: Sequences) -> tuple[Size, list[Packed]]:
    """As hosts would: each needs what it needs, they agree on the largest, each packs its own."""
    pieces = [Sequences(*columns) for columns in zip(*(np.split(x, packing.parts) for x in whole), strict=True)]
    size = packing.size(np.max([packing.rows_needed(piece) for piece in pieces], axis=0))
    return size, [packing.pack(piece, size, index) for index, piece in enumerate(pieces)]


def assert_whole(rows: Packed, whole: Sequences, first_row: int = 0) -> None:
    """Every sequence once, whole, alone in its segment, its response where the packed batch says."""
    found = []
    for i, (row, start) in enumerate(zip(rows.row - first_row, rows.start, strict=True)):
        prompt = whole.prompt_tokens[i, : whole.prompt_lengths[i]]
        response = whole.response_tokens[i, : whole.response_lengths[i]]
        slots = rows.scored[row, start : start + len(response)]
        np.testing.assert_array_equal(rows.tokens[row, slots], response)
        begins = int(np.flatnonzero(rows.tokens[row] == prompt[0])[0])
        slots = np.arange(begins, begins + len(prompt) + len(response))
        np.testing.assert_array_equal(rows.tokens[row, slots], [*prompt, *response])
        (segment,) = set(rows.segment_ids[row, slots].tolist())
        assert segment > 0 and (rows.segment_ids[row] == segment).sum() == len(slots)
        found += [(row, slot) for slot in slots.tolist()]
    assert len(set(found)) == len(found) == (rows.segment_ids > 0).sum() == (rows.tokens > 0).sum()
    assert (rows.scored > 0).sum() == whole.response_lengths.sum()


@st.composite
def cases(draw):
    row_parts = draw(st.sampled_from([1, 2, 4]))
    parts = draw(st.sampled_from([n for n in (1, 2, 4) if row_parts % n == 0]))
    micro_batches = draw(st.integers(1, 4))
    responses = row_parts * micro_batches * draw(st.integers(1, 6))
    pairs = st.tuples(st.integers(1, PROMPT), st.integers(0, RESPONSE))
    prompt_lengths, response_lengths = zip(*draw(st.lists(pairs, min_size=responses, max_size=responses)), strict=True)
    width = draw(st.integers(PROMPT + RESPONSE, 3 * (PROMPT + RESPONSE)))
    packing = Packing(width, RESPONSE, responses, micro_batches, row_parts, parts)
    return packing, sequences(prompt_lengths, response_lengths)


@given(cases())
def test_every_response_is_packed_once_and_whole_by_the_host_that_has_it(case):
    packing, whole = case
    size, pieces = packed(packing, whole)
    assert size.rows in packing.rows_ladder and size.scored_width in packing.scored_widths
    assert size.rows <= packing.responses
    count = micro_batches_of(size.rows, packing.responses, packing.micro_batches)
    assert count <= packing.micro_batches and size.rows % (count * packing.row_parts) == 0
    for index, rows in enumerate(pieces):
        share = size.rows // packing.parts
        assert rows.tokens.shape == rows.segment_ids.shape == (share, packing.width)
        assert rows.scored.shape == (share, size.scored_width)
        assert ((rows.row >= index * share) & (rows.row < (index + 1) * share)).all()
        assert_whole(rows, Sequences(*(np.split(x, packing.parts)[index] for x in whole)), index * share)
    assert all(len(x) == n for x, n in zip(joined(pieces), (*[size.rows] * 3, *[packing.responses] * 2), strict=True))


def test_a_row_is_filled_before_the_next_one_is_begun():
    packing = Packing(width=10, response_width=8, responses=5)
    size, (rows,) = packed(packing, sequences([2, 1, 4, 1, 3], [5, 2, 3, 1, 3], 4, 8))
    assert size.rows == 3  # 7 and 3; 7 and 2; 6
    np.testing.assert_array_equal(rows.row, [0, 0, 1, 1, 2])
    np.testing.assert_array_equal((rows.segment_ids > 0).sum(axis=1), [10, 9, 6])
    np.testing.assert_array_equal(rows.start, [0, 5, 0, 3, 0])


def test_long_prompts_leave_few_logits():
    packing = Packing(width=64, response_width=8, responses=64)
    size, _ = packed(packing, sequences([20] * 64, [4] * 64, 56, 8))
    assert size == Size(rows=packing.rows_ladder[packing.rows_ladder.index(32)], scored_width=16)
    size, _ = packed(packing, sequences([2] * 64, [8] * 64, 56, 8))
    assert size.scored_width == 64


def test_responses_of_full_length_need_a_row_and_their_logits_each():
    packing = Packing(row_width(1536 + 2560), 2560, 512, micro_batches=16, row_parts=32)
    needed = packing.rows_needed(sequences([1536] * 512, [2560] * 512, 1536, 2560))
    assert packing.size(needed) == Size(512, 2560)


def test_rows_are_as_wide_as_the_kernel_wants_where_that_costs_little():
    assert row_width(21) == 21 and row_width(511) == 511
    assert row_width(512) == 512 and row_width(4000) == 4096


def test_fewer_rows_are_fewer_micro_batches_not_smaller_ones():
    assert [micro_batches_of(rows, 512, 16) for rows in (512, 480, 160, 32, 8)] == [16, 15, 5, 1, 1]
    assert all(rows <= 32 * micro_batches_of(rows, 512, 16) for rows in Packing(64, 32, 512, 16, 8).rows_ladder)


@pytest.mark.parametrize(("prompt", "response"), [(9, 13), (1, 13), (22, 0)])
def test_a_sequence_longer_than_a_row_is_refused(prompt, response):
    packing = Packing(width=21, response_width=12, responses=2)
    said = f"a prompt of {prompt} tokens with a response of {response} does not fit a row of 21, 12"
    with pytest.raises(UserError, match=said):
        packing.rows_needed(sequences([3, prompt], [4, response], 22, 13))
    with pytest.raises(UserError, match=said):
        packing.pack(sequences([3, prompt], [4, response], 22, 13), Size(2, 21))


def test_rows_that_do_not_hold_the_responses_are_refused():
    with pytest.raises(ValueError, match="3 responses need 2 rows, not 1"):
        Packing(21, 12, 3).pack(sequences([5, 5, 5], [5, 5, 5]), Size(1, 21))


@pytest.mark.parametrize("told", [{"row_parts": 8}, {"row_parts": 4, "parts": 3}, {"row_parts": 1, "parts": 2}])
def test_numbers_that_do_not_divide_are_refused(told):
    with pytest.raises(ValueError, match="do not divide"):
        Packing(21, 12, 12, **told)


@pytest.mark.parametrize(
    ("prompt", "response", "responses", "micro_batches", "row_parts"),
    [
        (1536, 2560, 512, 16, 1),
        (1536, 2560, 512, 16, 8),
        (1536, 2560, 512, 16, 32),
        (256, 1024, 256, 4, 1),
        (256, 1024, 256, 4, 8),
        (128, 256, 256, 1, 4),
    ],
)
def test_padding_stays_low_and_sizes_few_while_responses_grow_to_twice_their_length(
    prompt, response, responses, micro_batches, row_parts
):
    """Lognormal lengths whose mean goes from 20 % of the longest response to 40 %, prompts about 10 % of theirs."""
    rng = np.random.default_rng(0)
    lognormal = lambda mean, spread: np.exp(rng.normal(np.log(mean) - spread**2 / 2, spread, responses))  # noqa: E731
    packing = Packing(row_width(prompt + response), response, responses, micro_batches, row_parts)
    sizes, padding = set(), []
    for update in range(64):
        prompts = np.clip(lognormal(0.1 * prompt, 0.5), 8, prompt).astype(int)
        answers = np.clip(lognormal(0.2 * response * 2 ** (update / 63), 0.7), 1, response).astype(int)
        narrow: np.ndarray = np.zeros((responses, 0), np.int32)
        size = packing.size(packing.rows_needed(Sequences(narrow, prompts, narrow, answers)))
        sizes.add(size)
        padding.append(1 - (prompts + answers).sum() / (size.rows * packing.width))
    assert np.mean(padding) < 0.15 and max(padding) < 0.25
    assert len(sizes) <= (5 if responses == 512 else 6), sorted(sizes)
