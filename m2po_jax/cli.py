"""The `m2po` command. Exit codes: 0 done, 2 bad input (one line, with the fix), 1 failure, 130 or 143 stopped."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from m2po_jax import __version__
from m2po_jax.cli_store import copy, fork, prune, verify
from m2po_jax.cli_training import OBJECTIVE_FLAG, STOPPED, code_of, flag_of, generate, learn, train
from m2po_jax.config import Config, UserError

if TYPE_CHECKING:  # these import JAX, which most commands start sooner without
    pass


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
        code = code_of(stop)
    except BrokenPipeError:  # the reader of our output has gone, as in `m2po inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


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
    if objective := flag_of(arguments, OBJECTIVE_FLAG):
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
    "learn": learn,
    "generate": generate,
    "sweep": sweep,
    "report": report,
    "inspect": inspect,
    "verify": verify,
    "prune": prune,
    "copy": copy,
    "fork": fork,
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
