"""The loop of a generator: what it makes next, how far it runs ahead, and what it does where others are at work too."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from m2po_jax.config import StalenessConfig
from m2po_jax.generation import Generator, Worker
from m2po_jax.generation.polling import Poll
from m2po_jax.generation.service import mismatch
from m2po_jax.generation.worker import OVERDUE_LOOKS
from m2po_jax.rollouts import (
    Schedule,
    Store,
    UnitId,
    parse_shard_path,
    read_generator_lines,
    read_shard,
    shard_path,
    weights,
    write_position,
)
from tests import tiny
from tests.generation.test_service import BASE, LATER, MODEL, TASK
from tests.generation.test_service import CONFIG as SMALL
from tests.rollouts.conftest import _make_rollouts

CONFIG = replace(
    SMALL, staleness=StalenessConfig(k=4), learner=replace(SMALL.learner, total_updates=12, checkpoint_every=2)
)
QUICK = Poll(first_s=0.01, most_s=0.02)


class Watcher(tiny.Watcher):
    """Acts as the learner would after so many units, and stops when there is nothing to make."""

    def __init__(self, acts=()):
        super().__init__()
        self.acts, self.idle = dict(acts), 0

    def unit(self, position, total, facts):
        super().unit(position, total, facts)
        self.acts.pop(len(self.units), lambda: None)()

    def waiting(self, position, total, what):
        super().waiting(position, total, what)
        self.idle += 1

    def stopping(self):
        return self.idle > 3


def worker_of(store, watcher, config=CONFIG, name="worker", schedule=None):
    generator = Generator(store, "run", config, TASK, MODEL)
    generator.producer = name
    return Worker(store, generator, schedule or Schedule.of(config), watcher, QUICK)


def made(store) -> set[UnitId]:
    return {parse_shard_path(path) for path in store.list("rollouts")}


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "run", create=True)


def batch(version, index) -> set[UnitId]:
    return {UnitId(version, index, 0), UnitId(version, index, 1)}


def test_what_the_learner_will_consume_is_made_and_nothing_else(store):
    """exactly(4), 2 updates a batch: version 0 serves the batches of 0, 2 and 4, version 2 that of 6, and so on."""
    watcher = Watcher()
    assert worker_of(store, watcher).run() is False
    assert made(store) == set() and watcher.doings[0] == "waiting for the first weights"
    weights.publish(store, 0, BASE)
    worker_of(store, Watcher()).run()
    ahead = batch(0, 0) | batch(0, 1) | batch(0, 2)
    assert made(store) == ahead
    write_position(store, 4)
    weights.publish(store, 2, LATER)
    weights.publish(store, 4, BASE)
    worker_of(store, Watcher()).run()
    assert made(store) == ahead | batch(2, 0) | batch(4, 0), "every version in order, not only the newest"
    write_position(store, 12)
    assert worker_of(store, Watcher()).run() is True


def test_data_at_most_so_old_is_made_by_the_newest_policy_as_far_as_it_may_be(store):
    """At most 5 behind at the last of 2 updates: weights of version v serve what is consumed up to v + 4."""
    config = replace(CONFIG, staleness=StalenessConfig(policy="at_most", k=5))
    weights.publish(store, 0, BASE)
    worker_of(store, Watcher(), config).run()
    ahead = batch(0, 0) | batch(0, 1) | batch(0, 2)
    assert made(store) == ahead
    weights.publish(store, 2, LATER)
    weights.publish(store, 4, BASE)
    write_position(store, 4)
    worker_of(store, Watcher(), config).run()
    assert made(store) == ahead | batch(4, 3) | batch(4, 4)


def test_a_shard_that_the_learner_moved_aside_is_made_again(store):
    weights.publish(store, 0, BASE)
    gone = UnitId(0, 1, 0)

    def learner():
        write_position(store, 2)
        store.delete(shard_path(gone))
        weights.publish(store, 2, LATER)

    watcher = Watcher({6: learner})
    worker_of(store, watcher).run()
    assert made(store) == batch(0, 0) | batch(0, 1) | batch(0, 2) | batch(2, 0)
    lines = read_generator_lines(store)
    again = [UnitId(line["version"], line["batch"], line["unit"]) for line in lines][6:]
    assert gone in again and set(again) == batch(2, 0) | {gone}


def test_the_first_missing_unit_does_not_wait_for_the_worker_whose_place_it_is(store):
    """The learner waits for it, and that worker may have died."""
    weights.publish(store, 0, BASE)
    config = replace(CONFIG, staleness=StalenessConfig(k=10))
    alone = worker_of(store, Watcher(), config)
    alone._place = 0.99
    alone.run()
    made_in_order = [(line["batch"], line["unit"]) for line in read_generator_lines(store)]
    assert (0, 0) in made_in_order[:OVERDUE_LOOKS] and len(made_in_order) == 12


def test_several_workers_begin_at_different_units_and_all_is_made_once(store):
    weights.publish(store, 0, BASE)
    config = replace(CONFIG, staleness=StalenessConfig(k=10))
    watchers = [Watcher() for _ in range(3)]
    workers = [worker_of(store, watcher, config, f"worker {i}") for i, watcher in enumerate(watchers)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made(store)) == 12
    done = sum(len(watcher.units) for watcher in watchers)
    assert 12 <= done <= 20, f"{done} units were made for 12"
    for unit in made(store):
        assert read_shard(store, unit).rollouts.rows == 9


def test_weights_that_were_retired_meanwhile_are_said_and_left(store):
    weights.publish(store, 0, BASE)
    weights.publish(store, 2, LATER)
    write_position(store, 4)
    weights.retire(store, 0)
    watcher = Watcher()
    worker_of(store, watcher).run()
    assert any("version 0 has no weights any more" in note for note in watcher.notes)


def test_responses_are_scored_again_by_the_forward_pass_of_training(store):
    config = replace(CONFIG, rollouts=replace(CONFIG.rollouts, rescore=True))
    weights.publish(store, 0, BASE)
    watcher = Watcher()
    worker_of(store, watcher, config).run()
    rollouts = read_shard(store, UnitId(0, 0, 0)).rollouts
    mask = np.arange(rollouts.response_tokens.shape[1]) < rollouts.response_lengths[:, None]
    np.testing.assert_allclose(rollouts.rescored_logprobs[mask], rollouts.behavior_logprobs[mask], atol=1e-5)
    assert not rollouts.rescored_logprobs[~mask].any()
    assert 0 <= watcher.units[0]["mismatch_mean"] <= watcher.units[0]["mismatch_worst"] < 1e-5
    assert watcher.units[0]["mismatch_k3"] < 1e-9


def test_the_mismatch_by_hand():
    rollouts = replace(_make_rollouts(1, 1, 0), rescored_logprobs=None)
    length = int(rollouts.response_lengths[0])
    scored = rollouts.behavior_logprobs.copy()
    scored[0, 0] += 0.5
    found = mismatch(replace(rollouts, rescored_logprobs=scored))
    assert found["mismatch_mean"] == pytest.approx(0.5 / length)
    assert found["mismatch_worst"] == pytest.approx(0.5)
    assert found["mismatch_k3"] == pytest.approx((np.exp(0.5) - 1.5) / length, rel=1e-5)
    assert mismatch(rollouts) == {}
