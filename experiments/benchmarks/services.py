"""Separate programs that are killed, against lockstep: the quickstart's M2PO arm at staleness 256.

Command:   python experiments/benchmarks/services.py --runs runs/services --seeds 7 8 9
Hardware:  2 CPU cores, 4 GB; several minutes a seed.
Expect:    the same weights to the bit, hence the same accuracy; README.md has the table.

A learner and two generators, as processes of their own, share nothing but a bucket on an in-memory server that speaks
the protocol of Google Cloud Storage (or a directory, with --directory). A process chosen at random gets SIGKILL every
so often and is started again at once.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from m2po_jax.analysis.frames import load  # noqa: E402
from m2po_jax.analysis.table import final_accuracy  # noqa: E402
from m2po_jax.rollouts import Store, parse_shard_path, read_generator_lines, weights  # noqa: E402

ARM = "experiments/quickstart.py:m2po-s256"
ROLES = ("learn", "generate-1", "generate-2")


def main() -> None:
    """Run every seed both ways and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs/services", help="folder for runs and logs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--every", type=float, default=30.0, help="mean seconds between kills")
    parser.add_argument("--updates", type=int, default=1280, help="learner.total_updates")
    parser.add_argument("--directory", action="store_true", help="share a local directory in place of a bucket")
    given = parser.parse_args()
    folder = Path(given.runs).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print("seed  lockstep  separate  same bits  lockstep s  separate s  kills  units  made  learner waits", flush=True)
    for seed in given.seeds:
        with _shared(folder, seed, given.directory) as (run, env):
            print(_row(seed, folder, run, env, given.every, given.updates), flush=True)


def _row(seed: int, folder: Path, run: str, env: dict[str, str], every_s: float, updates: int) -> str:
    lockstep = folder / f"lockstep-{seed}"
    flags = ["--seed", seed, "--learner.total-updates", updates]
    began = time.monotonic()
    subprocess.run(_command("train", ARM, "--run", lockstep, *flags), cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    alone_s = time.monotonic() - began
    began = time.monotonic()
    kills = _killed_together(folder, run, env, flags, every_s, seed)
    together_s = time.monotonic() - began
    os.environ.update(env)
    here, there = load(lockstep), load(run)
    store = Store.open(run)
    same = weights.latest(store) == weights.latest(Store.open(lockstep))
    units = len({unit for path in store.list("rollouts") if (unit := parse_shard_path(path))})
    waits = there.updates["data_wait_frac"].to_numpy(float)
    return (
        f"{seed:4}  {final_accuracy(here):8.3f}  {final_accuracy(there):8.3f}  {'yes' if same else 'no':>9}"
        f"  {alone_s:10.0f}  {together_s:10.0f}  {kills:5}  {units:5}  {len(read_generator_lines(store)):4}"
        f"  {waits[len(waits) // 2 :].mean():13.1%}"
    )


def _killed_together(folder: Path, run: str, env: dict[str, str], flags: list, every_s: float, seed: int) -> int:
    """Run the three programs to the end of the learner, killing one at a time; how many were killed."""
    commands = {role: _command("generate", run) for role in ROLES[1:]}
    commands["learn"] = _command("learn", ARM, "--run", run, *flags)
    moments, kills, running = random.Random(seed), 0, {}
    with open(folder / f"separate-{seed}.log", "w") as log:
        start = lambda role: subprocess.Popen(commands[role], cwd=ROOT, env=env, stdout=log, stderr=log)  # noqa: E731
        running = {role: start(role) for role in ROLES}
        try:
            due = time.monotonic() + moments.expovariate(1 / every_s)
            while running["learn"].poll() != 0:
                time.sleep(0.2)
                for role, process in running.items():
                    if process.poll() not in (None, 0, -9):
                        raise SystemExit(f"{role} failed with exit code {process.returncode}: see {log.name}")
                if time.monotonic() > due:
                    role = moments.choice(ROLES)
                    running[role].kill()
                    running[role].wait()
                    running[role], kills = start(role), kills + 1
                    due = time.monotonic() + moments.expovariate(1 / every_s)
            for role in ROLES[1:]:
                running[role].wait(timeout=120)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return kills


@contextmanager
def _shared(folder: Path, seed: int, directory: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Where the programs meet, and their environment."""
    if directory:
        yield str(folder / f"separate-{seed}"), dict(os.environ)
        return
    from tests.gcs import serving

    with serving() as server:
        yield f"gs://{server.bucket}/separate-{seed}", {**os.environ, **server.environment}


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "m2po_jax", *map(str, arguments)]


if __name__ == "__main__":
    main()
