"""Weights in an object store: one small directory of objects each, visible once whole, whatever fails on the way."""

import random
import time

import jax
import numpy as np
import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import Store, remote, staging, weights

PARAMS = {f"w{i}": np.full((64, 64), i, np.float32) for i in range(4)}
SHAPES = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in PARAMS.items()}


@pytest.fixture
def bucket(gcs, request) -> Store:
    """A store of its own in the bucket."""
    return Store.open(f"gs://{gcs.bucket}/{request.node.name}")


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
    gcs.faults(reset=True)
    weights.publish(bucket, 4, PARAMS)
    files = len(bucket.list("weights/00000004"))
    published = gcs.requests()
    assert published["put"] <= files + 1
    assert sum(published.get(kind, 0) for kind in ("put", "get", "head", "list", "delete")) <= files + 8
    gcs.faults(reset=True)
    weights.load(bucket, 4, SHAPES)
    assert sum(gcs.requests().get(kind, 0) for kind in ("get", "head", "list")) <= files + 3


@pytest.mark.slow
def test_a_fifth_of_the_requests_fail_and_every_version_loads(gcs, bucket):
    gcs.faults(share=0.2, kinds=["429", "503", "drop", "truncate"], seed=4)
    digests = {version: weights.publish(bucket, version, PARAMS).digest for version in range(4)}
    for version, digest in digests.items():
        loaded, recorded = weights.load(bucket, version, SHAPES)
        jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)
        assert recorded == digest
    assert sum(gcs.requests().get(kind, 0) for kind in ("429", "503", "drop", "truncate")) > 10
    assert weights.versions(bucket) == list(digests)


def test_what_an_interrupted_publication_left_is_not_there_and_is_replaced(gcs, bucket):
    whole = Store.open(bucket.url)
    weights.publish(whole, 0, PARAMS)
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


@pytest.mark.slow
def test_a_store_that_goes_away_in_a_publication_shows_nothing_and_the_next_one_succeeds(gcs, bucket, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE_S", 0.5)
    client, bucket._objects = bucket._objects, remote._client(bucket.url, max_retries=1, patience_s=1.0)
    gcs.faults(share=0.5, kinds=["503"], seed=1)
    with pytest.raises(UserError, match="does not answer"):
        for version in range(100):
            weights.publish(bucket, version, PARAMS)
    gcs.faults(share=0.0)
    bucket._objects = client
    assert weights.versions(bucket) == list(range(version))
    assert weights.publish(bucket, version, PARAMS).created
    weights.load(bucket, version, SHAPES)


def test_damage_is_found(bucket):
    weights.publish(bucket, 4, PARAMS)
    data = next(path for path in bucket.list("weights/00000004") if "/d/" in path)
    body = bytearray(bucket.get(data))
    body[len(body) // 2] ^= 1
    bucket.replace(data, bytes(body))
    with pytest.raises(UserError, match="weights of version 4 .* cannot be used: .*is not what was uploaded"):
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
    for turn in range(40):  # a busy machine may be killed before it writes
        if turn >= 5 and unfinished:
            break
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
