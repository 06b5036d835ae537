"""Reductions by blocks of columns against NumPy on the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax.objectives.reductions import Totals, over_columns, row_counts, row_max, row_sum


def reduce(columns):
    """Four counts, two of them stacked, a sum, a sum with a value a row, and a maximum."""
    x, where, by_row = columns
    counts = row_counts({"n": where, "-": where & (x < 0.0), "+": where & (x >= 0.0), "few": where & (x == 8.0)})
    return Totals(
        counts={"n": counts["n"], "few": counts["few"], "by_sign": jnp.stack([counts["-"], counts["+"]], axis=1)},
        sums={"x": row_sum(x, where), "scaled": row_sum(x * by_row, where)},
        maxima={"x": row_max(x, where)},
    )


jitted = jax.jit(lambda *columns: over_columns(reduce, columns))


def columns_of(shape, seed=0):
    """Small integers, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, shape).astype(np.float32)
    return x, rng.random(shape) < 0.7, rng.integers(0, 3, (shape[0], 1)).astype(np.float32)


def expected(x, where, by_row):
    inside = x[where]
    return {
        "n": where.sum(),
        "few": (inside == 8).sum(),
        "by_sign": [(inside < 0).sum(), (inside >= 0).sum()],
        "x": inside.sum(dtype=np.float64),
        "scaled": (x * by_row)[where].sum(dtype=np.float64),
        "max": inside.max(initial=-np.inf),
    }


def agree(totals, columns):
    wanted = expected(*columns)
    assert {"n", "few", "by_sign"} == totals.counts.keys() and all(x.dtype == jnp.int32 for x in totals.counts.values())
    assert totals.sums["x"].dtype == totals.maxima["x"].dtype == jnp.float32
    np.testing.assert_array_equal(totals.counts["n"], wanted["n"])
    np.testing.assert_array_equal(totals.counts["few"], wanted["few"])
    np.testing.assert_array_equal(totals.counts["by_sign"], wanted["by_sign"])
    np.testing.assert_array_equal(totals.sums["x"], wanted["x"])
    np.testing.assert_array_equal(totals.sums["scaled"], wanted["scaled"])
    np.testing.assert_array_equal(totals.maxima["x"], wanted["max"])


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (1, 1),
        (3, 127),
        (3, 128),
        (3, 129),
        (3, 300),
        (1024, 64),
        (1024, 200),
        (4096, 97),
    ],
)
def test_any_width_is_as_if_taken_at_once(rows, width):
    """Blocks have 128 columns for few rows, 64 for 1,024 and 32 for 4,096."""
    agree(jitted(*columns_of((rows, width))), columns_of((rows, width)))


@pytest.mark.parametrize("shape", [(0, 5), (0, 200)])
def test_nothing_gives_zeros_and_no_maximum(shape):
    agree(jitted(*columns_of(shape)), columns_of(shape))


def test_everything_masked_gives_zeros_and_no_maximum():
    x, _, by_row = columns_of((3, 200))
    totals = jitted(x, np.zeros(x.shape, bool), by_row)
    agree(totals, (x, np.zeros(x.shape, bool), by_row))
    assert totals.maxima["x"] == -np.inf


def test_what_is_masked_never_matters():
    x, where, by_row = columns_of((3, 200))
    for junk in (np.nan, np.inf, -np.inf):
        agree(jitted(np.where(where, x, np.float32(junk)), where, by_row), (x, where, by_row))


@pytest.mark.parametrize("width", [5, 300])
def test_rows_on_eight_devices(width, devices):
    columns = columns_of((16, width))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in columns]
    agree(jitted(*sharded), columns)


def test_no_block_is_gathered_from_other_devices(devices):
    """Only what is left of each row is added up across devices: the loop over blocks has no collective in it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in columns_of((16, 300))]
    text = jitted.lower(*sharded).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text


def test_counts_beyond_the_integers_of_float32_are_exact():
    """2^24 + 1 is no float32; three rows of 2^23 + 1 and one row of 2^24 are counted to the last token."""
    wide = jnp.ones((3, 2**23 + 1), bool)
    count = jax.jit(lambda where: over_columns(lambda w: Totals(row_counts({"n": w}), {}, {}), where).counts["n"])
    assert int(count(wide)) == 3 * 2**23 + 3
    assert int(count(jnp.ones((1, 2**24), bool))) == 2**24


def test_many_blocks_of_a_value_add_up_to_rounding():
    """Row sums first: 2^18 times 0.1 is right to 1e-5, although 0.1 is no float32."""
    x = jnp.full((2, 2**17), 0.1, jnp.float32)
    totals = jax.jit(lambda x: over_columns(lambda x: Totals({}, {"x": row_sum(x, x > 0.0)}, {}), x))(x)
    np.testing.assert_allclose(totals.sums["x"], 2**18 * float(np.float32(0.1)), rtol=1e-5)


def test_row_functions_by_hand():
    x = jnp.asarray([[1.0, -2.0, 5.0], [4.0, 0.5, -1.0]])
    where = jnp.asarray([[True, True, False], [False, False, False]])
    np.testing.assert_array_equal(row_counts({"one": where})["one"], [2.0, 0.0])
    np.testing.assert_array_equal(row_sum(x, where), [-1.0, 0.0])
    np.testing.assert_array_equal(row_max(x, where), [1.0, -np.inf])
    assert row_sum(x[:, :1], where).shape == (2,)


def test_any_number_of_counts_of_full_rows_of_a_block():
    """Three to a sum: none runs over into the next, and all come back by name."""
    every, none = jnp.ones((2, 128), bool), jnp.zeros((2, 128), bool)
    for size in range(8):
        where = {f"count {i}": every if i % 3 != 1 else none for i in range(size)}
        found = row_counts(where)
        assert found.keys() == where.keys()
        for i in range(size):
            np.testing.assert_array_equal(found[f"count {i}"], [128.0 if i % 3 != 1 else 0.0] * 2)
            assert found[f"count {i}"].dtype == jnp.float32
