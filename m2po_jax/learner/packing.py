"""Whole sequences one after the other in the rows of the model's input, so that little of it is padding; numpy alone.

Axis letters: B response, P prompt token, T response token, R row, S slot of a row, W response tokens of a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from m2po_jax.config import UserError

STEPS_PER_DOUBLING = 4
"""Numbers of rows that are compiled for, from one number to twice as many."""
SCORED_SHARES = (4, 2, 1)
"""Of a row's slots, one in so many may hold a response token: the numbers of logits of a row that are compiled for."""
SCORED_FILL = 0.9
"""Most of a number of them that is filled on average."""
SPARE = 1.1
"""Fewer of them may take so many times the rows."""
WIDE, LANES = 512, 128
"""Rows from `WIDE` on are a multiple of `LANES` slots wide, as the attention kernel of TPUs wants them."""

Agree = Callable[[np.ndarray], np.ndarray]
"""From what this host needs to what all need: the largest of each number over all hosts."""


class Sequences(NamedTuple):
    """Prompts with their responses, padded on the right."""

    prompt_tokens: np.ndarray
    """int32 (B, P)."""
    prompt_lengths: np.ndarray
    """int (B,)."""
    response_tokens: np.ndarray
    """int32 (B, T)."""
    response_lengths: np.ndarray
    """int (B,)."""

    @property
    def lengths(self) -> np.ndarray:
        """Of prompt and response together, int (B,)."""
        return self.prompt_lengths + self.response_lengths


class Packed(NamedTuple):
    """A mini-batch as the model sees it: rows of prompts with their responses, and where the responses lie."""

    tokens: Any
    """int32 (R, S), 0 on padding."""
    segment_ids: Any
    """int32 (R, S), 1 and up for the sequences of a row, 0 on padding."""
    scored: Any
    """int32 (R, W), slots of the response tokens of a row in order, 0 where it has fewer."""
    row: Any
    """int32 (B,), row of each response."""
    start: Any
    """int32 (B,), the place among the scored slots of its row at which a response begins."""


class Size(NamedTuple):
    """What a packed mini-batch is compiled for."""

    rows: int
    """R, of all hosts together."""
    scored_width: int
    """W."""


def row_width(longest: int) -> int:
    """Slots of a row that must hold a sequence of `longest` tokens."""
    return longest if longest < WIDE else -(-longest // LANES) * LANES


def micro_batches_of(rows: int, responses: int, micro_batches: int) -> int:
    """Micro-batches of so many packed rows: each has at most as many as it would have responses, were none packed."""
    return -(-rows // -(-responses // micro_batches))


@dataclass(frozen=True)
class Packing:
    """How the mini-batches of a run are packed.

    Each part of the responses is packed into rows of its own. Rows are dealt to micro-batches like cards, equally
    many to each; fewer rows are fewer micro-batches, each as large as memory was planned for. Raises ValueError where
    the numbers do not divide.
    """

    width: int
    """S."""
    response_width: int
    """T, the longest response."""
    responses: int
    """B of a mini-batch, all hosts together."""
    micro_batches: int = 1
    """Most parts that a mini-batch is cut into to save memory."""
    row_parts: int = 1
    """Parts of the mesh that compute rows of their own."""
    parts: int = 1
    """Contiguous parts of the responses that are packed apart, one for each host that has rows of its own."""

    def __post_init__(self):
        if self._micro_rows % self.row_parts:
            raise ValueError(f"{self.row_parts} parts of the mesh do not divide {self._micro_rows} rows")
        if self.row_parts % self.parts or self.responses % self.parts:
            raise ValueError(f"{self.parts} hosts do not divide {self.row_parts} parts or {self.responses} responses")

    @property
    def _micro_rows(self) -> int:
        return -(-self.responses // self.micro_batches)

    @cached_property
    def rows_ladder(self) -> tuple[int, ...]:
        """The numbers of rows that are compiled for, ascending, up to a row for each response."""
        most, fewest = self._micro_rows * self.micro_batches, self.row_parts
        steps = math.ceil(STEPS_PER_DOUBLING * math.log2(most / fewest)) if most > fewest else 0
        wanted = [max(most * 2.0 ** (-i / STEPS_PER_DOUBLING), fewest) for i in range(steps + 1)]
        return tuple(sorted({self._whole(math.ceil(rows - 1e-6)) for rows in wanted}))

    def _whole(self, rows: int) -> int:
        """So many rows, or the next number that micro-batches and the mesh divide."""
        unit = self.row_parts * micro_batches_of(rows, self.responses, self.micro_batches)
        return -(-rows // unit) * unit

    @cached_property
    def scored_widths(self) -> tuple[int, ...]:
        """The numbers W of response tokens of a row that are compiled for, ascending, up to the whole row."""
        return tuple(sorted({max(-(-self.width // share), self.response_width) for share in SCORED_SHARES}))

    def rows_needed(self, part: Sequences) -> np.ndarray:
        """Rows that one part needs at each of `scored_widths`, int64; hosts agree on the largest of each.

        Where a width has little room to spare it is a row for each response: what is compiled for is then a matter of
        the share of response tokens, which changes slowly, and not of how well the last ones fit.

        Raises:
            UserError: a sequence is longer than a row; it says how long.
        """
        self._require_room(part)
        share = part.response_lengths.sum() / max(part.lengths.sum(), 1)
        needed = np.full(len(self.scored_widths), len(part.lengths), np.int64)
        for i, most in enumerate(self.scored_widths):
            if most == self.width or share * self.width <= SCORED_FILL * most:
                needed[i] = _first_fit(part, self.width, most).max(initial=-1) + 1
        return needed

    def size(self, needed: np.ndarray) -> Size:
        """The smallest size for parts that need so many rows: fewest scored slots that take hardly more rows."""
        enough = next(i for i, rows in enumerate(needed.tolist()) if rows <= SPARE * needed[-1])
        rows = int(needed[enough]) * self.parts
        return Size(next(rung for rung in self.rows_ladder if rung >= rows), self.scored_widths[enough])

    def pack(self, part: Sequences, size: Size, index: int = 0) -> Packed:
        """One part in its share of the rows, longest sequences first, each in the first row that has room for it.

        Args:
            size: one that holds what `rows_needed` says.
            index: of the part; `row` counts the rows of all parts.

        Raises:
            UserError: a sequence is longer than a row.
            ValueError: the rows do not hold the part.
        """
        self._require_room(part)
        prompts, prompt_lengths_B, responses, response_lengths_B = part
        row_B = _first_fit(part, self.width, size.scored_width)
        rows = size.rows // self.parts
        if row_B.max(initial=-1) >= rows:
            raise ValueError(f"{len(row_B)} responses need {row_B.max() + 1} rows, not {rows}")
        segment_B, offset_B, start_B = _before(row_B, np.ones_like(row_B), part.lengths, response_lengths_B)
        tokens_RS, segment_ids_RS = np.zeros((2, rows, self.width), np.int32)
        scored_RW = np.zeros((rows, size.scored_width), np.int32)
        first_B = offset_B + prompt_lengths_B
        _place(tokens_RS, row_B, offset_B, prompt_lengths_B, prompts)
        _place(tokens_RS, row_B, first_B, response_lengths_B, responses)
        ids_BS = np.broadcast_to(segment_B[:, None] + 1, (len(row_B), self.width))
        _place(segment_ids_RS, row_B, offset_B, part.lengths, ids_BS)
        _place(scored_RW, row_B, start_B, response_lengths_B, first_B[:, None] + np.arange(responses.shape[1]))
        row_B = row_B + index * rows
        return Packed(tokens_RS, segment_ids_RS, scored_RW, row_B.astype(np.int32), start_B.astype(np.int32))

    def _require_room(self, part: Sequences) -> None:
        too_long = (part.lengths > self.width) | (part.response_lengths > self.response_width)
        if too_long.any():
            worst = int(too_long.argmax())
            raise UserError(
                f"a prompt of {part.prompt_lengths[worst]} tokens with a response of {part.response_lengths[worst]}"
                f" does not fit a row of {self.width}, {self.response_width} of them for the response:"
                " task.max_prompt_tokens or sampling.max_new_tokens is below that of the run that made it"
            )


def joined(parts: Sequence[Packed]) -> Packed:
    """All parts of a mini-batch, in order, as one."""
    return Packed(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _first_fit(part: Sequences, width: int, scored_width: int) -> np.ndarray:
    """Row of each sequence, int64 (B,): by falling size, each in the first row with room for it and its response.

    Those that not even the shortest one fits beside have the first rows, a row each.
    """
    lengths_B, scored_B = part.lengths, part.response_lengths
    alone_B = lengths_B + lengths_B.min(initial=width) > width
    row_B = np.cumsum(alone_B) - 1
    others = np.flatnonzero(~alone_B)
    free, free_scored = np.full(len(others), width), np.full(len(others), scored_width)
    sizes = np.maximum(lengths_B[others] / width, scored_B[others] / scored_width)
    for i in others[np.argsort(-sizes, kind="stable")].tolist():
        row = ((free >= lengths_B[i]) & (free_scored >= scored_B[i])).argmax()
        row_B[i] = row + len(lengths_B) - len(others)
        free[row] -= lengths_B[i]
        free_scored[row] -= scored_B[i]
    return row_B


def _before(row_B: np.ndarray, *amounts: np.ndarray) -> list[np.ndarray]:
    """For each amount a sequence has, (B,), the sum of those of the sequences before it in its row."""
    order = np.argsort(row_B, kind="stable")
    begins = np.searchsorted(row_B[order], row_B[order])
    found = []
    for amount_B in amounts:
        until = np.concatenate([[0], np.cumsum(amount_B[order])])
        before_B = np.empty(len(row_B), np.int64)
        before_B[order] = until[:-1] - until[begins]
        found.append(before_B)
    return found


def _place(
    into: np.ndarray, row_B: np.ndarray, start_B: np.ndarray, lengths_B: np.ndarray, values_BT: np.ndarray
) -> None:
    """Write the first `lengths_B` values of each sequence into its row from `start_B` on."""
    columns = np.arange(values_BT.shape[1])
    inside = columns < lengths_B[:, None]
    rows = np.broadcast_to(row_B[:, None], inside.shape)[inside]
    into[rows, (start_B[:, None] + columns)[inside]] = values_BT[inside]
