"""What every program of a run begins with: its parts, opened and checked, and its base policy, version 0."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from m2po_jax.config import Config, UserError
from m2po_jax.evaluation import HeldOut
from m2po_jax.generation import Sampler
from m2po_jax.generation.engine import Streams
from m2po_jax.learner.hosts import Hosts
from m2po_jax.learner.loop import Learner, Watcher
from m2po_jax.learner.profiling import Profile
from m2po_jax.learner.spec import objective_of
from m2po_jax.learner.warm_start import Demonstrations, warm_start
from m2po_jax.models import Transformer, huggingface, sharding
from m2po_jax.models.mesh import make_mesh, require_rows
from m2po_jax.rollouts import (
    Provenance,
    RunInfo,
    Schedule,
    Store,
    create_or_resume,
    inventory_key,
    open_run,
    sole_learner,
    weights,
    whole_batches,
)
from m2po_jax.tasks import ArithmeticTask, Task, left_padded, make_task, right_padded


@dataclass(frozen=True)
class Parts:
    """What a configuration is made of, checked before any run directory is made."""

    task: Task
    model: Transformer
    mesh: Mesh | None
    """None where it is one device."""

    @classmethod
    def of(cls, config: Config) -> "Parts":
        """Raises UserError for what cannot run."""
        objective_of(config)
        task = make_task(config.task, config.model.source)
        task.held_out(config.evaluation.prompts)
        model = Transformer(config.model, task.tokenizer.vocab_size)
        model.require_room(task.max_prompt_tokens + config.sampling.max_new_tokens)
        mesh = make_mesh(config.mesh)
        if mesh.size == 1:
            return cls(task, model, None)
        sharding.shardings(model.sized, mesh)
        rows = config.mini_batch_rows
        require_rows(rows, "responses of a mini-batch", mesh)
        require_rows(-(-rows // config.learner.micro_batches), "responses of a micro-batch", mesh)
        return cls(task, model, mesh)


@contextlib.contextmanager
def learner_of(
    config: Config, run: str, watcher: Watcher, base: str | None, hosts: Hosts, profile: Profile | None = None
) -> Iterator[Learner]:
    """The learner of a run, made or resumed, under its lock, with version 0 published.

    Raises:
        UserError: bad configuration, a run with another configuration, an unusable store; on every host.
    """
    _check_base(config, run, base)
    parts = Parts.of(config)
    others, schedule = _other_runs(config, parts.task)
    for note in parts.task.notes:
        watcher.note(note)
    hosts.gather("a run directory")
    with contextlib.ExitStack() as stack:
        if hosts.first:
            store = Store.open(run, create=True)
            info = create_or_resume(store, config)
            stack.enter_context(sole_learner(store))
            hosts.gather("the run", info.run_id)
        else:
            store, info = _shared_run(run, hosts.gather("the run")[0])
        info = replace(info, config=config)
        sampler = Sampler(parts.task, parts.model, config.sampling)
        held_out = HeldOut(sampler, config.evaluation.prompts, config.seed)
        learner = Learner(
            store, info, watcher, parts.task, parts.model, parts.mesh, hosts, profile, schedule, others, held_out
        )
        _publish_base(learner, base, held_out)
        yield learner


def _other_runs(config: Config, task: Task) -> tuple[dict[str, tuple[Store, Provenance]], Schedule]:
    """The runs that the staleness policy reads beside this one, and the schedule that knows their batches.

    Raises UserError if one is not there, has no whole batch, or has batches of another shape or sampling.
    """
    others, inventory = {}, {}
    for source in config.staleness.sources:
        if source.policy != "frozen" or source.run is None:
            continue
        store, info = open_run(source.run)
        for name in ("prompts_per_batch", "group_size", "units_per_batch"):
            theirs, ours = getattr(info.config.rollouts, name), getattr(config.rollouts, name)
            if theirs != ours:
                raise UserError(
                    f"rollouts.{name} is {theirs} in {store.url} and {ours} here: staleness.run needs the same"
                )
        if info.config.sampling != config.sampling:
            raise UserError(f"{store.url} was sampled with {info.config.sampling}: staleness.run needs this run's")
        batches = whole_batches(store, source.version, config.rollouts.units_per_batch)
        if not batches:
            which = "" if source.version is None else f" of version {source.version}"
            raise UserError(f"{store.url} has no whole batch{which}: name another staleness.run or staleness.version")
        others[source.run] = store, Provenance(info.run_id, "", task.tokenizer.fingerprint)
        inventory[inventory_key(source)] = batches
    return others, Schedule.of(config, inventory)


def _check_base(config: Config, run: str, base: str | None) -> None:
    """Raises UserError if the base policy of a new run is not where it should come from."""
    if base is not None:
        weights.read_digest(open_run(base)[0], 0)
    elif config.model.source is not None:
        try:
            open_run(run)
        except UserError:  # a new run
            huggingface.check(config.model.source, config.model)


def _shared_run(run: str, run_id: str) -> tuple[Store, RunInfo]:
    """The run that the first host made, on another one; UserError if it cannot be seen from here."""
    with contextlib.suppress(UserError):
        store, info = open_run(run)
        if info.run_id == run_id:
            return store, info
    raise UserError(f"the run {run} of host 0 is not there on this host: use gs://bucket/prefix, or a shared disk")


def _publish_base(learner: Learner, base: str | None, held_out: HeldOut) -> None:
    """Publish version 0 unless it is there: of another run with the same base, of a directory, or warm-started."""
    store, hosts, config = learner.store, learner.hosts, learner.config
    if hosts.gather("the base policy", 0 in weights.versions(store))[0]:
        return
    alone = base is None and config.model.source is None
    if hosts.first or not alone:
        params = _base_policy(learner, base, held_out)
        weights.publish(store, 0, weights.snapshot(params, learner.publisher.dtypes))
    hosts.gather("version 0")


def _base_policy(learner: Learner, base: str | None, held_out: HeldOut) -> Any:
    config, watcher = learner.config, learner.watcher
    if base is not None:
        watcher.note(f"base policy taken from {base}")
        return weights.load(Store.open(base), 0, learner.published)[0]
    if config.model.source is not None:
        where = None if learner.mesh is None else sharding.shardings(learner.model.sized, learner.mesh)
        watcher.note(f"base policy read from {config.model.source}")
        return huggingface.load(config.model.source, config.model, where)

    def watch(step: int, accuracy: float) -> None:
        target = config.warm_start.target_accuracy
        watcher.warm_start(step, accuracy, target)
        if accuracy < target and watcher.stopping():
            raise KeyboardInterrupt  # there is nothing to save yet; the warm start begins anew

    return warm_start(
        config.warm_start,
        learner.model,
        Streams.of(config.seed).parameters,
        lambda step: _demonstrations(config, step),
        lambda params, step: held_out.accuracy(params, step).value,
        watch,
    )


def _demonstrations(config: Config, step: int) -> Demonstrations:
    task, warm = ArithmeticTask(config.task), config.warm_start
    tokenizer = task.tokenizer
    worked = task.demonstrations(warm.batch_size, warm.slip_rate, (config.seed, step, 0, 0, 1))
    prompts = [tokenizer.prompt(problem.prompt) for problem, _ in worked]
    answers = [[*tokenizer.prompt(answer), *tokenizer.stop_ids] for _, answer in worked]
    return (
        *left_padded(prompts, task.max_prompt_tokens, tokenizer.pad_id),
        *right_padded(answers, config.sampling.max_new_tokens, tokenizer.pad_id),
    )
