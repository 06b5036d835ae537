"""From rollouts to the mini-batches of one batch."""

import jax
import numpy as np
from jax.sharding import Mesh

from m2po_jax.config import Config
from m2po_jax.learner.packing import Agree, Packed, Packing, Sequences, joined, row_width
from m2po_jax.learner.update import MiniBatch
from m2po_jax.models.mesh import local_rows, placed, row_shares
from m2po_jax.rollouts import Rollouts


def packing_of(config: Config, max_prompt_tokens: int, row_parts: int = 1, parts: int = 1) -> Packing | None:
    """How a run's mini-batches are packed, or None where they are not; as `Packing` says."""
    if not config.learner.packing:
        return None
    return Packing(
        width=row_width(max_prompt_tokens + config.sampling.max_new_tokens),
        response_width=config.sampling.max_new_tokens,
        responses=config.mini_batch_rows,
        micro_batches=config.learner.micro_batches,
        row_parts=row_parts,
        parts=parts,
    )


def mini_batches(
    rollouts: Rollouts,
    count: int,
    prompt_width: int,
    response_width: int,
    staleness_updates: int | np.ndarray,
    packing: Packing | None = None,
    part: int | None = None,
    agree: Agree = lambda needed: needed,
) -> list[MiniBatch]:
    """Cut rollouts into `count` mini-batches of whole groups, in order, at fixed widths or packed.

    Args:
        staleness_updates: their age at the first update, of all or int (R,); each later one finds them an update older.
        packing: None for a response a row.
        part: the part of `packing` that these rollouts are of every mini-batch; None for all of it.
        agree: called once, with what each mini-batch needs, int64 (count, ...).

    Raises:
        ValueError: a row does not fit the widths, or the rows do not divide by `count`.
    """
    if rollouts.rows % count:
        raise ValueError(f"{rollouts.rows} responses do not divide into {count} mini-batches")
    rollouts = rollouts.padded(prompt_width, response_width)
    size = rollouts.rows // count
    whole = _unpacked(rollouts)._replace(
        staleness=np.asarray(staleness_updates, np.int32) + np.arange(rollouts.rows, dtype=np.int32) // size,
    )
    cuts = [slice(start, start + size) for start in range(0, rollouts.rows, size)]
    batches: list[MiniBatch] = [jax.tree.map(lambda x, cut=cut: x[cut], whole) for cut in cuts]
    if packing is None:
        return batches
    packed = _packed(rollouts, cuts, packing, part, agree)
    bare = (batch._replace(prompt_tokens=None, prompt_valid=None) for batch in batches)
    return [batch._replace(packed=rows) for batch, rows in zip(bare, packed, strict=True)]


def on_mesh(batch: MiniBatch, mesh: Mesh) -> MiniBatch:
    """A mini-batch on the mesh; of several hosts each has its own responses, packed in rows of its own."""
    if batch.packed is not None:
        rows = local_rows(mesh, len(batch.packed.tokens) * row_shares(mesh))
        row = rows[batch.packed.row].astype(np.int32)
        batch = batch._replace(packed=batch.packed._replace(row=row))
    whole: MiniBatch = placed(mesh, batch)
    return whole


def padding_frac(batch: MiniBatch) -> float:
    """Share of the model's input that holds no token, of a mini-batch on the host."""
    if batch.packed is not None:
        return 1.0 - float(np.mean(batch.packed.segment_ids > 0))
    real = np.concatenate([np.asarray(batch.prompt_valid), np.asarray(batch.response_mask)], axis=1)
    return 1.0 - float(np.mean(real))


def left_aligned_to_right(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move padding from the right to the left: int32 (R, P) and lengths (R,) to tokens and validity (R, P)."""
    width = tokens.shape[1]
    source = np.arange(width)[None, :] - (width - lengths[:, None])
    valid = source >= 0
    return np.where(valid, np.take_along_axis(tokens, np.maximum(source, 0), axis=1), 0), valid


def _unpacked(rollouts: Rollouts) -> MiniBatch:
    """All rollouts, a response a row, of age 0."""
    prompt_tokens, prompt_valid = left_aligned_to_right(rollouts.prompt_tokens, rollouts.prompt_lengths)
    return MiniBatch(
        prompt_tokens=prompt_tokens,
        prompt_valid=prompt_valid,
        prompt_lengths=rollouts.prompt_lengths,
        response_tokens=rollouts.response_tokens,
        response_mask=np.arange(rollouts.response_tokens.shape[1])[None, :] < rollouts.response_lengths[:, None],
        behavior_logprobs=rollouts.behavior_logprobs,
        rewards=rollouts.rewards,
        truncated=np.array([reason == "length" for reason in rollouts.finish_reasons]),
        staleness=np.zeros(rollouts.rows, np.int32),
    )


def _packed(rollouts: Rollouts, cuts: list[slice], packing: Packing, part: int | None, agree: Agree) -> list[Packed]:
    """The rows of each mini-batch: of the part, or of all parts together."""
    parts = range(packing.parts) if part is None else [part]

    def of(cut: slice, which: int) -> Sequences:
        size = (cut.stop - cut.start) // len(parts)
        mine = slice(cut.start + which * size, cut.start + (which + 1) * size)
        columns = rollouts.prompt_tokens, rollouts.prompt_lengths, rollouts.response_tokens, rollouts.response_lengths
        return Sequences(*(column[mine] for column in columns))

    pieces = [[of(cut, which) for which in range(len(parts))] for cut in cuts]
    needs = [[packing.rows_needed(piece) for piece in of_cut] for of_cut in pieces]
    sizes = [packing.size(needed) for needed in agree(np.max(needs, axis=1))]
    return [
        joined([packing.pack(piece, size, which) for piece, which in zip(of_cut, parts, strict=True)])
        for of_cut, size in zip(pieces, sizes, strict=True)
    ]
