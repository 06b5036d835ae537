"""TensorBoard events, written in the caller's thread: on a full disk tensorboardX's own writer thread dies unheard."""

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from m2po_jax.rollouts.store import is_no_room, no_room


class Events:
    """One event file of a run; every event is handed to the operating system at once."""

    def __init__(self, directory: Path, first_step: int):
        """Begins a file in `directory` that stands in for whatever earlier files say of `first_step` and later."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(str(directory / "events"), f".{time.time_ns()}")
        except OSError as error:
            raise self._said(error) from error
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """One event: tag -> number, at a step. Raises UserError when the disk is full."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=number) for tag, number in values.items()])
        self._write(Event(step=step, summary=summary))

    def close(self) -> None:
        """Close the file. Raises UserError when the disk is full."""
        try:
            self._file.close()
        except OSError as error:
            raise self._said(error) from error

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        try:
            self._file.write_event(event)
            self._file.flush()
        except OSError as error:
            raise self._said(error) from error

    def _said(self, error: OSError) -> Exception:
        return no_room(str(self._directory)) if is_no_room(error) else error
