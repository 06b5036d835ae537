import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2po_jax.rollouts import UnitId, batches_of, exactly, served_after, units

shapes = st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 4)).map(
    lambda t: (t[0] * t[1] * t[2], t[1], t[1] * t[2])  # k, U, P: P a multiple of U, k one of P
)


@given(shapes, st.integers(1, 80))
def test_every_batch_of_every_version_is_consumed_once_and_in_order(shape, steps):
    k, per_batch, publish_every = shape
    consumed = [exactly(n * per_batch, k, per_batch, publish_every) for n in range(steps)]
    assert consumed == sorted(set(consumed))
    for version in {v for v, _ in consumed}:
        assert version % publish_every == 0
        batches = [b for v, b in consumed if v == version]
        assert batches == list(range(len(batches)))
        if version != consumed[-1][0]:
            assert len(batches) == (k + publish_every if version == 0 else publish_every) // per_batch


@given(shapes, st.integers(0, 80))
def test_age_is_exactly_k_once_such_a_version_exists(shape, step):
    k, per_batch, publish_every = shape
    version = step * per_batch
    behavior, _ = exactly(version, k, per_batch, publish_every)
    assert behavior <= version
    if version < k:
        assert behavior == 0
    elif publish_every == per_batch:
        assert version - behavior == k
    else:
        assert k <= version - behavior < k + publish_every


@given(shapes, st.integers(0, 12))
def test_batches_of_is_the_inverse(shape, published):
    k, per_batch, publish_every = shape
    behavior = published * publish_every
    found = batches_of(behavior, k, per_batch, publish_every)
    expected = [
        (n, exactly(n, k, per_batch, publish_every)[1])
        for n in range(0, behavior + k + 2 * publish_every, per_batch)
        if exactly(n, k, per_batch, publish_every)[0] == behavior
    ]
    assert list(found) == expected


@given(shapes, st.integers(0, 60), st.integers(1, 60))
def test_weights_are_needed_until_their_last_batch(shape, step, steps):
    k, per_batch, publish_every = shape
    version, total = step * per_batch, steps * per_batch
    to_come = {exactly(n, k, per_batch, publish_every)[0] for n in range(version, total, per_batch)}
    needed = served_after(version, k, per_batch, publish_every, total)
    assert needed == tuple(sorted(v for v in to_come if v <= version))
    unbounded = served_after(version, k, per_batch, publish_every)
    far = range(version, version + 2 * (k + publish_every), per_batch)
    assert unbounded == tuple(sorted({v for n in far if (v := exactly(n, k, per_batch, publish_every)[0]) <= version}))


def test_the_papers_setting_by_hand():
    assert [exactly(n, 8, 4, 4) for n in range(0, 24, 4)] == [(0, 0), (0, 1), (0, 2), (4, 0), (8, 0), (12, 0)]
    assert exactly(1024, 256, 4, 4) == (768, 0)
    assert exactly(12, 0, 4, 4) == (12, 0)
    assert [exactly(n, 8, 4, 8) for n in range(0, 28, 4)] == [(0, 0), (0, 1), (0, 2), (0, 3), (8, 0), (8, 1), (16, 0)]
    assert served_after(16, 8, 4, 4) == (8, 12, 16)
    assert served_after(16, 8, 4, 4, total_updates=20) == (8,)


def test_units_come_in_order():
    assert units(4, 2, 3) == (UnitId(4, 2, 0), UnitId(4, 2, 1), UnitId(4, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 8, 4, 4), "version 3"),
        ((-4, 8, 4, 4), "version -4"),
        ((4, 6, 4, 4), "k 6"),
        ((4, -4, 4, 4), "k -4"),
        ((4, 8, 4, 6), "publish_every 6"),
        ((4, 8, 0, 4), "updates_per_batch 0"),
    ],
)
def test_impossible_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        exactly(*arguments)


def test_an_unpublished_version_has_no_batches():
    with pytest.raises(ValueError, match="version 6 is not published"):
        batches_of(6, 8, 4, 4)
