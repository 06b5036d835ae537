import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2po_jax.rollouts import paths
from m2po_jax.rollouts.schema import UnitId


def test_names_are_those_of_the_contract():
    assert paths.shard_path(UnitId(256, 1, 2)) == "rollouts/00000256/000001-0002.parquet"
    assert paths.weights_path(4) == "weights/00000004"
    assert paths.LATEST == "weights/LATEST"
    assert paths.batch_record_path(1024) == "batches/00001024.json"
    assert paths.checkpoint_path(128) == "checkpoints/00000128"
    assert paths.diagnostics_path(64) == "diagnostics/00000064.parquet"
    assert paths.metrics_path(0) == "metrics/00000000.jsonl"


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1), st.integers(0, 10**4 - 1))
def test_a_shard_path_names_its_unit(version, batch, unit):
    assert paths.parse_shard_path(paths.shard_path(UnitId(version, batch, unit))) == UnitId(version, batch, unit)


def test_shards_sort_in_the_order_they_are_read():
    units = [UnitId(v, b, u) for v in (0, 4, 100) for b in (0, 2, 11) for u in (0, 1, 10)]
    assert sorted(map(paths.shard_path, reversed(units))) == [paths.shard_path(unit) for unit in units]


@pytest.mark.parametrize(
    "path",
    [
        "rollouts/00000004/000001-0002.parquet.bad-12ab34cd",
        "rollouts/00000004/000001-0002.parquet#1",
        "rollouts/00000004/1-2.parquet",
        "diagnostics/00000004.parquet",
        "weights/00000004/000001-0002.parquet",
    ],
)
def test_other_names_are_no_shards(path):
    assert paths.parse_shard_path(path) is None


@pytest.mark.parametrize("name", ["00000004.orbax-checkpoint-tmp", "00000004.deleting-12ab34cd", "LATEST", "4"])
def test_other_names_are_no_versions(name):
    assert paths.parse_version("00000004") == 4
    assert paths.parse_version(name) is None
