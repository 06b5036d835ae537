"""`python -m tests.dying_run ROLE RUN BASE [POINT NTH]`: the tiny run in a process that dies at a named point.

ROLE is train, learn or generate. BASE is a run to take version 0 from, or `-` for a warm start. At the NTH arrival at
POINT the process sends itself SIGKILL: nothing is flushed, closed or caught, as in a preemption. Exit code 0 when the
run finished, 2 with one line for a UserError.
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from m2po_jax import catalog, lockstep, services
from m2po_jax.config import MeshConfig, UserError
from m2po_jax.progress import hush_closed_loops
from tests import tiny

CONFIG = tiny.with_learner(tiny.TINY, total_updates=40)

POINTS = {
    "before the first weights": ("m2po_jax.rollouts.weights:publish", "before"),
    "while weights are written": ("m2po_jax.rollouts.weights:_save", "during"),
    "between weights and LATEST": ("m2po_jax.rollouts.weights:_point_latest", "before"),
    "between the shards of a batch": ("m2po_jax.generation.service:write_shard", "after"),
    "after a batch record": ("m2po_jax.learner.feed:write_batch_record", "after"),
    "between the updates of a batch": ("m2po_jax.learner.loop:Learner._facts", "after"),
    "between metrics and checkpoint": ("m2po_jax.learner.loop:Checkpoints.save", "before"),
    "while a checkpoint is written": ("m2po_jax.learner.loop:Checkpoints.save", "after"),
    "before weights are retired": ("m2po_jax.learner.loop:Learner._retire", "before"),
    "while weights are retired": ("m2po_jax.rollouts.store:shutil.rmtree", "before"),
    "before the position is written": ("m2po_jax.learner.position:write_position", "before"),
    "after the position is written": ("m2po_jax.learner.position:write_position", "after"),
    "while a shard is read": ("m2po_jax.learner.feed:read_shard", "before"),
    "while waiting for units": ("m2po_jax.services:Shelf.look", "after"),
    "while weights are loaded": ("m2po_jax.rollouts.weights:load", "during"),
    "while decoding": ("m2po_jax.generation.service:Generator.begin", "after"),
    "before a shard is written": ("m2po_jax.generation.service:write_shard", "before"),
    "while a shard is written": ("m2po_jax.generation.service:write_shard", "during"),
    "while generators' lines are written": ("m2po_jax.generation.worker:write_generator_lines", "before"),
}
"""Name -> the function that is interrupted, and when. Several points are arrived at for each version or unit."""

_DURING_S = 0.004


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(point: str, nth: int) -> None:
    """Wrap the point's function so that its NTH call is the last thing the process does."""
    target, when = POINTS[point]
    module, path = target.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for attribute in owners:
        owner = getattr(owner, attribute)
    setattr(owner, name, _dying(getattr(owner, name), when, nth))


def _dying(function: Callable[..., Any], when: str, nth: int) -> Callable[..., Any]:
    calls = [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth and when == "before":
            die()
        if calls[0] == nth and when == "during":
            threading.Thread(target=lambda: (time.sleep(_DURING_S), die()), daemon=True).start()
        result = function(*args, **kwargs)
        if calls[0] == nth and when == "after":
            die()
        return result

    return wrapper


def work(role: str, run: str, base: str | None, watcher: "tiny.Watcher") -> None:
    """One of the programs of the run, to its end."""
    config = catalog.resolved(CONFIG)
    if role == "train":
        lockstep.train(config, run, watcher, base)
    elif role == "learn":
        services.learn(config, run, watcher, base)
    else:
        services.generate(run, watcher, MeshConfig(data=1))


def main(role: str, run: str, base: str, point: str | None = None, nth: str = "1") -> None:
    if point is not None:
        interrupt(point, int(nth))
    hush_closed_loops()
    if ahead_s := float(os.environ.get("M2PO_TEST_CLOCK_AHEAD_S", 0)):
        clock = time.time
        time.time = lambda: clock() + ahead_s
    watcher = tiny.Watcher()
    try:
        work(role, run, None if base == "-" else base, watcher)
    except UserError as error:
        print(f"m2po: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        print(*watcher.notes, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
