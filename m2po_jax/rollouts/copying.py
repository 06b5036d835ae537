"""Runs copied between two stores: whole, compared by content, going on where an earlier copy stopped."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2po_jax.config import UserError
from m2po_jax.rollouts import staging
from m2po_jax.rollouts.paths import CHECKPOINTS, CONFIG, LATEST, LOCK, POSITION, WEIGHTS, parse_version
from m2po_jax.rollouts.store import Store

_AT_A_TIME = 8
_POINTERS = (LATEST, POSITION)
_HALF = ".orbax-checkpoint-tmp-copy"


@dataclass(frozen=True)
class Copied:
    """What a copy did."""

    objects: int
    size_bytes: int
    there_before: int
    """Objects that were at the target already, with the same content."""


def copy_run(source: Store, target: Store, facts: Callable[[str], dict[str, Any]]) -> Copied:
    """Copy all objects of a run; `config.json` comes last, so that half a copy is no run.

    `facts` gives what a directory of weights or checkpoints is committed with in an object store.

    Raises:
        UserError: the target holds another object under one of the names, or is another run; it is left as it is.
    """
    if target.exists(CONFIG) and target.get(CONFIG) != source.get(CONFIG):
        raise UserError(f"{target.url} holds another run: name an empty place to copy to")
    names = source.sizes()
    there = target.sizes()
    plain = [path for path in names if _is_plain(path)]
    done = list(_each(plain, lambda path: copy_object(source, target, path, path in there)))
    for kind in (WEIGHTS, CHECKPOINTS):
        done += [copy_directory(source, target, f"{kind}/{name}", facts) for name in _versions(source, kind)]
    for path in (*_POINTERS, CONFIG):
        if path in names:
            data = source.get(path)
            target.replace(path, data)
            done.append((len(data), path in there))
    moved = [size for size, was_there in done if not was_there]
    return Copied(len(moved), sum(moved), len(done) - len(moved))


def copy_object(source: Store, target: Store, path: str, there: bool = False) -> tuple[int, bool]:
    """Copy one object; returns its size and whether it was `there`. UserError when another one is there."""
    data = source.get(path)
    if not (target.get(path) == data if there else target.create(path, data)):
        raise _other(target, path)
    return len(data), there


def copy_directory(source: Store, target: Store, path: str, facts: Callable[[str], dict[str, Any]]) -> tuple[int, bool]:
    """Copy a directory that Orbax wrote; it is at the target once it is whole. As `copy_object` otherwise."""
    with staging.scratch() as scratch:
        if source.local_path is None:
            folder = scratch / "directory"
            staging.download(source, path, folder)
        else:
            folder = source.local_path / path
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        if (found := _digests(target, path)) is not None:
            if found != {file.relative_to(folder).as_posix(): _digest(file) for file in files}:
                raise _other(target, path)
            return size, True
        if target.local_path is None:
            target.delete_prefix(path)
            staging.upload(target, folder, path, facts(path))
        else:
            half = target.local_path / f"{path}{_HALF}"
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(folder, half)
            os.rename(half, target.local_path / path)
    return size, False


def _digests(store: Store, path: str) -> dict[str, str] | None:
    """File -> sha256 of a whole directory, or None where there is none."""
    if store.local_path is None:
        facts = staging.committed(store, path)
        return None if facts is None else {name: digest for name, _, digest in facts["files"]}
    folder = store.local_path / path
    if not folder.is_dir():
        return None
    return {file.relative_to(folder).as_posix(): _digest(file) for file in folder.rglob("*") if file.is_file()}


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_plain(path: str) -> bool:
    """Whether a path is an object of its own, neither in a directory of Orbax nor a pointer nor a lock."""
    in_directory = path.split("/")[0] in (WEIGHTS, CHECKPOINTS)
    return not in_directory and path not in (*_POINTERS, CONFIG, LOCK)


def _versions(store: Store, kind: str) -> list[str]:
    names = store.children(kind) if store.local_path is not None else staging.children(store, kind)
    return [name for name in names if parse_version(name) is not None]


def _each(paths: Iterable[str], copy: Callable[[str], tuple[int, bool]]) -> Iterable[tuple[int, bool]]:
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        yield from threads.map(copy, paths)


def _other(target: Store, path: str) -> UserError:
    return UserError(f"{target.location(path)} is there with other content: it stays; copy to an empty place")
