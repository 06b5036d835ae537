"""What shards cost: encoding and decoding on one core, and the share of the store's own speed that is left.

Command:   python experiments/benchmarks/store.py
Hardware:  any CPU; under a minute.
Expect:    README.md has the table; compare within a run only.

A shard of 256 responses of up to 1,024 tokens to prompts of up to 256. MB are those of its arrays and texts before
compression; the raw store moves as many bytes as the shard's file has, as they are.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from m2po_jax.rollouts import Provenance, Rollouts, Store, UnitId, decode, encode, read_shard, shard_path, write_shard

PROVENANCE = Provenance("run", "weights", "tokenizer")


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="longest response")
    parser.add_argument("--repeats", type=int, default=7, help="the median counts")
    given = parser.parse_args()
    rollouts = made(given.rows, given.tokens)
    unit = UnitId(0, 0, 0)
    data = encode(rollouts, unit, PROVENANCE, "benchmark")
    plain_mb = plain_bytes(rollouts) / 1e6
    print(f"a shard: {given.rows} responses, {plain_mb:.1f} MB of arrays and texts, {len(data) / 1e6:.1f} MB as a file")
    encode_s = median(given.repeats, lambda i: encode(rollouts, unit, PROVENANCE, "benchmark"))
    decode_s = median(given.repeats, lambda i: decode(data, "shard"))
    print(f"encode {plain_mb / encode_s:7.0f} MB/s    decode and verify {plain_mb / decode_s:7.0f} MB/s    on one core")
    with tempfile.TemporaryDirectory() as folder:
        report("a directory", Store.open(folder), rollouts, data, given.repeats)
    from tests.gcs import serving

    with serving() as server:
        os.environ.update(server.environment)
        report("a bucket on this machine", Store.open(f"gs://{server.bucket}/run"), rollouts, data, given.repeats)


def report(name: str, store: Store, rollouts: Rollouts, data: bytes, repeats: int) -> None:
    """A line each for writing and reading."""
    raw_write_s = median(repeats, lambda i: store.create(f"raw/{i}", data))
    raw_read_s = median(repeats, lambda i: store.get(f"raw/{i}"))
    write_s = median(repeats, lambda i: write_shard(store, rollouts, UnitId(0, i, 0), PROVENANCE, "benchmark"))
    read_s = median(repeats, lambda i: read_shard(store, UnitId(0, i, 0), PROVENANCE))
    mb = len(store.get(shard_path(UnitId(0, 0, 0)))) / 1e6
    for what, raw_s, ours_s in (("write", raw_write_s, write_s), ("read", raw_read_s, read_s)):
        share = raw_s / ours_s
        print(f"{name}, {what}: raw {mb / raw_s:5.0f} MB/s, shards {mb / ours_s:5.0f} MB/s, {share:4.0%} of it")


def made(rows: int, tokens: int, prompt: int = 256, group: int = 8) -> Rollouts:
    """Rollouts with the entropy of real ones: ids of a vocabulary of 150,000 by a power law, log-probs, texts."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(tokens // 4, tokens + 1, rows).astype(np.int32)
    prompts = np.repeat(rng.integers(prompt // 2, prompt + 1, rows // group), group).astype(np.int32)
    mask = np.arange(tokens) < lengths[:, None]
    ids = np.minimum(rng.zipf(1.3, (rows, tokens)), 149_999).astype(np.int32)
    logprobs = -rng.exponential(0.4, (rows, tokens)).astype(np.float32)
    words = np.array(["the", "so", "x", "=", "therefore", "12", "+", "frac", "\\boxed", "7"])
    return Rollouts(
        prompt_tokens=np.where(np.arange(prompt) < prompts[:, None], ids[:, :prompt], 0),
        prompt_lengths=prompts,
        response_tokens=np.where(mask, ids, 0),
        response_lengths=lengths,
        behavior_logprobs=np.where(mask, logprobs, np.float32(0)),
        rescored_logprobs=None,
        rewards=rng.integers(0, 2, rows).astype(np.float32),
        prompt_ids=[f"prompt {i // group}" for i in range(rows)],
        group_ids=np.repeat(np.arange(rows // group, dtype=np.int64), group),
        sample_indices=np.tile(np.arange(group, dtype=np.int32), rows // group),
        finish_reasons=["stop"] * rows,
        response_texts=[" ".join(words[rng.integers(0, len(words), length)]) for length in lengths],
        gold_answers=["12"] * rows,
        temperature=1.0,
        top_p=1.0,
    )


def plain_bytes(rollouts: Rollouts) -> int:
    """Bytes of the tokens, log-probs and texts, without padding."""
    tokens = int(rollouts.prompt_lengths.sum() + 2 * rollouts.response_lengths.sum())
    return 4 * tokens + sum(map(len, rollouts.response_texts))


def median(repeats: int, timed: Callable[[int], object]) -> float:
    """Seconds of a call, the median of several, each with its own number."""
    taken = []
    for i in range(repeats):
        began = time.perf_counter()
        timed(i)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


if __name__ == "__main__":
    main()
