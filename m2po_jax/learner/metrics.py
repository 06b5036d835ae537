"""Metrics of updates and evaluations: fetched one batch late, kept as lines, written as whole segments."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m2po_jax.learner.events import Events
from m2po_jax.learner.speed import Speed
from m2po_jax.rollouts import Store, write_segment


class MetricsLog:
    """Collects lines for the segment of one checkpoint interval, and TensorBoard events as they come.

    Device values of a batch are fetched when the next batch has been dispatched, so that the loop never waits for
    a number it only logs.
    """

    def __init__(
        self,
        store: Store,
        first_version: int,
        tensorboard: Path | None,
        warn: Callable[[str], None],
        writes: bool = True,
        speed: Speed | None = None,
    ):
        """The first segment begins at `first_version`; `tensorboard` is a local directory or None for no events.

        `warn` is told, in a line, of every update that went wrong. On several hosts one of them `writes`. `speed` is
        the clock of the loop that makes the updates.
        """
        self._writes, self._speed = writes, speed
        self._store, self._segment, self._warn = store, first_version, warn
        self._lines: list[dict[str, Any]] = []
        self._pending: list[tuple[dict[str, Any], dict[str, jax.Array]]] = []
        self._events = Events(tensorboard, first_version) if tensorboard else None
        self._started, self._first, self.latest = time.perf_counter(), first_version, dict[str, Any]()

    def updates(self, batch: list[tuple[dict[str, Any], dict[str, jax.Array]]]) -> None:
        """Take the (facts, device metrics) of one batch's updates, and fetch those of the batch before."""
        ready, self._pending = self._pending, batch
        self._fetch(ready)

    def evaluation(self, version: int, values: dict[str, float]) -> None:
        """Take one evaluation of the policy at `version`."""
        self._append({"event": "evaluation", "version": version, **values})

    def flush(self, next_version: int) -> None:
        """Write the segment of everything so far; the next one begins at `next_version`."""
        self.updates([])
        if self._lines and self._writes:
            write_segment(self._store, self._segment, self._lines)
        self._segment, self._lines = next_version, []

    def close(self) -> None:
        """Release the event file."""
        if self._events:
            self._events.close()

    def _fetch(self, batch: list[tuple[dict[str, Any], dict[str, jax.Array]]]) -> None:
        if not batch:
            return
        elapsed = time.perf_counter() - self._started
        fetched = [
            {name: _plain(np.asarray(value)) for name, value in jax.device_get(metrics).items()} for _, metrics in batch
        ]
        speed = self._speed.turn(fetched) if self._speed else {}
        for (facts, _), values in zip(batch, fetched, strict=True):
            rate = (facts["version"] + 1 - self._first) / elapsed
            self.latest = {**facts, **values, "wall_time_s": elapsed, "updates_per_s": rate, **speed}
            self._append({"event": "update", **self.latest})
            for alarm in alarms(self.latest):
                self._warn(f"update {facts['version']}: {alarm}")

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        if self._events:
            tag = line["event"]
            numbers = {f"{tag}/{name}": value for name, value in line.items() if isinstance(value, (int, float))}
            self._events.scalars(line["version"], numbers)


def alarms(line: dict[str, Any]) -> list[str]:
    """What must not pass silently in the metrics of an update, a phrase each."""
    found = [
        f"{value:.0f} tokens whose {name.removeprefix('nonfinite_')} log-prob is not finite; masked"
        for name, value in line.items()
        if name.startswith("nonfinite_") and name != "nonfinite_tokens" and value
    ]
    if line.get("nonfinite_tokens") and not found:
        found.append(f"{line['nonfinite_tokens']:.0f} tokens whose log-ratio is not finite; masked")
    if line.get("all_masked"):
        found.append("every token is masked")
    if line.get("saturated_frac"):
        found.append(f"{line['saturated_frac']:.2%} of the ratios are saturated")
    if line.get("skipped"):
        found.append("loss or gradient is not finite; update skipped")
    return found


def _plain(value: np.ndarray) -> float | list[Any]:
    """A number, or nested lists of numbers; whole ones as integers, which JSON writes shorter."""
    if value.ndim == 0:
        return float(value)
    whole = np.all(value == np.round(value))
    plain: list[Any] = value.astype(np.int64 if whole else np.float64).tolist()
    return plain
