"""The table of mesh axes: every parameter and activation has its place, and what cannot be cut is named."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from m2po_jax.config import ConfigError, ModelConfig
from m2po_jax.models import Transformer, response_logprobs, sharding
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
    assert sharding.ACTIVATION_RULES.keys() == SIZES.keys() - {"N"} | {"B", "T"}


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


WIDE = ModelConfig(width=96, layers=2, query_heads=4, kv_heads=4, head_dim=8, mlp_width=64, vocab_size=128)
ROWS, LENGTH = 16, 160
"""Long enough for the activations of any device to have more elements than any weights that it gathers."""
CASES = [((2, 2, 2), 400), ((8, 1, 1), None), ((1, 8, 1), None), ((2, 2, 2), None), ((1, 2, 4), None)]
"""Shape of the mesh, and tokens of a chunk of logits or None for all at once."""


def compiled_on(mesh, chunk_tokens=None):
    """A loss and its gradient, of parameters and tokens on the mesh."""

    def loss(params, tokens):
        real = jnp.ones(tokens.shape, bool)
        batch = tokens[:, :1], real[:, :1], tokens[:, 1:], real[:, 1:]
        logprobs, entropy = response_logprobs(Transformer(WIDE), params, *batch, chunk_tokens=chunk_tokens)
        return jnp.mean(logprobs + jnp.square(entropy))

    params = jax.eval_shape(Transformer(WIDE).init_params, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    where = sharding.shardings(WIDE, mesh)
    options = {"in_shardings": (where, sharding.batch_sharding(mesh)), "out_shardings": (None, where)}
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss), **options).lower(params, tokens).compile()


@pytest.fixture(scope="module")
def on_one():
    """The program on one device, and arguments, a value and a gradient of it."""
    program = compiled_on(mesh_of(1, 1, 1))
    params = jax.tree.map(np.asarray, Transformer(WIDE).init_params(jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, WIDE.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    return program, (params, tokens), program(params, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "chunk_tokens"), CASES, ids=str)
def test_a_mesh_changes_values_by_rounding_and_gathers_no_activation(on_one, shape, chunk_tokens):
    one, arguments, (value, gradient) = on_one
    mesh = mesh_of(*shape)
    program = compiled_on(mesh, chunk_tokens)
    placed = jax.device_put(arguments, (sharding.shardings(WIDE, mesh), sharding.batch_sharding(mesh)))
    found_value, found_gradient = program(*placed)
    np.testing.assert_allclose(found_value, value, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-4), found_gradient, gradient)

    data, fsdp, _ = shape
    activation = ROWS // (data * fsdp) * LENGTH * WIDE.width
    assert max(gathered_sizes(program.as_text()), default=0) < activation
    assert 4 * temporary_bytes(program) < temporary_bytes(one)


def gathered_sizes(text: str) -> list[int]:
    """Elements of each float array that comes out of an all-gather of a compiled program's text."""
    results = re.findall(r"= (\(?[^=]*?\)?) all-gather(?:-start)?\(", text)
    shapes = [shape for result in results for shape in re.findall(r"f32\[([\d,]+)\]", result)]
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def temporary_bytes(program) -> int:
    return program.memory_analysis().temp_size_in_bytes


def test_an_activation_is_cut_where_the_mesh_divides_it():
    mesh = mesh_of(2, 2, 2)
    found = {}
    for shape in ((8, 5, 4), (6, 5, 4), (8, 5, 3)):
        with jax.set_mesh(mesh):
            x = jax.jit(partial(sharding.laid_out, axes="BTF"))(jnp.ones(shape))
        found[shape] = x.sharding.shard_shape(shape)
    assert found[8, 5, 4] == (2, 5, 2)
    assert found[6, 5, 4][2] == 2
    assert found[8, 5, 3][0] == 2


def test_without_a_mesh_nothing_is_cut_or_recorded():
    x = jnp.ones((8, 5))
    assert sharding.laid_out(x, "BT") is x and sharding.parts("BV") == 1
    with jax.set_mesh(mesh_of(2, 2, 2)):
        assert sharding.parts("BV") == 8 and sharding.parts("BT") == 4 and sharding.parts("T") == 1
