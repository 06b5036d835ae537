import json
import math

import numpy as np
import pandas as pd
import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import read_diagnostics, read_segments, write_diagnostics, write_segment


def test_a_run_without_metrics_reads_as_empty(store):
    assert read_segments(store) == []
    assert read_diagnostics(store).num_rows == 0
    write_segment(store, 0, [])
    assert store.list() == []


def test_segments_join_in_order_and_the_last_one_wins(store):
    write_segment(store, 4, [{"event": "update", "version": v, "loss": 2.0} for v in (4, 5)])
    write_segment(store, 0, [{"event": "update", "version": v, "loss": 1.0} for v in (0, 1, 4)])
    write_segment(store, 8, [{"event": "evaluation", "version": 4, "accuracy": 0.5}])
    lines = read_segments(store)
    assert [(line["event"], line["version"]) for line in lines] == [
        ("update", 0),
        ("update", 1),
        ("update", 4),
        ("evaluation", 4),
        ("update", 5),
    ]
    assert lines[2]["loss"] == 2.0


def test_a_segment_is_replaced_whole(store):
    write_segment(store, 0, [{"event": "update", "version": v} for v in range(4)])
    write_segment(store, 0, [{"event": "update", "version": 0, "again": True}])
    assert read_segments(store) == [{"event": "update", "version": 0, "again": True}]


def test_pandas_reads_a_segment_and_numbers_that_are_not_finite_are_null(store):
    values = {"nan": math.nan, "inf": -math.inf, "numpy": np.float32(0.5), "list": [np.int64(1), math.inf], "n": None}
    write_segment(store, 0, [{"event": "update", "version": np.int32(0), **values}])
    text = store.get("metrics/00000000.jsonl").decode()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "event": "update",
        "version": 0,
        "nan": None,
        "inf": None,
        "numpy": 0.5,
        "list": [1, None],
        "n": None,
    }
    frame = pd.read_json(store.local_path / "metrics" / "00000000.jsonl", lines=True)
    assert frame["numpy"].tolist() == [0.5]
    assert frame["nan"].isna().all()


def test_a_line_without_its_key_is_refused(store):
    with pytest.raises(ValueError, match="event and version"):
        write_segment(store, 0, [{"version": 1}])


@pytest.mark.parametrize("text", [b'{"event": "update", "ver', b'{"event": "update"}\n', b"3\n"])
def test_a_damaged_segment_is_named(store, text):
    store.replace("metrics/00000004.jsonl", text)
    with pytest.raises(UserError, match=r"metrics/00000004\.jsonl is not a metrics segment"):
        read_segments(store)


def test_diagnostics_of_all_versions_make_one_table(store):
    for version in (16, 0):
        columns = {"version": np.full(3, version), "log_ratio": np.linspace(-1, 1, 3, dtype=np.float32)}
        write_diagnostics(store, version, columns)
    table = read_diagnostics(store)
    assert table.column("version").to_pylist() == [0, 0, 0, 16, 16, 16]
    assert table.column("log_ratio").to_numpy().dtype == np.float32
    assert len(pd.read_parquet(store.local_path / "diagnostics" / "00000016.parquet")) == 3
