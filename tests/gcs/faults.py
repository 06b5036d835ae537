"""What goes wrong with a share of the requests, drawn from a seed, and how many requests there were of each kind."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

KINDS = ("429", "503", "hang", "drop", "truncate")


@dataclass(frozen=True)
class Fate:
    """What is to happen to one request: one of KINDS or `away`, before or after it was carried out."""

    kind: str
    after: bool = False


class Faults:
    """Settings that can change while the server runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.set({})

    def set(self, settings: dict) -> None:
        """Shares by kind in 0..1, `hang_s`, `away_s` (no connection is answered for so long), `seed`."""
        with self._lock:
            self.shares = {kind: float(settings.get(kind, 0)) for kind in KINDS}
            self.hang_s = float(settings.get("hang_s", 30))
            self.away_until = time.monotonic() + float(settings.get("away_s", 0))
            self._random = random.Random(settings.get("seed", 0))

    def draw(self) -> Fate | None:
        """What happens to the next request."""
        if time.monotonic() < self.away_until:
            return Fate("away")
        with self._lock:
            place = self._random.random()
            for kind, share in self.shares.items():
                if place < share:
                    return Fate(kind, after=kind not in ("429", "503") and self._random.random() < 0.5)
                place -= share
        return None

    def count(self, **numbers: int) -> None:
        with self._lock:
            self.counts.update(numbers)

    def taken(self) -> dict[str, int]:
        """Counts since they were last taken."""
        with self._lock:
            counts, self.counts = dict(self.counts), Counter()
        return counts
