"""`m2po sweep`: every configuration of an experiment, for every seed, from one base policy a seed; then the report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from m2po_jax.analysis import report, table
from m2po_jax.analysis.frames import find_runs, load
from m2po_jax.config import Config, UserError
from m2po_jax.lockstep import Outcome, train
from m2po_jax.progress import TerminalProgress
from m2po_jax.rollouts import open_run, weights


def sweep(configs: Sequence[Config], seeds: Sequence[int] | None, runs: str, console: Console) -> bool:
    """Run what is not done yet, each in `runs/<name>/seed-<seed>`, and print the table of arms.

    Args:
        configs: arms; `seeds` replaces their own seed, None keeps it.
        runs: folder of the sweep; calling again resumes, and skips what is finished.
        console: where the table and notes go.

    Returns:
        False if someone asked to stop.
    """
    planned = [replace(config, seed=seed) for seed in seeds or () for config in configs] or list(configs)
    for number, config in enumerate(planned, start=1):
        run = run_directory(runs, config)
        if _finished(run, config):
            console.print(f"[{number}/{len(planned)}] {run} is done", markup=False)
            continue
        console.print(f"[{number}/{len(planned)}] {run}", markup=False)
        if not _train(config, run, _sibling(planned, runs, config)).finished:
            console.print(f"stopped; the same command resumes {run} and goes on", markup=False)
            return False
        if number < len(planned):
            report.write([runs])  # an early look
    console.print(f"report: {report.write([runs])}", markup=False, soft_wrap=True)
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


def _train(config: Config, run: str, base: str | None) -> Outcome:
    with TerminalProgress(f"{config.name} seed {config.seed}") as progress:
        return train(config, run, progress, base)


def _finished(run: str, config: Config) -> bool:
    """Whether a run with this very configuration has reached its last update."""
    if not Path(run, "config.json").is_file():
        return False
    if open_run(run)[1].config != config:
        return False  # training refuses it, naming the fields
    return load(run).complete


def _sibling(planned: Sequence[Config], runs: str, config: Config) -> str | None:
    """A run of the sweep whose base policy is this run's too, if it has one already."""
    for other in planned:
        run = run_directory(runs, other)
        if other is not config and _has_base(run, config):
            return run
    return None


def _has_base(run: str, config: Config) -> bool:
    """Whether there is a run whose version 0 was made as `config` would make it."""
    try:
        store, info = open_run(run)
    except UserError:
        return False
    return _base_of(info.config) == _base_of(config) and 0 in weights.versions(store)


_base_of: Callable[[Config], tuple] = lambda c: (  # noqa: E731
    c.seed,
    c.task,
    c.model,
    c.warm_start,
    c.sampling,
    c.evaluation.prompts,
)
