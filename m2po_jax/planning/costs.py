"""What a compiled program does on one device: FLOPs of its products, bytes through HBM, collectives."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from m2po_jax.planning.hlo import Computation, Instruction, Program, Run, Shape

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_FREE = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"),
    *("while", "conditional", "call", "async-start", "async-done", "async-update", "partition-id", "replica-id"),
}
"""Opcodes that move nothing, or whose computations are counted on their own."""
_VIEWS = ("bitcast", "get-tuple-element", "reshape")
_READS_PART = ("dynamic-slice", "slice", "gather")
_NO_WORK = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "AsyncCollective")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one run of a program."""

    count: int
    """Started by each device."""
    payload_bytes: int
    """Bytes that a device hands in, or of an all-gather gets out."""
    sent_bytes: int
    """Bytes that a device must send to others at least."""


@dataclass(frozen=True)
class Costs:
    """One run of a program on one device."""

    flops: float
    """2 a multiply-add of every matrix product and convolution; elementwise work is left out."""
    flops_once: float
    """The same with every loop body counted once, as XLA's cost analysis does."""
    hbm_bytes: float
    """Read and written, each instruction or fusion reading its operands and writing its result."""
    collectives: dict[str, Traffic] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    """Kernels written for the chip, by name -> calls. Of these `flops` knows nothing; `hbm_bytes` has their operands
    and results once, which is the least that they move."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other chips."""
        return sum(traffic.sent_bytes for traffic in self.collectives.values())


def costs(program: Program, devices: int, unknown_trips: int = 1) -> Costs:
    """Add up a program for one of `devices`; `unknown_trips` as in `Program.runs`."""
    flops = flops_once = hbm = 0.0
    counts, payload, sent = Counter[str](), Counter[str](), Counter[str]()
    kernels = Counter[str]()
    seen: set[str] = set()
    for run in program.runs(unknown_trips):
        first = run.computation.name not in seen
        seen.add(run.computation.name)
        for instruction in run.computation.instructions.values():
            once = product_flops(run.computation, instruction)
            flops += once * run.times
            flops_once += once * first
            if (kind := collective_kind(instruction)) is not None and _begins(run.computation, instruction):
                hbm += run.times * _array_bytes(run.computation, instruction) * _is_chained(instruction)
                handed, out = _collective_bytes(run.computation, instruction, kind, devices)
                counts[kind] += run.times
                payload[kind] += handed * run.times
                sent[kind] += out * run.times
            if instruction.attribute("custom_call_target") == '"tpu_custom_call"':
                kernels[_kernel_name(instruction)] += run.times
            if not run.fused:
                hbm += hbm_bytes(program, run, instruction) * run.times
    traffic = {kind: Traffic(counts[kind], payload[kind], sent[kind]) for kind in COLLECTIVES if counts[kind]}
    return Costs(flops, flops_once, hbm, traffic, dict(kernels))


def collective_kind(instruction: Instruction) -> str | None:
    """Which collective an instruction begins; None for those that only end one."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def _is_chained(instruction: Instruction) -> bool:
    """Whether it goes on through several fusions, each of which shows it, while they compute."""
    return "chain_id=" in instruction.attributes


def _begins(computation: Computation, collective: Instruction) -> bool:
    """False for the later links of a chain."""
    users = computation.users.get(collective.name, [])
    return not _is_chained(collective) or any("AsyncCollectiveStart" in user.attributes for user in users)


def product_flops(computation: Computation, instruction: Instruction) -> float:
    """2 a multiply-add of a dot or a convolution, 0 for anything else; zeros of padding and dilation are left out."""
    if instruction.opcode == "dot":
        left = _operand(computation, instruction, 0)
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = math.prod(left.sizes[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
        return 2.0 * instruction.shapes[0].elements * contracted
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    return 0.0


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """TPU compilers write products as convolutions, batch axes as spatial ones with windows."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    left, right = _operand(computation, instruction, 0), _operand(computation, instruction, 1)
    out = instruction.shapes[0]
    window = _window(instruction.attributes)
    pairs = 1
    for axis in sorted(set(labels[1]) - {"b", "f"}):
        pairs *= _valid_pairs(
            left.sizes[labels[1].index(axis)],
            right.sizes[labels[2].index(axis)],
            out.sizes[labels[3].index(axis)],
            {name: values[int(axis)] for name, values in window.items() if int(axis) < len(values)},
        )
    batch = out.sizes[labels[3].index("b")] // int(instruction.attribute("batch_group_count") or 1)
    return 2.0 * batch * out.sizes[labels[3].index("f")] * right.sizes[labels[2].index("i")] * pairs


def _window(attributes: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    items = (item.split("=") for item in found[1].split()) if found else ()
    return {name: values.split("x") for name, values in items}


def _valid_pairs(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """(kernel position, output position) pairs that meet an element of the input along one spatial axis."""
    stride, dilation = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    spread = int(window.get("rhs_dilate", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    last = (size - 1) * dilation
    pairs = 0
    for position in range(kernel):
        for index in range(out):
            where = index * stride + position * spread - low
            pairs += 0 <= where <= last and where % dilation == 0
    return pairs


def _collective_bytes(computation: Computation, instruction: Instruction, kind: str, devices: int) -> tuple[int, int]:
    """Payload, and what a device must send of it: each piece once to each other member, sums halfway merged."""
    handed = sum(_array(computation, name).bytes for name in instruction.operands if _has_array(computation, name))
    members = group_size(instruction.attributes, devices)
    if kind == "all-gather":
        return handed * members, handed * (members - 1)
    if kind == "collective-permute":
        return handed, handed
    share = handed * (members - 1) // members
    return handed, 2 * share if kind == "all-reduce" else share


def group_size(attributes: str, devices: int) -> int:
    """Devices that exchange with one another, in any of XLA's three spellings.

    `{{0,1},{2,3}}` and `[2,4]<=[8]` list groups; `mesh['a'=2,'b'=4] {'b'}` names axes, maybe in part: `'b':(1)2`.
    """
    meshed = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if meshed:
        sizes = dict(re.findall(r"('\w+')=(\d+)", meshed[1]))
        used = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", meshed[2])
        return math.prod(int(part or sizes[axis]) for axis, part in used)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    if iota:
        return int(iota[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(listed[1].split(",")) if listed and listed[1] else devices


def hbm_bytes(program: Program, run: Run, instruction: Instruction) -> int:
    """Bytes that an instruction outside of fusions reads from and writes to HBM."""
    computation, opcode = run.computation, instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or any(name in instruction.attributes for name in _NO_WORK):
        return 0
    arrays = [_array(computation, name) for name in instruction.operands if _has_array(computation, name)]
    result = instruction.shapes[0].hbm_bytes if instruction.shapes else 0
    if opcode in ("copy-start", *(f"{kind}-start" for kind in COLLECTIVES)):
        written = instruction.shapes[0] if opcode == "copy-start" else instruction.shapes[len(arrays) :][0]
        return sum(array.hbm_bytes for array in arrays) + written.hbm_bytes
    if opcode == "slice-start":
        made = instruction.shapes[len(arrays) : len(arrays) + 1]
        return sum((0 if arrays[0].on_chip else shape.bytes) + shape.hbm_bytes for shape in made)
    if opcode in _READS_PART:
        return (0 if arrays[0].on_chip else instruction.shapes[0].bytes) + result
    if opcode == "dynamic-update-slice":
        return arrays[1].hbm_bytes + (0 if arrays[0].on_chip else arrays[1].bytes)
    if opcode == "fusion":
        return _fusion_bytes(program.computations[instruction.calls[0]], arrays, instruction)
    return _array_bytes(computation, instruction)


def _array_bytes(computation: Computation, instruction: Instruction) -> int:
    arrays = (_array(computation, name) for name in instruction.operands if _has_array(computation, name))
    return sum(array.hbm_bytes for array in (*arrays, *instruction.shapes))


def _fusion_bytes(fused: Computation, arrays: list[Shape], instruction: Instruction) -> int:
    """Operands of which a fusion reads a slice, and results of which it writes one, count as that slice."""
    parameters = sorted(
        (i for i in fused.instructions.values() if i.opcode == "parameter"), key=lambda i: int(i.text or 0)
    )
    total = 0
    for parameter, array in zip(parameters, arrays, strict=False):
        total += 0 if array.on_chip else min(array.bytes, _bytes_read(fused, parameter))
    root = fused.root
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for made, shape in zip(results, instruction.shapes, strict=False):
        while made.opcode in _VIEWS and made.operands:
            made = fused.instructions[made.operands[0]]
        if made.opcode == "parameter" or _is_chained(made):
            continue
        written = _operand(fused, made, 1).bytes if made.opcode == "dynamic-update-slice" else shape.bytes
        total += 0 if shape.on_chip else min(written, shape.bytes)
    return total


def _bytes_read(fused: Computation, value: Instruction) -> int:
    total = 0
    for user in fused.users.get(value.name, []):
        if user.opcode in _VIEWS:
            total += _bytes_read(fused, user)
        elif user.opcode in _READS_PART and user.operands[0] == value.name:
            total += user.shapes[0].bytes
        elif (
            user.opcode == "dynamic-update-slice"
            and user.operands[0] == value.name
            or user.opcode == "tuple"
            or _is_chained(user)
        ):
            continue
        else:
            return sum(shape.bytes for shape in value.shapes)
    return total


def _operand(computation: Computation, instruction: Instruction, index: int) -> Shape:
    return _array(computation, instruction.operands[index])


def _array(computation: Computation, name: str) -> Shape:
    return computation.instructions[name].shapes[0]


def _has_array(computation: Computation, name: str) -> bool:
    return name in computation.instructions and bool(computation.instructions[name].shapes)


def _kernel_name(instruction: Instruction) -> str:
    named = re.search(r'op_name="[^"]*/(splash_m\w+)', instruction.attributes)
    return named[1] if named else re.sub(r"[.\d]+$", "", instruction.name)
