"""Where the learner is, told to generators by a thread: object stores allow about one write a second to one object."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from m2po_jax.rollouts import Store, write_position


class Position:
    """Writes the newest position it was told, one write at a time, leaving out those that were overtaken."""

    def __init__(self, store: Store):
        """Of the run in `store`."""
        self._store = store
        self._lock = threading.Lock()
        self._told: int | None = None
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="position")

    def tell(self, version: int) -> None:
        """The next batch is consumed at this version; returns at once. Raises what an earlier write met."""
        with self._lock:
            self._told = version
            if self._writing is None:
                self._writing = self._thread.submit(self._write)
            elif self._writing.done():
                self._writing.result()

    def close(self) -> None:
        """Return when the newest position is written; raises what writing it met."""
        self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()

    def _write(self) -> None:
        while True:
            with self._lock:
                version, self._told = self._told, None
                if version is None:
                    self._writing = None
                    return
            write_position(self._store, version)
