"""`m2po train`, `m2po learn` and `m2po generate`: the programs that make a run."""

import contextlib
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro
from tyro.conf import Positional, arg

from m2po_jax.config import Config, MeshConfig, UserError
from m2po_jax.config_server import ServerConfig

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
class LearnOptions(TrainOptions):
    """Where to run, and the configuration, each field of which is a flag."""

    offline: bool = False
    """Nobody makes rollouts any more: what is missing is an error, not waited for."""


@dataclass(frozen=True)
class GenerateOptions:
    """Which run, and on which devices."""

    run: Positional[str]
    """Run directory or URL; its configuration is taken from there."""
    wait: float = 600.0
    """Seconds to wait for a learner to make the run."""
    source: str | None = None
    """Directory of the run's model (model.source) on this machine. Default: where the learner has it."""
    questions: str | None = None
    """File of the run's questions (task.questions) on this machine. Default: where the learner has it."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def train(arguments: list[str]) -> int:
    """Train one configuration in lockstep: generation and learning in one program, on one host or on several.

    Example: m2po train experiments/quickstart.py:m2po-s256 --run runs/mine --learner.learning-rate 5e-5
    """
    return _on_hosts(arguments, "train", TrainOptions, train.__doc__)


def learn(arguments: list[str]) -> int:
    """Train one configuration on rollouts that generators make: start m2po generate RUN beside it, as often as wanted.

    Example: m2po learn experiments/quickstart.py:m2po-s256 --run gs://my-bucket/runs/m2po-s256
    """
    return _on_hosts(arguments, "learn", LearnOptions, learn.__doc__)


def _on_hosts(arguments: list[str], command: str, kind: type[TrainOptions], text: str | None) -> int:
    read = partial(_command_line, arguments, command, kind, text)
    if "--distributed" not in arguments or {"-h", "--help"} & set(arguments):
        return _train(command, *read())
    from m2po_jax.learner.hosts import Hosts, LostHost, connect

    connect()  # before anything asks JAX for its devices
    hosts = Hosts()
    try:
        with hosts.together():
            code = _train(command, *read(), hosts)
    except (LostHost, KeyboardInterrupt) as reason:
        why = f"another host was lost ({reason})" if isinstance(reason, LostHost) else "stopped at once"
        print(f"m2po: host {hosts.index}: {why}; the same command resumes from the last checkpoint", file=sys.stderr)
        # Where JAX knows of a lost host it is about to end this one too, with a stack trace.
        _leave(hosts, 1) if isinstance(reason, LostHost) else _leave(hosts, code_of(reason), _LAST_WORDS_S)
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


def _command_line(
    arguments: list[str], command: str, kind: type[TrainOptions], text: str | None
) -> tuple[TrainOptions, str]:
    """Options and run directory of a command line."""
    from m2po_jax import catalog

    reference = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if reference is None and not {"-h", "--help"} & set(arguments):
        example = f"m2po {command} experiments/quickstart.py:m2po-s256"
        raise UserError(f"name a configuration: {example} (or a run to resume)")
    config = catalog.resolved(Config()) if reference is None else catalog.find_config(reference)
    if objective := flag_of(arguments, OBJECTIVE_FLAG):
        config = catalog.with_objective(config, objective)
    options = _options(config, arguments[1:] if reference else arguments, command, kind, text)
    options = dataclasses.replace(options, config=catalog.with_sources(catalog.resolved(options.config)))
    resumed = reference if reference and catalog.names_run(reference) else None
    return options, (options.run or resumed or f"runs/{options.config.name}")


def _options(
    config: Config, arguments: list[str], command: str, kind: type[TrainOptions], text: str | None
) -> TrainOptions:
    """The flags: every field of the configuration, and those of its objective's own, with their help and choices."""
    from m2po_jax import objectives

    values = objectives.get(config.objective.name, **config.objective.hyperparameters).config
    own = ("hyperparameters", Annotated[type(values), arg(name="objective")], values)
    flags = dataclasses.make_dataclass(kind.__name__, [own], bases=(kind,), frozen=True)
    given = tyro.cli(
        flags,
        default=flags(config=config),
        args=arguments,
        prog=f"m2po {command} CONFIG",
        description=text,
    )
    known = config.objective.hyperparameters
    chosen = {name: value for name, value in dataclasses.asdict(given.hyperparameters).items() if name in known}
    objective = dataclasses.replace(given.config.objective, hyperparameters=chosen)
    options = {each.name: getattr(given, each.name) for each in dataclasses.fields(kind)}
    return kind(**options | {"config": dataclasses.replace(given.config, objective=objective)})


def _train(command: str, options: TrainOptions, run: str, hosts: "Hosts | None" = None) -> int:
    from m2po_jax import lockstep, services
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
            given = options.config, run, view, options.base, hosts, profile
            if isinstance(options, LearnOptions):
                outcome = services.learn(*given, options.offline)
            else:
                outcome = lockstep.train(*given)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(signals.asked) from stop
    if speaks and outcome.finished:
        print(f"finished {run} at version {outcome.version}; report: {report.write([run])}", flush=True)
    elif speaks:
        print(f"stopped at version {outcome.version}; resume with: m2po {command} {run}", file=sys.stderr)
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


def generate(arguments: list[str]) -> int:
    """Make the rollouts of a run, beside its learner and any number of other generators, until the run ends.

    Example: m2po generate gs://my-bucket/runs/m2po-s256
    """
    options = tyro.cli(GenerateOptions, args=arguments, prog="m2po generate", description=generate.__doc__)
    from m2po_jax import services
    from m2po_jax.progress import GeneratorView, StopSignals, bars

    with StopSignals() as signals, bars() as drawn:
        view = GeneratorView(drawn, signals)
        signals.told = lambda: view.note("stopping after the unit at hand; once more stops at once")
        try:
            finished = services.generate(
                options.run,
                view,
                options.mesh,
                options.source,
                options.questions,
                options.wait,
                server=options.server,
            )
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(signals.asked) from stop
    if finished:
        print(f"finished {options.run}: {view.summary}", flush=True)
        return 0
    print(f"stopped; join again with: m2po generate {options.run}", file=sys.stderr)
    return STOPPED if signals.asked == "SIGINT" else PREEMPTED


def code_of(stop: KeyboardInterrupt) -> int:
    """The exit code of a stop at once."""
    return PREEMPTED if stop.args == ("SIGTERM",) else STOPPED


def flag_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag that must be known before the others can be parsed; the last one counts, as in tyro."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
    return value
