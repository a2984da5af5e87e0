"""Checkpoints in the formats of other libraries, from values that come one after another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwell.weights.safetensors_file import INDEX_NAME, SINGLE_NAME, is_storable, make_header
from shardwell.weights.staged_files import staged
from shardwell_wire.errors import UsageError

Values = Iterator[tuple[str, torch.Tensor]]

_OF_AN_EXPORT = re.compile(rf"model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE_NAME)}|{re.escape(INDEX_NAME)}")


def write_safetensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Values,
    *,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
) -> list[Path]:
    """Writes ``model.safetensors``, or several files with an index, as Hugging Face's libraries do.

    Args:
        folder: Made if it does not exist; of an earlier export nothing is left.
        tensors: Names to tensors of the right shapes and dtypes, whatever memory they have.
        values: The same names in the same order, with values.
        max_shard_bytes: Of the tensors in one file; a larger tensor has a file of its own.
        metadata: Further strings for the files' headers.

    Returns:
        The files with tensors.

    Raises:
        UsageError: The format has no such dtype, or ``max_shard_bytes`` is not positive.
        OSError: The files cannot be written; the folder is as it was.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: expected at least 1")
    for name, tensor in tensors.items():
        if not is_storable(tensor.dtype):
            raise UsageError(f"{name!r} is of {tensor.dtype}, which safetensors files can not have", parameter=name)
    files = _cut(tensors, max_shard_bytes)
    with staged(folder, markers=(INDEX_NAME, SINGLE_NAME), is_ours=_is_of_an_export) as stage:
        for file in files:
            _write(stage / file.name, file.tensors, values, {"format": "pt", **metadata})
        if len(files) > 1:
            (stage / INDEX_NAME).write_text(json.dumps(_index(files), indent=2, sort_keys=True) + "\n")
    return [folder / file.name for file in files]


def write_dcp(folder: Path, tensors: Mapping[str, torch.Tensor], values: Values) -> None:
    """Writes a ``torch.distributed.checkpoint``; arguments and OSError as of ``write_safetensors``."""
    from shardwell.weights.dcp_writing import write_checkpoint

    with staged(folder, markers=(".metadata",), is_ours=lambda name: name.endswith(".distcp")) as stage:
        write_checkpoint(stage, tensors, values)


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Of the values."""
    return sum(map(_size_bytes, tensors.values()))


def _is_of_an_export(name: str) -> bool:
    return _OF_AN_EXPORT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    tensors: Mapping[str, torch.Tensor]


def _size_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _cut(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[_File]:
    """Tensors to files, in order."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        size = _size_bytes(tensor)
        if size > room and parts[-1]:
            parts.append({})
            room = max_bytes
        parts[-1][name] = tensor
        room -= size
    if len(parts) == 1:
        return [_File(SINGLE_NAME, parts[0])]
    count = len(parts)
    return [_File(f"model-{number:05}-of-{count:05}.safetensors", part) for number, part in enumerate(parts, 1)]


def _index(files: Sequence[_File]) -> dict[str, Any]:
    places = {name: file.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": sum(total_bytes(file.tensors) for file in files)}, "weight_map": places}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], values: Values, metadata: Mapping[str, str]) -> None:
    """Writes one file with the next values, which are of these tensors."""
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        file.write(make_header(described, metadata))
        for expected in tensors:
            name, value = next(values)
            assert name == expected
            file.write(memory_of(value))
            del value  # before the next unit is gathered


def memory_of(value: torch.Tensor) -> memoryview:
    """A tensor's bytes where they lie; they stay while the tensor does."""
    flat = value.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
