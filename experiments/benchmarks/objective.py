"""What the objectives cost: the mask against a sort, and statistics against a bare loss; ratios of one run.

Command:   python experiments/benchmarks/objective.py            (2048 x 2560 tokens; --devices 8 for virtual devices)
Hardware:  2 CPU cores, about 2 minutes and 1 GB; see README.md for the table.

Times are the fastest of several calls. Machines differ and are shared: read the ratios, not the milliseconds.
"""

import argparse
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """One compiled program."""

    seconds: float
    temporary_arrays: float
    """Peak temporary memory, in token-sized float32 arrays of a device's share."""
    moved_bytes: int
    """Bytes that enter collectives on one device, with loops counted once."""


def main() -> None:
    """Print one Markdown table."""
    arguments = _arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    own_flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{own_flags} --xla_force_host_platform_device_count={arguments.devices}".strip()
    bench = _Benchmark(arguments.rows, arguments.columns, arguments.devices, arguments.repeats)
    print(f"{arguments.rows} x {arguments.columns} tokens, {arguments.devices} device(s), {os.cpu_count()} cores\n")
    print("| program | ms | against | ratio | temporary arrays | bytes between devices |")
    print("|:---|---:|:---|---:|---:|---:|")
    for name, baseline in bench.programs():
        found = bench.measured[name]
        ratio = f"{bench.measured[baseline].seconds / found.seconds:.1f}x faster" if "sort" in baseline else ""
        if baseline and "sort" not in baseline:
            ratio = f"{found.seconds / bench.measured[baseline].seconds:.2f}x"
        print(
            f"| {name} | {1e3 * found.seconds:.1f} | {baseline} | {ratio} | {found.temporary_arrays:.2f} |"
            f" {found.moved_bytes:,} |"
        )


class _Benchmark:
    """Programs on one batch, measured one after the other."""

    def __init__(self, rows: int, columns: int, devices: int, repeats: int):
        import jax

        self.rows, self.columns, self.repeats = rows, columns, repeats
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        self.sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        self.devices = devices
        self.measured: dict[str, Measured] = {}

    def programs(self) -> list[tuple[str, str]]:
        """Measure all of them; (name, baseline) in the order of the table."""
        import jax

        arrays, unmasked, more = self._batch(0.3), self._batch(0.05), self._more()
        table: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = [
            ("mask by sort and running sum", "", mask_by_sort, arrays),
            ("second_moment_mask", "mask by sort and running sum", mask_by_counting, arrays),
            ("second_moment_mask, nothing to mask", "mask by sort and running sum", mask_by_counting, unmasked),
            ("bare grpo loss and gradient", "", jax.value_and_grad(bare_grpo), arrays),
            ("m2po loss and gradient", "bare grpo loss and gradient", jax.value_and_grad(loss_alone("m2po")), arrays),
            ("grpo with all statistics", "bare grpo loss and gradient", with_statistics("grpo"), (*arrays, *more)),
            ("m2po with all statistics", "bare grpo loss and gradient", with_statistics("m2po"), (*arrays, *more)),
        ]
        for name, _, program, inputs in table:
            self.measured[name] = self._measure(program, inputs)
        return [(name, baseline) for name, baseline, _, _ in table]

    def _batch(self, spread: float) -> tuple[Any, ...]:
        import jax
        import numpy as np

        rng, shape = np.random.default_rng(0), (self.rows, self.columns)
        policy = rng.normal(-1.0, 0.5, shape).astype(np.float32)
        behavior = policy - rng.normal(0.0, spread, shape).astype(np.float32)
        advantages = rng.normal(0.0, 1.0, (self.rows, 1)).astype(np.float32)
        valid = np.arange(self.columns) < rng.integers(1, self.columns + 1, (self.rows, 1))
        return tuple(jax.device_put(x, self.sharding) for x in (policy, behavior, advantages, valid))

    def _more(self) -> tuple[Any, Any]:
        import jax
        import numpy as np

        entropy = np.random.default_rng(1).gamma(1.0, 0.5, (self.rows, self.columns)).astype(np.float32)
        ages = np.full(self.rows, 256, np.int32)
        return jax.device_put(entropy, self.sharding), jax.device_put(ages, self.sharding)

    def _measure(self, program: Callable[..., Any], inputs: tuple[Any, ...]) -> Measured:
        import jax

        compiled = jax.jit(program).lower(*inputs).compile()
        times = []
        for _ in range(self.repeats + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*inputs))
            times.append(time.perf_counter() - start)
        memory = compiled.memory_analysis()
        share = 4 * self.rows * self.columns / self.devices
        return Measured(min(times[1:]), memory.temp_size_in_bytes / share, collective_bytes(compiled.as_text()))


def bare_grpo(policy: Any, behavior: Any, advantages: Any, valid: Any) -> Any:
    """GRPO's loss and nothing else, as one would write it down."""
    import jax.numpy as jnp

    ratio = jnp.exp(jnp.where(valid, policy - behavior, 0.0))
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -jnp.sum(jnp.where(valid, surrogate, 0.0)) / jnp.sum(valid, dtype=jnp.float32)


def mask_by_sort(policy: Any, behavior: Any, advantages: Any, valid: Any) -> Any:
    """Algorithm 1 by a sort and a running mean, in float32."""
    import jax.numpy as jnp

    log_ratio = jnp.where(valid, policy - behavior, 0.0)
    in_region = valid & (log_ratio * advantages > 0.0)
    moments = jnp.where(in_region, log_ratio**2, jnp.inf)
    ordered = jnp.sort(moments.ravel())
    members = jnp.arange(1, ordered.size + 1, dtype=jnp.float32)
    means = jnp.cumsum(jnp.where(jnp.isinf(ordered), 0.0, ordered)) / members
    fits = (means <= 0.04) & jnp.isfinite(ordered)
    cut = jnp.max(jnp.where(fits, ordered, -1.0))
    return valid & ~(in_region & (moments > cut))


def mask_by_counting(policy: Any, behavior: Any, advantages: Any, valid: Any) -> Any:
    """The same by `second_moment_mask`."""
    from m2po_jax.objectives import second_moment_mask

    return second_moment_mask(policy - behavior, advantages, valid, 0.04)


def loss_alone(name: str) -> Callable[..., Any]:
    """An objective of the package whose statistics nobody reads."""
    from m2po_jax import objectives

    return lambda *arrays: objectives.get(name)(*arrays)[0]


def with_statistics(name: str) -> Callable[..., Any]:
    """Loss, gradient and every metric, as in an update."""
    import jax

    from m2po_jax import objectives

    def loss(policy: Any, behavior: Any, advantages: Any, valid: Any, entropy: Any, ages: Any) -> Any:
        return objectives.get(name)(policy, behavior, advantages, valid, entropy=entropy, staleness=ages)

    return jax.value_and_grad(loss, has_aux=True)


_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}


def collective_bytes(text: str) -> int:
    """Bytes that come out of the collectives of a compiled program's text, each counted once."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    text, total = re.sub(r"/\*.*?\*/", "", text), 0
    for result in re.findall(rf"= (\(?[^=]*?\)?) (?:{kinds})(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
            total += _SIZES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
    return total


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2048, help="responses (default: 2048)")
    parser.add_argument("--columns", type=int, default=2560, help="tokens a response (default: 2560)")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices that share the rows (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each program (default: 5)")
    arguments = parser.parse_args()
    for name in ("rows", "columns", "devices", "repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}: use 1 or more")
    if arguments.rows % arguments.devices:
        parser.error(f"--devices {arguments.devices} does not divide --rows {arguments.rows}")
    return arguments


if __name__ == "__main__":
    main()
