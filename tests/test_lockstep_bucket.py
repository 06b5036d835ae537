"""A run in a bucket: the bits of a run on a disk, and few requests a batch."""

import pytest

from m2po_jax.rollouts import Store
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
REQUESTS = ("get", "head", "put", "list", "delete")
BATCHES = 32


def test_requests_and_bytes_of_a_batch_are_few(gcs, tmp_path):
    """Two shards and a record of a batch are written and read once each, and little else."""
    config = tiny.with_learner(tiny.TINY, total_updates=2 * BATCHES, checkpoint_every=2 * BATCHES, publish_every=4)
    run, disk = f"gs://{gcs.bucket}/{tmp_path.name}", tmp_path / "run"
    gcs.faults(reset=True)
    tiny.train(config, run, tiny.base_run())
    counts = gcs.requests()
    tiny.train(config, disk, tiny.base_run())
    assert tiny.weights_digest(run, 2 * BATCHES) == tiny.weights_digest(disk, 2 * BATCHES)
    store = Store.open(run)
    sizes = store.sizes()
    of_weights = sum(path.startswith(("weights/", "checkpoints/")) for path in sizes)
    requests = sum(counts.get(kind, 0) for kind in REQUESTS)
    assert counts["put"] - of_weights <= 5 * BATCHES, "two shards, a record, the position, and now and then metrics"
    assert requests <= 20 * BATCHES + 2 * of_weights, "weights are written once and read once"
    stored = sum(sizes.values())
    assert counts["bytes_in"] <= stored + 500 * BATCHES, "nothing is written twice but pointers"
    assert counts["bytes_out"] <= stored + 15_000 * BATCHES, "nothing is read twice but listings and records"
