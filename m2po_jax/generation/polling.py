"""Waits of whoever looks again and again."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Poll:
    """How long to wait before looking, or asking, once more: doubling, in seconds."""

    first_s: float = 0.05
    most_s: float = 1.0

    def waits(self) -> Iterator[float]:
        """The waits, one after the other."""
        wait_s = self.first_s
        while True:
            yield wait_s
            wait_s = min(2 * wait_s, self.most_s)
