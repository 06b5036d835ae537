"""One configuration on one topology: its programs compiled, measured by what they are, and set against the chip."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from m2po_jax.config import Config, UserError
from m2po_jax.models.chips import Chip
from m2po_jax.models.mesh import make_mesh
from m2po_jax.models.splash import BLOCK
from m2po_jax.planning import programs
from m2po_jax.planning.chips import Topology
from m2po_jax.planning.costs import Costs, costs
from m2po_jax.planning.formulas import generate_flops, kernel_flops, update_flops
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
    cost_analysis_flops: float = 0.0
    """What XLA says of one device: each loop body once, kernels not at all."""
    bounds: Roofline | None = None
    most_mfu: float = 0.0
    """At the bound; not a prediction."""
    data_loops: tuple[str, ...] = ()
    """Loops whose trips depend on data, by their operations in JAX."""

    @property
    def flops(self) -> float:
        """FLOPs of the compiled program on one device, kernels included."""
        return (self.costs.flops if self.costs else 0.0) + self.kernel_flops


@dataclass(frozen=True)
class Plan:
    """What `m2po plan` finds."""

    config: Config
    topology: str
    chip: Chip
    devices: int
    mesh: dict[str, int]
    update: ProgramPlan
    generate: ProgramPlan | None
    store: StoreCost | None
    """None where no bound on the time of an update is known, as the update does not fit."""

    @property
    def fits(self) -> bool:
        """Whether all its programs do."""
        return all(program.memory.fits for program in (self.update, self.generate) if program is not None)


def make_plan(config: Config, where: Topology, say: Callable[[str], None], generator: bool = True) -> Plan:
    """Compile the programs of a configuration for a slice.

    Args:
        say: told in a line what is being done, as compiling takes minutes.
        generator: whether to compile the generator's program too.

    Raises:
        ConfigError: the mesh does not divide devices, heads or rows.
    """
    mesh = make_mesh(config.mesh, where.devices)
    lowered = programs.lower_update(config, mesh)
    unit = programs.lower_generate(config, mesh) if generator else None
    say(f"compiling the update of {config.name} for {where.name}")
    update = _update(config, mesh, where.chip, lowered)
    generate = None
    if unit is not None:
        say(f"update: {update.compile_s:.0f} s; compiling the generator's program")
        generate = _generate(config, mesh, where.chip, unit)
    store = store_cost(config, update.bounds.bound_s) if update.bounds else None
    return Plan(config, where.name, where.chip, mesh.size, dict(mesh.shape), update, generate, store)


def _update(config: Config, mesh: Mesh, chip: Chip, lowered: jax.stages.Lowered) -> ProgramPlan:
    state = programs.abstract_state(config, mesh)
    arguments = {
        "params": programs.device_bytes(state.params),
        "optimizer": programs.device_bytes(state.opt_state),
    }
    found = _compiled("update", lowered, arguments, mesh, chip, MASK_PASSES)
    closed = update_flops(config, bool(found.costs and found.costs.kernels))
    rows = programs.micro_batch_rows(config) // (mesh.shape["data"] * mesh.shape["fsdp"])
    return _bounded(found, config, mesh, chip, rows, closed.useful, closed.executed)


def _generate(config: Config, mesh: Mesh, chip: Chip, lowered: jax.stages.Lowered) -> ProgramPlan:
    arguments = {"params": programs.device_bytes(programs.abstract_params(config, mesh)), "optimizer": 0}
    found = _compiled("generate", lowered, arguments, mesh, chip, config.sampling.max_new_tokens)
    flops = generate_flops(config)
    return _bounded(found, config, mesh, chip, 0, flops, flops)


def _compiled(
    name: str, lowered: jax.stages.Lowered, arguments: dict[str, int], mesh: Mesh, chip: Chip, unknown_trips: int
) -> ProgramPlan:
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = hbm_needed(str(error), sum(arguments.values()))
        if needed is None:
            raise
        memory = Memory(
            params=arguments["params"],
            optimizer=arguments["optimizer"],
            batch=0,
            working=0,
            code=0,
            peak=needed,
            hbm=chip.hbm_bytes,
            refused=_said(error),
        )
        return ProgramPlan(name, time.perf_counter() - started, memory)
    seconds = time.perf_counter() - started
    program = parse(compiled.as_text() or "")
    return ProgramPlan(
        name,
        seconds,
        _memory(compiled.memory_analysis(), arguments, chip),
        costs(program, mesh.size, unknown_trips),
        cost_analysis_flops=float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        data_loops=tuple(program.unknown_loops()),
    )


def _memory(found: Any, arguments: dict[str, int], chip: Chip) -> Memory:
    code = found.generated_code_size_in_bytes
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(
        params=arguments["params"],
        optimizer=arguments["optimizer"],
        batch=max(0, found.argument_size_in_bytes - sum(arguments.values())),
        working=found.temp_size_in_bytes + new,
        code=code,
        peak=found.argument_size_in_bytes + new + found.temp_size_in_bytes + code,
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


def hbm_needed(message: str, argument_bytes: int) -> int | None:
    """Bytes of HBM that a program would need, from the compiler's refusal; None for any other error.

    It names either all that is used, or the temporaries, which come on top of the arguments.
    """
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of [\d.]+[KMGT]? hbm", message)
    temporaries = re.search(rf"required for HLO temporaries \({size}\) exceeds available HBM", message)
    if found:
        return int(float(found[1]) * _UNITS[found[2]])
    return argument_bytes + int(float(temporaries[1]) * _UNITS[temporaries[2]]) if temporaries else None


def _said(error: Exception) -> str:
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if "hbm" in line.lower()), lines[0])[:300]


def require_planable(config: Config) -> None:
    """Raises UserError if the configuration leaves open what a plan needs."""
    if config.model.vocab_size is None:
        raise UserError("model.vocab_size is None: set it, or --model.source DIRECTORY, as a plan reads no tokenizer")
