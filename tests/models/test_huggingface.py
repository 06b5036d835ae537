"""Weights in and out: against transformers on torch for each family, byte for byte, and with something wrong."""

import filecmp
import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from m2po_jax.config import ConfigError, ModelConfig, UserError
from m2po_jax.models import Transformer, huggingface, packed_logprobs, response_logprobs, sharding
from m2po_jax.models.positions import positions
from m2po_jax.models.tensors import Reader
from m2po_jax.models.transformer import forward, forward_packed, logits_of
from m2po_jax.tasks import left_padded, right_padded
from tests import tiny
from tests.models import policies, published

LENGTHS = (40, 1, 17, 8)
ROWS = [np.random.default_rng(n).integers(0, published.VOCAB, n).tolist() for n in LENGTHS]
PACKED = [[0, 1], [2, 3]]
"""Sequences of ROWS that stand in one row."""
WIDTH = 44


@functools.cache
def made(family: str):
    return published.make(family)


@pytest.fixture(scope="module", params=published.FAMILIES)
def family(request, tmp_path_factory):
    """The torch model, our model and its parameters as read from what transformers saved."""
    theirs = made(request.param)
    directory = published.save(theirs, tmp_path_factory.mktemp(request.param))
    config = huggingface.read_config(directory)
    return theirs, Transformer(config), huggingface.load(directory, config)


def packed():
    """PACKED as token ids and segment ids, with padding behind, and for the second row before, its sequences."""
    tokens, segments = np.full((2, WIDTH), 7, np.int32), np.zeros((2, WIDTH), np.int32)
    for row, members in enumerate(PACKED):
        slot = row
        for number, member in enumerate(members, start=1):
            where = slice(slot, slot + len(ROWS[member]))
            tokens[row, where], segments[row, where] = ROWS[member], number
            slot = where.stop
    return tokens, segments


@pytest.mark.parametrize("padded", [left_padded, right_padded])
def test_logits_agree_with_transformers_under_padding(family, padded):
    theirs, model, params = family
    tokens, valid = padded(ROWS, WIDTH, pad_id=3)
    hidden, _ = jax.jit(forward, static_argnums=0)(model, params, tokens, positions(valid), valid)
    logits = np.asarray(logits_of(model, params, hidden))
    for row, ids in enumerate(ROWS):
        np.testing.assert_allclose(logits[row][valid[row]], published.logits(theirs, ids), atol=1e-4, rtol=0)


def test_logits_agree_with_transformers_under_packing(family):
    theirs, model, params = family
    tokens, segments = packed()
    hidden = jax.jit(forward_packed, static_argnums=0)(model, params, tokens, segments)
    logits = np.asarray(logits_of(model, params, hidden))
    for row, members in enumerate(PACKED):
        for number, member in enumerate(members, start=1):
            expected = published.logits(theirs, ROWS[member])
            np.testing.assert_allclose(logits[row][segments[row] == number], expected, atol=1e-4, rtol=0)


def test_logprobs_agree_with_transformers_under_padding_and_packing(family):
    theirs, model, params = family
    prompts, responses = [row[:1] for row in ROWS], [row[1:] for row in ROWS]
    batch = *left_padded(prompts, 3, pad_id=3), *right_padded(responses, WIDTH, pad_id=3)
    padded_logprobs, _ = jax.jit(response_logprobs, static_argnums=0)(model, params, *batch)
    tokens, segments = packed()
    packed_values, _ = jax.jit(packed_logprobs, static_argnums=0)(model, params, tokens, segments)
    for row, members in enumerate(PACKED):
        for number, member in enumerate(members, start=1):
            expected = published.logprobs(theirs, ROWS[member])
            np.testing.assert_allclose(padded_logprobs[member, : len(expected)], expected, atol=1e-5, rtol=0)
            found = np.asarray(packed_values[row])[segments[row] == number]
            np.testing.assert_allclose(found[1:], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", published.FAMILIES)
@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
def test_what_was_read_is_written_back_byte_for_byte(name, dtype, max_shard_size, tmp_path):
    source = published.save(made(name), tmp_path / "source", dtype, max_shard_size)
    (source / "tokenizer_config.json").write_text("{}")
    config = huggingface.read_config(source)
    params = huggingface.load(source, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(np.float32)}
    huggingface.export(params, config, source, tmp_path / "out")
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert filecmp.cmpfiles(source, tmp_path / "out", names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("name", published.FAMILIES)
def test_transformers_loads_what_is_exported_without_a_source(name, tmp_path):
    theirs = made(name)
    source = published.save(theirs, tmp_path / "source")
    config = huggingface.read_config(source)
    params = huggingface.load(source, config)
    (tmp_path / "tokenizer").mkdir()
    huggingface.export(params, config, tmp_path / "tokenizer", tmp_path / "out", dtype="float32")
    assert huggingface.read_config(tmp_path / "out") == config
    again = type(theirs).from_pretrained(tmp_path / "out").eval()
    assert published.logits(again, ROWS[0]).dtype == np.float32
    np.testing.assert_allclose(published.logits(again, ROWS[0]), published.logits(theirs, ROWS[0]), atol=1e-5)


def test_transformers_makes_of_our_config_what_it_would_make_of_its_own(tmp_path):
    for name in published.FAMILIES:
        theirs = made(name).config.to_dict()
        source = published.save(made(name), tmp_path / name)
        config = huggingface.read_config(source)
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        huggingface.export(huggingface.load(source, config), config, tmp_path / "tokenizer", tmp_path / f"{name}-out")
        ours = type(made(name).config).from_pretrained(tmp_path / f"{name}-out").to_dict()
        assert ours["rope_parameters"] == theirs["rope_parameters"], name
        assert ours["dtype"] == "bfloat16"
        for field in published._SIZES.keys() | {"head_dim", "tie_word_embeddings", "hidden_act"} & theirs.keys():
            assert ours[field] == theirs[field], (name, field)


# From here on without torch: directories that our own export made.


@pytest.fixture
def directory(tmp_path) -> Path:
    """A small Qwen2 in one file."""
    return written(tmp_path / "model", ModelConfig(**SMALL, qkv_bias=True, qk_norm=False))


SMALL = {"width": 8, "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 4, "mlp_width": 12, "vocab_size": 16}


def written(path: Path, config: ModelConfig, dtype: str = "float32") -> Path:
    tokenizer = path.with_name(f"{path.name}-tokenizer")
    tokenizer.mkdir()
    huggingface.export(params_of(config), config, tokenizer, path, dtype)
    return path


def params_of(config: ModelConfig):
    return policies.random_policy(config.vocab_size, **vars(config))[1]


def load(directory: Path):
    return huggingface.load(directory, huggingface.read_config(directory))


def edited(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def in_two_files(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refusal(call) -> str:
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


MESHES = ((1, 1, 2), (2, 1, 1), (1, 4, 1), (2, 2, 2), (1, 4, 2))


@pytest.mark.parametrize("shape", MESHES)
def test_sharded_parameters_are_those_on_one_device(directory, shape):
    config = huggingface.read_config(directory)
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    wanted = sharding.shardings(config, mesh)
    params = huggingface.load(directory, config, wanted)
    jax.tree.map(np.testing.assert_array_equal, params, params_of(config))
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == wanted
    tokens, segments = np.arange(24, dtype=np.int32).reshape(4, 6) % 16, np.int32([[1, 1, 1, 2, 2, 0]] * 4)
    scored = jax.jit(packed_logprobs, static_argnums=0)
    alone = scored(Transformer(config), load(directory), tokens, segments)
    rows = sharding.batch_sharding(mesh)
    apart = scored(Transformer(config), params, jax.device_put(tokens, rows), jax.device_put(segments, rows))
    for a, b in zip(alone, apart, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_exported_directory_is_whole_or_absent(directory, tmp_path):
    config = huggingface.read_config(directory)
    params = load(directory)
    params["blocks"]["up"]["kernel"] = params["blocks"]["up"]["kernel"].at[1, 2, 3].set(1e6)
    message = refusal(lambda: huggingface.export(params, config, directory, tmp_path / "out", "float16"))
    assert message == "tensor model.layers.1.mlp.up_proj.weight has values that are not finite in float16"
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".exporting-*"))
    huggingface.export(params, config, directory, tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert "exists" in refusal(lambda: huggingface.export(params, config, directory, tmp_path / "out"))


def test_large_models_are_exported_in_several_files(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "FILE_BYTES", 2000)
    config = huggingface.read_config(directory)
    (tmp_path / "tokenizer").mkdir()
    huggingface.export(load(directory), config, tmp_path / "tokenizer", tmp_path / "out", "float32")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 4000 for file in files)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out"), load(directory))


def test_another_model_than_the_source_is_not_exported(directory, tmp_path):
    config = replace(huggingface.read_config(directory), rope_theta=5.0)
    message = refusal(lambda: huggingface.export(load(directory), config, directory, tmp_path / "out"))
    assert "config.json means model.rope_theta 10000.0, but the model has 5.0" in message
    both = ModelConfig(**SMALL, qkv_bias=True, qk_norm=True)
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ConfigError, match="no published architecture"):
        huggingface.export(params_of(both), both, tmp_path / "tokenizer", tmp_path / "out")


def test_an_untied_copy_of_a_tied_embedding_is_found(directory):
    edited(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    load(directory)
    edited(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    message = refusal(lambda: load(directory))
    assert "model.safetensors: tensor lm_head.weight is not model.embed_tokens.weight" in message


def test_a_copy_of_a_tied_embedding_is_exported_again(directory, tmp_path):
    edited(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    huggingface.export(load(directory), huggingface.read_config(directory), directory, tmp_path / "out")
    assert (directory / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


K_BIAS = "model.layers.1.self_attn.k_proj.bias"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(K_BIAS), f"tensor {K_BIAS} is missing"),
        (
            lambda t: t.update({DOWN: t[DOWN].T.copy()}),
            f"tensor {DOWN} has shape (12, 8), but config.json means (8, 12)",
        ),
        (lambda t: t.update({DOWN: t[DOWN].astype(np.int8)}), f"tensor {DOWN} is stored as I8"),
        (lambda t: t.update({"model.layers.2.x": t[DOWN]}), "model.safetensors: tensor model.layers.2.x is unknown"),
        (lambda t: t.update({f"{DOWN}_scale": t[DOWN]}), f"model.safetensors: tensor {DOWN}_scale is unknown"),
    ],
)
def test_wrong_tensors_are_named(directory, change, expected):
    edited(directory, change)
    message = refusal(lambda: load(directory))
    assert expected in message and str(directory) in message


def test_constant_buffers_are_passed_over(directory):
    before = load(directory)
    edited(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}))
    jax.tree.map(np.testing.assert_array_equal, load(directory), before)


@pytest.mark.parametrize("kept", [0, 5, 100, -1, -700])
def test_truncated_files_are_named(directory, kept):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:kept])
    message = refusal(lambda: load(directory))
    assert message.startswith(f"{file} is cut short")
    assert ("bytes of tensor model." in message) == (kept < 0)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe\x00\x01"])
def test_damaged_headers_are_named(directory, header):
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors is no safetensors file" in refusal(lambda: load(directory))


def test_several_files_need_each_of_them(directory):
    before = load(directory)
    in_two_files(directory)
    jax.tree.map(np.testing.assert_array_equal, load(directory), before)
    (directory / "b.safetensors").rename(directory / "c.safetensors")
    message = refusal(lambda: load(directory))
    assert message.startswith(f"{directory / 'b.safetensors'} is missing") and "tensor model." in message
    (directory / "a.safetensors").rename(directory / "b.safetensors")
    (directory / "c.safetensors").rename(directory / "a.safetensors")
    message = refusal(lambda: load(directory))
    assert "safetensors: tensor model." in message and "index.json says it is there" in message


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'],
)
def test_a_damaged_index_is_named(directory, index):
    (directory / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(lambda: load(directory))


def test_pickled_weights_are_refused(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pickled weights are never read" in refusal(lambda: load(directory))


@pytest.mark.parametrize("largest", [15, 16])
def test_a_tokenizer_larger_than_the_embedding_is_refused(directory, largest):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 14}}, "added_tokens": [{"id": largest, "content": "<end>"}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if largest < 16:
        load(directory)
    else:
        expected = "tokenizer.json has ids up to 16, but tensor model.embed_tokens.weight has 16 rows"
        assert expected in refusal(lambda: load(directory))


def test_every_value_is_read_once_and_nothing_else(directory, monkeypatch):
    config = huggingface.read_config(directory)
    mesh = jax.make_mesh((2, 2, 2), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    sizes = []
    monkeypatch.setattr(Reader, "read", recorded(Reader.read, lambda values: sizes.append(values.size)))
    params = huggingface.load(directory, config, sharding.shardings(config, mesh))
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert max(sizes) == params["embedding"].size // 4


def recorded(function, note):
    def call(*args):
        result = function(*args)
        note(result)
        return result

    return call


@pytest.mark.slow
def test_loading_needs_the_parameters_and_one_of_them_more(tmp_path, user_env):
    config = ModelConfig(
        width=512, layers=12, query_heads=8, kv_heads=4, head_dim=64, mlp_width=2048, vocab_size=32768
    )  # fmt: skip
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params_shapes(config))
    (tmp_path / "tokenizer").mkdir()
    huggingface.export(ones, config, tmp_path / "tokenizer", tmp_path / "model", "bfloat16")
    env = tiny.subprocess_env(user_env) | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = tiny.run(env, "-m", "tests.models.loading", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    peak, held, largest = map(int, done.stdout.split())
    assert held < 1.01 * sum(leaf.nbytes for leaf in jax.tree.leaves(ones))
    assert held + 2 * largest < 1.6 * held, "or a copy of everything would go unnoticed"
    assert 0.9 * held < peak < held + 2 * largest


def params_shapes(config: ModelConfig):
    return jax.eval_shape(Transformer(config).init_params, jax.random.key(0))


def test_a_source_sets_the_sizes_and_leaves_the_rest_to_the_user(directory):
    asked = ModelConfig(source=str(directory), compute_dtype="bfloat16", remat="full", max_positions=64)
    found, theirs = huggingface.resolved(asked), huggingface.read_config(directory)
    assert found == replace(theirs, source=str(directory), compute_dtype="bfloat16", remat="full", max_positions=64)
    assert huggingface.resolved(found) == found
    assert huggingface.resolved(ModelConfig(source=str(directory))).max_positions == theirs.max_positions
    assert huggingface.resolved(ModelConfig(width=48)) == ModelConfig(width=48)


def test_sizes_that_are_not_the_sources_are_refused(directory):
    theirs = huggingface.read_config(directory)
    message = refusal(lambda: huggingface.resolved(ModelConfig(source=str(directory), width=48)))
    assert message == f"model.width is 48, but {directory} has {theirs.width}: leave it out"
    message = refusal(lambda: huggingface.resolved(ModelConfig(source=str(directory), max_positions=10**6)))
    assert message == f"model.max_positions 1000000 is over the {theirs.max_positions} of {directory}"
    assert "config.json is missing" in refusal(lambda: huggingface.resolved(ModelConfig(source="nowhere")))


def test_a_check_reads_headers_alone(directory, monkeypatch):
    config = huggingface.read_config(directory)
    monkeypatch.setattr(Reader, "read", lambda *_: pytest.fail("values were read"))
    huggingface.check(directory, config)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "is cut short" in refusal(lambda: huggingface.check(directory, config))


def test_values_that_are_not_finite_are_named(directory):
    edited(directory, lambda t: t[DOWN].__setitem__((0, 0), np.nan))
    message = refusal(lambda: load(directory))
    assert message.endswith(f"model.safetensors: tensor {DOWN} has values that are not finite")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"layer_types": 5},
        {"rope_scaling": [1, 2]},
        {"rope_parameters": "yarn"},
        {"rope_theta": 10**400},
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": "2"},
    ],
)
def test_fields_of_a_wrong_type_are_said_in_a_line(directory, changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert str(path) in refusal(lambda: huggingface.read_config(directory))


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "x"]}}',
        b'{"a": {"dtype": ["x"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a":' * 100_000,
    ],
)
def test_headers_that_python_trips_over_are_named(directory, header):
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors is no safetensors file" in refusal(lambda: load(directory))
