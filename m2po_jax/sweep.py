"""`m2po sweep`: every configuration of an experiment, for every seed, from one base policy a seed; then the report."""

import logging
import multiprocessing
import os
import queue
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from m2po_jax.analysis import report, table
from m2po_jax.analysis.frames import find_runs, load
from m2po_jax.catalog import with_sources
from m2po_jax.config import Config, UserError
from m2po_jax.lockstep import make_base, train
from m2po_jax.progress import Bars, RunView, StopSignals, bars, hush_closed_loops
from m2po_jax.rollouts import open_run, weights

_POLL_S = 0.1
_LOG = logging.getLogger(__name__)


def sweep(configs: Sequence[Config], seeds: Sequence[int] | None, runs: str, jobs: int, console: Console) -> bool:
    """Run what is not done yet, each in `runs/<name>/seed-<seed>`, write the report and print the table of arms.

    Args:
        configs: arms; `seeds` replaces their own seed, None keeps it.
        runs: folder of the sweep; calling again resumes, and skips what is finished.
        jobs: runs at a time, each a process with its share of the cores.
        console: where the table and notes go.

    Returns:
        False if someone asked to stop.

    Raises:
        UserError: a run could not go on; the others were asked to stop first.
    """
    planned = [replace(config, seed=seed) for seed in seeds or () for config in configs] or list(configs)
    planned = [with_sources(config) for config in planned]
    if len({run_directory(runs, config) for config in planned}) < len(planned):
        raise UserError("a sweep runs each arm once for each seed: name no arm and no seed twice")
    todo = [config for config in planned if not _finished(run_directory(runs, config), config)]
    if len(todo) < len(planned):
        console.print(f"{len(planned) - len(todo)} of {len(planned)} runs are done already")
    if not _Workers(planned, todo, runs, jobs).run():
        console.print("stopped; the same command resumes", markup=False)
        return False
    console.print(f"report: {report.write([runs], runs)}", markup=False, soft_wrap=True)
    summarise(runs, console)
    return True


def run_directory(runs: str, config: Config) -> str:
    """Where a sweep keeps one run."""
    return f"{runs}/{config.name}/seed-{config.seed}"


def summarise(runs: str, console: Console) -> None:
    """Print the table of arms, and paired differences where arms share more than one seed."""
    loaded = [load(path) for path in find_runs([runs])]
    console.print(table.render(table.summary(loaded), "Arms: final is the mean accuracy of the last quarter"))
    differences = table.paired_differences(loaded, table.default_pairs(loaded))
    if len(differences):
        console.print(table.render(differences, "Paired differences over seeds, in points"))


@dataclass
class _Worker:
    config: Config
    process: BaseProcess
    slot: int
    view: RunView
    base_only: bool


class _Workers:
    """Runs processes side by side; a base policy that several runs share is made by one of them, first."""

    def __init__(self, planned: Sequence[Config], todo: Sequence[Config], runs: str, jobs: int):
        self.planned, self.todo, self.runs, self.jobs = planned, list(todo), runs, jobs
        self.active: dict[str, _Worker] = {}
        self.context = multiprocessing.get_context("spawn")
        self.messages: Any = self.context.Queue()
        self.error: str | None = None
        self.stopped = self.looked = False

    def run(self) -> bool:
        with StopSignals() as signals, bars() as drawn:
            try:
                self._until_done(signals, drawn)
            except BaseException:
                self._stop()
                raise
        if self.error:
            raise UserError(self.error)
        return not self.stopped

    def _until_done(self, signals: StopSignals, drawn: Bars) -> None:
        while self.active or (self.todo and not self.stopped):
            if (signals.asked or self.error) and not self.stopped:
                drawn.console.print(f"{signals.asked or 'error'}: finishing this batch and checkpointing")
                self._stop()
            while not self.stopped and (config := self._next()) is not None:
                self._start(config, RunView(drawn, f"{config.name} seed {config.seed}", signals))
            self._listen()

    def _next(self) -> Config | None:
        """A run that may start now: its base policy is there, or nobody is making it."""
        if len(self.active) >= self.jobs:
            return None
        for config in self.todo:
            if self._base(config) or not any(_same_base(worker.config, config) for worker in self.active.values()):
                self.todo.remove(config)
                return config
        return None

    def _base(self, config: Config) -> str | None:
        """A run that has the base policy of `config`, its own run first."""
        places = [config, *(other for other in self.planned if other is not config)]
        runs = (run_directory(self.runs, place) for place in places)
        return next((run for run in runs if _has_base(run, config)), None)

    def _start(self, config: Config, view: RunView) -> None:
        """Start a run; where its base policy is missing, make that alone, on all cores if nothing else can run."""
        run, base = run_directory(self.runs, config), self._base(config)
        alone = base is None and not self.active and all(_same_base(other, config) for other in self.todo)
        slot = next(slot for slot in range(self.jobs) if all(w.slot != slot for w in self.active.values()))
        cores = _cores(0, 1) if alone else _cores(slot, self.jobs)
        arguments = (config, run, base, cores, os.getpid(), self.messages)
        process = self.context.Process(target=_work, args=arguments, daemon=False)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a Ctrl-C must not end a worker's imports
        process.start()
        signal.signal(signal.SIGINT, before)
        self.active[run] = _Worker(config, process, slot, view, base_only=base is None)

    def _listen(self) -> None:
        """Show what workers say; a worker that dies without a word is an error."""
        dead = [run for run, worker in self.active.items() if not worker.process.is_alive()]
        try:
            run, what, arguments = self.messages.get(timeout=_POLL_S)
        except queue.Empty:
            for run in dead:  # before the wait, so their last words would have come
                self._ended(run, f"{run} ended without a word (exit code {self.active[run].process.exitcode})", False)
            return
        if what == "ended":
            self._ended(run, *arguments)
        elif run in self.active:
            getattr(self.active[run].view, what)(*arguments)
            if what == "update" and not self.looked and arguments[0] > self.active[run].config.learner.checkpoint_every:
                self._look()

    def _ended(self, run: str, error: str | None, finished: bool) -> None:
        worker = self.active.pop(run, None)
        if worker is None:
            return
        worker.process.join()
        worker.view.close()
        if self.stopped:
            return
        self.error = error or (None if finished else f"{run} was stopped from outside; the same command resumes")
        if self.error:
            return
        if worker.base_only:
            self.todo.insert(0, worker.config)
            return
        worker.view.note("done")
        if self.todo or self.active:
            self._look()

    def _look(self) -> None:
        """Write the report of what there is so far; what hinders it is said, and does not end the sweep."""
        self.looked = True
        try:
            report.write([self.runs], self.runs)
        except (UserError, OSError) as error:
            _LOG.warning("no early report: %s", error)

    def _stop(self) -> None:
        self.stopped = True
        for worker in self.active.values():
            worker.process.terminate()


class _Reporter:
    """A trainer's progress, sent to the process that draws it."""

    def __init__(self, run: str, messages: Any, parent: int, signals: StopSignals):
        self._run, self._messages, self._parent, self._signals = run, messages, parent, signals

    def note(self, message: str) -> None:
        self._messages.put((self._run, "note", (message,)))

    def doing(self, what: str) -> None:
        self._messages.put((self._run, "doing", (what,)))

    def warm_start(self, step: int, accuracy: float, target: float) -> None:
        self._messages.put((self._run, "warm_start", (step, accuracy, target)))

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        self._messages.put((self._run, "update", (version, total, metrics)))

    def evaluation(self, version: int, accuracy: float) -> None:
        self._messages.put((self._run, "evaluation", (version, accuracy)))

    def stopping(self) -> bool:
        return self._signals.asked is not None or os.getppid() != self._parent


def _work(config: Config, run: str, base: str | None, cores: set[int], parent: int, messages: Any) -> None:
    """One run, or its base policy where there is none, in a process of its own.

    Stopping is the parent's business: it sends SIGTERM once.
    """
    os.setpgrp()  # signals to the parent's group are the parent's business too
    hush_closed_loops()
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    with StopSignals((signal.SIGTERM,)) as signals:
        error, finished = None, True
        try:
            reporter = _Reporter(run, messages, parent, signals)
            if base is None:
                make_base(config, run, reporter)
            else:
                finished = train(config, run, reporter, base).finished
        except UserError as problem:
            error = str(problem)
        except KeyboardInterrupt:
            finished = False
    messages.put((run, "ended", (error, finished)))


def _cores(slot: int, jobs: int) -> set[int]:
    """This slot's share of the cores; small programs run best on one core each."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // jobs, 1)
    first = slot * share % len(cores)
    return set(cores[first : first + share])


def _finished(run: str, config: Config) -> bool:
    """Whether a run with this very configuration has reached its last update."""
    if not Path(run, "config.json").is_file():
        return False
    if open_run(run)[1].config != config:
        return False  # training refuses it, naming the fields
    return load(run).complete


def _has_base(run: str, config: Config) -> bool:
    """Whether there is a run whose version 0 was made as `config` would make it."""
    try:
        store, info = open_run(run)
    except UserError:
        return False
    return _same_base(info.config, config) and 0 in weights.versions(store)


def _same_base(a: Config, b: Config) -> bool:
    """Whether two configurations make the same base policy."""
    parts = [(c.seed, c.task, c.model, c.warm_start, c.sampling, c.evaluation.prompts) for c in (a, b)]
    return parts[0] == parts[1]
