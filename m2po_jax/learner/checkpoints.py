"""Checkpoints of the full train state with the data cursor, through Orbax, written in the background."""

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


class Staged:
    """Checkpoints of a remote store: in a local directory while Orbax writes or reads them."""

    def __init__(self, store: Store, keep: int, keep_every: int | None):
        """Keeps in the store what `Checkpoints` says."""
        self._store, self._keep, self._keep_every = store, keep, keep_every
        self._folder = tempfile.TemporaryDirectory(prefix="m2po-checkpoints-")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._uploads: list[Future[None]] = []

    @property
    def location(self) -> str:
        """The local directory."""
        return self._folder.name

    def versions(self) -> list[int]:
        """Versions whose checkpoint is in the store, whole, in order."""
        return [int(name) for name in staging.children(self._store, _DIRECTORY)]

    def upload(self, version: int, written: Callable[[], Any]) -> None:
        """Begin to upload a checkpoint, once it is `written`; older ones are deleted when it is whole."""
        self._uploads.append(self._thread.submit(self._upload, version, written))

    def download(self, version: int) -> None:
        """Have a checkpoint in the local directory."""
        staging.download(self._store, checkpoint_path(version), Path(self.location) / f"{version:08d}")

    def wait(self) -> None:
        """Return when all is uploaded; raises what went wrong."""
        while self._uploads:
            self._uploads.pop(0).result()

    def close(self) -> None:
        """Finish, and delete the local directory."""
        self._thread.shutdown()
        self._folder.cleanup()

    def _upload(self, version: int, written: Callable[[], Any]) -> None:
        written()
        there = self.versions()
        self._store.delete_prefix(checkpoint_path(version))  # what an attempt before may have left
        staging.upload(self._store, Path(self.location) / f"{version:08d}", checkpoint_path(version), {})
        for old in sorted(there)[: -self._keep + 1 or None]:
            if self._keep_every is None or old % self._keep_every:
                staging.delete(self._store, checkpoint_path(old))


class Checkpoints:
    """`checkpoints/<version>` of one run; a checkpoint is visible once it is whole."""

    def __init__(self, store: Store, keep: int, keep_every: int | None = None):
        """Keeps the newest `keep` checkpoints, and those of versions that `keep_every` divides.

        On several hosts all of them make one, and call it in the same order.
        """
        self._location = store.location(_DIRECTORY)
        several = jax.process_count() > 1
        # One host writes for a remote store into a local directory, which is then uploaded; several write themselves.
        self._staged = None if several or store.local_path else Staged(store, keep, keep_every)
        if store.local_path is not None:
            (store.local_path / _DIRECTORY).mkdir(exist_ok=True)
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
        location = self._staged.location if self._staged else self._location
        self._manager = ocp.CheckpointManager(location, options=options)

    def latest(self) -> int | None:
        """Version of the newest whole checkpoint."""
        return max(self._versions(), default=None)

    def save(self, state: TrainState, cursor: Cursor) -> None:
        """Start writing; returns once the state may be donated. A checkpoint that is there already is kept."""
        if self._staged:
            self._staged.wait()  # the directory may lose the one before, now
        if cursor.version in self._versions():
            return
        # On CPU the view that Orbax takes on the host would be the donated buffer itself.
        copied = jax.tree.map(jnp.copy, state) if jax.default_backend() == "cpu" else state
        parts = ocp.args.Composite(state=ocp.args.StandardSave(copied), cursor=ocp.args.JsonSave(asdict(cursor)))
        with self._no_room_said():
            self._manager.save(cursor.version, args=parts)
            if self._staged:
                self._staged.upload(cursor.version, self._manager.wait_until_finished)

    def restore(self, version: int, like: TrainState) -> tuple[TrainState, Cursor]:
        """The state and cursor of a version, with the shapes and shardings of `like`.

        Raises:
            UserError: the checkpoint cannot be read, or is one of another model.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore())
        try:
            if self._staged:
                self._staged.download(version)
                self._manager.reload()
            restored: Any = self._manager.restore(version, args=parts)
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
            if self._staged:
                self._staged.wait()

    def close(self) -> None:
        """Wait, and release the background threads."""
        with self._no_room_said():
            self._manager.close()
            if self._staged:
                try:
                    self._staged.wait()
                finally:
                    self._staged.close()

    def _versions(self) -> list[int]:
        """Those whose checkpoint is whole."""
        return self._staged.versions() if self._staged else list(self._manager.all_steps())

    @contextlib.contextmanager
    def _no_room_said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            if is_no_room(error):
                raise no_room(self._location) from error
            raise


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Orbax logs of its housekeeping, and for its tracebacks of a full disk, which we say in a line."""
    error = record.exc_info[1] if record.exc_info else None
    return record.levelno >= logging.ERROR and (error is None or not is_no_room(error))
