"""Staleness policies as pure arithmetic on versions: which batch of which version a learner step reads.

U = updates_per_batch, P = publish_every (a multiple of U), k = staleness, all in model updates.
Weights exist for versions 0, P, 2P, ...; batches are consumed at learner versions 0, U, 2U, ...

What happens when the wanted data does not exist yet belongs to the policy: `exactly` and `uniform` read version 0
while the run is younger than the age that they ask for, and else wait for the one batch they chose; `at_most` takes
the newest there is within its bound, unit by unit, and waits where there is none; `frozen` on another run never waits.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from m2po_jax.config import Config, SourceConfig
from m2po_jax.rollouts.schema import UnitId

AHEAD_BATCHES = 16
"""Batches that generators make ahead of the learner where the policy itself sets no bound."""


class Source(NamedTuple):
    """Where the units of one batch may be read."""

    version: int
    batch: int
    run: str | None = None
    """Another run; None for the learner's own."""


Inventory = Mapping[str, tuple[tuple[int, int], ...]]
"""Another run -> its whole batches (version, batch) that a policy may read, in order."""


@dataclass(frozen=True)
class Schedule:
    """What is read at each learner version, and what generators make for it: a pure function of the run."""

    sources: tuple[SourceConfig, ...]
    updates_per_batch: int
    publish_every: int
    total_updates: int
    seed: int
    inventory: Inventory = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, config: Config, inventory: Inventory | None = None) -> "Schedule":
        """The schedule of a run.

        `inventory` is for its learner, where the policy reads another run; generators need none, as they make nothing
        for that.
        """
        learner = config.learner
        others = (source for source in config.staleness.sources if source.run is not None)
        return cls(
            sources=config.staleness.sources,
            updates_per_batch=learner.updates_per_batch,
            publish_every=learner.publish_interval,
            total_updates=learner.total_updates,
            seed=config.seed,
            inventory=inventory or {inventory_key(source): ((0, 0),) for source in others},
        )

    def reads(self, version: int) -> tuple[Source, ...]:
        """Where each unit of the batch consumed at a learner version may come from, best first; all of one run.

        Raises ValueError when version is no multiple of U.
        """
        if version < 0 or version % self.updates_per_batch:
            raise ValueError(f"version {version} is no multiple of updates_per_batch {self.updates_per_batch}")
        part, source = self._part(version)
        if source.policy == "exactly":
            return (self._exactly(version, source.k),)
        index = version // self.updates_per_batch
        if source.policy == "at_most":
            return tuple(
                Source(v, index) for v in at_most(version, source.k, self.updates_per_batch, self.publish_every)
            )
        if source.policy == "uniform":
            draw = _draw(self.seed, version, "age")
            return (Source(uniform(version, source.low, source.high, self.publish_every, draw), index),)
        if source.run is None:
            return (Source(0, index),)
        earlier = sum(self._part(n)[0] == part for n in range(0, version, self.updates_per_batch))
        batches = self.inventory[inventory_key(source)]
        return (Source(*batches[earlier % len(batches)], source.run),)

    def needs(self, position: int, latest: int) -> Iterator[tuple[int, tuple[Source, ...]]]:
        """What generators are to make: (learner version, sources, best first), in the order in which it is consumed.

        Args:
            position: learner version at which the next batch is consumed.
            latest: newest version whose weights are published.
        """
        for version in range(position, min(self._end(position, latest), self.total_updates), self.updates_per_batch):
            sources = tuple(s for s in self.reads(version) if s.run is None and s.version <= latest)
            if sources:
                yield version, sources

    def served(self, version: int, total_updates: int | None = None) -> frozenset[int]:
        """Versions published up to `version` that have a batch to be consumed at `version` or later.

        The weights of any older version can be retired: all its batches were consumed. With `total_updates`, versions
        whose first batch the run never reaches are left out.
        """
        end = self._end(version, version)
        span = range(version, end if total_updates is None else min(end, total_updates), self.updates_per_batch)
        read = (source for n in span for source in self.reads(n))
        return frozenset(s.version for s in read if s.run is None and s.version <= version)

    def _exactly(self, version: int, k: int) -> Source:
        behavior_version, batch = exactly(version, k, self.updates_per_batch, self.publish_every)
        # In a mixture other parts read the same versions: batches are counted over the whole run there.
        return Source(behavior_version, batch if len(self.sources) == 1 else version // self.updates_per_batch)

    def _end(self, position: int, latest: int) -> int:
        """No batch consumed at this learner version or later is made of `latest` or an older version."""
        reach = {"exactly": lambda s: s.k, "uniform": lambda s: s.high, "at_most": lambda s: s.k}
        ages = [reach[s.policy](s) for s in self.sources if s.policy in reach]
        ends = [latest + age + self.publish_every for age in ages]
        if any(s.policy == "frozen" for s in self.sources):
            ends.append(position + AHEAD_BATCHES * self.updates_per_batch)
        return max(ends)

    def _part(self, version: int) -> tuple[int, SourceConfig]:
        if len(self.sources) == 1:
            return 0, self.sources[0]
        shares = [source.share for source in self.sources]
        left = _draw(self.seed, version, "part") / _DRAWS * sum(shares)
        for part, share in enumerate(shares):
            left -= share
            if left < 0:
                return part, self.sources[part]
        return len(shares) - 1, self.sources[-1]


def exactly(version: int, k: int, updates_per_batch: int, publish_every: int) -> tuple[int, int]:
    """The (behavior_version, batch_index) that `exactly(k)` consumes at a learner version.

    The delay line: data of version n - k, rounded down to a published one; of version 0 while n < k. Version 0 so
    serves (k + P) / U batches and every later version P / U of them. Raises ValueError when version is no multiple
    of U, P none of U, or k none of P.
    """
    _check(k, updates_per_batch, publish_every)
    if version < 0 or version % updates_per_batch:
        raise ValueError(f"version {version} is no multiple of updates_per_batch {updates_per_batch}")
    behavior_version = max(version - k, 0) // publish_every * publish_every
    if behavior_version == 0:
        return 0, version // updates_per_batch
    return behavior_version, (version - k - behavior_version) // updates_per_batch


def at_most(version: int, k: int, updates_per_batch: int, publish_every: int) -> tuple[int, ...]:
    """Published versions, newest first, that are at most k behind at the last of the U updates from `version` on."""
    oldest = max(version + updates_per_batch - 1 - k, 0)
    newest = version // publish_every * publish_every
    return tuple(range(newest, oldest - 1, -publish_every))


def uniform(version: int, low: int, high: int, publish_every: int, draw: int) -> int:
    """One of the published versions that are low to high behind, by a draw; version 0 for those before it.

    Raises ValueError when no version is so far behind.
    """
    first, last = -((high - version) // publish_every), (version - low) // publish_every
    if first > last:
        raise ValueError(f"no published version is {low} to {high} behind version {version}")
    return max(first + draw % (last - first + 1), 0) * publish_every


def units(behavior_version: int, batch: int, units_per_batch: int) -> tuple[UnitId, ...]:
    """The work units of one batch, in the order in which a learner reads them."""
    return tuple(UnitId(behavior_version, batch, unit) for unit in range(units_per_batch))


def inventory_key(source: SourceConfig) -> str:
    """The key of a frozen source in the inventory."""
    return f"{source.run} {'all' if source.version is None else source.version}"


_DRAWS = 2**64


@cache
def _draw(seed: int, version: int, use: str) -> int:
    """A whole number below 2^64 by hash, the same for ever and everywhere."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{version}/{use}".encode()).digest()[:8], "big")


def _check(k: int, updates_per_batch: int, publish_every: int) -> None:
    if updates_per_batch < 1 or publish_every < 1 or publish_every % updates_per_batch:
        raise ValueError(f"publish_every {publish_every} is no multiple of updates_per_batch {updates_per_batch}")
    if k < 0 or k % publish_every:
        raise ValueError(f"k {k} is no multiple of publish_every {publish_every}")
