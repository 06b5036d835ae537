"""Directories that other libraries write, in object stores: made on the local disk, moved, visible once whole.

A file named COMMITTED is written last and deleted first; without it a directory is not there. Orbax writes a file of
that name last too, where several hosts let it write to the store themselves.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from m2po_jax.rollouts.store import Store

COMMITTED = "commit_success.txt"
_AT_A_TIME = 8
_MARK = b"All files of this directory were written before this one.\n"


@contextmanager
def scratch(what: str) -> Iterator[Path]:
    """A local directory for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix=f"m2po-{what}-") as name:
        yield Path(name)


def is_whole(store: Store, path: str) -> bool:
    """Whether a directory was written to its end; on a local disk it appears by a rename, so one that is there was."""
    if store.local_path is not None:
        return (store.local_path / path).is_dir()
    return store.exists(f"{path}/{COMMITTED}")


def whole(store: Store, prefix: str) -> list[str]:
    """Sorted names of the whole directories directly under a directory; one request for each 1,000 files in them."""
    if store.local_path is not None:
        return store.children(prefix)
    return [path.split("/")[-2] for path in store.list(prefix) if path.endswith(f"/{COMMITTED}")]


def upload(store: Store, directory: Path, path: str) -> None:
    """Make a directory of an object store of a local one, in place of what an interrupted upload left there."""
    remove(store, path)
    files = [file for file in sorted(directory.rglob("*")) if file.is_file() and file.name != COMMITTED]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        moved = pool.map(lambda file: store.upload(f"{path}/{file.relative_to(directory).as_posix()}", file), files)
        for _ in moved:
            pass
    store.replace(f"{path}/{COMMITTED}", _MARK)


def download(store: Store, path: str, directory: Path) -> None:
    """Copy a directory of an object store to a local one; raises FileNotFoundError when it is not there, whole."""
    sizes = store.sizes(path)
    if sizes.pop(f"{path}/{COMMITTED}", None) is None:
        raise FileNotFoundError(store.location(path))
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        copied = pool.map(lambda name: store.download(name, sizes[name], directory / name[len(path) + 1 :]), sizes)
        for _ in copied:
            pass


def remove(store: Store, path: str) -> None:
    """Delete a directory, which is not there from the first moment on; that there is none is success."""
    if store.local_path is None:
        store.delete(f"{path}/{COMMITTED}")
    store.delete_prefix(path)
