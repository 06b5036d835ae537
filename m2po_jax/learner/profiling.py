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
        """`say` is told where the trace is, and how to open it.

        Raises:
            UserError: the directory cannot be made.
        """
        self._versions, self._directory, self._say = versions, directory, say
        self._began: int | None = None
        self._over = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--profile-dir {directory} cannot be made: {error.strerror or error}") from error

    def before(self, batch: range, state: Any) -> None:
        """Called before the updates `batch`, with what the ones before return, which is waited for at either end."""
        if self._began is not None and batch.start >= self._versions.stop:
            self._end(batch.start, state)
        elif self._began is None and not self._over and batch.stop > self._versions.start:
            self._over = batch.start >= self._versions.stop
            if self._over:
                self._say(f"nothing was profiled: this run goes on after update {batch.start - 1}")
                return
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would be most of the trace
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._began = batch.start

    def close(self, version: int, state: Any = None) -> None:
        """End a trace that is still going on before update `version`, if there is one."""
        if self._began is not None:
            self._end(version, state)

    def _end(self, version: int, state: Any) -> None:
        jax.block_until_ready(state)
        began, self._began, self._over = self._began, None, True
        jax.profiler.stop_trace()
        traces = sorted(self._directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        self._say(
            f"profile of updates {began} to {version - 1} in {self._directory}; open it with"
            f" `xprof --logdir {self._directory}` (pip install xprof)"
            + (f", or {traces[-1].relative_to(self._directory)} at https://ui.perfetto.dev" if traces else "")
        )
