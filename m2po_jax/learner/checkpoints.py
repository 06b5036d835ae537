"""Checkpoints of the full train state with the data cursor, through Orbax, written in the background.

One host writes to an object store by way of its own disk, as weights are; several hosts let Orbax write there.
"""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from m2po_jax.config import UserError
from m2po_jax.learner.state import TrainState
from m2po_jax.rollouts import Store, checkpoint_path, staging
from m2po_jax.rollouts.paths import parse_version
from m2po_jax.rollouts.remote import StoreAway
from m2po_jax.rollouts.store import is_no_room, no_room

_DIRECTORY = "checkpoints"


@dataclass(frozen=True)
class Cursor:
    """Where the learner stands in its data: everything before this was consumed, nothing after it."""

    version: int
    """Learner version at which the next batch is consumed."""
    behavior_version: int
    """Version whose rollouts that batch holds."""
    batch: int
    """Index of that batch among those of its version."""


class Checkpoints:
    """`checkpoints/<version>` of one run; a checkpoint is visible once it is whole."""

    def __init__(self, store: Store, keep: int, keep_every: int | None = None):
        """Keeps the newest `keep` checkpoints, and those of versions that `keep_every` divides.

        On several hosts all of them make one, and call it in the same order.
        """
        self._location = store.location(_DIRECTORY)
        self._remote, folder = None, self._location
        if store.local_path is None and jax.process_count() == 1:
            self._remote = _Remote(store, keep, keep_every)
            folder, keep, keep_every = str(self._remote.folder), 1, None
        elif store.local_path is not None:
            (store.local_path / _DIRECTORY).mkdir(exist_ok=True)
        several = jax.process_count() > 1
        # Naming the hosts keeps Orbax from waiting for them by programs on their devices, among those of the learner.
        hosts = MultiprocessingOptions(0, set(range(jax.process_count())), "checkpoints") if several else None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            step_format_fixed_length=8,
            create=False,
            multiprocessing_options=hosts or MultiprocessingOptions(),
        )
        for logger in ("absl", "asyncio"):
            logging.getLogger(logger).addFilter(_is_news)  # a filter that is there already is not added again
        self._manager = ocp.CheckpointManager(folder, options=options)

    def latest(self) -> int | None:
        """Version of the newest whole checkpoint."""
        return max(self._versions(), default=None)

    def _versions(self) -> list[int]:
        return list(self._manager.all_steps()) if self._remote is None else self._remote.versions()

    def save(self, state: TrainState, cursor: Cursor) -> None:
        """Start writing; returns once the state may be donated. A checkpoint that is there already is kept."""
        if self._remote is not None:
            self._remote.wait()
        if cursor.version in self._versions():
            return
        # On CPU the view that Orbax takes on the host would be the donated buffer itself.
        copied = jax.tree.map(jnp.copy, state) if jax.default_backend() == "cpu" else state
        parts = ocp.args.Composite(state=ocp.args.StandardSave(copied), cursor=ocp.args.JsonSave(asdict(cursor)))
        with self._no_room_said():
            self._manager.save(cursor.version, args=parts)
        if self._remote is not None:
            self._remote.move(cursor.version, self._manager.wait_until_finished)

    def restore(self, version: int, like: TrainState) -> tuple[TrainState, Cursor]:
        """The state and cursor of a version, with the shapes and shardings of `like`.

        Raises:
            UserError: the checkpoint cannot be read, or is one of another model.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore())
        try:
            if self._remote is not None:
                self._remote.fetch(version)
                self._manager.reload()
            restored: Any = self._manager.restore(version, args=parts)
        except StoreAway:
            raise
        except Exception as error:  # Orbax and TensorStore raise many types for damaged files
            raise UserError(
                f"checkpoint {version} in {self._location} cannot be restored ({str(error).splitlines()[0][:200]}):"
                " delete its directory to resume from the one before"
            ) from error
        return jax.tree.map(jnp.array, restored["state"]), Cursor(**restored["cursor"])

    def wait(self) -> None:
        """Return when every started checkpoint is whole. Raises UserError when the disk is full, as `save` does."""
        with self._no_room_said():
            self._manager.wait_until_finished()
            if self._remote is not None:
                self._remote.wait()

    def close(self) -> None:
        """Wait, and release the background threads."""
        with self._no_room_said(), self._remote or contextlib.nullcontext():
            self._manager.close()

    @contextlib.contextmanager
    def _no_room_said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            if is_no_room(error):
                raise no_room(self._location) from error
            raise


class _Remote:
    """Checkpoints in an object store, moved there from a folder of the local disk by a thread."""

    def __init__(self, store: Store, keep: int, keep_every: int | None):
        self._store, self._keep, self._keep_every = store, keep, keep_every
        self._scratch = tempfile.TemporaryDirectory(prefix="m2po-checkpoints-")
        self.folder = Path(self._scratch.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._moving: Future[None] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._scratch.cleanup()

    def versions(self) -> list[int]:
        return [v for name in staging.whole(self._store, _DIRECTORY) if (v := parse_version(name)) is not None]

    def move(self, version: int, written: Callable[[], object]) -> None:
        """Begin to move a version, once `written` returns."""
        self._moving = self._thread.submit(self._move, version, written)

    def wait(self) -> None:
        """Return when what was begun is whole; raises what went wrong."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.result()

    def fetch(self, version: int) -> None:
        """Copy a version to the folder."""
        staging.download(self._store, checkpoint_path(version), self.folder / f"{version:08d}")

    def _move(self, version: int, written: Callable[[], object]) -> None:
        written()
        staging.upload(self._store, self.folder / f"{version:08d}", checkpoint_path(version))
        newest = sorted(self.versions())[-self._keep :]
        for name in self._store.children(_DIRECTORY):
            found = parse_version(name)
            kept = found in newest or (found is not None and self._keep_every and found % self._keep_every == 0)
            if found is not None and not kept:
                staging.remove(self._store, checkpoint_path(found))


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Orbax logs of its housekeeping, and for its tracebacks of a full disk, which we say in a line."""
    error = record.exc_info[1] if record.exc_info else None
    return record.levelno >= logging.ERROR and (error is None or not is_no_room(error))
