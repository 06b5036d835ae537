"""A compiled program read from its text: computations, instructions, and how often each computation runs.

XLA's own cost analysis counts the body of a loop once; here a body counts as often as it runs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2}


class Shape(NamedTuple):
    """One array."""

    dtype: str
    sizes: tuple[int, ...]
    on_chip: bool
    """In the chip's vector or scalar memory rather than in its HBM."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of tiles."""
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS.get(self.dtype, int(digits[0]) if digits else 8)
        return self.elements * bits // 8

    @property
    def hbm_bytes(self) -> int:
        """Bytes if it lies in HBM, else 0."""
        return 0 if self.on_chip else self.bytes


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """The arrays of its result, those of a tuple in order."""
    operands: tuple[str, ...]
    text: str
    """What stands in the parentheses; of a constant, its value."""
    attributes: str
    is_root: bool
    """Its value is that of its computation."""

    def attribute(self, name: str) -> str | None:
        """The value of an attribute that has no commas."""
        found = re.search(rf"\b{name}=%?([^,\s]+)", self.attributes)
        return found[1] if found else None

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs, but for those of a loop and the scalar ones of a reduction."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        names = re.findall(r"%([\w.\-]+)", branches[1]) if branches else []
        for key in ("calls", "true_computation", "false_computation"):
            if (name := self.attribute(key)) is not None:
                names.append(name)
        if self.opcode == "call" and (name := self.attribute("to_apply")) is not None:
            names.append(name)
        return tuple(names)


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name of an instruction -> those that have it as operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found


class Run(NamedTuple):
    """A computation and how often the program runs it."""

    computation: Computation
    times: int
    fused: bool
    """Inside a fusion, whose intermediate values are not in HBM."""
    assumed: bool = False
    """Inside a loop whose number of trips is not known."""


@dataclass(frozen=True)
class Program:
    """A compiled module."""

    computations: dict[str, Computation]
    entry: str

    def runs(self, unknown_trips: int = 1) -> Iterator[Run]:
        """Every computation at every place that runs it; all branches of a conditional count.

        `unknown_trips` stands for the trips of a loop whose number is not known when it is compiled; such a loop inside
        another one, as what admits a response to a slot now and then, counts once for each of its trips.
        """
        stack = [Run(self.computations[self.entry], 1, False)]
        while stack:
            run = stack.pop()
            yield run
            for instruction in run.computation.instructions.values():
                if instruction.opcode == "while":
                    trips = self.trips(run.computation, instruction)
                    body = self.computations[instruction.attribute("body") or ""]
                    assumed = 1 if run.assumed else unknown_trips
                    times = run.times * (assumed if trips is None else trips)
                    stack.append(Run(body, times, run.fused, run.assumed or trips is None))
                elif not instruction.opcode.endswith(("-done", "-update")):
                    fused = run.fused or instruction.opcode == "fusion"
                    called = (self.computations[name] for name in instruction.calls)
                    stack += [Run(computation, run.times, fused, run.assumed) for computation in called]

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a loop's body runs; None if that depends on data.

        From the compiler's note where there is one, else from a counter that is compared with a constant.
        """
        noted = re.search(r'known_trip_count\W+n\W+"?(\d+)', loop.attributes)
        if noted:
            return int(noted[1])
        condition = self.computations[loop.attribute("condition") or ""]
        test = condition.root
        if test.opcode != "compare" or test.attribute("direction") != "LT":
            return None
        counter, bound = (condition.instructions[name] for name in test.operands)
        index, end = counter.attribute("index"), constant(condition, bound.name)
        if counter.opcode != "get-tuple-element" or index is None or end is None:
            return None
        start = _element(computation, loop.operands[0], int(index))
        step = self._step(self.computations[loop.attribute("body") or ""], int(index))
        return max(0, -(-(end - (start or 0)) // step))

    def unknown_loops(self) -> list[str]:
        """Where loops come from whose number of trips depends on data: the names of their operations in JAX."""
        found = set()
        for run in self.runs():
            for instruction in run.computation.instructions.values():
                if instruction.opcode == "while" and self.trips(run.computation, instruction) is None:
                    source = re.search(r'op_name="([^"]*)"', instruction.attributes)
                    found.add(source[1] if source else instruction.name)
        return sorted(found)

    def _step(self, body: Computation, index: int) -> int:
        """What a counter grows by in a trip; 1 where it cannot be read."""
        root = body.root
        if root.opcode != "tuple":
            return 1
        grown = body.instructions[root.operands[index]]
        while grown.opcode in _ALIASES and grown.operands:
            grown = body.instructions[grown.operands[0]]
        if grown.opcode != "add":
            return 1
        steps = [constant(body, name) for name in grown.operands]
        return next((step for step in steps if step), 1)


_ALIASES = ("copy", "bitcast", "copy-done", "copy-start")


def parse(text: str) -> Program:
    """Read `jax.stages.Compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _whole_lines(text):
        if header := _HEADER.match(line):
            current = computations[header[2]] = Computation(header[2])
            entry = header[2] if header[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (start := _LINE.match(line)):
            instruction = _instruction(start[2], line[start.end() :], bool(start[1]))
            current.instructions[instruction.name] = instruction
    return Program(computations, entry)


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_BEGINS = re.compile(r"^(\s+(ROOT )?%?[\w.\-]+ = |(ENTRY )?%?[\w.\-]+ \(.*\{$|\}$|HloModule|$)")
_ARRAY = re.compile(r"(\w+)\[([\d,<=?]*)\](\{[^}]*\})?")


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, of which attributes of kernels may hold several."""
    whole = ""
    for line in text.splitlines():
        if _BEGINS.match(line):
            yield whole
            whole = line
        else:
            whole += line
    yield whole


def constant(computation: Computation, name: str) -> int | None:
    """The value of an integer constant of a computation, through copies; None for anything else."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in _ALIASES and instruction.operands:
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.text):
        return None
    return int(instruction.text)


def _element(computation: Computation, name: str, index: int) -> int | None:
    """The constant at an index of a tuple, if it is one."""
    made = computation.instructions.get(name)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return constant(computation, made.operands[index])


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    shape, rest = _until_space(rest)
    opcode, _, rest = rest.partition("(")
    inside, attributes = _closed(rest)
    operands = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, opcode.strip(), _shapes(shape), operands, inside, attributes, root)


def _shapes(text: str) -> tuple[Shape, ...]:
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        numbers = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        found.append(Shape(dtype, numbers, re.search(r"S\([1-9]", layout or "") is not None))
    return tuple(found)


def _until_space(text: str) -> tuple[str, str]:
    """A shape, in which parentheses may hold spaces, and what follows it."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if character == " " and depth == 0:
            return text[:position], text[position + 1 :]
    return text, ""


def _closed(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes, and after it."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:position], text[position + 1 :]
    return text, ""
