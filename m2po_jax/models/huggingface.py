"""Weights in and out of Hugging Face directories: safetensors only, slice by slice, nothing of pickle."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from m2po_jax.config import ConfigError, ModelConfig, UserError
from m2po_jax.models.families import fields_of, mathematics, read_config
from m2po_jax.models.parameters import Parameter, leaf, size, table, tree
from m2po_jax.models.tensors import DTYPES, INDEX, SINGLE, Reader, Tensor, TensorFiles

__all__ = ["check", "export", "load", "read_config", "resolved"]

DEFAULT_DTYPE = "bfloat16"
FILE_BYTES = 5 * 10**9
"""Most bytes of weights in one exported file, unless one tensor has more."""
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that go from the source to an exported directory as they are."""
_TIED_OUTPUT, _TIED_INPUT = "lm_head.weight", "model.embed_tokens.weight"
_BUFFER = "rotary_emb.inv_freq"
_SPELLED = {kept.name: stored for stored, kept in DTYPES.items()}
Slices = tuple[slice, ...]


def load(directory: str | Path, config: ModelConfig, shardings: Any = None) -> dict[str, Any]:
    """The parameters of the model in a directory, float32, each shard read by the host that holds it.

    Args:
        directory: `model.safetensors`, or several files with their index, as `save_pretrained` writes them.
        config: `read_config(directory)`, perhaps with another compute dtype or remat.
        shardings: a tree of shardings, from `sharding.shardings`; None: everything on the first device.

    Raises:
        UserError: a file is missing or cut short; a tensor is missing, unknown or of another shape; the tokenizer
            has more ids than the embedding has rows. The message names file and tensor.
    """
    files, sources = _sources(directory, config)
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves = {}
    for row, tensors in sources.items():
        where = single if shardings is None else leaf(shardings, row)
        with files.reader() as reader:
            part = _shard_reader(reader, row, config, tensors)
            leaves[row] = jax.make_array_from_callback(row.shape(config), where, part)
    return tree(leaves)


def export(
    params: Any,
    config: ModelConfig,
    source: str | Path | None,
    out: str | Path,
    dtype: str | None = None,
) -> None:
    """Write a directory that `transformers` and vLLM load: weights, `config.json`, tokenizer files of `source`.

    Args:
        params: the parameter tree; all of it within reach of this process.
        source: the directory that the model came from, or one with tokenizer files alone, or None. With its weights
            there, tensors keep their stored dtypes, files and order: unchanged parameters give the same bytes.
        out: the new directory; it appears when it is whole.
        dtype: float32, float16 or bfloat16 for all tensors; None: as in `source`, or bfloat16 without its weights.

    Raises:
        UserError: `out` exists, `source` is of another model, or a value does not fit the dtype.
    """
    source, out = None if source is None else Path(source), Path(out).expanduser()
    if dtype not in (None, *_SPELLED):
        raise UserError(f"dtype {dtype} is not supported: use one of {', '.join(_SPELLED)}")
    files = None if source is None else _files_of(source, config)
    with _new_directory(out) as partial:
        stored = _write_weights(params, config, partial, files, dtype and _SPELLED[dtype])
        _write_texts(config, source, partial, stored)
        for file in partial.glob("*.safetensors"):  # written for the owner's eyes alone
            shutil.copymode(partial / "config.json", file)


@contextlib.contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A folder of this call's own, which becomes `out` when all went well, unless another was first."""
    refusal = UserError(f"{out} exists: name a directory that does not")
    partial: Path | None = None
    try:
        if out.exists():
            raise refusal
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".exporting-", dir=out.parent))
        (partial / "whole").mkdir()
        yield partial / "whole"
        if out.exists():
            raise refusal
        (partial / "whole").rename(out)
    except UserError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def check(directory: str | Path, config: ModelConfig) -> None:
    """Raises UserError where `load` would, but reads only what the files say of themselves."""
    _sources(directory, config)


def resolved(config: ModelConfig) -> ModelConfig:
    """The configuration with what the `config.json` of its source says; without a source, as it is.

    `compute_dtype` and `remat` are the user's, and so is a `max_positions` within the model's.

    Raises:
        UserError: there is no readable `config.json`.
        ConfigError: the model is not supported, or a field is set to something else than the model's.
    """
    if config.source is None:
        return config
    theirs, plain = read_config(config.source), ModelConfig()
    for name, value in mathematics(theirs).items():
        given = getattr(config, name)
        if given not in (value, getattr(plain, name)):
            raise ConfigError(f"model.{name} is {given}, but {config.source} has {value}: leave it out")
    if config.max_positions is not None and config.max_positions > (theirs.max_positions or 0):
        raise ConfigError(
            f"model.max_positions {config.max_positions} is over the {theirs.max_positions} of {config.source}"
        )
    return replace(
        theirs,
        source=os.path.abspath(config.source),
        max_positions=config.max_positions or theirs.max_positions,
        compute_dtype=config.compute_dtype,
        remat=config.remat,
    )


def _sources(directory: str | Path, config: ModelConfig) -> tuple[TensorFiles, dict[Parameter, list[Tensor]]]:
    """The files of a directory, and the tensors of each parameter, once nothing is missing or too much."""
    files = TensorFiles.of(directory)
    sources = {row: _tensors(files, row, config) for row in table(config)}
    _refuse_unknown(files, config)
    _refuse_large_tokenizer(Path(directory), config)
    return files, sources


def _tensors(files: TensorFiles, row: Parameter, config: ModelConfig) -> list[Tensor]:
    return [files.tensor(name, row.stored_shape(config)) for name in row.stored_names(config)]


def _shard_reader(
    reader: Reader, row: Parameter, config: ModelConfig, tensors: list[Tensor]
) -> Callable[[Slices | None], np.ndarray]:
    """A function from the index of a shard to its values; copies of a shard are read once."""
    shape, read = row.shape(config), {}

    def shard(index: Slices | None) -> np.ndarray:
        bounds = tuple(slice(*part.indices(n)[:2]) for part, n in zip(index or (), shape, strict=True))
        key = tuple((part.start, part.stop) for part in bounds)
        if key not in read:
            read[key] = np.empty([part.stop - part.start for part in bounds], np.float32)
            layers, within = (bounds[0], bounds[1:]) if row.stacked else (slice(0, 1), bounds)
            values = read[key] if row.stacked else read[key][None]
            for value, tensor in zip(values, tensors[layers], strict=True):
                value[...] = _layer(reader, row, config, tensor, within)
        return read[key]

    return shard


def _layer(reader: Reader, row: Parameter, config: ModelConfig, tensor: Tensor, bounds: Slices) -> np.ndarray:
    """A part of one layer's tensor in our axes: `bounds` are of `row.axes` without N."""
    wanted = dict(zip(row.axes.removeprefix("N"), bounds, strict=True))
    slices, lengths, inner = [], [], []
    for letters in row.stored_axes:
        width = size(config, letters[1]) if len(letters) == 2 else 1
        outer = wanted[letters[0]]
        slices.append(slice(outer.start * width, outer.stop * width))
        lengths += [outer.stop - outer.start, width][: len(letters)]
        inner += [slice(None), wanted[letters[-1]]][: len(letters)]
    try:
        read = reader.read(tensor, tuple(slices))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{tensor.where} cannot be read: {error}") from error
    order = "".join(row.stored_axes)
    values = read.astype(np.float32).reshape(lengths)[tuple(inner)]
    if not np.isfinite(values).all():
        raise UserError(f"{tensor.where} has values that are not finite")
    return values.transpose([order.index(letter) for letter in wanted])


def _refuse_unknown(files: TensorFiles, config: ModelConfig) -> None:
    """Tensors that this model has no place for; a copy of tied embeddings and constant buffers are no fault."""
    known = {name for row in table(config) for name in row.stored_names(config)}
    for name in files.tensors.keys() - known:
        tensor = files.tensors[name]
        if name.endswith(_BUFFER):
            continue
        if name != _TIED_OUTPUT or not config.tie_embeddings:
            raise UserError(f"{tensor.where} is unknown to a model of this config.json")
        if not _equal(files, tensor, files.tensors[_TIED_INPUT]):
            raise UserError(f"{tensor.where} is not {_TIED_INPUT}, though config.json ties the two")


def _equal(files: TensorFiles, a: Tensor, b: Tensor) -> bool:
    """Whether two matrices hold the same, read some rows at a time."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    with files.reader() as reader:
        starts = range(0, a.shape[0], 4096)
        parts = [(slice(start, min(start + 4096, a.shape[0])), slice(None)) for start in starts]
        return all(np.array_equal(reader.read(a, part), reader.read(b, part)) for part in parts)


def _refuse_large_tokenizer(directory: Path, config: ModelConfig) -> None:
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"].get("vocab", {})
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = max([-1, *ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: {error!r}") from error
    rows = size(config, "V")
    if largest >= rows:
        raise UserError(f"{path} has ids up to {largest}, but tensor {_TIED_INPUT} has {rows} rows")


def _files_of(source: Path, config: ModelConfig) -> TensorFiles | None:
    """The source's weights, if it has any, once it is known to be of this model."""
    if not source.is_dir():
        raise UserError(f"{source} is no directory: give the one that the model or its tokenizer came from")
    _refuse_other_model(source, config)
    has_weights = (source / SINGLE).exists() or (source / INDEX).exists()
    return TensorFiles.of(source) if has_weights else None


def _refuse_other_model(source: Path, config: ModelConfig) -> None:
    if not (source / "config.json").exists():
        return
    theirs, ours = mathematics(read_config(source)), mathematics(config)
    for name, value in ours.items():
        if theirs[name] != value:
            raise ConfigError(f"{source / 'config.json'} means model.{name} {theirs[name]}, but the model has {value}")


def _write_weights(
    params: Any, config: ModelConfig, out: Path, files: TensorFiles | None, dtype: str | None
) -> dict[str, str]:
    """Write all tensors; returns name -> stored dtype."""
    places = {name: (row, layer) for row in table(config) for layer, name in enumerate(row.stored_names(config))}
    if files is not None:
        stored = {name: dtype or tensor.dtype for name, tensor in files.tensors.items() if not name.endswith(_BUFFER)}
        if config.tie_embeddings and _TIED_OUTPUT in stored:
            places[_TIED_OUTPUT] = places[_TIED_INPUT]
    else:
        stored = dict.fromkeys(places, dtype or _SPELLED[DEFAULT_DTYPE])
    for name in places.keys() ^ stored.keys():
        raise UserError(f"{out.name}: tensor {name} is in the parameters or in the source, but not in both")
    sizes = {name: _bytes(places[name][0], config, stored[name]) for name in stored}
    plan = list(_planned(files, sizes))
    for file_name, names, metadata in plan:
        values = {name: _stored(params, *places[name], DTYPES[stored[name]], name) for name in names}
        save_file(values, out / file_name, metadata=metadata)
    if len(plan) > 1 or (files is not None and files.index_json is not None):
        known = (files.index_json or {}).get("metadata") if files is not None else None
        total = {"total_size": sum(sizes.values())}
        index: dict[str, Any] = {"metadata": {**(known if isinstance(known, dict) else {}), **total}}
        index["weight_map"] = {name: file_name for file_name, names, _ in plan for name in names}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return stored


def _planned(
    files: TensorFiles | None, sizes: dict[str, int]
) -> Iterator[tuple[str, list[str], dict[str, str] | None]]:
    """File name, tensors and metadata of each file: as in the source, or filled one after the other."""
    if files is not None:
        for file, metadata in files.metadata.items():
            yield file.name, [name for name in sizes if files.tensors[name].file == file], metadata
        return
    groups: list[list[str]] = [[]]
    for name in sizes:
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + sizes[name] > FILE_BYTES:
            groups.append([])
        groups[-1].append(name)
    for number, group in enumerate(groups, start=1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        yield name, group, {"format": "pt"}


def _bytes(row: Parameter, config: ModelConfig, dtype: str) -> int:
    return int(np.prod(row.stored_shape(config))) * DTYPES[dtype].itemsize


@jax.jit
def _taken(stacked: Any, layer: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _stored(params: Any, row: Parameter, layer: int, dtype: np.dtype, name: str) -> np.ndarray:
    """One tensor as the files hold it."""
    value = leaf(params, row)
    ours = np.asarray(_taken(value, np.int32(layer)) if row.stacked else value)
    axes, order = row.axes.removeprefix("N"), "".join(row.stored_axes)
    theirs = ours.transpose([axes.index(letter) for letter in order])
    lengths = dict(zip(axes, ours.shape, strict=True))
    theirs = theirs.reshape([int(np.prod([lengths[x] for x in letters])) for letters in row.stored_axes])
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(theirs.astype(dtype))  # the file is written from memory as it lies
    if not np.isfinite(narrow.astype(np.float32)).all():
        raise UserError(f"tensor {name} has values that are not finite in {dtype.name}")
    return narrow


def _write_texts(config: ModelConfig, source: Path | None, out: Path, stored: dict[str, str]) -> None:
    for name in COPIED:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    dtypes = {DTYPES[dtype].name for dtype in stored.values()}
    path = out / "config.json"
    if not path.exists():
        data = fields_of(config, *sorted(dtypes))
    else:
        data = json.loads(path.read_text(encoding="utf-8"))
        key = "dtype" if "dtype" in data else "torch_dtype"
        if len(dtypes) != 1 or data.get(key) in (None, *dtypes):
            return
        data[key] = dtypes.pop()
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
