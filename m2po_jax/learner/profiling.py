"""A trace of chosen updates, by jax.profiler, of the whole batches that they are in."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from m2po_jax.config import UserError


def chosen(text: str, total_updates: int) -> range:
    """The versions of `FIRST:END`, such as 10, 11 and 12 of 10:13.

    Raises:
        UserError: it is no such range, it is empty, or the run has no such update.
    """
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not found:
        raise UserError(f"--profile {text!r} is no range of updates: write FIRST:END, as 10:13 for 10, 11 and 12")
    versions = range(int(found[1]), int(found[2]))
    if not versions:
        raise UserError(f"--profile {text} is empty: END comes after the last update, as 10:13 for 10, 11 and 12")
    if versions.stop > total_updates:
        raise UserError(f"--profile {text}: the run has updates 0 to {total_updates - 1} (learner.total_updates)")
    return versions


class Profile:
    """Begins a trace before the batch of the first chosen update, and ends it after that of the last."""

    def __init__(self, versions: range, directory: Path, say: Callable[[str], None]):
        """`say` is told where the trace is, and how to open it."""
        self._versions, self._directory, self._say = versions, directory, say
        self._traced: range | None = None
        self._over = False

    def prepare(self) -> None:
        """Make the directory, long before it is needed. Raises UserError if that cannot be."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the profile's directory {self._directory} cannot be made: {error.strerror}") from error

    def before(self, batch: range, state: Any) -> None:
        """Called before the updates `batch`, with what the ones before return, which is waited for at either end."""
        if self._traced is not None and batch.start >= self._versions.stop:
            jax.block_until_ready(state)
            self.close()
        elif self._traced is not None:
            self._traced = range(self._traced.start, batch.stop)
        elif not self._over and batch.start >= self._versions.stop:
            self._over = True
            self._say(f"nothing was profiled: this run goes on after update {batch.start - 1}")
        elif not self._over and batch.stop > self._versions.start:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would be most of the trace
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._traced = batch

    def close(self) -> None:
        """End a trace that is going on, if there is one."""
        if self._traced is None:
            return
        traced, self._traced, self._over = self._traced, None, True
        jax.profiler.stop_trace()
        files = sorted(self._directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        self._say(
            f"profile of updates {traced.start} to {traced.stop - 1} in {self._directory}; open it with"
            f" `xprof --logdir {self._directory}` (pip install xprof)"
            + (f", or {files[-1].relative_to(self._directory)} at https://ui.perfetto.dev" if files else "")
        )
