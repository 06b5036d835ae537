"""The generation service's loop: find the next unit that the learner will consume and nobody has made, and make it.

Any number of workers may run, join, die and come back; they share nothing but the store. No unit waits for the one
that began it: each looks anew for what is missing before every unit, and makes what is missing.
"""

import hashlib
import time
from collections import deque
from typing import Any, Protocol

from m2po_jax.config import ConfigError, UserError
from m2po_jax.generation.polling import Poll
from m2po_jax.generation.server import ServerError
from m2po_jax.generation.service import Begun, Generator, Made
from m2po_jax.rollouts import Schedule, Shelf, Store, UnitId, read_position, weights, write_generator_lines

WINDOW_UNITS = 32
"""Workers are at different places among so many missing units, so that little is made twice."""
OVERDUE_LOOKS = 3
"""The unit that the learner waits for first is made by whoever has found it missing so many times in a row."""
OTHERS_EVERY_S = 2.0
"""Where many versions will do, those that are not the best one are looked through no more often."""
_WEIGHTS_ATTEMPTS = 5
_LINES_EVERY_S = 30.0
_RATE_OVER_UNITS = 16


class GeneratorWatcher(Protocol):
    """What a worker tells whoever watches it, and asks back: whether to stop."""

    def note(self, message: str) -> None:
        """One line worth reading."""

    def unit(self, position: int, total: int, facts: dict[str, Any]) -> None:
        """A unit was made; the learner is at `position` of `total` updates."""

    def waiting(self, position: int, total: int, what: str) -> None:
        """Nothing is to be made now, and why."""

    def stopping(self) -> bool:
        """Whether someone asked to stop after this unit."""


class Worker:
    """One generator of a run."""

    def __init__(self, store: Store, generator: Generator, schedule: Schedule, watcher: GeneratorWatcher, poll: Poll):
        """`generator` makes units of the run in `store`, whose `schedule` says which."""
        self._store, self._generator, self._schedule = store, generator, schedule
        self._watcher, self._poll = watcher, poll
        self._shelf = Shelf(store)
        self._units_per_batch = generator.config.rollouts.units_per_batch
        digest = hashlib.sha256(generator.producer.encode()).digest()
        self._place = int.from_bytes(digest[:8], "big") / 2**64
        self._lines: list[dict[str, Any]] = []
        self._name = f"{generator.producer.replace(':', '-')}-{int(time.time())}"
        self._segment, self._written = 0, time.monotonic()
        self._recent: deque[Made] = deque(maxlen=_RATE_OVER_UNITS)
        self._made = self._twice = 0
        self._gone: set[int] = set()
        self._first: UnitId | None = None
        self._looks = 0

    def run(self) -> bool:
        """Work until the learner has all it needs (True), or until asked to stop (False)."""
        begun: Begun | None = None
        waits = self._poll.waits()
        try:
            while True:
                position, latest = self._look()
                finished = position >= self._schedule.total_updates
                ends = finished or self._watcher.stopping()
                unit = None if ends else self._next(position, latest, begun.unit if begun else None)
                following = self._begin(unit) if unit else None
                if begun:  # the next one is being sampled meanwhile
                    self._finish(begun, position)
                    waits = self._poll.waits()
                if ends:
                    return finished
                begun = following
                if begun is None:
                    self._wait(next(waits), position, latest)
        finally:
            self._write_lines()

    def _look(self) -> tuple[int, int | None]:
        """Learner version of the next batch, and the newest published version."""
        newest = weights.latest(self._store)
        return read_position(self._store) or 0, newest[0] if newest else None

    def _next(self, position: int, latest: int | None, begun: UnitId | None) -> UnitId | None:
        """The unit to make now, None if all that can be made is there or begun."""
        if latest is None:
            return None
        missing: list[UnitId] = []
        looked: set[int] = set()
        for version, sources in self._schedule.needs(position, latest):
            options = [tuple(UnitId(v, b, u) for v, b, _ in sources) for u in range(self._units_per_batch)]
            best, *others = (source.version for source in sources)
            # What the learner waits for is looked up each time, as it may have moved a bad shard aside.
            if version == position or any(self._shelf.first(units) is None for units in options):
                self._shelf.look({best} - looked)
                self._shelf.look(others, OTHERS_EVERY_S)
                looked.add(best)
            lacking = (units[0] for units in options if self._shelf.first(units) is None)
            missing += [unit for unit in lacking if unit != begun]
            if len(missing) >= WINDOW_UNITS:
                break
        self._shelf.drop_below(min((unit.version for unit in missing), default=0))
        return self._chosen(missing[:WINDOW_UNITS])

    def _chosen(self, missing: list[UnitId]) -> UnitId | None:
        """One of the units, which stand in the order in which they are consumed: that at this worker's place.

        Whoever has the first place may have died, so the first unit does not wait for it.
        """
        if not missing:
            return None
        self._looks = self._looks + 1 if self._first == missing[0] else 1
        self._first = missing[0]
        return missing[0] if self._looks >= OVERDUE_LOOKS else missing[int(self._place * len(missing))]

    def _begin(self, unit: UnitId) -> Begun | None:
        """Start to sample a unit; None if its weights are not to be had, as when all their batches were consumed."""
        for attempt in range(_WEIGHTS_ATTEMPTS):
            try:
                return self._generator.begin(unit)
            except (ServerError, ConfigError):
                raise
            except UserError as error:
                if unit.version not in weights.versions(self._store):
                    if unit.version not in self._gone:
                        self._watcher.note(f"version {unit.version} has no weights any more: waiting for the learner")
                    self._gone.add(unit.version)
                    return None
                if attempt == _WEIGHTS_ATTEMPTS - 1:
                    raise
                self._watcher.note(f"{error}; trying again")
                time.sleep(self._poll.most_s)
        return None

    def _finish(self, begun: Begun, position: int) -> None:
        made = self._generator.finish(begun)
        self._shelf.add(begun.unit)
        self._recent.append(made)
        self._made += 1
        self._twice += not made.first
        seconds, work = sum(each.seconds for each in self._recent), self._generator.sampler.work
        facts = {
            "behavior_version": begun.unit.version,
            "lag": position - begun.unit.version,
            "tokens_per_s": sum(each.tokens for each in self._recent) / max(seconds, 1e-9),
            **({"slot_occupancy": work.occupancy} if work.slot_steps else {}),
            "reward_mean": made.reward_mean,
            "units_made": self._made,
            "units_twice": self._twice,
            **made.mismatch,
        }
        line = {"event": "unit", "version": begun.unit.version, "batch": begun.unit.batch, "unit": begun.unit.unit}
        line |= {"time": time.time(), "position": position, "first": made.first}
        self._lines.append(line | facts | {"tokens": made.tokens, "seconds": made.seconds})
        if time.monotonic() - self._written > _LINES_EVERY_S:
            self._write_lines()
        self._watcher.unit(position, self._schedule.total_updates, facts)

    def _write_lines(self) -> None:
        if self._lines:
            write_generator_lines(self._store, self._name, self._segment, self._lines)
        self._segment, self._lines, self._written = self._segment + 1, [], time.monotonic()

    def _wait(self, wait_s: float, position: int, latest: int | None) -> None:
        what = "the first weights" if latest is None else f"weights after version {latest}"
        self._watcher.waiting(position, self._schedule.total_updates, f"waiting for {what}")
        time.sleep(wait_s)
