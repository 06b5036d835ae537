"""A run directory: made once with its configuration, resumed with the same one, opened by its readers."""

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from m2po_jax.config import Config, ConfigError, UserError, differences, from_json, run_id_of, to_json
from m2po_jax.rollouts.paths import CONFIG, LOCK
from m2po_jax.rollouts.store import Store

_MAY_MOVE = ("model.source", "task.questions")


@dataclass(frozen=True)
class RunInfo:
    """Who a run is: a random id that its shards carry, its resolved configuration, and where it came from."""

    run_id: str
    config: Config
    parents: tuple[str, ...] = ()
    """Runs that this one was forked from, whose shards among its own are good."""


def create_or_resume(store: Store, config: Config) -> RunInfo:
    """Make the run with this configuration, or resume it; the first of two makers wins.

    A run may be resumed on another mesh than it was made on, and files may have moved since, as their digests are
    fields too. Raises ConfigError, naming the fields and both values, when the run exists with another configuration.
    """
    if not store.exists(CONFIG):
        store.create(CONFIG, to_json(config, uuid.uuid4().hex).encode())
    info = _read(store)
    changed = differences(replace(info.config, mesh=config.mesh), config)
    if changed := {name: values for name, values in changed.items() if name not in _MAY_MOVE}:
        fields = ", ".join(f"{name} ({old!r} there, {new!r} asked for)" for name, (old, new) in changed.items())
        raise ConfigError(
            f"the run {store.url} exists with another configuration: {fields}; use another --run directory"
        )
    return replace(info, config=config)


@contextlib.contextmanager
def sole_learner(store: Store) -> Iterator[None]:
    """Hold a local run for one learner; the lock goes with the process, however that ends.

    Raises UserError when another process holds it. Remote runs are not locked.
    """
    if store.local_path is None:
        yield
        return
    taken = f"another process is training {store.url}: wait for it, or use another --run directory"
    with held(store.local_path / LOCK, taken):
        yield


@contextlib.contextmanager
def held(path: Path, taken: str) -> Iterator[None]:
    """Hold a lock file, which goes with the process; UserError with the message `taken` where another one has it."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(taken) from error
        yield


def open_run(location: str | os.PathLike) -> tuple[Store, RunInfo]:
    """Open an existing run for reading; raises UserError when there is none at the path or URL."""
    store = Store.open(location)
    try:
        return store, _read(store)
    except FileNotFoundError as error:
        raise UserError(f"{store.url} is not a run: it has no {CONFIG}; name the directory of a run") from error


def _read(store: Store) -> RunInfo:
    text = store.get(CONFIG).decode()
    source = store.location(CONFIG)
    info = RunInfo(run_id_of(text, source), from_json(text, source))
    return replace(info, parents=tuple(map(str, json.loads(text).get("parents", ()))))
