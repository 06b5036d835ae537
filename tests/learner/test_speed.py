"""Seconds of updates and shares of the wall time: the arithmetic by hand, and the clock on real programs."""

import time

import jax
import jax.numpy as jnp
import pytest

from m2po_jax.learner import speed
from m2po_jax.learner.speed import Speed, covered, fullest, peak_flops_per_s, shares_of
from m2po_jax.models import flops
from tests import tiny

WORK = {"sequence_tokens": 300.0, "token_pairs": 5000.0, "tokens": 100.0}


@jax.jit
def slow(x):
    """A tenth of a second of products, or more."""
    return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ y), x)


X = jnp.ones((300, 300))


def test_covered_seconds_count_once():
    assert covered((0.0, 10.0), [(1.0, 3.0), (2.0, 4.0), (8.0, 12.0), (-5.0, 0.5)]) == 3.0 + 2.0 + 0.5
    assert covered((0.0, 10.0), [(5.0, 6.0), (1.0, 9.0), (2.0, 3.0)]) == 8.0
    assert covered((0.0, 10.0), []) == 0.0


def test_shares_of_a_turn():
    """Ten seconds: four of data, two of which the devices generate; one of a checkpoint; updates from 6 to 9."""
    spans = [
        (speed.DATA, (10.0, 14.0)),
        (speed.GENERATE, (12.0, 14.0)),
        (speed.CHECKPOINT, (18.5, 19.5)),
        (speed.EVALUATE, (5.0, 9.0)),
    ]
    shares = shares_of((10.0, 20.0), spans, [(16.0, 19.0)])
    assert shares == pytest.approx({"data_wait_frac": 0.4, "checkpoint_wait_frac": 0.1, "host_frac": 0.5})


def test_an_update_ends_when_its_metrics_are_there():
    clock = Speed(tiny.TINY.model, jax.devices()[:1])
    slow(X).block_until_ready()
    began = time.perf_counter()
    for version in range(2):
        with clock.updating(version) as metrics:
            metrics.append(slow(X))
    handed_over = time.perf_counter() - began
    told = clock.turn([WORK, WORK])
    took = time.perf_counter() - began
    clock.close()
    assert handed_over < told["update_s"], "the clock does not wait for an update when it is handed over"
    assert 0.5 * took < 2 * told["update_s"] <= took
    assert told["tokens_per_s"] == pytest.approx(300.0 / told["update_s"])
    work = flops.Work(tokens=300.0, pairs=5000.0, responses=100.0)
    assert told["flops_per_s"] * told["update_s"] == pytest.approx(3 * flops.forward(tiny.TINY.model, work).total)
    assert "mfu" not in told, "there is no published peak of a CPU"


def test_the_time_of_the_host_is_not_that_of_the_devices():
    clock = Speed(tiny.TINY.model, jax.devices()[:1])
    began = time.perf_counter()
    with clock.doing(speed.DATA):
        time.sleep(0.2)
    with clock.updating(0) as metrics:
        metrics.append(slow(X))
    jax.block_until_ready(metrics)
    with clock.doing(speed.CHECKPOINT):
        time.sleep(0.1)
    told = clock.turn([WORK])
    whole = time.perf_counter() - began
    assert 0.2 <= told["data_wait_frac"] * whole < 0.3
    assert 0.1 <= told["checkpoint_wait_frac"] * whole < 0.2
    assert told["host_frac"] * whole == pytest.approx(whole - told["update_s"], abs=0.05)
    with clock.updating(1) as metrics:
        metrics.append(slow(X))
    after = clock.turn([WORK])
    clock.close()
    assert after["data_wait_frac"] == after["checkpoint_wait_frac"] == 0.0, "a turn forgets the one before it"


def test_an_update_that_still_runs_keeps_the_devices_busy():
    clock = Speed(tiny.TINY.model, jax.devices()[:1])
    for version in range(2):
        with clock.updating(version) as metrics:
            metrics.append(slow(X))
    first = clock.turn([WORK])
    second = clock.turn([WORK])
    clock.close()
    assert first["host_frac"] < 0.1
    assert second["host_frac"] < 0.1


def test_peaks_are_added_up_where_they_are_known():
    assert peak_flops_per_s(["TPU v5 lite", "TPU v5 lite"]) == 2 * 197e12
    assert peak_flops_per_s(["TPU v5 lite", "cpu"]) is None
    assert peak_flops_per_s([device.device_kind for device in jax.devices()]) is None


def test_memory_is_that_of_the_fullest_device():
    told = [{"bytes_in_use": used, "peak_bytes_in_use": 2 * used, "largest_alloc_size": 1} for used in (3, 7)]
    assert fullest(told) == {"memory_bytes": 7.0, "memory_peak_bytes": 14.0}
    assert fullest([*told, {"bytes_in_use": 1}]) == {"memory_bytes": 7.0}
    assert fullest([device.memory_stats() for device in jax.devices()]) == {}
