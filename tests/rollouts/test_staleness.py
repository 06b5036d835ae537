import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from m2po_jax.config import Config, SourceConfig, StalenessConfig
from m2po_jax.rollouts import Schedule, UnitId, exactly, inventory_key, units
from m2po_jax.rollouts.staleness import AHEAD_BATCHES

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


@given(shapes, st.integers(0, 60), st.integers(1, 60))
def test_weights_are_needed_until_their_last_batch(shape, step, steps):
    k, per_batch, publish_every = shape
    version, total = step * per_batch, steps * per_batch
    to_come = {exactly(n, k, per_batch, publish_every)[0] for n in range(version, total, per_batch)}
    schedule = schedule_of(StalenessConfig(k=k), per_batch, publish_every)
    assert schedule.served(version, total) == {v for v in to_come if v <= version}
    far = range(version, version + 2 * (k + publish_every), per_batch)
    read = {exactly(n, k, per_batch, publish_every)[0] for n in far}
    assert schedule.served(version) == {v for v in read if v <= version}


def test_the_papers_setting_by_hand():
    assert [exactly(n, 8, 4, 4) for n in range(0, 24, 4)] == [(0, 0), (0, 1), (0, 2), (4, 0), (8, 0), (12, 0)]
    assert exactly(1024, 256, 4, 4) == (768, 0)
    assert exactly(12, 0, 4, 4) == (12, 0)
    assert [exactly(n, 8, 4, 8) for n in range(0, 28, 4)] == [(0, 0), (0, 1), (0, 2), (0, 3), (8, 0), (8, 1), (16, 0)]
    schedule = schedule_of(StalenessConfig(k=8), 4, 4)
    assert schedule.served(16) == {8, 12, 16}
    assert schedule.served(16, total_updates=20) == {8}


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


POLICIES = {
    "exactly": StalenessConfig(k=24),
    "at_most": StalenessConfig(policy="at_most", k=27),
    "uniform": StalenessConfig(policy="uniform", low=8, high=40),
    "frozen": StalenessConfig(policy="frozen"),
    "mixture": StalenessConfig(
        policy="mixture",
        parts=(
            SourceConfig(k=24, share=2.0),
            SourceConfig(policy="at_most", k=11),
            SourceConfig(policy="frozen"),
            SourceConfig(policy="uniform", low=0, high=16),
        ),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("publish_every", [4, 8])
def test_whatever_the_policy_its_data_exists_is_made_in_time_and_is_read_once(name, publish_every):
    """A learner and generators that only ever see the store's pointers: version published, position of the learner."""
    schedule = schedule_of(POLICIES[name], 4, publish_every, total_updates=400)
    made, read = set(), []
    for position in range(0, 400, 4):
        latest = position // publish_every * publish_every
        for version, sources in schedule.needs(position, latest):
            assert version >= position and all(source.version <= latest for source in sources)
            if not made & set(schedule.reads(version)):
                made.add(sources[0])
        chosen = next(source for source in schedule.reads(position) if source in made)
        assert chosen.version in schedule.served(chosen.version), "or its weights are never published"
        assert chosen.version in schedule.served(position), "or they are retired too early"
        read.append(chosen)
    assert len(set(read)) == 100, "no batch is read twice"
    assert made == set(read), "and none is made that nobody reads"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("restart", [0, 4, 48])
def test_what_is_made_ahead_of_a_restarted_learner_stays_within_the_policy(name, restart):
    """REGRESSIONS 19: weights may be published up to version 100 when the learner goes back to a checkpoint."""
    schedule = schedule_of(POLICIES[name], 4, 4)
    reach = {"exactly": 24, "at_most": 24, "uniform": 40, "frozen": 4 * AHEAD_BATCHES, "mixture": 4 * AHEAD_BATCHES}
    for latest in (restart, 100):
        needed = list(schedule.needs(restart, latest))
        assert needed[0][0] == restart, "what the learner waits for comes first"
        for version, sources in needed:
            assert version <= max(latest, restart) + reach[name]
            assert all(source in schedule.reads(version) and source.version <= version for source in sources)


def test_at_most_bounds_the_last_update_of_a_batch():
    schedule = schedule_of(POLICIES["at_most"], 4, 4)
    for version in range(0, 200, 4):
        ages = [version + 3 - source.version for source in schedule.reads(version)]
        assert ages == sorted(ages) and ages[0] == 3
        assert ages[-1] == min(27, version + 3)
        assert {source.batch for source in schedule.reads(version)} == {version // 4}


def test_uniform_ages_are_uniform_and_the_base_policy_stands_in_for_older_ones():
    schedule = schedule_of(POLICIES["uniform"], 4, 4)
    ages = [version - schedule.reads(version)[0].version for version in range(40, 40_040, 4)]
    counts = np.bincount(np.array(ages) // 4, minlength=11)
    assert counts[:2].sum() == 0 and len(counts) == 11
    assert chisquare(counts[2:]).pvalue > 1e-3
    assert [schedule.reads(version)[0].version for version in (0, 4, 8)] == [0, 0, 0]
    again = schedule_of(POLICIES["uniform"], 4, 4, seed=0)
    other = schedule_of(POLICIES["uniform"], 4, 4, seed=1)
    assert [again.reads(n) for n in range(0, 400, 4)] == [schedule.reads(n) for n in range(0, 400, 4)]
    assert [other.reads(n) for n in range(0, 400, 4)] != [schedule.reads(n) for n in range(0, 400, 4)]


def test_a_mixture_has_its_shares():
    schedule = schedule_of(POLICIES["mixture"], 4, 4)
    parts = [schedule._part(version)[0] for version in range(0, 40_000, 4)]
    assert chisquare(np.bincount(parts), 10_000 * np.array([2, 1, 1, 1]) / 5).pvalue > 1e-3


def test_another_run_is_read_round_and_round_within_its_part():
    source = SourceConfig(policy="frozen", run="other")
    mixed = StalenessConfig(policy="mixture", parts=(SourceConfig(k=8), source))
    batches = ((0, 0), (0, 1), (4, 0))
    schedule = schedule_of(mixed, 4, 4, total_updates=1280, inventory={inventory_key(source): batches})
    theirs = [s for n in range(0, 400, 4) for s in schedule.reads(n) if s.run == "other"]
    assert len(theirs) > 30
    assert [(s.version, s.batch) for s in theirs[:6]] == [*batches, *batches]
    generators = Schedule.of(Config(staleness=mixed))
    for position in range(0, 80, 4):
        assert list(generators.needs(position, position)) == list(schedule.needs(position, position))
        assert not any(s.run for _, sources in generators.needs(position, position) for s in sources)


def test_draws_are_the_same_for_ever():
    """Runs are resumed by later versions of the package."""
    schedule = schedule_of(POLICIES["uniform"], 4, 4)
    assert [schedule.reads(n)[0].version for n in range(40, 80, 4)] == [20, 28, 20, 44, 16, 40, 56, 40, 36, 40]


def schedule_of(staleness, updates_per_batch, publish_every, total_updates=10**6, seed=0, inventory=None) -> Schedule:
    sources = staleness.sources
    return Schedule(sources, updates_per_batch, publish_every, total_updates, seed, inventory or {})
