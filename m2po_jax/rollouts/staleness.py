"""Staleness policies as pure arithmetic on versions: which batch of which version a learner step reads.

U = updates_per_batch, P = publish_every (a multiple of U), k = staleness (a multiple of P), all in model updates.
Weights exist for versions 0, P, 2P, ...; batches are consumed at learner versions 0, U, 2U, ...
"""

from m2po_jax.rollouts.schema import UnitId


def exactly(version: int, k: int, updates_per_batch: int, publish_every: int) -> tuple[int, int]:
    """The (behavior_version, batch_index) that `exactly(k)` consumes at a learner version.

    The delay line: data of version n - k, rounded down to a published one; of version 0 while n < k. Version 0 so
    serves (k + P) / U batches and every later version P / U of them. Raises ValueError when version is no multiple
    of U, P none of U, or k none of P.
    """
    _check(k, updates_per_batch, publish_every)
    if version < 0 or version % updates_per_batch:
        raise ValueError(f"version {version} is no multiple of updates_per_batch {updates_per_batch}")
    behavior_version = max(version - k, 0) // publish_every * publish_every
    if behavior_version == 0:
        return 0, version // updates_per_batch
    return behavior_version, (version - k - behavior_version) // updates_per_batch


def batches_of(
    behavior_version: int, k: int, updates_per_batch: int, publish_every: int
) -> tuple[tuple[int, int], ...]:
    """The (learner_version, batch_index) pairs at which the batches of one published version are consumed."""
    _check(k, updates_per_batch, publish_every)
    if behavior_version < 0 or behavior_version % publish_every:
        raise ValueError(f"version {behavior_version} is not published: publish_every is {publish_every}")
    first = behavior_version + k if behavior_version else 0
    last = behavior_version + k + publish_every
    return tuple((n, b) for b, n in enumerate(range(first, last, updates_per_batch)))


def served_after(
    version: int, k: int, updates_per_batch: int, publish_every: int, total_updates: int | None = None
) -> tuple[int, ...]:
    """Versions published up to `version` that have a batch to be consumed at `version` or later, in order.

    Weights of any older version can be retired: all its batches were consumed. With `total_updates`, versions whose
    first batch the run never reaches are left out.
    """
    _check(k, updates_per_batch, publish_every)
    oldest = exactly(version, k, updates_per_batch, publish_every)[0]
    published = range(oldest, version + 1, publish_every)
    return tuple(
        v for v in published if total_updates is None or _first_use(v, k) < total_updates and version < total_updates
    )


def units(behavior_version: int, batch: int, units_per_batch: int) -> tuple[UnitId, ...]:
    """The work units of one batch, in the order in which a learner reads them."""
    return tuple(UnitId(behavior_version, batch, unit) for unit in range(units_per_batch))


def _first_use(behavior_version: int, k: int) -> int:
    return behavior_version + k if behavior_version else 0


def _check(k: int, updates_per_batch: int, publish_every: int) -> None:
    if updates_per_batch < 1 or publish_every < 1 or publish_every % updates_per_batch:
        raise ValueError(f"publish_every {publish_every} is no multiple of updates_per_batch {updates_per_batch}")
    if k < 0 or k % publish_every:
        raise ValueError(f"k {k} is no multiple of publish_every {publish_every}")
