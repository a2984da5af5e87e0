"""Reads and writes the safetensors file format piece by piece, without holding whole tensors.

A file consists of the length of the header (8 bytes, little-endian), the header (JSON: name to dtype, shape and
half-open byte range after the header), and the bytes of the tensors in C order, without holes.
(https://github.com/huggingface/safetensors, "Format".)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwell_wire.errors import CorruptDataError, NotFoundError

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
"""File names in a model's folder, as in Hugging Face's libraries."""

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the header's size in the reference implementation."""

_ALIGNMENT_BYTES = 8

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
        header_bytes = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise CorruptDataError(
                f"{path} is not a safetensors file, or is truncated: {size_bytes} bytes, expected a header of "
                f"{header_bytes} bytes after the first 8"
            )
        text = file.read(header_bytes)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _parse(path, name, entry, 8 + header_bytes) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"{path} is not a safetensors file: its header does not parse ({error})") from error
    _check_ranges(path, tensors, header, size_bytes - 8 - header_bytes)
    return tensors


def _parse(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has unknown dtype {entry['dtype']!r}")
    shape = tuple(int(size) for size in entry["shape"])
    if any(size < 0 for size in shape):
        raise ValueError(f"tensor {name!r} has shape {shape}")
    return StoredTensor(path, name, DTYPES[entry["dtype"]], shape, data_start + int(entry["data_offsets"][0]))


def _check_ranges(path: Path, tensors: Mapping[str, StoredTensor], header: Mapping[str, Any], size_bytes: int) -> None:
    """Raises CorruptDataError unless the tensors are stored one after another and fill the file."""
    position = 0
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        start, stop = header[name]["data_offsets"]
        stored = tensors[name]
        needed = math.prod(stored.shape) * stored.dtype.itemsize
        if start != position or stop - start != needed:
            raise CorruptDataError(
                f"{path}: tensor {name!r} {stored.shape} of {stored.dtype} has bytes [{start}, {stop}) in the header, "
                f"expected [{position}, {position + needed})"
            )
        position = stop
    if position != size_bytes:
        kind = "truncated" if position > size_bytes else "longer than its header says"
        raise CorruptDataError(f"{path} is {kind}: {size_bytes} bytes of tensors, expected {position}")


def is_storable(dtype: torch.dtype) -> bool:
    """Returns whether the format supports a dtype."""
    return dtype in _NAMES


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file. The bytes of the tensors follow in the same order.

    Args:
        tensors: Dtype and shape by name.
        metadata: Additional strings.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
