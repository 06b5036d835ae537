"""The terminal view of a run: progress bar, reward, age, masked share, speed and time left; and Ctrl-C."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from m2po_jax.analysis.figures import sparkline


class TerminalProgress:
    """Shows one run; as a context manager it also turns the first Ctrl-C or SIGTERM into a request to stop."""

    def __init__(self, name: str):
        """`name` stands before the bar."""
        self.name, self.accuracies = name, list[float]()
        self.console = Console(file=sys.stderr)
        self._stop = False
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(name, total=None, facts="starting")
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "TerminalProgress":
        """Start drawing and watch for signals (in the main thread)."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing; restore the signal handlers."""
        self._bar.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, message: str) -> None:
        """One line above the bar."""
        self.console.print(f"{self.name}: {message}", markup=False, highlight=False, soft_wrap=True)

    def warm_start(self, step: int, accuracy: float, target: float) -> None:
        """Progress of the warm start towards its target accuracy."""
        facts = f"warm start step {step}: accuracy {accuracy:.3f} of {target:.2f}"
        self._bar.update(self._task, facts=facts)
        self._say(facts)

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        """Progress of training, from the newest fetched metrics."""
        facts = ""
        if metrics:
            facts = (
                f"reward {metrics['reward_mean']:.2f}  age {metrics['staleness_updates']}"
                f"  masked {metrics['masked_frac']:.2%}  {metrics['updates_per_s']:.1f} updates/s"
            )
        curve = f"  held-out {sparkline(self.accuracies[-24:])} {self.accuracies[-1]:.3f}" if self.accuracies else ""
        self._bar.update(self._task, completed=version, total=total, facts=facts + curve)
        if version % max(total // 16 // 4 * 4, 4) == 0:
            self._say(f"{version}/{total}  {facts}{curve}")

    def evaluation(self, version: int, accuracy: float) -> None:
        """Take a held-out accuracy for the curve."""
        self.accuracies.append(accuracy)

    def stopping(self) -> bool:
        """Whether a signal asked to stop."""
        return self._stop

    def _say(self, message: str) -> None:
        """Where no bar can be drawn (a log file), say it in a line."""
        if not self.console.is_terminal:
            self.note(message)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        self.note(f"{signal.Signals(number).name}: finishing this batch and checkpointing; again to stop at once")
