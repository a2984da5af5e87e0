"""Reads and writes the safetensors file format piece by piece, without holding whole tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwell_wire.checkpoints import safetensors_header
from shardwell_wire.checkpoints.safetensors_header import LENGTH_BYTES, header_size, parse_header
from shardwell_wire.errors import CorruptDataError, NotFoundError

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
"""File names in a model's folder, as in Hugging Face's libraries."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by the format's names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    """Position in the file."""

    def read(self, runs: Iterable[tuple[int, int]]) -> bytes:
        """Reads some elements.

        Args:
            runs: ``(first element, number of elements)`` in the flattened tensor.

        Raises:
            CorruptDataError: The file was truncated.
            OSError: The file cannot be read.
        """
        size, parts = self.dtype.itemsize, []
        with self.path.open("rb", buffering=0) as file:
            for first, count in runs:
                file.seek(self.start_bytes + first * size)
                part = file.read(count * size)
                if len(part) != count * size:
                    raise CorruptDataError(f"{self.path} ends in the middle of tensor {self.name!r}")
                parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def find_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by name. Reads headers only.

    Args:
        path: A safetensors file, an index of several (``*.index.json``), or a folder with either.

    Raises:
        NotFoundError: There is no such file.
        CorruptDataError: A file is not a safetensors file or is truncated, or the index contradicts the files.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise NotFoundError(f"no safetensors file or index at {path}", path=path)
    return _of_index(path) if path.name.endswith(".json") else read_header(path)


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE_NAME, INDEX_NAME):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:5]) or "none"
        raise NotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, and not exactly one other safetensors file "
            f"({found}): pass the file or the index",
            path=folder,
        )
    return files[0]


def _of_index(path: Path) -> dict[str, StoredTensor]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: path.parent / file for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{path} is not an index of safetensors files: expected a JSON object with a weight_map"
        ) from error
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for file in dict.fromkeys(files.values()):
        if not file.is_file():
            raise NotFoundError(f"{path} refers to {file.name}, which does not exist", path=file)
        headers[file] = read_header(file)
    for name, file in files.items():
        if name not in headers[file]:
            raise CorruptDataError(f"{path} refers to tensor {name!r} in {file.name}, which does not contain it")
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name.

    Raises:
        CorruptDataError: The file is not a safetensors file, or is truncated.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        header = start + file.read(header_size(start, size_bytes, str(path)) - LENGTH_BYTES)
    entries, _ = parse_header(header, size_bytes, str(path))
    return {
        name: StoredTensor(path, name, DTYPES[entry.dtype], entry.shape, entry.start_bytes)
        for name, entry in entries.items()
    }


def is_storable(dtype: torch.dtype) -> bool:
    """Returns whether the format supports a dtype."""
    return dtype in _NAMES


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file. The bytes of the tensors follow in the same order.

    Args:
        tensors: Dtype and shape by name.
        metadata: Additional strings.
    """
    stored = {name: (_NAMES[dtype], shape) for name, (dtype, shape) in tensors.items()}
    return safetensors_header.make_header(stored, metadata)
