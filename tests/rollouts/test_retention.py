"""What may be pruned, against a slow double that walks through every learner step from the oldest checkpoint on."""

from dataclasses import replace

import pytest

from m2po_jax.config import StalenessConfig
from m2po_jax.rollouts import BatchRecord, Schedule, UnitId, retention, shard_path
from m2po_jax.rollouts.paths import diagnostics_path, weights_path
from tests.tiny import TINY

POLICIES = (
    StalenessConfig(k=4),
    StalenessConfig(k=0),
    StalenessConfig(policy="at_most", k=4),
    StalenessConfig(policy="uniform", low=0, high=8),
)


def made_run(staleness: StalenessConfig, checkpoints: tuple[int, ...], records: tuple[BatchRecord, ...] = ()):
    config = replace(TINY, staleness=staleness)
    versions = range(0, 17, 2)
    units = [UnitId(version, batch, unit) for version in versions for batch in range(9) for unit in range(2)]
    sizes = {shard_path(unit): 10 for unit in units}
    sizes |= {f"{weights_path(version)}/{name}": 7 for version in versions for name in ("a", "b")}
    sizes |= {diagnostics_path(version): 3 for version in versions}
    sizes["rollouts/00000000/000000-0000.parquet.bad-0123abcd"] = 1
    schedule = Schedule.of(config)
    return retention.Run(config, schedule, sizes, records, tuple(versions), checkpoints)


@pytest.mark.parametrize("staleness", POLICIES, ids=lambda s: f"{s.policy}-{s.k}")
@pytest.mark.parametrize("checkpoints", [(), (4, 8), (16,)])
def test_what_a_resumed_learner_or_its_generators_read_stays(staleness, checkpoints):
    run = made_run(staleness, checkpoints)
    gone = {removal.path for removal in retention.removable(run)}
    horizon = min(checkpoints, default=0)
    for version in range(horizon, 16, 2):
        for source in run.schedule.reads(version):
            assert not {shard_path(UnitId(source.version, source.batch, unit)) for unit in range(2)} & gone
            assert weights_path(source.version) not in gone
    assert weights_path(0) not in gone and weights_path(16) not in gone
    assert "rollouts/00000000/000000-0000.parquet.bad-0123abcd" in gone
    assert {path for path in gone if path.startswith("diagnostics")} == {
        diagnostics_path(v) for v in range(0, horizon, 2)
    }


def test_what_can_go_goes():
    gone = retention.removable(made_run(StalenessConfig(k=4), (8, 12)))
    assert shard_path(UnitId(2, 0, 0)) in {removal.path for removal in gone}
    assert weights_path(2) in {removal.path for removal in gone}
    assert retention.totals(gone)["weights"] == (2, 14), "of 2, which is served at 6; those of 4 are read at 8"


def test_recorded_shards_recent_ones_and_weights_kept_on_purpose_stay():
    recorded = shard_path(UnitId(2, 7, 1))
    records = (
        BatchRecord(8, 4, 0, 4, ((recorded, "d"),)),
        BatchRecord(6, 2, 0, 4, ((shard_path(UnitId(2, 0, 0)), "d"),)),
    )
    run = made_run(StalenessConfig(k=4), (8,), records)
    gone = {removal.path for removal in retention.removable(run)}
    assert recorded not in gone
    assert shard_path(UnitId(2, 0, 0)) in gone, "recorded before the oldest checkpoint"
    gone = {removal.path for removal in retention.removable(run, keep_last=6)}
    assert shard_path(UnitId(2, 0, 0)) not in gone and shard_path(UnitId(0, 0, 0)) in gone
    keeps = replace(run.config, rollouts=replace(run.config.rollouts, keep_weights_every=2))
    assert not [r for r in retention.removable(replace(run, config=keeps)) if r.kind == "weights"]


def test_only_the_kinds_asked_for_go():
    run = made_run(StalenessConfig(k=0), (16,))
    for kind in retention.KINDS:
        assert {removal.kind for removal in retention.removable(run, (kind,))} == {kind}
