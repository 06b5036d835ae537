"""The terminal view of runs: progress bar, reward, age, masked share, speed and time left; and Ctrl-C."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from m2po_jax.analysis.figures import sparkline

_LINES_A_RUN = 16
_SILENCE_S = 30.0


class StopSignals:
    """As a context manager: the first of `numbers` asks to stop, the second raises KeyboardInterrupt."""

    def __init__(self, numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)):
        """Signals to watch for; only the main thread can."""
        self.asked: str | None = None
        self.told: Callable[[], None] = lambda: None
        """Called at the first signal, since the batch that is to be finished may take minutes."""
        self._numbers, self._before = numbers, dict[int, Any]()

    def __enter__(self) -> "StopSignals":
        """Take the signals over."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        self.told()


class HostView:
    """What one of several hosts says that is not the first, which draws the bar: what is worth reading."""

    def __init__(self, name: str, signals: StopSignals):
        """`name` stands before each line."""
        self.name, self._signals = name, signals

    def note(self, message: str) -> None:
        """One line on standard error."""
        print(f"{self.name}: {message}", file=sys.stderr, flush=True)

    def doing(self, what: str) -> None:
        """Nothing."""

    def warm_start(self, step: int, accuracy: float, target: float) -> None:
        """Nothing."""

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def evaluation(self, version: int, accuracy: float) -> None:
        """Nothing."""

    def stopping(self) -> bool:
        """Whether a signal asked this host to stop."""
        return self._signals.asked is not None


def hush_closed_loops() -> None:
    """Keep from standard error what a full disk leaves behind in this process, and say the rest as before.

    Orbax closes its event loop at the first write that fails; the callback of each other one then finds it closed.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def bars() -> Bars:
    """An empty set of progress bars on standard error."""
    return Bars(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )


class RunView:
    """One run's bar; where no bar can be drawn (a log file), a line now and then."""

    def __init__(self, drawn: Bars, name: str, signals: StopSignals):
        """`name` stands before the bar."""
        self.name, self._bars, self._signals = name, drawn, signals
        self._accuracies: list[float] = []
        self._task = drawn.add_task(name, total=None, facts="starting")
        self._told, self._facts = 0, ""
        self._spoke = float("-inf")

    def note(self, message: str) -> None:
        """One line above the bars."""
        self._bars.console.print(f"{self.name}: {message}", markup=False, highlight=False, soft_wrap=True)

    def doing(self, what: str) -> None:
        """Beside the bar, after the newest facts; in a log file, at first and after half a minute of silence."""
        self._bars.update(self._task, facts=f"{self._facts}  {what}".strip())
        if time.monotonic() - self._spoke > _SILENCE_S:
            self._say(what)

    def warm_start(self, step: int, accuracy: float, target: float) -> None:
        """Progress of the warm start towards its target accuracy."""
        facts = f"warm start step {step}: accuracy {accuracy:.3f} of {target:.2f}"
        self._bars.update(self._task, facts=facts)
        self._say(facts)

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        """Progress of training, from the newest fetched metrics."""
        facts = ""
        if metrics:
            facts = (
                f"reward {metrics['reward_mean']:.2f}  age {metrics['staleness_updates']}"
                f"  masked {metrics['masked_frac']:.2%}  {metrics['updates_per_s']:.1f} updates/s"
            )
            if "tokens_per_s" in metrics:
                facts += f"  {metrics['tokens_per_s']:,.0f} tokens/s"
            if "mfu" in metrics:
                facts += f"  MFU {metrics['mfu']:.0%}"
        if self._accuracies:
            facts += f"  held-out {sparkline(self._accuracies[-20:])} {self._accuracies[-1]:.3f}"
        self._facts = facts
        self._bars.update(self._task, completed=version, total=total, facts=facts)
        if version * _LINES_A_RUN // total > self._told:
            self._told = version * _LINES_A_RUN // total
            self._say(f"{version}/{total}  {facts}")

    def evaluation(self, version: int, accuracy: float) -> None:
        """Take a held-out accuracy for the curve."""
        self._accuracies.append(accuracy)

    def stopping(self) -> bool:
        """Whether a signal asked to stop."""
        return self._signals.asked is not None

    def close(self) -> None:
        """Remove the bar."""
        self._bars.remove_task(self._task)

    def _say(self, message: str) -> None:
        self._spoke = time.monotonic()
        if not self._bars.console.is_terminal:
            self.note(message)


class GeneratorView:
    """One generator's bar: how far the learner is, and what this generator does."""

    def __init__(self, drawn: Bars, signals: StopSignals):
        """Draws among the `drawn` bars."""
        self._bars, self._signals = drawn, signals
        self._task = drawn.add_task("generator", total=None, facts="starting")
        self._spoke, self._made = float("-inf"), "made no units"

    @property
    def summary(self) -> str:
        """What was made, in a few words."""
        return self._made

    def note(self, message: str) -> None:
        """One line above the bar."""
        self._bars.console.print(f"generator: {message}", markup=False, highlight=False, soft_wrap=True)

    def unit(self, position: int, total: int, facts: dict[str, Any]) -> None:
        """A unit was made."""
        twice = f", {facts['units_twice']} of them made twice" if facts["units_twice"] else ""
        self._made = f"made {facts['units_made']:,} units{twice}"
        text = (
            f"version {facts['behavior_version']}  lag {facts['lag']}  reward {facts['reward_mean']:.2f}"
            f"  {facts['tokens_per_s']:,.0f} tokens/s"
        )
        if "slot_occupancy" in facts:
            text += f"  slots {facts['slot_occupancy']:.0%} busy"
        if "mismatch_mean" in facts:
            text += f"  mismatch {facts['mismatch_mean']:.1e}"
        self._show(position, total, f"{text}  {self._made}")

    def waiting(self, position: int, total: int, what: str) -> None:
        """Nothing is to be made now."""
        self._show(position, total, f"{what}  {self._made}")

    def stopping(self) -> bool:
        """Whether a signal asked to stop."""
        return self._signals.asked is not None

    def _show(self, position: int, total: int, facts: str) -> None:
        self._bars.update(self._task, completed=position, total=total, facts=facts)
        if not self._bars.console.is_terminal and time.monotonic() - self._spoke > _SILENCE_S:
            self._spoke = time.monotonic()
            self.note(f"learner at {position}/{total}  {facts}")
