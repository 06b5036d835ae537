"""`m2po generate` and `m2po learn`: generators and a learner as programs of their own, with the store between them."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from m2po_jax import catalog
from m2po_jax.config import Config, MeshConfig, UserError
from m2po_jax.config_server import ServerConfig
from m2po_jax.generation import Generator, Sampling, Worker
from m2po_jax.generation.handover import Handover
from m2po_jax.generation.polling import Poll
from m2po_jax.generation.remote import RemoteSampler
from m2po_jax.generation.server import Server
from m2po_jax.generation.worker import OTHERS_EVERY_S, GeneratorWatcher
from m2po_jax.learner.feed import Supply
from m2po_jax.learner.hosts import Hosts
from m2po_jax.learner.loop import Learner, Outcome, Watcher
from m2po_jax.learner.profiling import Profile
from m2po_jax.lockstep import agree
from m2po_jax.models import Transformer, sharding
from m2po_jax.models.mesh import make_mesh, require_rows
from m2po_jax.opening import learner_of
from m2po_jax.rollouts import RunInfo, Schedule, Shelf, Store, UnitId, open_run, shard_path
from m2po_jax.tasks import Task, make_task

_SAY_AFTER_S = 30.0


def learn(
    config: Config,
    run: str,
    watcher: Watcher,
    base: str | None = None,
    hosts: Hosts | None = None,
    profile: Profile | None = None,
    offline: bool = False,
    poll: Poll | None = None,
) -> Outcome:
    """Start or resume the run directory `run` with `config`, on rollouts that generators make.

    Several `hosts` all call this. `offline`: nobody makes any more, so what is missing is an error.

    Raises:
        UserError: as `lockstep.train` does; offline, a unit is missing.
        LostHost: another host does not answer.
    """
    hosts = hosts or Hosts()
    with hosts.together():
        agree(hosts, config, run, base)
        with learner_of(config, run, watcher, base, hosts, profile) as learner:
            return learner.run(_waiting(learner, offline, poll or Poll()))


def generate(
    run: str,
    watcher: GeneratorWatcher,
    mesh: MeshConfig | None = None,
    source: str | None = None,
    questions: str | None = None,
    wait_s: float = 600.0,
    poll: Poll | None = None,
    server: ServerConfig | None = None,
) -> bool:
    """Make the rollouts of a run until its learner has all it needs (True), or until asked to stop (False).

    Args:
        run: directory or URL; waited for, where a learner has yet to make it.
        mesh: of this generator; None: as many of its devices as a work unit has rows for, each with the whole policy.
        source: where the model's directory lies here, if it has moved; questions likewise.
        wait_s: how long to wait for the run.
        server: what draws the responses; None, or one without a URL: the decode engine, here.

    Raises:
        UserError: there is no run, or it cannot be generated for here.
    """
    poll = poll or Poll()
    found = _awaited(run, watcher, wait_s, poll)
    if found is None:
        return False
    store, info = found
    if all(part.run is not None for part in info.config.staleness.sources):
        raise UserError(f"{store.url} reads only rollouts of other runs: there is nothing to generate for it")
    config = replace(
        info.config,
        mesh=mesh or MeshConfig(),
        model=replace(info.config.model, source=source or info.config.model.source),
        task=replace(info.config.task, questions=questions or info.config.task.questions),
    )
    config = catalog.with_sources(config)
    task = make_task(config.task, config.model.source)
    model = Transformer(config.model, task.tokenizer.vocab_size)
    devices = make_mesh(_fitting(config, watcher))
    abstract = jax.eval_shape(model.init_params, jax.random.key(0))
    if devices.size > 1:
        sharding.shardings(model.sized, devices)
        require_rows(config.rollouts.prompts_per_unit, "prompts of a work unit", devices)
        abstract = sharding.abstract_params(model.sized, devices)
    published = sharding.published(abstract, model.config)
    with contextlib.ExitStack() as stack:
        if devices.size > 1:
            stack.enter_context(jax.set_mesh(devices))
        sampler = stack.enter_context(_sampler(server, config, task, model, watcher))
        generator = Generator(store, info.run_id, config, task, model, published, sampler)
        return Worker(store, generator, Schedule.of(info.config), watcher, poll).run()


@contextlib.contextmanager
def _sampler(
    options: ServerConfig | None, config: Config, task: Task, model: Transformer, watcher: GeneratorWatcher
) -> Iterator[Sampling | None]:
    """What draws responses on a server; None without one."""
    if options is None or options.url is None:
        yield None
        return
    server = Server(options.url, watcher.note, options.wait)
    directory = Path(options.directory or Path("served") / server.address)
    handover = Handover(directory, model.sized, config.model.source, server, options.reload)
    restarts_s = options.wait if options.reload else None
    sampler = RemoteSampler(task, model, config.sampling, server, handover, watcher.note, options.tolerance, restarts_s)
    with contextlib.closing(sampler), handover.alone():
        yield sampler


def _fitting(config: Config, watcher: GeneratorWatcher) -> MeshConfig:
    """The mesh, with as many copies of the policy as divide the prompts of a work unit where nobody says how many."""
    mesh, prompts = config.mesh, config.rollouts.prompts_per_unit
    if mesh.data is not None:
        return mesh
    room = max(jax.device_count() // (mesh.fsdp * mesh.tensor), 1)
    copies = math.gcd(room, max(prompts // mesh.fsdp, 1))
    if copies < room:
        used = copies * mesh.fsdp * mesh.tensor
        watcher.note(f"uses {used} of {jax.device_count()} devices, as a work unit has {prompts} prompts")
    return replace(mesh, data=copies)


def _awaited(run: str, watcher: GeneratorWatcher, wait_s: float, poll: Poll) -> tuple[Store, RunInfo] | None:
    """The run, once a learner has made it; None if asked to stop meanwhile."""
    since, told = time.monotonic(), False
    for pause_s in poll.waits():
        try:
            return open_run(run)
        except UserError:
            if time.monotonic() - since + pause_s > wait_s or not _may_come(run):
                raise
        if not told:
            watcher.note(f"waiting for a learner to make the run {run} ({wait_s:.0f} s at most)")
            told = True
        if watcher.stopping():
            return None
        time.sleep(pause_s)
    return None


def _may_come(run: str) -> bool:
    """Whether a run that is not there may appear; False if its store itself cannot be used."""
    if "://" not in run:
        return True
    Store.open(run).exists("config.json")  # raises the reason
    return True


def _waiting(learner: Learner, offline: bool, poll: Poll) -> Supply:
    """Waits until generators have made the units of a batch; the first of several hosts looks for them."""
    store, hosts, shelf = learner.store, learner.hosts, Shelf(learner.store)
    asked: list[Sequence[tuple[UnitId, ...]]] = []

    def look(options: Sequence[tuple[UnitId, ...]]) -> list[list[int] | None]:
        again = asked[-1:] == [options]  # what was there was bad, or has gone
        asked[:] = [options]
        lacking = [units for units in options if again or shelf.first(units) is None]
        shelf.look({units[0].version for units in lacking})
        shelf.look({unit.version for units in lacking for unit in units[1:]}, 0.0 if again else OTHERS_EVERY_S)
        shelf.drop_below(min(unit.version for units in options for unit in units))
        found = [shelf.first(units) for units in options]
        return [None if unit is None else [unit.version, unit.batch, unit.unit] for unit in found]

    def supply(options: Sequence[tuple[UnitId, ...]]) -> tuple[UnitId, ...] | None:
        since, told = time.monotonic(), False
        for pause_s in poll.waits():
            found = hosts.gather("the units that are there", look(options) if hosts.first else None)[0]
            missing = [units[0] for units, at in zip(options, found, strict=True) if at is None]
            if not missing:
                return tuple(UnitId(*at) for at in found)
            if offline:
                raise UserError(
                    f"{store.location(shard_path(missing[0]))} is not there, and --offline says that nobody makes it:"
                    " start m2po generate on this run, or choose a policy that reads what there is"
                )
            if any(hosts.gather("whether to stop", learner.watcher.stopping())):
                return None
            learner.watcher.doing(f"waiting for {len(missing)} units of version {missing[0].version}")
            if not told and time.monotonic() - since > _SAY_AFTER_S:
                learner.watcher.note(
                    f"still waiting for {shard_path(missing[0])}: is a generator running?  m2po generate {store.url}"
                )
                told = True
            time.sleep(pause_s)
        return None

    return supply
