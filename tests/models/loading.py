"""Loads a directory onto eight virtual devices and prints how much memory that took at its peak, beside the result.

Run as `python -m tests.models.loading DIRECTORY`, in a process of its own: a peak cannot be taken back.
"""

import resource
import sys
from pathlib import Path

import jax
from jax.sharding import AxisType

from m2po_jax.models import huggingface, sharding


def peak_bytes() -> int:
    """Most memory this process ever had. On Linux `getrusage` counts what its parent had before the program too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def main(directory: str) -> None:
    config = huggingface.read_config(directory)
    mesh = jax.make_mesh((1, 4, 2), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    where = sharding.shardings(config, mesh)
    before = peak_bytes()
    params = huggingface.load(directory, config, where)
    jax.block_until_ready(params)
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(peak_bytes() - before, held, largest)


if __name__ == "__main__":
    main(sys.argv[1])
