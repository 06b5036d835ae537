"""`m2po train`: generation and learning in one process, in lockstep, with the store as the only link between them.

For each batch: make what is missing, read and verify it, record what is about to be consumed, update, publish.
"""

from collections.abc import Sequence

import jax

from m2po_jax import __version__
from m2po_jax.config import Config
from m2po_jax.config_json import flatten
from m2po_jax.generation import Generator
from m2po_jax.learner import speed
from m2po_jax.learner.feed import Supply
from m2po_jax.learner.hosts import Hosts
from m2po_jax.learner.loop import Learner, Outcome, Watcher
from m2po_jax.learner.profiling import Profile
from m2po_jax.opening import learner_of
from m2po_jax.rollouts import UnitId, shard_path


def train(
    config: Config,
    run: str,
    watcher: Watcher,
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
        agree(hosts, config, run, base)
        with learner_of(config, run, watcher, base, hosts, profile) as learner:
            return learner.run(_making(learner))


def agree(hosts: Hosts, config: Config, run: str, base: str | None) -> None:
    """Raises UserError on every host if they were not all started alike."""
    versions = {"m2po_jax": __version__, "jax": jax.__version__}
    hosts.agree("configuration", flatten(config) | {"run": run, "base": base} | versions)


def make_base(config: Config, run: str, watcher: Watcher) -> None:
    """Only make the run's base policy, version 0; raises as `train` does."""
    with learner_of(config, run, watcher, None, Hosts()):
        pass


def _making(learner: Learner) -> Supply:
    """Makes the units of a batch that are not there, all hosts together, each writing its share."""
    store, hosts = learner.store, learner.hosts
    generator = Generator(store, learner.run_id, learner.config, learner.task, learner.model, learner.published)

    def there(options: Sequence[UnitId]) -> list[int] | None:
        return next(([u.version, u.batch, u.unit] for u in options if store.exists(shard_path(u))), None)

    def supply(options: Sequence[tuple[UnitId, ...]]) -> tuple[UnitId, ...]:
        found = hosts.gather("the units to make", list(map(there, options)) if hosts.first else None)[0]
        chosen = [units[0] if at is None else UnitId(*at) for units, at in zip(options, found, strict=True)]
        missing = [unit for unit, at in zip(chosen, found, strict=True) if at is None]
        if missing:
            learner.watcher.doing(f"generating, of version {missing[0].version}")
            learner.publisher.wait(missing[0].version)
            with learner.speed.doing(speed.GENERATE):
                generator.make(missing, hosts.index, hosts.count)
            hosts.gather("that units are made")
        return tuple(chosen)

    return supply
