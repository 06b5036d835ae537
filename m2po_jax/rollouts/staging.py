"""Directories that a library writes on a local disk and a remote store keeps: whole, or not there.

Object stores know no directories and no renames. So a directory is written locally, its files are uploaded, and last of
all a small object that names them: what has none is not there, and what has one can be read whole.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from m2po_jax.rollouts.store import Store

COMMITTED = "COMMITTED"
"""Name of that object in its directory."""
_THREADS = 8


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory, on the disk that TMPDIR names."""
    with tempfile.TemporaryDirectory(prefix="m2po-") as folder:
        yield Path(folder)


def upload(store: Store, directory: Path, prefix: str, facts: dict[str, Any]) -> None:
    """Upload a directory's files, then commit them with `facts`."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())

    def put(path: Path) -> list[Any]:
        name = path.relative_to(directory).as_posix()
        store.upload(f"{prefix}/{name}", path)
        return [name, path.stat().st_size, _file_digest(path)]

    with ThreadPoolExecutor(_THREADS) as threads:
        files = list(threads.map(put, paths))
    commit(store, prefix, facts | {"files": files})


def commit(store: Store, prefix: str, facts: dict[str, Any]) -> None:
    """Say that a directory is whole, with `facts`."""
    store.replace(f"{prefix}/{COMMITTED}", (json.dumps(facts) + "\n").encode())


def committed(store: Store, prefix: str) -> dict[str, Any] | None:
    """The facts that a directory was committed with; None where it is not there, or not whole."""
    try:
        facts: dict[str, Any] = json.loads(store.get(f"{prefix}/{COMMITTED}"))
    except FileNotFoundError:
        return None
    return facts


def children(store: Store, prefix: str) -> list[str]:
    """Sorted names of the directories under a prefix that are whole."""
    ends = f"/{COMMITTED}"
    return [path.removesuffix(ends).rsplit("/", 1)[-1] for path in store.list(prefix) if path.endswith(ends)]


def download(store: Store, prefix: str, directory: Path) -> dict[str, Any]:
    """Write the files of a committed directory to a local one; returns its facts.

    Raises FileNotFoundError where it is not whole, OSError where a file is not as it was uploaded.
    """
    facts = committed(store, prefix)
    if facts is None:
        raise FileNotFoundError(store.location(prefix))

    def get(file: list[Any]) -> None:
        name, size, digest = file
        store.download(f"{prefix}/{name}", size, directory / name)
        if _file_digest(directory / name) != digest:
            raise OSError(f"{store.location(f'{prefix}/{name}')} is not what was uploaded")

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(get, facts["files"]))
    return facts


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete(store: Store, prefix: str) -> None:
    """Delete a directory: first what says that it is whole."""
    store.delete(f"{prefix}/{COMMITTED}")
    store.delete_prefix(prefix)
