"""The table of mesh axes: every parameter has its place, and what cannot be cut is named."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from m2po_jax.config import ConfigError, ModelConfig
from m2po_jax.models import Transformer, sharding
from m2po_jax.models.parameters import SIZES, leaf, table

SMALL = ModelConfig(width=8, query_heads=4, kv_heads=2, head_dim=4, mlp_width=12, vocab_size=16)
CONFIGS = {
    "qwen3": SMALL,
    "qwen2": ModelConfig(**{**vars(SMALL), "qk_norm": False, "qkv_bias": True, "tie_embeddings": False}),
    "llama": ModelConfig(**{**vars(SMALL), "qk_norm": False}),
}


def mesh_of(*shape, names=sharding.MESH_AXES):
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_holds_the_parameters_of_the_model(name):
    config = CONFIGS[name]
    abstract = jax.eval_shape(Transformer(config).init_params, jax.random.key(0))
    rows = table(config)
    assert len(rows) == len(jax.tree.leaves(abstract))
    for row in rows:
        assert leaf(abstract, row).shape == row.shape(config), row.path
        assert sorted("".join(row.stored_axes)) == sorted(row.axes.removeprefix("N")), row.path
    assert jax.tree.structure(sharding.shardings(config, mesh_of(1, 1, 1))) == jax.tree.structure(abstract)


def test_every_axis_has_a_rule():
    assert sharding.RULES.keys() == SIZES.keys()
    assert {*sharding.RULES.values()} - {None} <= {*sharding.MESH_AXES}


def test_matrices_are_cut_and_vectors_copied():
    found = sharding.shardings(CONFIGS["qwen2"], mesh_of(1, 4, 2))
    specs = jax.tree.map(lambda s: s.spec, found)
    assert specs["embedding"] == specs["unembedding"] == PartitionSpec("tensor", "fsdp")
    assert specs["blocks"]["attention"]["q"]["kernel"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert specs["blocks"]["attention"]["q"]["bias"] == PartitionSpec(None, "tensor", None)
    assert specs["blocks"]["down"]["kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs["blocks"]["mlp_norm"]["scale"] == specs["final_norm"]["scale"] == PartitionSpec()


def test_parts_of_another_length_are_refused_by_name():
    with pytest.raises(ConfigError) as raised:
        sharding.shardings(SMALL, mesh_of(1, 1, 4))
    assert str(raised.value) == (
        "parameter blocks/attention/k/kernel: model.kv_heads 2 cannot be cut into the 4 parts of mesh axis tensor"
    )


def test_two_axes_on_one_mesh_axis_are_refused_by_name():
    with pytest.raises(ConfigError, match="parameter embedding: vocab_size and width are both cut by mesh axis tensor"):
        sharding.shardings(SMALL, mesh_of(1, 1, 2), {**sharding.RULES, "D": "tensor"})


def test_a_mesh_without_an_axis_is_refused():
    with pytest.raises(ConfigError, match="the mesh has axes data, model, not"):
        sharding.shardings(SMALL, mesh_of(2, 2, names=("data", "model")))


def test_a_vocabulary_left_to_the_tokenizer_has_no_shape():
    with pytest.raises(ConfigError, match="model.vocab_size is None"):
        sharding.shardings(ModelConfig(), mesh_of(1, 1, 1))


def test_rows_of_a_batch_lie_on_data_and_fsdp():
    assert sharding.batch_sharding(mesh_of(2, 2, 2)).spec == PartitionSpec(("data", "fsdp"))
