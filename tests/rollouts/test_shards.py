import hashlib
import io
import timeit
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_jax.config import UserError
from m2po_jax.rollouts import BadShard, Provenance, UnitId, decode, encode, read_shard, shard_path, write_shard
from m2po_jax.rollouts.shards import content_digest


@pytest.fixture(scope="module")
def rollouts(make_rollouts):
    return make_rollouts()


@pytest.fixture(scope="module")
def shard(rollouts, unit, provenance) -> bytes:
    return encode(rollouts, unit, provenance, "host-1")


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def edited(shard: bytes, name: str, edit, sealed: bool = False) -> bytes:
    """The shard with one column changed by a function of its list of values; sealed: with a digest that fits."""
    table = pq.read_table(pa.BufferReader(shard))
    column = pa.array(edit(table.column(name).to_pylist()), table.schema.field(name).type)
    table = table.set_column(table.column_names.index(name), table.schema.field(name), column)
    return parquet(seal(table) if sealed else table)


def seal(table: pa.Table) -> pa.Table:
    metadata = dict(table.schema.metadata)
    core = (
        metadata[f"m2po_jax.{key}".encode()].decode() for key in ("run_id", "weights_digest", "tokenizer_fingerprint")
    )
    digest = content_digest(table, Provenance(*core))
    fitting = {b"m2po_jax.content_digest": digest, b"m2po_jax.rows": str(table.num_rows)}
    return table.replace_schema_metadata(metadata | fitting)


def with_metadata(shard: bytes, **changes: str | None) -> bytes:
    table = pq.read_table(pa.BufferReader(shard))
    metadata = dict(table.schema.metadata) | {f"m2po_jax.{k}".encode(): v for k, v in changes.items()}
    return parquet(table.replace_schema_metadata({k: v for k, v in metadata.items() if v is not None}))


def set_row(row: int, value):
    return lambda values: [value if i == row else old for i, old in enumerate(values)]


def set_token(row: int, token: int, value: float):
    return lambda values: [
        [value if (i, t) == (row, token) else old for t, old in enumerate(tokens)] for i, tokens in enumerate(values)
    ]


def test_a_shard_reads_back_as_it_was_written(shard, rollouts, unit, provenance, equal):
    read = decode(shard, "here", provenance, unit)
    equal(read.rollouts, rollouts)
    assert (read.unit, read.provenance, read.producer) == (unit, provenance, "host-1")
    assert len(read.digest) == 64
    assert read.created_at.endswith("+00:00")


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4),
    size=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    rescored=st.booleans(),
    longest=st.integers(1, 12),
    numbers=st.tuples(st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1), st.integers(0, 10**4 - 1)),
    texts=st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=20)] * 4),
)
def test_any_rollouts_round_trip(make_rollouts, equal, groups, size, seed, rescored, longest, numbers, texts):
    rollouts = make_rollouts(groups, size, seed, 2**62, rescored, longest)
    rollouts = replace(rollouts, prompt_ids=[texts[0]] * rollouts.rows, response_texts=[texts[1]] * rollouts.rows)
    provenance = Provenance(texts[2], texts[3], "tokenizer")
    read = decode(encode(rollouts, UnitId(*numbers), provenance, texts[0]), "here", provenance, UnitId(*numbers))
    equal(read.rollouts, rollouts)
    assert read.producer == texts[0]


def test_the_digest_is_of_the_content_alone(rollouts, unit, provenance):
    digests = {
        decode(encode(variant, unit, provenance, producer), "here").digest
        for variant, producer in ((rollouts, "one"), (rollouts, "two"), (rollouts.padded(99, 77), "three"))
    }
    assert len(digests) == 1
    noise = replace(rollouts, response_tokens=np.where(rollouts.behavior_logprobs == 0, 9, rollouts.response_tokens))
    assert {decode(encode(noise, unit, provenance, "four"), "here").digest} == digests, "padding is not content"
    shard = encode(rollouts, unit, provenance, "one")
    others = [
        decode(encode(rollouts, replace(unit, batch=4), provenance, "one"), "here").digest,
        decode(encode(rollouts, unit, replace(provenance, run_id="other"), "one"), "here").digest,
        decode(edited(shard, "reward", set_row(0, 0.25), sealed=True), "here").digest,
    ]
    assert len({*digests, *others}) == 4


def test_the_digest_is_pinned(make_rollouts, unit, provenance):
    """The digest of schema version 1 must never change: it is stored with every shard and in batch records."""
    rollouts = make_rollouts(groups=1, size=1)
    rollouts = replace(
        rollouts,
        prompt_tokens=np.array([[1, 2]], np.int32),
        prompt_lengths=np.array([2], np.int32),
        response_tokens=np.array([[3]], np.int32),
        response_lengths=np.array([1], np.int32),
        behavior_logprobs=np.array([[-0.5]], np.float32),
        rewards=np.array([1], np.float32),
        finish_reasons=["stop"],
        response_texts=["é"],
        gold_answers=["3"],
    )
    core = b'{"rows": 1, "run_id": "run", "schema_version": 1, "tokenizer_fingerprint": "tokenizer", '
    core += b'"weights_digest": "weights"}'

    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    def numbers(dtype: str, *values) -> bytes:
        return np.array(values, dtype).tobytes()

    columns = {
        "policy_version": numbers("<i8", 8),
        "batch_index": numbers("<i4", 3),
        "unit": numbers("<i4", 1),
        "prompt_id": text(b"add-0"),
        "group_id": numbers("<i8", 0),
        "sample_index": numbers("<i4", 0),
        "prompt_tokens": numbers("<i8", 2) + numbers("<i4", 1, 2),
        "response_tokens": numbers("<i8", 1) + numbers("<i4", 3),
        "behavior_logprobs": numbers("<i8", 1) + numbers("<f4", -0.5),
        "rescored_logprobs": numbers("<i8", -1),
        "reward": numbers("<f4", 1),
        "finish_reason": text(b"stop"),
        "temperature": numbers("<f8", 0.7),
        "top_p": numbers("<f8", 1.0),
        "response_text": text("é".encode()),
        "gold_answer": text(b"3"),
    }
    content = core + b"".join(b"\n" + name.encode() + b"\n" + value for name, value in columns.items())
    assert decode(encode(rollouts, unit, provenance, "x"), "here").digest == hashlib.sha256(content).hexdigest()


def test_pandas_reads_a_shard_without_our_code(shard, rollouts, tmp_path):
    (tmp_path / "shard.parquet").write_bytes(shard)
    frame = pd.read_parquet(tmp_path / "shard.parquet")
    assert " ".join(frame.columns) == (
        "policy_version batch_index unit prompt_id group_id sample_index prompt_tokens response_tokens "
        "behavior_logprobs rescored_logprobs reward finish_reason temperature top_p response_text gold_answer"
    )
    assert frame["reward"].mean() == pytest.approx(rollouts.rewards.mean())
    assert frame["response_tokens"].map(len).tolist() == rollouts.response_lengths.tolist()
    assert frame["rescored_logprobs"].isna().all()


def test_logprobs_of_rounding_size_are_clipped_to_zero(shard):
    read = decode(edited(shard, "behavior_logprobs", set_token(0, 0, 9e-5), sealed=True), "here")
    assert read.rollouts.behavior_logprobs[0, 0] == 0
    assert (read.rollouts.behavior_logprobs <= 0).all()


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        ("behavior_logprobs", set_token(2, 0, float("nan")), "behavior_logprobs of row 2, token 0 is nan"),
        ("behavior_logprobs", set_token(2, 0, float("-inf")), "row 2, token 0 is -inf"),
        ("behavior_logprobs", set_token(1, 0, 2e-4), "row 1, token 0 is 0.0002: no log-probability is above 0"),
        ("behavior_logprobs", lambda v: [v[0] + [-1.0], *v[1:]], "response tokens but .* behavior_logprobs"),
        ("behavior_logprobs", lambda v: [v[0][:-1], *v[1:]], "row 0 has .* response tokens but"),
        ("behavior_logprobs", set_row(0, None), "behavior_logprobs has 1 nulls"),
        ("behavior_logprobs", set_token(0, 0, None), "behavior_logprobs has a null token"),
        ("rescored_logprobs", set_row(0, [-1.0]), "rescored_logprobs has 7 nulls"),
        ("response_tokens", set_token(0, 0, -1), "a response token is negative"),
        ("prompt_tokens", set_token(0, 0, -7), "a prompt token is negative"),
        ("reward", set_row(3, float("inf")), "reward of row 3 is inf"),
        ("finish_reason", set_row(3, "abort"), "unknown finish reason 'abort'"),
        ("sample_index", set_row(1, 0), "sample indices of group 0 are not 0..3"),
        ("group_id", set_row(0, 1), "group 0 has 3 responses, others have 5"),
        ("policy_version", set_row(0, 9), "policy_version is not the same in every row"),
        ("unit", set_row(0, 9), "unit is not the same"),
        ("temperature", set_row(0, 1.0), "temperature is not the same"),
    ],
)
def test_each_fault_is_refused_by_name(shard, name, edit, reason):
    """With a digest that fits: a producer wrote it so. Without one, the edit itself is the fault, or found first."""
    with pytest.raises(BadShard, match=reason) as refused:
        decode(edited(shard, name, edit, sealed=True), "rollouts/x.parquet")
    assert refused.value.source == "rollouts/x.parquet"
    with pytest.raises(BadShard):
        decode(edited(shard, name, edit), "rollouts/x.parquet")


def test_an_edited_row_is_refused_by_its_digest(shard):
    for name, edit in (
        ("reward", set_row(0, 0.5)),
        ("response_text", set_row(1, "42")),
        ("group_id", lambda v: v[::-1]),
    ):
        with pytest.raises(BadShard, match="content does not match its digest"):
            decode(edited(shard, name, edit), "here")


def test_missing_members_and_rows_are_refused(shard):
    table = pq.read_table(pa.BufferReader(shard))
    with pytest.raises(BadShard, match="7 rows where its metadata says 8"):
        decode(parquet(table.slice(0, 7)), "here")
    with pytest.raises(BadShard, match="group 1 has 3 responses, others have 4"):
        decode(parquet(seal(table.slice(0, 7))), "here")
    with pytest.raises(BadShard, match="no rows"):
        decode(parquet(seal(table.slice(0, 0))), "here")


def test_missing_and_foreign_columns_are_refused(shard):
    table = pq.read_table(pa.BufferReader(shard))
    with pytest.raises(BadShard, match="column reward is missing"):
        decode(parquet(table.drop_columns(["reward"])), "here")
    with pytest.raises(BadShard, match="unknown column note"):
        decode(parquet(table.append_column("note", pa.nulls(8, pa.int32()))), "here")
    wide = table.set_column(10, "reward", table.column("reward").cast(pa.float64()))
    with pytest.raises(BadShard, match="column reward is double, not float"):
        decode(parquet(wide), "here")


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("run_id", "run id is run, expected other"),
        ("weights_digest", "weights digest is weights, expected other"),
        ("tokenizer_fingerprint", "tokenizer fingerprint is tokenizer, expected other"),
    ],
)
def test_data_of_another_run_policy_or_tokenizer_is_refused(shard, provenance, field, reason):
    with pytest.raises(BadShard, match=reason):
        decode(shard, "here", replace(provenance, **{field: "other"}))


@pytest.mark.parametrize("field", ["version", "batch", "unit"])
def test_a_shard_under_another_name_is_refused(shard, unit, field):
    with pytest.raises(BadShard, match=f"{field} is {vars(unit)[field]}, expected 77"):
        decode(shard, "here", unit=replace(unit, **{field: 77}))


def test_a_newer_schema_is_refused_by_both_names(shard):
    with pytest.raises(UserError, match="schema version 2, this package reads up to 1: upgrade m2po-jax"):
        decode(with_metadata(shard, schema_version="2"), "here")
    for text in ("0", "one", ""):
        with pytest.raises(BadShard, match="schema version"):
            decode(with_metadata(shard, schema_version=text), "here")


@pytest.mark.parametrize("key", ["run_id", "rows", "content_digest", "producer"])
def test_missing_metadata_is_refused(shard, key):
    with pytest.raises(BadShard, match=f"metadata {key} is missing"):
        decode(with_metadata(shard, **{key: None}), "here")


def test_bytes_that_are_no_shard_are_refused(shard):
    for data in (b"", b"PAR1", b"not a parquet file", shard[:-1], shard[1:], shard[: len(shard) // 2], shard * 2):
        with pytest.raises(BadShard):
            decode(data, "here", unit=UnitId(0, 0, 0))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(shard, equal, rollouts, unit, provenance, data):
    position = data.draw(st.integers(0, len(shard) * 8 - 1))
    damaged = bytearray(shard)
    damaged[position // 8] ^= 1 << position % 8
    try:
        read = decode(bytes(damaged), "here", provenance, unit)
    except (BadShard, UserError):
        return
    equal(read.rollouts, rollouts)


@settings(max_examples=40, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_truncated_shard_is_refused(shard, cut):
    with pytest.raises(BadShard):
        decode(shard[: int(cut * len(shard))], "here")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: replace(r, behavior_logprobs=r.behavior_logprobs * np.float32("nan")), "not a finite number"),
        (lambda r: replace(r, prompt_ids=r.prompt_ids[1:]), "prompt_ids has 7 rows"),
        (lambda r: replace(r, behavior_logprobs=r.behavior_logprobs[:, 1:]), "behavior_logprobs has shape"),
        (lambda r: replace(r, response_lengths=r.response_lengths + 10), "response length lies outside"),
        (lambda r: replace(r, rewards=r.rewards[:0]), "no rows"),
    ],
)
def test_a_producer_cannot_write_what_a_reader_would_refuse(rollouts, unit, provenance, change, reason):
    with pytest.raises(BadShard, match=reason) as refused:
        encode(change(rollouts), unit, provenance, "x")
    assert refused.value.source == shard_path(unit)


def test_the_first_shard_of_a_unit_stands(store, make_rollouts, unit, provenance, equal):
    first, other = make_rollouts(seed=1), make_rollouts(seed=2)
    assert write_shard(store, first, unit, provenance, "one")
    assert write_shard(store, first, unit, provenance, "two"), (
        "the same content from another producer is the same shard"
    )
    assert not write_shard(store, other, unit, provenance, "three")
    read = read_shard(store, unit, provenance)
    equal(read.rollouts, first)
    assert read.producer == "one"


def test_a_bad_shard_is_moved_aside_and_made_again(store, rollouts, unit, provenance, equal):
    with pytest.raises(FileNotFoundError):
        read_shard(store, unit, provenance)
    write_shard(store, rollouts, unit, provenance, "one")
    path = store.local_path / shard_path(unit)
    path.write_bytes(path.read_bytes()[:-100])
    assert not write_shard(store, rollouts, unit, provenance, "two"), "a bad shard is its reader's to find"
    with pytest.raises(BadShard, match=r"000003-0001\.parquet: cannot be read as Parquet.*moved to .*\.bad-"):
        read_shard(store, unit, provenance)
    with pytest.raises(FileNotFoundError):
        read_shard(store, unit, provenance)
    assert write_shard(store, rollouts, unit, provenance, "two")
    equal(read_shard(store, unit, provenance).rollouts, rollouts)
    assert len(store.list("rollouts")) == 2


def test_a_newer_shard_is_not_moved(store, shard, unit):
    store.create(shard_path(unit), with_metadata(shard, schema_version="2"))
    with pytest.raises(UserError, match="upgrade"):
        read_shard(store, unit)
    assert store.exists(shard_path(unit))


def test_a_shard_is_small_and_quick(make_rollouts, unit, provenance):
    rollouts = make_rollouts(groups=64, size=8, longest=12)
    data = encode(rollouts, unit, provenance, "x")
    assert len(data) < 120 * rollouts.rows
    tries = timeit.repeat(lambda: decode(encode(rollouts, unit, provenance, "x"), "here"), number=1, repeat=9)
    assert min(tries) < 0.06, "about 6 ms on one idle core"
