"""The `m2po` command. Exit codes: 0 done, 2 bad input (one line, with the fix), 1 failure, 130 or 143 stopped."""

import contextlib
import dataclasses
import difflib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from m2po_jax import __version__
from m2po_jax.config import Config, UserError

if TYPE_CHECKING:  # these import JAX, which most commands start sooner without
    from m2po_jax.learner.hosts import Hosts
    from m2po_jax.learner.profiling import Profile

STOPPED = 130
"""By Ctrl-C, with a checkpoint; 128 and the number of SIGINT, as shells have it."""
PREEMPTED = 143
"""By SIGTERM, on any host, with a checkpoint: to be started again."""

_LAST_WORDS_S = 2.0

OBJECTIVE_FLAG = "--objective.name"


@dataclass(frozen=True)
class TrainOptions:
    """Where to run, and the configuration, each field of which is a flag."""

    run: str | None = None
    """Run directory; resumed if it exists with the same configuration. Default: runs/NAME."""
    base: str | None = None
    """Another run whose version 0 becomes the base policy, in place of a warm start."""
    distributed: bool = False
    """One of several hosts that train together, all with the same command; README.md says how they find each other."""
    profile: str | None = None
    """Updates to trace with jax.profiler, FIRST:END, as 10:13 for 10, 11 and 12: the whole batches that they are in."""
    profile_dir: str | None = None
    """Local directory for the trace. Default: RUN/profile, or profiles/NAME for a run that is not on this machine."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class SweepOptions:
    """Which experiment, where, and for which seeds."""

    experiment: Positional[str]
    """An experiment file, such as experiments/quickstart.py."""
    runs: str = "runs/sweep"
    """Folder for the runs, the report and its figures."""
    seeds: tuple[int, ...] = ()
    """Seeds to run every arm with. Default: the seed in each configuration."""
    jobs: int = 2
    """Runs at a time, each a process with its share of the cores; tiny models are fastest with one core each."""
    only: tuple[str, ...] = ()
    """Names of the arms to run. Default: all."""


@dataclass(frozen=True)
class ReportOptions:
    """Which runs, and where the page goes."""

    runs: Positional[tuple[str, ...]]
    """Run directories, or folders of runs."""
    output: str | None = None
    """Folder or .html file. Default: the run itself, or the folder that the runs share."""


@dataclass(frozen=True)
class InspectOptions:
    """Which run to look into."""

    run: Positional[str]
    """Run directory."""
    all: bool = False
    """List every version, not only the first and last few."""


@dataclass(frozen=True)
class ExportOptions:
    """Which weights, and where the directory goes."""

    run: Positional[str]
    """Run directory."""
    out: str
    """The new directory; it appears when it is whole."""
    version: int | None = None
    """Published version of the policy. Default: the newest."""
    source: str | None = None
    """Directory with the tokenizer's files, and the dtypes to store in. Default: the one that the run began from."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Store all tensors in this dtype. Default: as in the source, or bfloat16 where it has no weights."""


@dataclass(frozen=True)
class PlanOptions:
    """Which slice, and the configuration, each field of which is a flag."""

    topology: str
    """Chip and shape of the slice, such as v5p:4x4x4; no TPU is needed."""
    out: str | None = None
    """Folder for plan.json and plan.txt. Default: runs/plans/NAME-TOPOLOGY."""
    generator: bool = True
    """Compile the generator's program too."""
    generator_topology: str | None = None
    """Slice of a generator. Default: the smallest one of the chip that has room for the policy and a work unit."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
    except UserError as error:
        print(f"m2po: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt as stop:
        print("m2po: stopped at once; the same command resumes from the last checkpoint", file=sys.stderr)
        code = _code_of(stop)
    except BrokenPipeError:  # the reader of our output has gone, as in `m2po inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def train(arguments: list[str]) -> int:
    """Train one configuration in lockstep: generation and learning in one program, on one host or on several.

    Example: m2po train experiments/quickstart.py:m2po-s256 --run runs/mine --learner.learning-rate 5e-5
    """
    if "--distributed" not in arguments or {"-h", "--help"} & set(arguments):
        return _train(*_train_command(arguments))
    from m2po_jax.learner.hosts import Hosts, LostHost, connect

    connect()  # before anything asks JAX for its devices
    hosts = Hosts()
    try:
        with hosts.together():
            code = _train(*_train_command(arguments), hosts)
    except (LostHost, KeyboardInterrupt) as reason:
        why = f"another host was lost ({reason})" if isinstance(reason, LostHost) else "stopped at once"
        print(f"m2po: host {hosts.index}: {why}; the same command resumes from the last checkpoint", file=sys.stderr)
        # Where JAX knows of a lost host it is about to end this one too, with a stack trace.
        _leave(hosts, 1) if isinstance(reason, LostHost) else _leave(hosts, _code_of(reason), _LAST_WORDS_S)
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        _leave(hosts, 1, _LAST_WORDS_S)
    return code


def _leave(hosts: "Hosts", code: int, patience_s: float = 0.0) -> NoReturn:
    """Exit: at a normal exit JAX would wait for the other hosts, and it ends them when the first has gone."""
    sys.stderr.flush()
    time.sleep(patience_s if hosts.first else 0.0)
    os._exit(code)


def _train_command(arguments: list[str]) -> tuple[TrainOptions, str]:
    """Options and run directory of a command line."""
    from m2po_jax import catalog

    reference = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if reference is None and not {"-h", "--help"} & set(arguments):
        raise UserError("name a configuration: m2po train experiments/quickstart.py:m2po-s256 (or a run to resume)")
    config = catalog.resolved(Config()) if reference is None else catalog.find_config(reference)
    if objective := _flag(arguments, OBJECTIVE_FLAG):
        config = catalog.with_objective(config, objective)
    options = _train_options(config, arguments[1:] if reference else arguments)
    options = dataclasses.replace(options, config=catalog.with_sources(catalog.resolved(options.config)))
    resumed = reference if reference and catalog.names_run(reference) else None
    return options, (options.run or resumed or f"runs/{options.config.name}")


def _train_options(config: Config, arguments: list[str]) -> TrainOptions:
    """The flags: every field of the configuration, and those of its objective's own, with their help and choices."""
    from m2po_jax import objectives

    values = objectives.get(config.objective.name, **config.objective.hyperparameters).config
    own = ("hyperparameters", Annotated[type(values), arg(name="objective")], values)
    flags = dataclasses.make_dataclass("TrainOptions", [own], bases=(TrainOptions,), frozen=True)
    given = tyro.cli(
        flags,
        default=flags(config=config),
        args=arguments,
        prog="m2po train CONFIG",
        description=train.__doc__,
    )
    known = config.objective.hyperparameters
    chosen = {name: value for name, value in dataclasses.asdict(given.hyperparameters).items() if name in known}
    objective = dataclasses.replace(given.config.objective, hyperparameters=chosen)
    options = {each.name: getattr(given, each.name) for each in dataclasses.fields(TrainOptions)}
    return TrainOptions(**options | {"config": dataclasses.replace(given.config, objective=objective)})


def _train(options: TrainOptions, run: str, hosts: "Hosts | None" = None) -> int:
    from m2po_jax import lockstep
    from m2po_jax.analysis import report
    from m2po_jax.progress import HostView, RunView, StopSignals, bars, hush_closed_loops

    hush_closed_loops()
    speaks = hosts is None or hosts.first
    with StopSignals() as signals, bars() if speaks else contextlib.nullcontext() as drawn:
        name = options.config.name if hosts is None or hosts.first else f"host {hosts.index}"
        view = RunView(drawn, name, signals) if drawn else HostView(name, signals)
        signals.told = lambda: view.note("stopping after this batch, with a checkpoint; once more stops at once")
        host = hosts.index if hosts is not None and hosts.count > 1 else None
        profile = _profile(options, run, host, view.note)
        try:
            outcome = lockstep.train(options.config, run, view, options.base, hosts, profile)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(signals.asked) from stop
    if speaks and outcome.finished:
        print(f"finished {run} at version {outcome.version}; report: {report.write([run])}", flush=True)
    elif speaks:
        print(f"stopped at version {outcome.version}; resume with: m2po train {run}", file=sys.stderr)
    # All end together: at the end of a process JAX does not let it wait long for the others.
    asked = [signals.asked] if hosts is None else hosts.gather("the end", signals.asked)
    if outcome.finished:
        return 0
    return STOPPED if "SIGINT" in asked else PREEMPTED  # as a Ctrl-C on any host is no reason to start again


def _profile(options: TrainOptions, run: str, host: int | None, say: Callable[[str], None]) -> "Profile | None":
    """What is to be traced, each of several hosts into a directory of its own."""
    from m2po_jax.learner.profiling import Profile, chosen

    if options.profile is None:
        if options.profile_dir is not None:
            raise UserError("--profile-dir says where a trace goes: say of which updates, as in --profile 10:13")
        return None
    versions = chosen(options.profile, options.config.learner.total_updates)
    where = f"profiles/{options.config.name}" if "://" in run else f"{run}/profile"
    directory = Path(options.profile_dir or where)
    return Profile(versions, directory if host is None else directory / f"host-{host}", say)


def _code_of(stop: KeyboardInterrupt) -> int:
    return PREEMPTED if stop.args == ("SIGTERM",) else STOPPED


def plan(arguments: list[str]) -> int:
    """Compile a configuration for a TPU slice without a TPU: memory, FLOPs, collectives, bounds; exit 1 if too large.

    Example: m2po plan experiments/plans.py:qwen3-8b --topology v5p:4x4x4 --mesh.fsdp 64
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX first asks for its devices; a TPU here stays free
    from m2po_jax import catalog
    from m2po_jax.planning import chips, report
    from m2po_jax.planning.generators import smallest_slice
    from m2po_jax.planning.plan import require_planable

    reference = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if reference is None and not {"-h", "--help"} & set(arguments):
        raise UserError("name a configuration: m2po plan experiments/plans.py:qwen3-8b --topology v5p:4x4x4")
    config = catalog.resolved(Config()) if reference is None else catalog.find_config(reference)
    if objective := _flag(arguments, OBJECTIVE_FLAG):
        config = catalog.with_objective(config, objective)
    options = tyro.cli(
        PlanOptions,
        default=PlanOptions(topology=tyro.MISSING, config=config),
        args=arguments[1:] if reference else arguments,
        prog="m2po plan CONFIG",
        description=plan.__doc__,
    )
    config = catalog.with_sources(catalog.resolved(options.config))
    require_planable(config)
    where = chips.topology(options.topology)
    generators = None
    if options.generator:
        smallest = f"{where.chip.name}:{smallest_slice(config, where.chip)}"
        generators = chips.topology(options.generator_topology or smallest)
    folder = options.out or f"runs/plans/{config.name}-{options.topology.replace(':', '-')}"
    say = lambda message: print(f"m2po: {message} ...", file=sys.stderr, flush=True)  # noqa: E731
    found, text = report.write(config, where, folder, say, generators)
    print(text, end="")
    return 0 if found.fits else 1


def sweep(arguments: list[str]) -> int:
    """Run every configuration of an experiment file, skipping what is done; write the report and print the table.

    Example: m2po sweep experiments/quickstart.py --runs runs/quickstart --seeds 1 2 3
    """
    from m2po_jax import catalog
    from m2po_jax.sweep import sweep as run_sweep

    options = tyro.cli(SweepOptions, args=arguments, prog="m2po sweep", description=sweep.__doc__)
    configs = catalog.find_experiment(options.experiment)
    if options.only:
        configs = tuple(catalog.find_config(f"{options.experiment}:{name}") for name in options.only)
    return 0 if run_sweep(configs, options.seeds or None, options.runs, max(options.jobs, 1), Console()) else STOPPED


def report(arguments: list[str]) -> int:
    """Write one self-contained HTML page and PNG figures about one run or many.

    Example: m2po report runs/quickstart
    """
    from m2po_jax.analysis import report as page

    options = tyro.cli(ReportOptions, args=arguments, prog="m2po report", description=report.__doc__)
    if not options.runs:
        raise UserError("name a run, or a folder of runs: m2po report runs/quickstart")
    print(page.write(options.runs, options.output))
    return 0


def inspect(arguments: list[str]) -> int:
    """List versions, shards, ages and rewards of a run, and verify every shard; exit 1 if one fails.

    Example: m2po inspect runs/quickstart/m2po-s256/seed-0
    """
    from m2po_jax.analysis import inspect as inspection

    options = tyro.cli(InspectOptions, args=arguments, prog="m2po inspect", description=inspect.__doc__)
    found = inspection.inspect(options.run)
    Console().print(inspection.render(found, options.all))
    return 0 if found.well else 1


def export(arguments: list[str]) -> int:
    """Write weights of a run as a Hugging Face directory, with the tokenizer of the model that it began from.

    Example: m2po export runs/mine --version 64 --out exported/mine-64
    """
    from m2po_jax.exporting import export as write

    options = tyro.cli(ExportOptions, args=arguments, prog="m2po export", description=export.__doc__)
    print(write(options.run, options.out, options.version, options.source, options.dtype))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "sweep": sweep,
    "report": report,
    "inspect": inspect,
    "export": export,
    "plan": plan,
}


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"m2po-jax {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"there is no command {name!r}: {hint}Commands are {', '.join(COMMANDS)}")
    return COMMANDS[name](rest)


def _usage() -> str:
    lines = ["usage: m2po COMMAND ... (m2po COMMAND --help says more)", ""]
    for name, command in COMMANDS.items():
        summary, _, example = (command.__doc__ or "").partition("Example:")
        lines += [f"  {name:9}{' '.join(summary.split())}", f"           {example.strip()}"]
    return "\n".join(lines)


def _flag(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag that must be known before the others can be parsed; the last one counts, as in tyro."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
    return value
