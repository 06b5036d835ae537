"""The smallest run that learns: one layer of width 16, two operands, two updates a batch, behind by four updates.

As an experiment file, `tests/tiny.py:tiny`, it also serves the tests that start real processes.
"""

import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from m2po_jax import catalog, lockstep
from m2po_jax.config import (
    Config,
    EvaluationConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    StalenessConfig,
    TaskConfig,
    WarmStartConfig,
)
from m2po_jax.models import Transformer
from m2po_jax.rollouts import Store, open_run, read_segments, weights
from m2po_jax.tasks import ArithmeticTask

ROOT = Path(__file__).parents[1]
TIMING = (
    "wall_time_s", "updates_per_s", "update_s", "tokens_per_s", "flops_per_s", "data_wait_frac",
    "checkpoint_wait_frac", "host_frac",
)  # fmt: skip

TINY = Config(
    name="tiny",
    task=TaskConfig(min_operands=2, max_operands=2),
    model=ModelConfig(width=16, layers=1, query_heads=2, kv_heads=1, head_dim=8, mlp_width=16),
    warm_start=WarmStartConfig(
        target_accuracy=0.2, max_steps=400, check_every=10, batch_size=64, learning_rate=1e-2
    ),
    sampling=SamplingConfig(max_new_tokens=4),
    rollouts=RolloutConfig(prompts_per_batch=4, group_size=4, units_per_batch=2),
    staleness=StalenessConfig(k=4),
    learner=LearnerConfig(
        total_updates=16, updates_per_batch=2, checkpoint_every=4, learning_rate=3e-3, warmup_updates=2,
        decay_updates=None,
        diagnostics_every=None,
    ),
    evaluation=EvaluationConfig(every=8, prompts=16),
    mesh=MeshConfig(data=1),
)  # fmt: skip


def configs() -> tuple[Config, ...]:
    """Two arms that share a base policy."""
    return TINY, replace(TINY, name="tiny-s0", staleness=StalenessConfig(k=0))


def with_learner(config: Config, **changes: Any) -> Config:
    return replace(config, learner=replace(config.learner, **changes))


class Watcher:
    """A progress that remembers what it was told, and asks to stop at a version."""

    def __init__(self, stop_at: int | None = None):
        self.notes: list[str] = []
        self.doings: list[str] = []
        self.warm_starts: list[tuple[int, float, float]] = []
        self.versions: list[int] = []
        self.accuracies: dict[int, float] = {}
        self.units: list[dict[str, Any]] = []
        self._stop_at, self._reached = stop_at, -1

    def note(self, message: str) -> None:
        self.notes.append(message)

    def doing(self, what: str) -> None:
        self.doings.append(what)

    def warm_start(self, step: int, accuracy: float, target: float) -> None:
        self.warm_starts.append((step, accuracy, target))

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        self.versions.append(version)
        self._reached = version

    def evaluation(self, version: int, accuracy: float) -> None:
        self.accuracies[version] = accuracy
        self._reached = version

    def unit(self, position: int, total: int, facts: dict[str, Any]) -> None:
        self.units.append(facts)

    def waiting(self, position: int, total: int, what: str) -> None:
        self.doings.append(what)

    def stopping(self) -> bool:
        return self._stop_at is not None and self._reached >= self._stop_at


def train(config: Config, run: Path | str, base: Path | str | None, watcher: Watcher | None = None) -> Watcher:
    """Run in this process."""
    watcher = watcher or Watcher()
    lockstep.train(catalog.resolved(config), str(run), watcher, None if base is None else str(base))
    return watcher


@functools.cache
def _kept() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="m2po-tests-")


@functools.cache
def base_run() -> Path:
    """A run that was warm-started and stopped at once: version 0, a policy that is right one time in five."""
    run = Path(_kept().name) / "base"
    train(TINY, run, None, Watcher(stop_at=0))
    return run


def subprocess_env(user_env: dict[str, str]) -> dict[str, str]:
    """A user's environment, with one compilation cache for all processes of a test session, as each compiles alike."""
    return {
        **user_env,
        "JAX_COMPILATION_CACHE_DIR": str(Path(_kept().name) / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), user_env.get("PYTHONPATH", "")])),
        "COLUMNS": "200",
    }


def start(env: dict[str, str], *arguments: Any, group: bool = False) -> subprocess.Popen:
    """A Python process of its own in the repository, with both streams as text; `group`: and a group of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=env,
        process_group=0 if group else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(env: dict[str, str], *arguments: Any, timeout_s: float = 300) -> subprocess.CompletedProcess:
    """The same, to its end."""
    process = start(env, *arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def weights_digest(run: Path | str, version: int) -> str:
    """sha256 of every bit of the published parameters, computed from the arrays themselves."""
    config = open_run(run)[1].config
    model = Transformer(config.model, ArithmeticTask(config.task).tokenizer.vocab_size)
    params, _ = weights.load(Store.open(run), version, jax.eval_shape(model.init_params, jax.random.key(0)))
    return weights.params_digest(params)


def lines(run: Path | str) -> list[dict[str, Any]]:
    """The metrics lines of a run but for their timing."""
    found = read_segments(Store.open(run))
    return [{name: value for name, value in line.items() if name not in TIMING} for line in found]
