"""What goes wrong on the way: a seeded share of the requests, or all of them for a while."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

KINDS = ("429", "503", "hang", "drop", "truncate")
"""Too many requests; unavailable; no answer until the client gives up; closed before and after the request was done;
an answer that breaks off in the middle."""


@dataclass
class Faults:
    """Which requests fail, and how; and how many requests there were."""

    share: float = 0.0
    kinds: tuple[str, ...] = KINDS
    hang_s: float = 2.0
    away_until: float = 0.0
    requests: Counter = field(default_factory=Counter)
    """By kind: get, head, list, put, delete, and so on; `bytes_in`, `bytes_out`; and each fault by its kind."""
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, request: str) -> str | None:
        """Count a request, and say what befalls it."""
        with self._lock:
            self.requests[request] += 1
            if time.monotonic() < self.away_until:
                fault = "503"
            elif self._random.random() < self.share:
                fault = self._random.choice(self.kinds)
            else:
                return None
            self.requests[fault] += 1
            return fault

    def count(self, name: str, amount: int) -> None:
        """Add to a number of `requests`."""
        with self._lock:
            self.requests[name] += amount

    def set(self, settings: dict) -> None:
        """Take settings by name; `away_s` from now on, `seed`, and `reset` of the counts."""
        with self._lock:
            settings = dict(settings)
            if "seed" in settings:
                self._random = random.Random(settings.pop("seed"))
            if "away_s" in settings:
                self.away_until = time.monotonic() + settings.pop("away_s")
            if settings.pop("reset", False):
                self.requests.clear()
            for name, value in settings.items():
                setattr(self, name, tuple(value) if name == "kinds" else value)

    @property
    def is_before(self) -> bool:
        """Whether a dropped connection drops before the request is done, or after it."""
        with self._lock:
            return self._random.random() < 0.5
