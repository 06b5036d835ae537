import json
import logging
import os
import random
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.config import UserError
from m2po_jax.rollouts import weights


def make_params(seed: int = 0, width: int = 8) -> dict:
    key = jax.random.key(seed)
    return {
        "embed": jax.random.normal(key, (15, width)),
        "blocks": [{"w": jnp.full((width, width), seed + i, jnp.bfloat16), "scale": jnp.ones(())} for i in range(2)],
    }


def shapes(params):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


def test_published_weights_load_bit_equal_with_their_digest(store):
    params = make_params()
    with jax.transfer_guard("disallow"):
        published = weights.publish(store, 4, params)
        loaded, digest = weights.load(store, 4, shapes(params))
    assert published == weights.Published(4, weights.params_digest(params), created=True)
    assert_same(loaded, params)
    assert digest == published.digest == weights.read_digest(store, 4)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    assert weights.latest(store) == (4, digest)


def test_arrays_and_shardings_in_place_of_shapes(store):
    params = make_params()
    weights.publish(store, 0, params)
    loaded, _ = weights.load(store, 0, make_params(seed=1))
    assert_same(loaded, params)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    abstract = shapes(params)
    abstract["embed"] = jax.ShapeDtypeStruct((15, 8), jnp.float32, sharding=split)
    loaded, _ = weights.load(store, 0, abstract)
    assert_same(loaded, params)
    assert loaded["embed"].sharding == split
    assert weights.publish(store, 4, loaded).digest == weights.params_digest(params)


def test_the_digest_sees_values_shapes_types_and_names():
    base = {"a": jnp.zeros((2, 3)), "b": jnp.ones(2)}
    variants = [
        base,
        base | {"a": jnp.zeros((3, 2))},
        base | {"a": jnp.zeros((2, 3), jnp.int32)},
        base | {"a": -jnp.zeros((2, 3))},
        {"a": base["b"], "b": base["a"]},
        {"a": base["a"], "c": base["b"]},
        {"b": base["b"]},
    ]
    assert len({weights.params_digest(params) for params in variants}) == len(variants)
    assert weights.params_digest({"b": np.ones(2, np.float32), "a": base["a"]}) == weights.params_digest(base)


def test_publishing_again_keeps_what_is_there_and_warns_when_it_differs(store, caplog):
    first = weights.publish(store, 4, make_params(0))
    with caplog.at_level(logging.WARNING):
        again = weights.publish(store, 4, make_params(0))
        assert again == weights.Published(4, first.digest, created=False)
        assert not caplog.records
        other = weights.publish(store, 4, make_params(1))
    assert other == again
    assert "weights/00000004 holds other weights already" in caplog.text
    assert_same(weights.load(store, 4, shapes(make_params()))[0], make_params(0))


def test_latest_never_goes_backwards(store):
    assert weights.latest(store) is None
    digests = {v: weights.publish(store, v, make_params(v)).digest for v in (4, 12, 8)}
    assert weights.latest(store) == (12, digests[12])
    assert weights.versions(store) == [4, 8, 12]
    (store.local_path / "weights" / "LATEST").unlink()
    weights.publish(store, 12, make_params(12))
    assert weights.latest(store) == (12, digests[12]), "a crash between the weights and LATEST is mended"


def test_missing_weights_are_named_with_those_there_are(store):
    with pytest.raises(UserError, match=r"no weights of version 3 at .*00000003: the versions there are none"):
        weights.load(store, 3, shapes(make_params()))
    weights.publish(store, 0, make_params())
    weights.publish(store, 4, make_params())
    with pytest.raises(UserError, match="no weights of version 3 .* the versions there are 0, 4"):
        weights.load(store, 3, shapes(make_params()))


def test_retired_weights_are_gone_and_may_be_retired_again(store):
    for version in (0, 4):
        weights.publish(store, version, make_params(version))
    weights.retire(store, 0)
    weights.retire(store, 0)
    assert weights.versions(store) == [4]
    assert sorted(os.listdir(store.local_path / "weights")) == ["00000004", "LATEST"]


def test_leftovers_of_a_crash_do_not_count_and_are_swept(store):
    weights.publish(store, 0, make_params())
    root = store.local_path / "weights"
    for name in ("00000004.orbax-checkpoint-tmp-17", "00000000.deleting-12ab34cd", "00000008.orbax-checkpoint-tmp"):
        (root / name).mkdir()
        (root / name / "part").write_bytes(b"x")
    assert weights.versions(store) == [0]
    weights.publish(store, 4, make_params())
    assert sorted(os.listdir(root)) == ["00000000", "00000004", "00000008.orbax-checkpoint-tmp", "LATEST"]


def test_weights_of_another_shape_are_named(store):
    params = make_params(width=8)
    weights.publish(store, 4, params)
    for abstract, reason in (
        (shapes(make_params(width=16)), r"blocks/0/w is bfloat16\(8, 8\), this model has bfloat16\(16, 16\)"),
        (
            shapes(params | {"embed": params["embed"].astype(jnp.bfloat16)}),
            r"embed is float32\(15, 8\), this .* bfloat16",
        ),
        (shapes(params | {"head": params["embed"]}), r"head is missing, this model has float32\(15, 8\)"),
        (shapes({"blocks": params["blocks"]}), r"embed is float32\(15, 8\), this model has none"),
    ):
        with pytest.raises(UserError, match=f"weights of version 4 .* cannot be used: {reason}"):
            weights.load(store, 4, abstract)


LOADER = """
import sys
import jax
from m2po_jax.config import UserError
from m2po_jax.rollouts import Store, weights
params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), "float32") for i in range(4)}
for version in map(int, sys.argv[2:]):
    try:
        weights.load(Store.open(sys.argv[1]), version, params)
        print("loaded", version)
    except UserError as error:
        print(error)
"""


def test_damaged_weights_are_named(store, start):
    """In a process of its own: TensorStore goes on reading after Orbax gave up, and says so wherever it is by then."""
    damages = {0: lambda b: b, 1: lambda b: b[:-9], 2: lambda b: bytes(x ^ 255 for x in b), 3: lambda b: b""}
    for version, damage in damages.items():
        weights.publish(store, version, {f"w{i}": np.full((64, 64), i, np.float32) for i in range(4)})
        for file in (store.local_path / "weights" / f"{version:08d}").rglob("d/*"):
            file.write_bytes(damage(file.read_bytes()))
    lines = start(LOADER, store.local_path, *damages).communicate(timeout=60)[0].splitlines()
    assert lines[0] == "loaded 0"
    assert len(lines) == 4, "one line each"
    for version, line in enumerate(lines[1:], 1):
        assert re.search(f"weights of version {version} .* cannot be used: they are damaged .*resume the run", line)


def test_weights_swapped_for_others_are_refused_by_their_digest(store):
    weights.publish(store, 4, make_params(1))
    weights.publish(store, 8, make_params(2))
    root = store.local_path / "weights"
    metadata = (root / "00000004" / "_CHECKPOINT_METADATA").read_text()
    (root / "00000008" / "_CHECKPOINT_METADATA").write_text(metadata)
    with pytest.raises(UserError, match="version 8 .* does not match their digest"):
        weights.load(store, 8, shapes(make_params()))
    (root / "00000008" / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": {}}))
    with pytest.raises(UserError, match="version 8 .* their metadata is unreadable"):
        weights.read_digest(store, 8)


def test_a_damaged_pointer_is_named(store):
    store.replace("weights/LATEST", b"{")
    with pytest.raises(UserError, match="weights/LATEST is unreadable"):
        weights.latest(store)


def test_a_background_thread_publishes_while_another_reads(store):
    versions = range(0, 24, 4)
    digests, failures = {}, []

    def publish():
        for version in versions:
            digests[version] = weights.publish(store, version, make_params(version)).digest

    publisher = threading.Thread(target=publish)
    publisher.start()
    seen = set()
    while publisher.is_alive() or not seen:
        if (pointer := weights.latest(store)) is not None:
            params, digest = weights.load(store, pointer[0], shapes(make_params()))
            if weights.params_digest(params) != digest:
                failures.append(pointer)
            seen.add(pointer)
    publisher.join()
    assert not failures
    assert seen <= set(digests.items())
    assert weights.versions(store) == list(versions)


PUBLISHER = """
import itertools, sys
import numpy as np
from m2po_jax.rollouts import Store, weights
store = Store.open(sys.argv[1])
for version in itertools.count(int(sys.argv[2])):
    params = {f"w{i}": np.full((64, 64), version + i, np.float32) for i in range(20)}
    weights.publish(store, version, params)
    print(version, flush=True)
"""


def test_a_publisher_killed_at_any_moment_shows_no_half_weights(store, start):
    first = 0
    unfinished = 0
    for _ in range(3):
        publisher = start(PUBLISHER, store.local_path, first)
        assert publisher.stdout.readline().strip() == str(first)
        time.sleep(random.uniform(0.02, 0.2))
        publisher.kill()
        publisher.wait()
        unfinished += any("tmp" in name for name in os.listdir(store.local_path / "weights"))
        there = weights.versions(store)
        assert there == list(range(there[-1] + 1))
        for version in there[first:]:
            abstract = {f"w{i}": jax.ShapeDtypeStruct((64, 64), np.float32) for i in range(20)}
            loaded, _ = weights.load(store, version, abstract)
            assert float(loaded["w3"][0, 0]) == version + 3
        pointer = weights.latest(store)
        assert pointer is not None and pointer[0] in there
        first = there[-1] + 1
    assert unfinished, "no kill fell into a publication: the test shows nothing"
    weights.publish(store, first, make_params())
    assert not [name for name in os.listdir(store.local_path / "weights") if "tmp" in name]


def test_a_full_disk_is_named_and_shows_no_weights(small_disk, caplog):
    with pytest.raises(UserError, match="no space left to write .*weights/00000004"):
        weights.publish(small_disk, 4, {"w": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)})
    assert not caplog.records, "one clear line, no traceback"
    assert weights.versions(small_disk) == []
    assert weights.latest(small_disk) is None
    weights.publish(small_disk, 4, {"w": np.zeros(2, np.float32)})
    assert weights.versions(small_disk) == [4]
