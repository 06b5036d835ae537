"""Which work units have a shard: what was seen is remembered, and the rest is found by listing one version's prefix."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from m2po_jax.rollouts.paths import ROLLOUTS, parse_shard_path, rollouts_path
from m2po_jax.rollouts.schema import UnitId
from m2po_jax.rollouts.store import Store


class Shelf:
    """The shards of one run as one program knows them; not for several threads at once."""

    def __init__(self, store: Store):
        """Knows of none; `look` finds them."""
        self._store = store
        self._units: dict[int, set[UnitId]] = {}
        self._looked: dict[int, float] = {}

    def look(self, versions: Iterable[int], unless_within_s: float = 0.0) -> None:
        """List the shards of some versions anew, one request a version (and a further one for every 1,000 shards).

        Those that were listed within the last `unless_within_s` seconds are left out.
        """
        now = time.monotonic()
        for version in set(versions):
            if now - self._looked.get(version, -math.inf) < unless_within_s:
                continue
            self._looked[version] = now
            found = map(parse_shard_path, self._store.list(rollouts_path(version)))
            self._units[version] = {unit for unit in found if unit is not None}

    def first(self, options: Sequence[UnitId]) -> UnitId | None:
        """The first of some units that has a shard as far as is known."""
        return next((unit for unit in options if unit in self._units.get(unit.version, ())), None)

    def add(self, unit: UnitId) -> None:
        """A shard was seen, or made."""
        self._units.setdefault(unit.version, set()).add(unit)

    def forget(self, unit: UnitId) -> None:
        """A shard was moved aside."""
        self._units.get(unit.version, set()).discard(unit)

    def drop_below(self, version: int) -> None:
        """Forget older versions than this, which nobody asks for any more."""
        for old in [known for known in self._units if known < version]:
            del self._units[old]
            self._looked.pop(old, None)


def whole_batches(store: Store, version: int | None, units_per_batch: int) -> tuple[tuple[int, int], ...]:
    """(version, batch) of every batch that has all its units, of one version or of all, in order."""
    paths = store.list(ROLLOUTS if version is None else rollouts_path(version))
    found = Counter((unit.version, unit.batch) for path in paths if (unit := parse_shard_path(path)) is not None)
    return tuple(sorted(batch for batch, count in found.items() if count == units_per_batch))
