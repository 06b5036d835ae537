"""The safetensors files of a Hugging Face directory: what they hold, checked, and slices of it."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import safe_open

from m2po_jax.config import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes that weights may be stored in, as the files spell them."""


class Tensor(NamedTuple):
    """A tensor in a file, unread."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.file}: tensor {self.name}"


class TensorFiles(NamedTuple):
    """All tensors of a directory."""

    directory: Path
    tensors: dict[str, Tensor]
    metadata: dict[Path, dict[str, str] | None]
    """The free text that each file holds beside its tensors."""
    index_json: dict[str, Any] | None
    """The JSON that says which tensor is in which file; None where there is one file."""

    @classmethod
    def of(cls, directory: str | Path) -> "TensorFiles":
        """Reads index and headers, and checks that the files are whole.

        Raises:
            UserError: no weights, a missing file, a file cut short or damaged, an index that disagrees with it.
        """
        directory = Path(directory)
        index = directory / INDEX
        document = _document(index) if index.exists() else None
        weight_map = None if document is None else document["weight_map"]
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        tensors: dict[str, Tensor] = {}
        metadata: dict[Path, dict[str, str] | None] = {}
        for name in names:
            file = directory / name
            if not file.is_file():
                raise UserError(_missing(file, weight_map))
            found, metadata[file] = _header(file)
            for tensor in found:
                if tensor.name in tensors:
                    raise UserError(f"{tensor.where} is in {tensors[tensor.name].file.name} too")
                tensors[tensor.name] = tensor
        for name, file_name in (weight_map or {}).items():
            if name not in tensors or tensors[name].file.name != file_name:
                raise UserError(f"{directory / file_name}: tensor {name} is missing, though {INDEX} says it is there")
        return cls(directory, tensors, metadata, document)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name; raises UserError if it is missing or of another shape or kind."""
        if name not in self.tensors:
            raise UserError(f"{self.directory}: tensor {name} is missing from the safetensors files")
        found = self.tensors[name]
        if found.shape != shape:
            raise UserError(f"{found.where} has shape {found.shape}, but config.json means {shape}")
        if found.dtype not in DTYPES:
            raise UserError(f"{found.where} is stored as {found.dtype}: use one of {', '.join(DTYPES)}")
        return found

    @contextmanager
    def reader(self) -> Iterator["Reader"]:
        """Files are opened when first read and closed at the end, and with that what was read leaves memory."""
        with ExitStack() as stack:
            yield Reader(stack, {})


class Reader(NamedTuple):
    """Open files."""

    stack: ExitStack
    files: dict[Path, Any]

    def read(self, tensor: Tensor, slices: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor in its stored dtype; nothing else is read."""
        if tensor.file not in self.files:
            self.files[tensor.file] = self.stack.enter_context(safe_open(tensor.file, framework="np"))
        return self.files[tensor.file].get_slice(tensor.name)[slices]


def _missing(file: Path, weight_map: dict[str, str] | None) -> str:
    if weight_map is not None:
        tensor = next(name for name, file_name in weight_map.items() if file_name == file.name)
        return f"{file} is missing, though {INDEX} says that it holds tensor {tensor}"
    if any(file.parent.glob("*.bin")) or any(file.parent.glob("*.pth")):
        return f"{file} is missing: pickled weights are never read, save them as safetensors"
    return f"{file} is missing"


def _document(index: Path) -> dict[str, Any]:
    """The index, once every file name in it is one."""
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
        items = document["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} cannot be read: {error!r}") from error
    for tensor, name in items:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{index}: tensor {tensor} is in {name!r}, which is no file name")
    if not items:
        raise UserError(f"{index} names no tensor")
    return document


def _header(file: Path) -> tuple[list[Tensor], dict[str, str] | None]:
    """Tensors and metadata of a file: 8 bytes of length, so many bytes of JSON, then data to the end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{file} is cut short within its header: fetch it again")
        try:
            header = json.loads(stream.read(length))
            metadata = header.pop("__metadata__", None)
            entries = {
                name: (entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1])
                for name, entry in header.items()
            }
            ends = {name: int(end) for name, (_, _, end) in entries.items()}
            if not all(isinstance(dtype, str) for dtype, _, _ in entries.values()):
                raise ValueError("a dtype is no text")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} is no safetensors file: {error!r}") from error
    data_size = size - 8 - length
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > data_size:
            missing = f"{end - data_size} bytes of tensor {name} are missing"
            raise UserError(f"{file} is cut short: {missing}, fetch it again")
    return [Tensor(name, file, dtype, shape) for name, (dtype, shape, _) in entries.items()], metadata
