"""`m2po train`: generation and learning in one process, in lockstep, with the store as the only link between them.

For each batch: make what is missing, read and verify it, record what is about to be consumed, update, publish.
On several hosts each does all of this with its own devices and rows; the first writes what is written once.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from m2po_jax import __version__
from m2po_jax.config import Config, ModelConfig, UserError
from m2po_jax.config_json import flatten
from m2po_jax.evaluation import HeldOut
from m2po_jax.generation import Generator, Sampler
from m2po_jax.generation.engine import Streams
from m2po_jax.learner import speed
from m2po_jax.learner.batches import mini_batches, on_mesh, packing_of, padding_frac
from m2po_jax.learner.checkpoints import Checkpoints, Cursor
from m2po_jax.learner.diagnostics import token_columns, token_view
from m2po_jax.learner.feed import Feed
from m2po_jax.learner.hosts import Hosts
from m2po_jax.learner.metrics import MetricsLog
from m2po_jax.learner.profiling import Profile
from m2po_jax.learner.publisher import Publisher
from m2po_jax.learner.spec import objective_of, update_spec
from m2po_jax.learner.speed import Speed
from m2po_jax.learner.state import TrainState, init_state, learning_rate_schedule, make_optimizer, shardings_of
from m2po_jax.learner.update import MiniBatch, make_score, make_update
from m2po_jax.learner.warm_start import Demonstrations, warm_start
from m2po_jax.models import Transformer, huggingface, sharding
from m2po_jax.models.mesh import held, local_rows, make_mesh, require_rows, row_parts, row_shares
from m2po_jax.progress import Progress
from m2po_jax.rollouts import (
    BatchRecord,
    Provenance,
    Rollouts,
    RunInfo,
    Store,
    UnitId,
    create_or_resume,
    open_run,
    served_after,
    shard_path,
    sole_learner,
    weights,
    write_diagnostics,
)
from m2po_jax.tasks import ArithmeticTask, Task, left_padded, make_task, right_padded


@dataclass(frozen=True)
class Outcome:
    """How a call to `train` ended."""

    version: int
    finished: bool


class Lockstep:
    """The parts of one run, assembled once; `run` drives them."""

    def __init__(
        self,
        store: Store,
        info: RunInfo,
        progress: Progress,
        task: Task,
        model: Transformer,
        mesh: Mesh | None,
        hosts: Hosts,
        profile: Profile | None,
    ):
        """Builds objective, generator and evaluator of the run's configuration around its task and model.

        `mesh` is None where there is one device, `profile` where nothing is to be traced.
        """
        config = info.config
        self.store, self.config, self.progress, self.hosts = store, config, progress, hosts
        self.task, self.model, self.mesh, self.profile = task, model, mesh, profile
        self.spec = update_spec(config, model)
        self.optimizer = make_optimizer(config.learner)
        self.score = make_score(self.spec)
        self.reference: Any = None
        self.saved: int | None = None
        steps = jnp.arange(config.learner.total_updates)
        self.learning_rates = np.asarray(jax.vmap(learning_rate_schedule(config.learner))(steps))
        self.abstract_params: Any = jax.eval_shape(self.model.init_params, jax.random.key(0))
        if mesh is not None:
            self.abstract_params = sharding.abstract_params(_sized(model), mesh)
        self.published: Any = sharding.published(self.abstract_params, model.config)
        self.publisher = Publisher(store, jax.tree.map(lambda x: x.dtype, self.published))
        self.generator = Generator(store, info.run_id, config, self.task, self.model, self.published)
        self.held_out = HeldOut(Sampler(self.task, self.model, config.sampling), config.evaluation.prompts, config.seed)
        self.delay_line = {
            "k": config.staleness.k,
            "updates_per_batch": config.learner.updates_per_batch,
            "publish_every": config.learner.publish_interval,
        }
        self.feed = Feed(store, config, hosts, self._rows(), self._make, self._expected, progress.note)
        cut = (1, 1) if mesh is None else (row_parts(mesh), row_shares(mesh))
        self.packing = packing_of(config, task.max_prompt_tokens, *cut)
        self.part = 0 if cut[1] > 1 else None

    def _rows(self) -> np.ndarray:
        """Rows of a batch that this host needs: its own of each mini-batch."""
        size = self.config.mini_batch_rows
        own = np.arange(size) if self.mesh is None else local_rows(self.mesh, size)
        return np.concatenate([start + own for start in range(0, size * self.config.learner.updates_per_batch, size)])

    def base_policy(self, base: str | None) -> None:
        """Publish version 0 unless it is there: of another run with the same base, of a directory, or warm-started."""
        if self.hosts.gather("the base policy", 0 in weights.versions(self.store))[0]:
            return
        alone = base is None and self.config.model.source is None
        if self.hosts.first or not alone:
            weights.publish(self.store, 0, weights.snapshot(self._base_policy(base), self.publisher.dtypes))
        self.hosts.gather("version 0")

    def _base_policy(self, base: str | None) -> Any:
        if base is not None:
            self.progress.note(f"base policy taken from {base}")
            return weights.load(Store.open(base), 0, self.published)[0]
        if self.config.model.source is not None:
            where = None if self.mesh is None else sharding.shardings(_sized(self.model), self.mesh)
            self.progress.note(f"base policy read from {self.config.model.source}")
            return huggingface.load(self.config.model.source, self.config.model, where)
        return self._warm_started()

    def _warm_started(self) -> Any:
        return warm_start(
            self.config.warm_start,
            self.model,
            Streams.of(self.config.seed).parameters,
            self._demonstrations,
            lambda params, step: self.held_out.accuracy(params, step).value,
            self._watch_warm_start,
        )

    def _watch_warm_start(self, step: int, accuracy: float) -> None:
        target = self.config.warm_start.target_accuracy
        self.progress.warm_start(step, accuracy, target)
        if accuracy < target and self.progress.stopping():
            raise KeyboardInterrupt  # there is nothing to save yet; the warm start begins anew

    def run(self) -> Outcome:
        """Train from the newest checkpoint, or from version 0, to the end or until asked to stop."""
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            return self._run()

    def _run(self) -> Outcome:
        learner = self.config.learner
        if self.profile:
            self.profile.prepare()
        checkpoints = Checkpoints(self.store, learner.keep_checkpoints, learner.keep_checkpoint_every)
        state = self._restored(checkpoints)
        self.update = make_update(self.spec, self.optimizer, None if self.mesh is None else shardings_of(state))
        version = int(state.version)
        self.speed = Speed(_sized(self.model), jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat))
        log = MetricsLog(self.store, version, self._tensorboard(), self.progress.note, self.hosts.first, self.speed)
        if self.spec.objective.config.kl_coefficient:
            self.reference = self._version_0()
        try:
            if version == 0:
                self._evaluate(log, state, 0)
            else:
                self._publish(checkpoints, state, version)  # in case it was lost after the checkpoint
            while version < learner.total_updates and not self._stopping():
                state = self._batch(log, state, version)
                version += learner.updates_per_batch
                self._publish(checkpoints, state, version)
                if version % self.config.evaluation.every == 0 or version == learner.total_updates:
                    self._evaluate(log, state, version)
                if version % learner.checkpoint_every == 0:
                    self._checkpoint(checkpoints, log, state, version)
                self.progress.update(version, learner.total_updates, log.latest)
            if version != self.saved:
                self._checkpoint(checkpoints, log, state, version)
            self.publisher.wait()
            checkpoints.wait()
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
        return any(self.hosts.gather("whether to stop", self.progress.stopping()))

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
        self.progress.note(f"resumed from checkpoint {version}")
        self.saved = version
        return state

    def _batch(self, log: MetricsLog, state: TrainState, version: int) -> TrainState:
        learner = self.config.learner
        if self.profile:
            self.profile.before(range(version, version + learner.updates_per_batch), state)
        with self.speed.doing(speed.DATA):
            record, rollouts = self.feed.take(version)
        widths = self.task.max_prompt_tokens, self.config.sampling.max_new_tokens
        own = mini_batches(
            rollouts, learner.updates_per_batch, *widths, record.staleness_updates, self.packing, self.part, self._most
        )
        batches = own if self.mesh is None else [on_mesh(batch, self.mesh) for batch in own]
        self.progress.doing("learning")
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

    def _make(self, wanted: Sequence[UnitId]) -> None:
        """Make the units of a batch that are not there, all hosts together, each writing its share."""
        names = [shard_path(unit) for unit in self.generator.missing(wanted)] if self.hosts.first else None
        missing = self.hosts.gather("the units to make", names)[0]
        if not missing:
            return
        units = [unit for unit in wanted if shard_path(unit) in missing]
        self.progress.doing(f"generating, of version {units[0].version}")
        self.publisher.wait(units[0].version)
        with self.speed.doing(speed.GENERATE):
            self.generator.make(units, self.hosts.index, self.hosts.count)
        self.hosts.gather("that units are made")

    def _expected(self, version: int) -> Provenance | None:
        """What the shards of a version must state; None once its weights were retired.

        The digests in the batch record then bind the shards.
        """
        if version not in weights.versions(self.store):
            return None
        return self.generator.provenance(weights.read_digest(self.store, version))

    def _publish(self, checkpoints: Checkpoints, state: TrainState, version: int) -> None:
        """Publish what a generator will serve, what is to be kept, and the final policy."""
        total, every = self.config.learner.total_updates, self.config.rollouts.keep_weights_every
        served = version in served_after(version, **self.delay_line, total_updates=total)
        if served or version == total or (every is not None and version % every == 0):
            with self.speed.doing(speed.PUBLISH):
                if self.hosts.count > 1:
                    checkpoints.wait()  # hosts must not be at two writes in different orders
                self.publisher.start(version, state.params)

    def _evaluate(self, log: MetricsLog, state: TrainState, version: int) -> None:
        self.progress.doing(f"evaluating on {self.config.evaluation.prompts} prompts")
        with self.speed.doing(speed.EVALUATE):
            accuracy = self.held_out.accuracy(state.params, version)
        values = {"accuracy": accuracy.value, "standard_error": accuracy.standard_error}
        log.evaluation(version, {**values, "prompts": accuracy.prompts})
        self.progress.evaluation(version, accuracy.value)

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
        needed = set(served_after(version, **self.delay_line))
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
        return {
            "version": version,
            "behavior_version": record.behavior_version,
            "staleness_updates": version - record.behavior_version,
            "mini_batch": mini_batch,
            "learning_rate": float(self.learning_rates[version]),
        }

    def _cursor(self, version: int) -> Cursor:
        return Cursor(version, *self.feed.cursor(version))

    def _demonstrations(self, step: int) -> Demonstrations:
        task, config = ArithmeticTask(self.config.task), self.config.warm_start
        tokenizer = task.tokenizer
        worked = task.demonstrations(config.batch_size, config.slip_rate, (self.config.seed, step, 0, 0, 1))
        prompts = [tokenizer.prompt(problem.prompt) for problem, _ in worked]
        answers = [[*tokenizer.prompt(answer), *tokenizer.stop_ids] for _, answer in worked]
        return (
            *left_padded(prompts, task.max_prompt_tokens, tokenizer.pad_id),
            *right_padded(answers, self.config.sampling.max_new_tokens, tokenizer.pad_id),
        )


def train(
    config: Config,
    run: str,
    progress: Progress,
    base: str | None = None,
    hosts: Hosts | None = None,
    profile: Profile | None = None,
) -> Outcome:
    """Start or resume the run directory `run` (a path or gs:// URL) with `config`.

    `base` names another run whose version 0 becomes this run's base policy. Several `hosts` all call this. `profile`
    traces some of the updates.

    Raises:
        UserError: bad configuration, a run with another configuration, an unusable store; on every host.
        LostHost: another host does not answer.
    """
    hosts = hosts or Hosts()
    with hosts.together():
        versions = {"m2po_jax": __version__, "jax": jax.__version__}
        hosts.agree("configuration", flatten(config) | {"run": run, "base": base} | versions)
        _check_base(config, run, base)
        with _opened(config, run, progress, hosts, profile) as lockstep:
            lockstep.base_policy(base)
            return lockstep.run()


def make_base(config: Config, run: str, progress: Progress) -> None:
    """Only make the run's base policy, version 0; raises as `train` does."""
    _check_base(config, run, None)
    with _opened(config, run, progress, Hosts()) as lockstep:
        lockstep.base_policy(None)


def _check_base(config: Config, run: str, base: str | None) -> None:
    """Raises UserError if the base policy of a new run is not where it should come from."""
    if base is not None:
        weights.read_digest(open_run(base)[0], 0)
    elif config.model.source is not None:
        try:
            open_run(run)
        except UserError:  # a new run
            huggingface.check(config.model.source, config.model)


@contextlib.contextmanager
def _opened(
    config: Config, run: str, progress: Progress, hosts: Hosts, profile: Profile | None = None
) -> Iterator[Lockstep]:
    """The parts of a run under its lock; what can be refused is refused before the run directory is made."""
    objective_of(config)
    task = make_task(config.task, config.model.source)
    task.held_out(config.evaluation.prompts)
    model = Transformer(config.model, task.tokenizer.vocab_size)
    model.require_room(task.max_prompt_tokens + config.sampling.max_new_tokens)
    mesh = _mesh(config, model)
    for note in task.notes:
        progress.note(note)
    hosts.gather("a run directory")
    with contextlib.ExitStack() as stack:
        if hosts.first:
            store = Store.open(run, create=True)
            info = create_or_resume(store, config)
            stack.enter_context(sole_learner(store))
            hosts.gather("the run", info.run_id)
        else:
            store, info = _shared_run(run, hosts.gather("the run")[0])
        yield Lockstep(store, replace(info, config=config), progress, task, model, mesh, hosts, profile)


def _shared_run(run: str, run_id: str) -> tuple[Store, RunInfo]:
    """The run that the first host made, on another one; UserError if it cannot be seen from here."""
    with contextlib.suppress(UserError):
        store, info = open_run(run)
        if info.run_id == run_id:
            return store, info
    raise UserError(f"the run {run} of host 0 is not there on this host: use gs://bucket/prefix, or a shared disk")


def _mesh(config: Config, model: Transformer) -> Mesh | None:
    """The mesh of a run, None where it is one device; ConfigError if it does not divide the model or the batch."""
    mesh = make_mesh(config.mesh)
    if mesh.size == 1:
        return None
    sharding.shardings(_sized(model), mesh)
    require_rows(config.mini_batch_rows, "responses of a mini-batch", mesh)
    require_rows(-(-config.mini_batch_rows // config.learner.micro_batches), "responses of a micro-batch", mesh)
    return mesh


def _sized(model: Transformer) -> ModelConfig:
    return replace(model.config, vocab_size=model.vocab_size)
