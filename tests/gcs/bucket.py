"""Buckets in memory: objects with generations, and writes that hold only on a condition, as in Google Cloud Storage."""

import base64
import hashlib
import itertools
import struct
import threading
import time
from bisect import bisect_left, insort
from dataclasses import dataclass

import google_crc32c


class Refused(Exception):
    """A request that the service refuses, with its HTTP status and the service's word for it."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Blob:
    """One generation of an object."""

    data: bytes
    generation: int
    created: float

    @property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.data).digest()).decode()

    @property
    def crc32c(self) -> str:
        return base64.b64encode(struct.pack(">I", google_crc32c.value(self.data))).decode()

    @property
    def time(self) -> str:
        whole, part = divmod(self.created, 1)
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int(part * 1e6):06d}Z"


class Bucket:
    """Objects by name; every method is atomic."""

    def __init__(self) -> None:
        self._blobs: dict[str, Blob] = {}
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._generations = itertools.count(int(time.time() * 1e6))

    def put(self, name: str, data: bytes, only_over: int | None = None) -> Blob:
        """Write an object; `only_over` a generation, or 0 for none. Raises Refused when another one is there."""
        with self._lock:
            self._check(name, only_over)
            if name not in self._blobs:
                insort(self._names, name)
            blob = self._blobs[name] = Blob(data, next(self._generations), time.time())
            return blob

    def get(self, name: str, generation: int | None = None) -> Blob:
        """The object; raises Refused when there is none, or of another generation than asked for."""
        with self._lock:
            blob = self._blobs.get(name)
            if blob is None:
                raise Refused(404, "notFound")
            self._check(name, generation)
            return blob

    def delete(self, name: str, only: int | None = None) -> None:
        """Delete an object; raises Refused when there is none, or of another generation."""
        with self._lock:
            if name not in self._blobs:
                raise Refused(404, "notFound")
            self._check(name, only)
            del self._blobs[name]
            del self._names[bisect_left(self._names, name)]

    def page(self, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], list[str], str | None]:
        """(names, prefixes, last one listed or None at the end), of names above `after`, in order."""
        with self._lock:
            names: list[str] = []
            prefixes: list[str] = []
            at = bisect_left(self._names, max(prefix, after))
            while at < len(self._names) and self._names[at].startswith(prefix):
                name = self._names[at]
                at += 1
                if name <= after:
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    common = prefix + rest.split(delimiter)[0] + delimiter
                    if common <= after:
                        continue
                    prefixes.append(common)
                    at = bisect_left(self._names, common[:-1] + chr(ord(common[-1]) + 1))
                else:
                    names.append(name)
                if len(names) + len(prefixes) == most:
                    more = at < len(self._names) and self._names[at].startswith(prefix)
                    return names, prefixes, max(names[-1:] + prefixes[-1:]) if more else None
            return names, prefixes, None

    def _check(self, name: str, generation: int | None) -> None:
        blob = self._blobs.get(name)
        if generation is not None and generation != (blob.generation if blob else 0):
            raise Refused(412, "conditionNotMet")
