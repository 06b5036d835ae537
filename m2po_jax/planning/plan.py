"""One configuration on one topology: its programs compiled, measured by what they are, and set against the chip."""

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m2po_jax.config import Config, MeshConfig, UserError
from m2po_jax.models.chips import Chip
from m2po_jax.models.mesh import make_mesh
from m2po_jax.models.splash import BLOCK
from m2po_jax.planning import programs
from m2po_jax.planning.chips import Topology
from m2po_jax.planning.costs import Costs, costs
from m2po_jax.planning.formulas import generate_flops, kernel_flops, update_flops
from m2po_jax.planning.generators import abstract_published, require_copies, tensor_parts
from m2po_jax.planning.hlo import parse
from m2po_jax.planning.roofline import Roofline, roofline
from m2po_jax.planning.storage import StoreCost, store_cost

MASK_PASSES = 16
"""Trips assumed of the loops of an update whose number depends on data: the search for M2PO's threshold."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, at the peak of a program."""

    params: int
    optimizer: int
    batch: int
    working: int
    """Gradients, activations and everything else that lives within the program."""
    code: int
    peak: int
    """All of it; where the compiler refuses the program, what it says it would need."""
    hbm: int
    """What the chip has."""
    refused: str | None = None
    """What the compiler says, if it refuses."""

    @property
    def fits(self) -> bool:
        """Whether the compiler takes it."""
        return self.refused is None and self.peak <= self.hbm


@dataclass(frozen=True)
class ProgramPlan:
    """One program."""

    name: str
    compile_s: float
    memory: Memory
    costs: Costs | None = None
    """On one device; None where it does not fit."""
    kernel_flops: float = 0.0
    """FLOPs of the kernels on one device, in closed form."""
    useful_flops: float = 0.0
    """Of all devices, in closed form."""
    executed_flops: float = 0.0
    """Of all devices, in closed form, with what is computed again; beside the compiled program's."""
    first_pass_flops: float = 0.0
    """Of these, the pass before an objective's statistics."""
    cost_analysis_flops: float = 0.0
    """What XLA says of one device: each loop body once, kernels not at all."""
    bounds: Roofline | None = None
    most_mfu: float = 0.0
    """At the bound; not a prediction."""
    data_loops: tuple[str, ...] = ()
    """Loops whose trips depend on data, by their operations in JAX."""

    @property
    def collectives_share(self) -> float:
        """Time of collectives over that of compute, each at its peak; beyond 1 they set the bound."""
        return self.bounds.interconnect_s / self.bounds.compute_s if self.bounds and self.bounds.compute_s else 0.0

    @property
    def flops(self) -> float:
        """FLOPs of the compiled program on one device, kernels included."""
        return (self.costs.flops if self.costs else 0.0) + self.kernel_flops


@dataclass(frozen=True)
class GeneratorPlan:
    """The program of a generator, on a slice of its own."""

    topology: str
    devices: int
    tensor: int
    """Devices that share a copy of the policy; there are devices / tensor copies."""
    tokens: int
    """Sampled by one work unit, every response to its full length."""
    program: ProgramPlan

    @property
    def most_tokens_per_s(self) -> float:
        """At the bound; not a prediction."""
        bounds = self.program.bounds
        return self.tokens / bounds.bound_s if bounds and bounds.bound_s else 0.0


@dataclass(frozen=True)
class Plan:
    """What `m2po plan` finds."""

    config: Config
    topology: str
    chip: Chip
    devices: int
    mesh: dict[str, int]
    update: ProgramPlan
    generator: GeneratorPlan | None
    store: StoreCost | None
    """None where no bound on the time of an update is known, as the update does not fit."""

    @property
    def fits(self) -> bool:
        """Whether all its programs do."""
        return all(program.memory.fits for program in self.programs)

    @property
    def programs(self) -> tuple[ProgramPlan, ...]:
        """Those that were compiled."""
        return (self.update,) if self.generator is None else (self.update, self.generator.program)


def make_plan(config: Config, where: Topology, say: Callable[[str], None], generators: Topology | None = None) -> Plan:
    """Compile the programs of a configuration for a slice.

    Args:
        say: told in a line what is being done, as compiling takes minutes.
        generators: the slice of a generator; None: its program is not compiled.

    Raises:
        ConfigError: the mesh does not divide devices, heads or rows.
    """
    mesh = make_mesh(config.mesh, where.devices)
    lowered = programs.lower_update(config, mesh)
    if generators is not None:
        require_copies(config, generators.name, len(generators.devices))
    say(f"compiling the update of {config.name} for {where.name}")
    update = _update(config, mesh, where.chip, lowered)
    generator = None
    if generators is not None:
        say(f"update: {update.compile_s:.0f} s; compiling the generator's program for {generators.name}")
        generator = _generator(config, generators)
    store = store_cost(config, update.bounds.bound_s) if update.bounds else None
    return Plan(config, where.name, where.chip, mesh.size, dict(mesh.shape), update, generator, store)


def _update(config: Config, mesh: Mesh, chip: Chip, lowered: jax.stages.Lowered) -> ProgramPlan:
    state = programs.abstract_state(config, mesh)
    arguments = {
        "params": programs.device_bytes(state.params),
        "optimizer": programs.device_bytes(state.opt_state),
    }
    found = _compiled("update", lowered, arguments, mesh, chip, MASK_PASSES)
    closed = update_flops(config, bool(found.costs and found.costs.kernels))
    rows = programs.micro_batch_rows(config) // (mesh.shape["data"] * mesh.shape["fsdp"])
    planned = _bounded(found, config, mesh, chip, rows, closed.useful, closed.executed)
    return replace(planned, first_pass_flops=closed.first_pass)


def _generator(config: Config, where: Topology) -> GeneratorPlan:
    devices = len(where.devices)
    tensor = tensor_parts(config, devices)
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=tensor), where.devices)
    arguments = {"params": programs.device_bytes(abstract_published(config, mesh)), "optimizer": 0}
    lowered = programs.lower_generate(config, mesh)
    steps = programs.decode_steps(config, devices // tensor)
    found = _compiled("generate", lowered, arguments, mesh, where.chip, steps)
    flops = generate_flops(config)
    program = _bounded(found, config, mesh, where.chip, 0, flops, flops)
    rollouts = config.rollouts
    tokens = rollouts.prompts_per_unit * rollouts.group_size * config.sampling.max_new_tokens
    return GeneratorPlan(where.name, devices, tensor, tokens, program)


def _compiled(
    name: str, lowered: jax.stages.Lowered, arguments: dict[str, int], mesh: Mesh, chip: Chip, unknown_trips: int
) -> ProgramPlan:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            needed = hbm_needed(str(error)) or _reported(folder)
            if not needed:
                raise
            refused = Memory(arguments["params"], arguments["optimizer"], 0, 0, 0, needed, chip.hbm_bytes, _said(error))
            return ProgramPlan(name, time.perf_counter() - started, refused)
        seconds, used = time.perf_counter() - started, _reported(folder)
    program = parse(compiled.as_text() or "")
    return ProgramPlan(
        name,
        seconds,
        _memory(compiled.memory_analysis(), arguments, used, chip),
        costs(program, mesh.size, unknown_trips),
        cost_analysis_flops=float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        data_loops=tuple(program.unknown_loops()),
    )


def _reported(folder: str) -> int:
    """Bytes of HBM in the reports of memory that the compiler left in a folder; 0 if it left none."""
    reports = Path(folder).glob("*memory-usage-report.txt")
    return max((hbm_used(path.read_text(encoding="utf-8")) for path in reports), default=0)


def _memory(found: Any, arguments: dict[str, int], used: int, chip: Chip) -> Memory:
    """`used` is what the compiler lays out in HBM, arguments and results included.

    `memory_analysis()` gives arguments and temporaries that add up to more than that: they overlap.
    """
    held, code = found.argument_size_in_bytes, found.generated_code_size_in_bytes
    return Memory(
        params=arguments["params"],
        optimizer=arguments["optimizer"],
        batch=max(0, held - sum(arguments.values())),
        working=used - held,
        code=code,
        peak=used + code,
        hbm=chip.hbm_bytes,
    )


def _bounded(
    found: ProgramPlan, config: Config, mesh: Mesh, chip: Chip, rows: int, useful: float, executed: float
) -> ProgramPlan:
    """With closed forms and bounds; those without costs only get the first."""
    facts: dict[str, Any] = {**vars(found), "useful_flops": useful, "executed_flops": executed}
    if found.costs is not None:
        kernels = sum(
            calls * kernel_flops(name, config.model, rows, programs.row_widths(config)[0], mesh.shape["tensor"], BLOCK)
            for name, calls in found.costs.kernels.items()
        )
        bounds = roofline(chip, found.costs.flops + kernels, found.costs.hbm_bytes, found.costs.sent_bytes)
        facts |= {"kernel_flops": kernels, "bounds": bounds, "most_mfu": bounds.most_mfu(useful, mesh.size, chip)}
    return ProgramPlan(**facts)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def hbm_needed(message: str) -> int | None:
    """Bytes of HBM that a program would need, arguments included, from a refusal; None for any other error."""
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of [\d.]+[KMGT]? hbm", message)
    found = found or re.search(rf"required for HLO temporaries \({size}\) exceeds available HBM", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def hbm_used(report: str) -> int:
    """Bytes of HBM in the compiler's report of memory: all of a program's arrays, but not its code."""
    found = re.search(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)", report)
    return int(found[1]) if found else 0


def _said(error: Exception) -> str:
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if "hbm" in line.lower()), lines[0])[:300]


def require_planable(config: Config) -> None:
    """Raises UserError if the configuration leaves open what a plan needs."""
    if config.model.vocab_size is None:
        raise UserError("model.vocab_size is None: set it, or --model.source DIRECTORY, as a plan reads no tokenizer")
