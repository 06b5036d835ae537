"""Weights published while the learner goes on: copied on the devices at once, written by a thread."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from m2po_jax.rollouts import Store, weights


class Publisher:
    """Publishes versions of one run, one after the other, in the dtypes of the generators."""

    def __init__(self, store: Store, dtypes: Any):
        """`dtypes` is a tree like the parameters'."""
        self._store, self.dtypes = store, dtypes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._started: dict[int, Future[weights.Published]] = {}

    def start(self, version: int, params: Any) -> None:
        """Copy the parameters, which may then be donated, and begin to write them.

        A copy lives until it is written: there is one at a time beside the one that is being written.
        """
        while len(self._started) > 1:
            self.wait(min(self._started))
        taken = weights.snapshot(params, self.dtypes)
        self._started[version] = self._thread.submit(weights.publish, self._store, version, taken)

    def wait(self, version: int | None = None) -> None:
        """Return when a version that was started, or all of them, can be read; raises what `weights.publish` does."""
        for started in [version] if version is not None else list(self._started):
            if started in self._started:
                self._started.pop(started).result()

    def close(self) -> None:
        """Finish what was started, without raising; `wait` says what went wrong."""
        self._thread.shutdown()
