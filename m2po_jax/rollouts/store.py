"""The store: immutable objects under one root, on a local disk or in an object store, through one code path."""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore

from m2po_jax.config import UserError
from m2po_jax.rollouts.remote import open_remote, patiently

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_NO_ROOM_TEXT = re.compile(rf"os[ _]error(?:_code)?\W+(?:{'|'.join(map(str, _NO_ROOM))})\b")  # obstore's, TensorStore's
_Paths = list[str]  # named, as `list` is a method of Store
_DELETED_AT_A_TIME = 8
_PART_BYTES = 1 << 26
_DELETING = ".deleting-"

T = TypeVar("T")


class Store:
    """Objects by relative path under a root. Safe to use from several threads and processes at once."""

    def __init__(self, url: str, objects: Any, local_path: Path | None):
        self.url = url
        self.local_path = local_path
        self._objects = objects

    @classmethod
    def open(cls, location: str | os.PathLike, create: bool = False) -> "Store":
        """Open a local directory or a URL such as `gs://bucket/prefix`; raises UserError when it is not there."""
        text = os.fspath(location)
        if "://" in text and not text.startswith("file://"):
            return cls(text.rstrip("/"), open_remote(text.rstrip("/")), None)
        root = Path(text.removeprefix("file://")).expanduser().absolute()
        if create:
            _make_directory(root)
        if not root.is_dir():
            raise UserError(f"{root} is not a directory: name an existing run directory")
        return cls(str(root), LocalStore(prefix=root), root)

    def location(self, path: str) -> str:
        """The absolute path or URL of an object, for libraries that do their own I/O (Orbax) and for messages."""
        return f"{self.url}/{path}"

    def get(self, path: str) -> bytes:
        """The bytes of an object; raises FileNotFoundError."""
        data, meta = self._get(path)
        if self._is_vacated(meta):
            raise FileNotFoundError(self.location(path))
        return data

    def exists(self, path: str) -> bool:
        """Whether there is an object (not a directory) at `path`."""
        try:
            return not self._is_vacated(self._asked(lambda: obstore.head(self._objects, path)))
        except FileNotFoundError:
            return False

    def create(self, path: str, data: bytes) -> bool:
        """Create an object if there is none: all of it or nothing, and the first writer wins.

        Returns True when the object now holds `data`, be it by this call, by an earlier try of it, or by another
        producer of the same bytes; False when a different object was first. Raises UserError when the disk is full.
        """
        while not self._put(path, data, "create"):
            try:
                found, meta = self._get(path)
            except FileNotFoundError:  # moved aside since; the name is free again
                continue
            if not self._is_vacated(meta):
                return bytes_digest(found) == bytes_digest(data)
            if self._put(path, data, _only_over(meta)):
                break
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Write an object over whatever is there, atomically; raises UserError when the disk is full."""
        self._put(path, data, "overwrite")

    def upload(self, path: str, file: Path) -> None:
        """Write a local file over whatever is at `path`; a large one in parts, so that it need not be in memory."""
        if file.stat().st_size <= _PART_BYTES:
            return self.replace(path, file.read_bytes())
        parts: Any = {"use_multipart": True, "chunk_size": _PART_BYTES // 4, "max_concurrency": 4}
        self._asked(lambda: obstore.put(self._objects, path, file, **parts))

    def download(self, path: str, size: int, file: Path) -> None:
        """Copy an object of `size` bytes to a local file, part by part; raises FileNotFoundError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as target:
            for start in range(0, size, _PART_BYTES):
                part = {"start": start, "end": min(start + _PART_BYTES, size)}
                target.write(self._asked(partial(obstore.get_range, self._objects, path, **part)))

    def list(self, prefix: str = "") -> _Paths:
        """Sorted paths of the objects under a directory; unfinished writes are not objects."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Path -> bytes of the objects under a directory."""
        found: dict[str, int] = {}
        seen: _Paths = []

        def read_on() -> None:  # a listing that broke off goes on behind the last page that came
            for page in obstore.list(self._objects, prefix or None, offset=seen[-1] if seen else None):
                found.update({meta["path"]: meta["size"] for meta in page if not self._is_vacated(meta)})
                if page and self.local_path is None:
                    seen.append(page[-1]["path"])

        self._asked(read_on)
        return found

    def children(self, prefix: str) -> _Paths:
        """Sorted names of the directories directly under a directory."""
        found = self._asked(lambda: obstore.list_with_delimiter(self._objects, prefix or None))["common_prefixes"]
        return sorted(path.rsplit("/", 1)[-1] for path in found)

    def delete(self, path: str) -> None:
        """Delete an object; that there is none is success."""
        try:
            self._asked(lambda: obstore.delete(self._objects, path))
        except FileNotFoundError:
            return

    def delete_prefix(self, prefix: str) -> None:
        """Delete a directory and all in it; on a local disk it vanishes at once, before its parts do."""
        if self.local_path is None:
            with ThreadPoolExecutor(_DELETED_AT_A_TIME) as threads:
                list(threads.map(self.delete, self.list(prefix)))
            return
        doomed = self.local_path / f"{prefix}{_DELETING}{secrets.token_hex(4)}"
        try:
            os.rename(self.local_path / prefix, doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def move_aside(self, path: str, expected_digest: str) -> str | None:
        """Rename the object with this digest to `<path>.bad-<8 hex>`; any other object at `path` stays.

        Returns the new path, or None when the object was gone or another one (a good one made meanwhile, which is
        put back should the rename have caught it).
        """
        if self._digest_of(path) != expected_digest:
            return None
        aside = f"{path}.bad-{secrets.token_hex(4)}"
        if self.local_path is None:
            return self._copy_aside(path, aside, expected_digest)
        try:
            obstore.rename(self._objects, path, aside)
        except FileNotFoundError:
            return None
        if self._digest_of(aside) == expected_digest:
            return aside
        self._put_back(aside, path)
        return None

    def _put_back(self, aside: str, path: str) -> None:
        if self.create(path, self.get(aside)):
            self.delete(aside)

    def _copy_aside(self, path: str, aside: str, expected_digest: str) -> str | None:
        # Object stores neither rename atomically nor delete on a condition, but they overwrite on one: the bad object
        # gives way to an empty one, which stands for a free name and which `create` overwrites on a condition too.
        try:
            data, meta = self._get(path)
        except FileNotFoundError:
            return None
        if bytes_digest(data) != expected_digest or not self.create(aside, data):
            return None
        if self._put(path, b"", _only_over(meta)):
            return aside
        self.delete(aside)
        return None

    def _asked(self, operation: Callable[[], T]) -> T:
        """The result of an operation; of a remote store patiently."""
        return operation() if self.local_path else patiently(operation, self.url)

    def _get(self, path: str) -> tuple[bytes, Any]:
        """All bytes of an object and what the store says of it; never a part of them."""

        def read() -> tuple[bytes, Any]:
            found = obstore.get(self._objects, path)
            data = bytes(found.bytes())
            if len(data) != found.meta["size"]:
                raise OSError(f"{len(data)} of {found.meta['size']} bytes were read")
            return data, found.meta

        return self._asked(read)

    def _put(self, path: str, data: bytes, mode: Any) -> bool:
        """Put on a condition; False when it did not hold."""
        try:
            self._asked(lambda: obstore.put(self._objects, path, data, mode=mode, use_multipart=False))
        except (AlreadyExistsError, PreconditionError):
            return False
        except (BaseError, OSError) as error:
            if is_no_room(error):
                raise no_room(self.location(path)) from error
            raise
        return True

    def _is_vacated(self, meta: Any) -> bool:
        return self.local_path is None and meta["size"] == 0

    def _digest_of(self, path: str) -> str | None:
        try:
            return bytes_digest(self.get(path))
        except FileNotFoundError:
            return None


def _only_over(meta: Any) -> dict[str, str]:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def bytes_digest(data: bytes) -> str:
    """sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def is_no_room(error: BaseException) -> bool:
    """Whether an error of any library says that the disk is full, or a quota or size limit reached."""
    return getattr(error, "errno", None) in _NO_ROOM or _NO_ROOM_TEXT.search(str(error)) is not None


def no_room(location: str) -> UserError:
    """The error for a full disk at an absolute path or URL."""
    return UserError(f"no space left to write {location}: free some space and run the same command again")


def _make_directory(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {root}: {error.strerror}; name another one") from error
