"""The learner's loop: for each batch, read what its staleness policy chooses, update, publish.

On several hosts each does all of this with its own devices and rows; the first writes what is written once.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from m2po_jax.config import UserError
from m2po_jax.learner import speed
from m2po_jax.learner.batches import mini_batches, on_mesh, packing_of, padding_frac
from m2po_jax.learner.checkpoints import Checkpoints, Cursor
from m2po_jax.learner.diagnostics import token_columns, token_view
from m2po_jax.learner.feed import Feed, Supply
from m2po_jax.learner.hosts import Hosts
from m2po_jax.learner.metrics import MetricsLog
from m2po_jax.learner.profiling import Profile
from m2po_jax.learner.publisher import Publisher
from m2po_jax.learner.spec import update_spec
from m2po_jax.learner.speed import Speed
from m2po_jax.learner.state import TrainState, init_state, learning_rate_schedule, make_optimizer, shardings_of
from m2po_jax.learner.update import MiniBatch, make_score, make_update
from m2po_jax.models import Transformer, sharding
from m2po_jax.models.mesh import held, local_rows, row_parts, row_shares
from m2po_jax.rollouts import (
    BatchRecord,
    Provenance,
    Rollouts,
    RunInfo,
    Schedule,
    Store,
    weights,
    write_diagnostics,
)
from m2po_jax.tasks import Task


class Watcher(Protocol):
    """What a learner tells whoever watches it, and asks back: whether to stop."""

    def note(self, message: str) -> None:
        """One line worth reading."""

    def doing(self, what: str) -> None:
        """What it is at, until it says something else."""

    def warm_start(self, step: int, accuracy: float, target: float) -> None:
        """A check of the warm start."""

    def update(self, version: int, total: int, metrics: dict[str, Any]) -> None:
        """A batch is done; `metrics` are those of the newest update that was fetched."""

    def evaluation(self, version: int, accuracy: float) -> None:
        """A held-out accuracy."""

    def stopping(self) -> bool:
        """Whether someone asked to stop after this batch."""


class Measured(Protocol):
    """A share of right answers."""

    @property
    def value(self) -> float:
        """In [0, 1]."""

    @property
    def prompts(self) -> int:
        """How many it is of."""

    @property
    def standard_error(self) -> float:
        """Of `value`."""


class Evaluator(Protocol):
    """Measures policies on held-out prompts."""

    def accuracy(self, params: Any, version: int) -> Measured:
        """Sampled accuracy of the parameters of a version."""


@dataclass(frozen=True)
class Outcome:
    """How a run of the loop ended."""

    version: int
    finished: bool


class Learner:
    """The parts of one learner, assembled once; `run` drives them."""

    def __init__(
        self,
        store: Store,
        info: RunInfo,
        watcher: Watcher,
        task: Task,
        model: Transformer,
        mesh: Mesh | None,
        hosts: Hosts,
        profile: Profile | None,
        schedule: Schedule,
        others: Mapping[str, tuple[Store, Provenance]],
        evaluator: Evaluator,
    ):
        """Builds the update of the run's configuration around its task and model.

        `mesh` is None where there is one device, `profile` where nothing is to be traced; `schedule` says what is
        read, and `others` are the runs that it reads beside this one.
        """
        config = info.config
        self.store, self.config, self.watcher, self.hosts, self.run_id = store, config, watcher, hosts, info.run_id
        self.parents = info.parents
        self.task, self.model, self.mesh, self.profile = task, model, mesh, profile
        self.schedule, self.others, self.evaluator = schedule, others, evaluator
        self.spec = update_spec(config, model)
        self.optimizer = make_optimizer(config.learner)
        self.score = make_score(self.spec)
        self.reference: Any = None
        self.saved: int | None = None
        steps = jnp.arange(config.learner.total_updates)
        self.learning_rates = np.asarray(jax.vmap(learning_rate_schedule(config.learner))(steps))
        self.abstract_params: Any = jax.eval_shape(self.model.init_params, jax.random.key(0))
        if mesh is not None:
            self.abstract_params = sharding.abstract_params(model.sized, mesh)
        self.published: Any = sharding.published(self.abstract_params, model.config)
        self.publisher = Publisher(store, jax.tree.map(lambda x: x.dtype, self.published))
        cut = (1, 1) if mesh is None else (row_parts(mesh), row_shares(mesh))
        self.packing = packing_of(config, task.max_prompt_tokens, *cut)
        self.part = 0 if cut[1] > 1 else None

    def _rows(self) -> np.ndarray:
        """Rows of a batch that this host needs: its own of each mini-batch."""
        size = self.config.mini_batch_rows
        own = np.arange(size) if self.mesh is None else local_rows(self.mesh, size)
        return np.concatenate([start + own for start in range(0, size * self.config.learner.updates_per_batch, size)])

    def run(self, supply: Supply) -> Outcome:
        """Train on what `supply` brings, from the newest checkpoint or version 0, to the end or until asked to stop."""
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            return self._run(supply)

    def _run(self, supply: Supply) -> Outcome:
        learner = self.config.learner
        if self.profile:
            self.profile.prepare()
        checkpoints = Checkpoints(self.store, learner.keep_checkpoints, learner.keep_checkpoint_every)
        state = self._restored(checkpoints)
        self.update = make_update(self.spec, self.optimizer, None if self.mesh is None else shardings_of(state))
        version = int(state.version)
        self.speed = Speed(self.model.sized, jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat))
        self.feed = Feed(
            self.store,
            self.schedule,
            self.config,
            self.hosts,
            self._rows(),
            supply,
            self._expected,
            self.watcher.note,
            self.others,
            self.parents,
        )
        log = MetricsLog(self.store, version, self._tensorboard(), self.watcher.note, self.hosts.first, self.speed)
        if self.spec.objective.config.kl_coefficient:
            self.reference = self._version_0()
        try:
            if version == 0:
                self._evaluate(log, state, 0)
            else:
                self._publish(checkpoints, state, version)  # in case it was lost after the checkpoint
            while version < learner.total_updates and not self._stopping():
                taken = self._taken(state, version)
                if taken is None:
                    break
                state = self._batch(log, state, *taken)
                version += learner.updates_per_batch
                self._publish(checkpoints, state, version)
                if version % self.config.evaluation.every == 0 or version == learner.total_updates:
                    self._evaluate(log, state, version)
                if version % learner.checkpoint_every == 0:
                    self._checkpoint(checkpoints, log, state, version)
                self.watcher.update(version, learner.total_updates, log.latest)
            if version != self.saved:
                self._checkpoint(checkpoints, log, state, version)
            self.publisher.wait()
            checkpoints.wait()
            if version >= learner.total_updates:
                self.feed.end(version)
        finally:
            if self.profile:
                self.profile.close()
            self.speed.close()
            self.feed.close()
            self.publisher.close()
            checkpoints.close()
            log.close()
        return Outcome(version, finished=version >= learner.total_updates)

    def _stopping(self) -> bool:
        """Whether somebody asked any of the hosts to stop."""
        return any(self.hosts.gather("whether to stop", self.watcher.stopping()))

    def _version_0(self) -> Any:
        """The base policy as float32 parameters."""
        params, _ = weights.load(self.store, 0, self.published)
        return jax.tree.map(lambda x: x.astype(jnp.float32), params)

    def _restored(self, checkpoints: Checkpoints) -> TrainState:
        state = init_state(self._version_0(), self.optimizer)
        version = self.hosts.gather("the newest checkpoint", checkpoints.latest())[0]
        if version is None:
            return state
        state, cursor = checkpoints.restore(version, state)
        if cursor != self._cursor(version):
            raise UserError(f"checkpoint {version} of {self.store.url} was at {cursor}, not at {self._cursor(version)}")
        self.watcher.note(f"resumed from checkpoint {version}")
        self.saved = version
        return state

    def _taken(self, state: TrainState, version: int) -> tuple[BatchRecord, Rollouts] | None:
        if self.profile:
            self.profile.before(range(version, version + self.config.learner.updates_per_batch), state)
        with self.speed.doing(speed.DATA):
            return self.feed.take(version)

    def _batch(self, log: MetricsLog, state: TrainState, record: BatchRecord, rollouts: Rollouts) -> TrainState:
        learner, version = self.config.learner, record.version
        widths = self.task.max_prompt_tokens, self.config.sampling.max_new_tokens
        own = mini_batches(
            rollouts, learner.updates_per_batch, *widths, self.feed.ages(record), self.packing, self.part, self._most
        )
        batches = own if self.mesh is None else [on_mesh(batch, self.mesh) for batch in own]
        self.watcher.doing("learning")
        with self.speed.doing(speed.SCORE):
            batches = [self._scored(state, batch) for batch in batches]
        if learner.diagnostics_every and version // learner.updates_per_batch % learner.diagnostics_every == 0:
            self._diagnose(state, batches[0], own[0], rollouts, record)
        done = []
        for index, batch in enumerate(batches):
            with self.speed.updating(version + index) as watched:
                state, metrics = self.update(state, batch)
                watched.append(metrics)
            facts = self._facts(record, version + index, index) | {"padding_frac": padding_frac(own[index])}
            done.append((facts, metrics))
        if (following := version + learner.updates_per_batch) < learner.total_updates:
            self.feed.read_ahead(following)
        log.updates(done)
        return state

    def _most(self, needed: np.ndarray) -> np.ndarray:
        """The largest of what the hosts need, number by number."""
        return np.max(self.hosts.gather("the rows that a batch needs", needed.tolist()), axis=0)

    def _scored(self, state: TrainState, batch: MiniBatch) -> MiniBatch:
        """With the log-probs of the other policies that the objective asks for; the proximal one is that of `state`."""
        if self.spec.objective.definition.proximal:
            batch = batch._replace(proximal_logprobs=self.score(state.params, batch))
        if self.reference is not None:
            batch = batch._replace(reference_logprobs=self.score(self.reference, batch))
        return batch

    def _expected(self, version: int) -> Provenance | None:
        """What the shards of a version must state; None once its weights were retired.

        The digests in the batch record then bind the shards.
        """
        digest = weights.find_digest(self.store, version)
        return None if digest is None else Provenance(self.run_id, digest, self.task.tokenizer.fingerprint)

    def _publish(self, checkpoints: Checkpoints, state: TrainState, version: int) -> None:
        """Publish what a generator will serve, what is to be kept, and the final policy."""
        total, every = self.config.learner.total_updates, self.config.rollouts.keep_weights_every
        served = version in self.schedule.served(version, total)
        if served or version == total or (every is not None and version % every == 0):
            with self.speed.doing(speed.PUBLISH):
                if self.hosts.count > 1:
                    checkpoints.wait()  # hosts must not be at two writes in different orders
                self.publisher.start(version, state.params)

    def _evaluate(self, log: MetricsLog, state: TrainState, version: int) -> None:
        self.watcher.doing(f"evaluating on {self.config.evaluation.prompts} prompts")
        with self.speed.doing(speed.EVALUATE):
            accuracy = self.evaluator.accuracy(state.params, version)
        values = {"accuracy": accuracy.value, "standard_error": accuracy.standard_error}
        log.evaluation(version, {**values, "prompts": accuracy.prompts})
        self.watcher.evaluation(version, accuracy.value)

    def _checkpoint(self, checkpoints: Checkpoints, log: MetricsLog, state: TrainState, version: int) -> None:
        """Metrics first, then the state; weights that no batch after the checkpoint before it needs are retired."""
        with self.speed.doing(speed.CHECKPOINT):
            self.publisher.wait()
            checkpoints.wait()
        whole = checkpoints.latest()
        log.flush(version)
        with self.speed.doing(speed.CHECKPOINT):
            checkpoints.save(state, self._cursor(version))
            self.saved = version
        if whole is not None and self.hosts.first:
            self._retire(whole)

    def _retire(self, version: int) -> None:
        needed = self.schedule.served(version)
        every = self.config.rollouts.keep_weights_every
        for old in weights.versions(self.store):
            kept = old == 0 or (every is not None and old % every == 0)
            if old < version and old not in needed and not kept:
                weights.retire(self.store, old)

    def _diagnose(
        self, state: TrainState, batch: MiniBatch, own: MiniBatch, rollouts: Rollouts, record: BatchRecord
    ) -> None:
        """Write the tokens of the first mini-batch; on several hosts, those in the rows of the first."""
        view = {name: held(values) for name, values in token_view(state.params, self.spec, batch).items()}
        if self.hosts.first:
            columns = token_columns(view, own, rollouts, record, self.task.tokenizer.token_text)
            write_diagnostics(self.store, record.version, columns)

    def _tensorboard(self) -> Path | None:
        return self.store.local_path / "tensorboard" if self.store.local_path and self.hosts.first else None

    def _facts(self, record: BatchRecord, version: int, mini_batch: int) -> dict[str, Any]:
        since = version - record.version
        return {
            "version": version,
            "behavior_version": record.behavior_version,
            "staleness_updates": record.staleness_updates + since,
            "staleness_mean": float(np.mean(record.ages)) + since,
            "mini_batch": mini_batch,
            "learning_rate": float(self.learning_rates[version]),
        }

    def _cursor(self, version: int) -> Cursor:
        behavior_version, batch, _ = self.schedule.reads(version)[0]
        return Cursor(version, behavior_version, batch)
