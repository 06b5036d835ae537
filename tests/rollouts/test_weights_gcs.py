"""Weights in an object store: one small directory of objects each, visible once whole, whatever fails on the way."""

import json
import random
import time

import jax
import numpy as np
import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import Store, staging, weights
from m2po_jax.rollouts.remote import StoreAway

PARAMS = {f"w{i}": np.full((64, 64), i, np.float32) for i in range(4)}
SHAPES = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in PARAMS.items()}


@pytest.fixture
def bucket(gcs, request) -> Store:
    """A store of its own in the bucket."""
    return Store.open(f"{gcs.bucket()}/{request.node.name}", patience_s=20)


def test_published_weights_load_and_are_published_and_retired_again(bucket):
    published = weights.publish(bucket, 4, PARAMS)
    assert published == weights.Published(4, weights.params_digest(PARAMS), created=True)
    assert weights.publish(bucket, 4, PARAMS) == weights.Published(4, published.digest, created=False)
    loaded, digest = weights.load(bucket, 4, SHAPES)
    jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)
    assert digest == published.digest == weights.read_digest(bucket, 4)
    assert weights.latest(bucket) == (4, digest)
    weights.publish(bucket, 8, PARAMS)
    assert weights.versions(bucket) == [4, 8]
    weights.retire(bucket, 4)
    weights.retire(bucket, 4)
    assert weights.versions(bucket) == [8]
    assert not bucket.list("weights/00000004")
    with pytest.raises(UserError, match="no weights of version 4 .* the versions there are 8"):
        weights.load(bucket, 4, SHAPES)


def test_requests_are_few(gcs, bucket):
    weights.publish(bucket, 0, PARAMS)
    gcs.counts()
    weights.publish(bucket, 4, PARAMS)
    files = len(bucket.list("weights/00000004"))
    published = gcs.counts()
    assert published["put"] <= files + 1
    assert published["requests"] <= files + 6
    weights.load(bucket, 4, SHAPES)
    assert gcs.counts()["requests"] <= files + 3


@pytest.mark.slow
def test_a_fifth_of_the_requests_fail_and_every_version_loads(gcs, bucket):
    gcs.trouble(0.2, seed=4)
    digests = {version: weights.publish(bucket, version, PARAMS).digest for version in range(4)}
    for version, digest in digests.items():
        loaded, recorded = weights.load(bucket, version, SHAPES)
        jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)
        assert recorded == digest
    assert gcs.counts()["faults"] > 10
    assert weights.versions(bucket) == list(digests)


def test_what_an_interrupted_publication_left_is_not_there_and_is_replaced(gcs, bucket):
    whole = Store.open(bucket.url)
    weights.publish(whole, 0, PARAMS)
    gcs.faults(away_s=0)
    left = weights.versions(whole)
    for path in whole.list("weights/00000000"):
        if not path.endswith(staging.COMMITTED):
            whole.replace(path.replace("00000000", "00000004"), b"half")
    whole.replace("weights/00000004/d/left", b"over")
    assert weights.versions(bucket) == left
    with pytest.raises(UserError, match="no weights of version 4"):
        weights.read_digest(bucket, 4)
    with pytest.raises(UserError, match="no weights of version 4"):
        weights.load(bucket, 4, SHAPES)
    assert weights.publish(bucket, 4, PARAMS).created
    weights.load(bucket, 4, SHAPES)
    assert "weights/00000004/d/left" not in bucket.list("weights")


def test_a_store_that_goes_away_in_a_publication_shows_nothing_and_the_next_one_succeeds(gcs, bucket):
    impatient = Store.open(bucket.url, patience_s=0.5)
    gcs.faults(drop=1.0)
    with pytest.raises(StoreAway):
        weights.publish(impatient, 4, PARAMS)
    gcs.faults()
    assert weights.versions(bucket) == []
    assert weights.publish(bucket, 4, PARAMS).created
    assert weights.versions(bucket) == [4]


def test_damage_is_found_by_the_digest(bucket):
    weights.publish(bucket, 4, PARAMS)
    assert weights.fault(bucket, 4) is None
    changed = json.loads(bucket.get("weights/00000004/_CHECKPOINT_METADATA"))
    changed["custom_metadata"]["params_digest"] = "0" * 64
    bucket.replace("weights/00000004/_CHECKPOINT_METADATA", json.dumps(changed).encode())
    assert "do not match" in weights.fault(bucket, 4).replace("does not", "do not")
    with pytest.raises(UserError, match="does not match their digest"):
        weights.load(bucket, 4, SHAPES)


PUBLISHER = """
import itertools, sys
import numpy as np
from m2po_jax.rollouts import Store, weights
store = Store.open(sys.argv[1])
for version in itertools.count(int(sys.argv[2])):
    params = {f"w{i}": np.full((64, 64), version + i, np.float32) for i in range(4)}
    weights.publish(store, version, params)
    print(version, flush=True)
"""


@pytest.mark.slow
def test_a_publisher_killed_at_any_moment_shows_no_half_weights(bucket, start):
    first = unfinished = 0
    for _ in range(8):
        publisher = start(PUBLISHER, bucket.url, first)
        assert publisher.stdout.readline().strip() == str(first)
        time.sleep(random.uniform(0.02, 0.3))
        publisher.kill()
        publisher.wait()
        there = weights.versions(bucket)
        unfinished += len(bucket.children("weights")) > len(there)
        assert there == list(range(there[-1] + 1))
        for version in there[first:]:
            loaded, _ = weights.load(bucket, version, SHAPES)
            assert float(loaded["w3"][0, 0]) == version + 3
        first = there[-1] + 1
    assert unfinished, "no kill fell into a publication: the test shows nothing"
