"""How fast a run learns and what it waits for: seconds of each update on the devices, and shares of the wall time.

An update begins when it is handed to the devices, or when the one before it is done if that is later; it is done when
its metrics are there, which a thread waits for, so that the loop does not. With them come

    update_s               seconds of an update, the mean of its batch, with what scores the batch before the first; in
                           the first batch with compiling
    tokens_per_s           tokens of its prompts and responses, without padding, over the seconds of its updates
    flops_per_s            useful FLOPs (models/flops.py, three passes a token) over the same, on all devices together
    mfu                    flops_per_s over the bfloat16 peak of all devices, where their kind is known

and of the turn, the wall time from the fetch of the batch before to that of this one, the shares

    data_wait_frac         waiting for rollouts: reading them and, in lockstep, generating them
    checkpoint_wait_frac   waiting for checkpoints and for published weights
    host_frac              nothing handed to the devices: neither an update that is not done, nor generation, nor an
                           evaluation. What a generator does on the host between two steps counts as generation.

and, where the device tells, the memory of the fullest local one: memory_bytes now, memory_peak_bytes at most so far.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from m2po_jax.config import ModelConfig
from m2po_jax.models import flops
from m2po_jax.models.chips import chip_of

Span = tuple[float, float]
"""Seconds at which something began and ended."""

DATA, GENERATE, SCORE, UPDATE, PUBLISH, EVALUATE, CHECKPOINT = (
    "data", "generate", "score", "update", "publish", "evaluate", "checkpoint",
)  # fmt: skip
"""What the loop is at, in metrics and in traces."""
_WAITS = {"data_wait_frac": {DATA}, "checkpoint_wait_frac": {PUBLISH, CHECKPOINT}}
_ON_DEVICES = {GENERATE, EVALUATE}


@dataclass(frozen=True)
class Running:
    """An update that was handed to the devices."""

    began: float
    done: Future[float]
    """The time at which its metrics were there."""


class Speed:
    """Clock of a run's loop; every method is for the thread of the loop."""

    def __init__(self, model: ModelConfig, devices: Sequence[jax.Device]):
        """Of a model on these devices, of all hosts."""
        self._model = model
        self._local = [device for device in devices if device.process_index == jax.process_index()]
        self._peak = peak_flops_per_s([device.device_kind for device in devices])
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="updates")
        self._spans: list[tuple[str, Span]] = []
        self._running: list[Running] = []
        self._last_done = self._turn_began = time.perf_counter()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While the loop is at `what`, one of the names above; traces have it under this name."""
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(what):
                yield
        finally:
            self._spans.append((what, (began, time.perf_counter())))

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[list[Any]]:
        """While update `version` is handed to the devices; its metrics are to be put into the list that this gives."""
        began, metrics = time.perf_counter(), list[Any]()
        with jax.profiler.StepTraceAnnotation(UPDATE, step_num=version):
            yield metrics
        self._running.append(Running(began, self._watcher.submit(_when_done, metrics)))

    def turn(self, updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The speed of the oldest updates that are not told yet, as many as there are fetched metrics; ends the turn.

        `updates` have `sequence_tokens`, `token_pairs` and `tokens`, the three numbers of `models.flops.Work`.
        """
        done, self._running = self._running[: len(updates)], self._running[len(updates) :]
        seconds, busy = 0.0, list[Span]()
        for update in done:
            began, self._last_done = max(update.began, self._last_done), update.done.result()
            seconds += self._last_done - began
            busy.append((began, self._last_done))
        now = time.perf_counter()
        busy += [(update.began, update.done.result() if update.done.done() else now) for update in self._running]
        shares = shares_of((self._turn_began, now), self._spans, busy)
        # What is still going on, such as an update, began before and is seen again in the next turn.
        self._turn_began, self._spans = now, []
        return self._rates(updates, seconds) | shares | fullest([device.memory_stats() for device in self._local])

    def close(self) -> None:
        """Let the thread end; it is not waited for, since an update may never be done where another host was lost."""
        self._watcher.shutdown(wait=False, cancel_futures=True)

    def _rates(self, updates: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
        names = ("sequence_tokens", "token_pairs", "tokens")
        work = flops.Work(*(sum(update[name] for update in updates) for name in names))
        rate = flops.TRAINING * flops.forward(self._model, work).total / seconds
        known = {} if self._peak is None else {"mfu": rate / self._peak}
        mean = seconds / len(updates)
        return {"update_s": mean, "tokens_per_s": work.tokens / seconds, "flops_per_s": rate, **known}


def peak_flops_per_s(kinds: Sequence[str]) -> float | None:
    """Of all devices of these kinds together; None where the figures of one are not known."""
    chips = [chip_of(kind) for kind in kinds]
    return sum(chip.flops_per_s for chip in chips if chip) if all(chips) else None


def shares_of(turn: Span, spans: Sequence[tuple[str, Span]], busy: Sequence[Span]) -> dict[str, float]:
    """The shares of a turn, from what the loop was at in it and from when the devices had an update."""
    length = max(turn[1] - turn[0], 1e-9)
    waits = {
        name: covered(turn, [span for what, span in spans if what in phases]) / length
        for name, phases in _WAITS.items()
    }
    on_devices = [*busy, *(span for what, span in spans if what in _ON_DEVICES)]
    return waits | {"host_frac": 1.0 - covered(turn, on_devices) / length}


def covered(within: Span, spans: Sequence[Span]) -> float:
    """Seconds of `within` that lie in one of the spans, or in several."""
    total, reached = 0.0, within[0]
    for began, ended in sorted(spans):
        began, ended = max(began, reached), min(ended, within[1])
        if ended > began:
            total, reached = total + ended - began, ended
    return total


def fullest(told: Sequence[Mapping[str, int] | None]) -> dict[str, float]:
    """Bytes in use on the fullest of some devices, now and at most so far; nothing where one does not tell."""
    names = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use"}
    stats = [each or {} for each in told]
    return {
        name: float(max(each[key] for each in stats))
        for name, key in names.items()
        if stats and all(key in each for each in stats)
    }


def _when_done(metrics: list[Any]) -> float:
    jax.block_until_ready(metrics)
    return time.perf_counter()
