"""Objects in memory as Google's store keeps them: generations, conditions on them, listings in pages."""

import base64
import hashlib
import struct
import threading
import time
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

import google_crc32c

PAGE = 1000
"""Most entries in one answer to a listing."""


class Refused(Exception):
    """A request that cannot be granted, with its HTTP status and the reason that the store gives."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Item:
    """One version of an object."""

    data: bytes
    generation: int

    @property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.data).digest()).decode()

    @property
    def crc32c(self) -> str:
        return base64.b64encode(struct.pack(">I", google_crc32c.value(self.data))).decode()

    @property
    def updated(self) -> str:
        """Generations are microseconds, as they are at Google."""
        seconds, micros = divmod(self.generation, 10**6)
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{micros:06d}Z"


@dataclass(frozen=True)
class Page:
    """Part of a listing: objects and common prefixes, and where the next page begins."""

    items: list[tuple[str, Item]]
    prefixes: list[str]
    token: str | None


@dataclass
class Bucket:
    """Objects by name; `forbidden` refuses everything, as to somebody without permission."""

    forbidden: bool = False
    items: dict[str, Item] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


class Buckets:
    """All buckets. Every method is atomic."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._lock = threading.RLock()
        self._generation = int(time.time() * 1e6)

    def add(self, bucket: str, forbidden: bool = False) -> None:
        with self._lock:
            self._buckets.setdefault(bucket, Bucket()).forbidden = forbidden

    def names(self) -> list[str]:
        return sorted(self._buckets)

    def find(self, bucket: str) -> Bucket:
        """Raises Refused when there is no such bucket, or it is not to be seen."""
        if (found := self._buckets.get(bucket)) is None:
            raise Refused(404, "NoSuchBucket")
        if found.forbidden:
            raise Refused(403, "AccessDenied")
        return found

    def put(self, bucket: str, name: str, data: bytes, generation: str | None = None) -> Item:
        """Store an object; `generation` is that of the object to be replaced, 0 where there must be none."""
        with self._lock:
            there = self.find(bucket)
            self.require(there.items.get(name), generation)
            self._generation += 1
            if name not in there.items:
                insort(there.names, name)
            there.items[name] = Item(data, self._generation)
            return there.items[name]

    def get(self, bucket: str, name: str, generation: str | None = None) -> Item:
        with self._lock:
            found = self.find(bucket).items.get(name)
            if found is None:
                raise Refused(404, "NoSuchKey")
            self.require(found, generation)
            return found

    def delete(self, bucket: str, name: str, generation: str | None = None) -> None:
        with self._lock:
            self.get(bucket, name, generation)
            there = self.find(bucket)
            del there.items[name]
            del there.names[bisect_left(there.names, name)]

    def fill(self, bucket: str, names: list[str], data: bytes) -> None:
        """Many objects of one content at once."""
        with self._lock:
            there = self.find(bucket)
            for name in names:
                self._generation += 1
                there.items[name] = Item(data, self._generation)
            there.names = sorted(there.items)

    def list(self, bucket: str, prefix: str, delimiter: str, after: str, most: int = PAGE, start: str = "") -> Page:
        """Entries behind `after`, in order; names that share a prefix up to the delimiter are one entry."""
        page = Page([], [], None)
        with self._lock:
            there = self.find(bucket)
            at = max(bisect_right(there.names, after) if after else 0, bisect_left(there.names, max(prefix, start)))
            last = after
            while at < len(there.names) and there.names[at].startswith(prefix):
                if len(page.items) + len(page.prefixes) >= most:
                    return Page(page.items, page.prefixes, last)
                name = there.names[at]
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                if found:
                    page.prefixes.append(prefix + head + delimiter)
                    last = prefix + head + delimiter + "\U0010ffff"
                    at = bisect_left(there.names, last)
                else:
                    page.items.append((name, there.items[name]))
                    last, at = name, at + 1
        return page

    @staticmethod
    def require(item: Item | None, generation: str | None) -> None:
        """Raises Refused unless the object has this generation; None asks for nothing."""
        if generation is not None and int(generation) != (item.generation if item else 0):
            raise Refused(412, "PreconditionFailed")
