"""A run on a mesh of devices: the same rollouts and the same policy, but for rounding, and resumed on another mesh."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from m2po_jax.config import ConfigError, MeshConfig
from m2po_jax.models import Transformer
from m2po_jax.rollouts import Store, weights
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
BASE = tiny.with_learner(
    replace(tiny.TINY, model=replace(tiny.TINY.model, kv_heads=2, vocab_size=16)),
    total_updates=8,
    diagnostics_every=1,
    adam_eps=1e-2,
)
MESHES = {"data": MeshConfig(8), "fsdp": MeshConfig(1, 8), "all three": MeshConfig(2, 2, 2)}


def params(run, version):
    model = Transformer(BASE.model)
    return weights.load(Store.open(run), version, jax.eval_shape(model.init_params, jax.random.key(0)))[0]


def rollouts(run):
    return pd.read_parquet(run / "rollouts").sort_values(["group_id", "sample_index"], ignore_index=True)


def assert_same(run, expected, version):
    ours, theirs = rollouts(run), rollouts(expected)
    for column in ("prompt_tokens", "response_tokens", "reward"):
        assert ours[column].map(np.ravel).map(tuple).tolist() == theirs[column].map(np.ravel).map(tuple).tolist()
    pairs = zip(jax.tree.leaves(params(run, version)), jax.tree.leaves(params(expected, version)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.fixture(scope="module")
def single(standard_promotion, tmp_path_factory):
    """A finished run on one device."""
    run = tmp_path_factory.mktemp("runs") / "single"
    tiny.train(BASE, run, None)
    return run


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_nothing_but_rounding(single, tmp_path, mesh):
    tiny.train(replace(BASE, mesh=MESHES[mesh]), tmp_path / "run", single)
    assert weights.read_digest(Store.open(tmp_path / "run"), 0) == weights.read_digest(Store.open(single), 0)
    assert_same(tmp_path / "run", single, 8)


def test_a_run_is_resumed_on_another_mesh(single, tmp_path):
    run = tmp_path / "run"
    tiny.train(replace(BASE, mesh=MESHES["all three"]), run, single, tiny.Watcher(stop_at=4))
    watcher = tiny.train(replace(BASE, mesh=MESHES["data"]), run, None)
    assert "resumed from checkpoint 4" in watcher.notes
    assert_same(run, single, 8)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (MeshConfig(None, 3), "mesh.fsdp 3 times mesh.tensor 1 does not divide 8 devices"),
        (MeshConfig(16), "mesh.data 16 times mesh.fsdp 1 times mesh.tensor 1 is not 8"),
        (MeshConfig(1, 1, 4), "cannot be cut into the 4 parts of mesh axis tensor"),
        (MeshConfig(4, 2), "4 responses of a micro-batch cannot be cut into the 8 parts"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_before_there_is_a_run(tmp_path, mesh, said):
    config = tiny.with_learner(replace(BASE, mesh=mesh), micro_batches=2)
    with pytest.raises(ConfigError) as raised:
        tiny.train(config, tmp_path / "run", None)
    assert said in str(raised.value)
    assert not (tmp_path / "run").exists()
