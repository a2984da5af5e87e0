"""Writes checkpoints in the formats of other libraries, from values that arrive one after another."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwell.weights.safetensors_file import INDEX_NAME, SINGLE_NAME, is_storable, make_header
from shardwell_wire.errors import UsageError

Values = Iterator[tuple[str, torch.Tensor]]

_EXPORTED_FILE = re.compile(rf"model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE_NAME)}|{re.escape(INDEX_NAME)}")


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
        folder: Created if it does not exist. Files of an earlier export are removed.
        tensors: Names and tensors with the right shapes and dtypes. Their memory is not read.
        values: The same names in the same order, with values.
        max_shard_bytes: Largest size of the tensors in one file. A larger tensor gets its own file.
        metadata: Additional strings for the headers of the files.

    Returns:
        The files with tensors.

    Raises:
        UsageError: The format does not support a dtype, or ``max_shard_bytes`` is not positive.
        OSError: The files cannot be written. The folder is unchanged.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: expected at least 1")
    for name, tensor in tensors.items():
        if not is_storable(tensor.dtype):
            raise UsageError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors files do not support", parameter=name
            )
    files = _cut(tensors, max_shard_bytes)
    with staged(folder, markers=(INDEX_NAME, SINGLE_NAME), is_exported=_is_exported) as stage:
        for file in files:
            _write(stage / file.name, file.tensors, values, {"format": "pt", **metadata})
        if len(files) > 1:
            (stage / INDEX_NAME).write_text(json.dumps(_index(files), indent=2, sort_keys=True) + "\n")
    return [folder / file.name for file in files]


def write_dcp(folder: Path, tensors: Mapping[str, Any], values: Values) -> None:
    """Writes a ``torch.distributed.checkpoint``. Arguments and OSError as in ``write_safetensors``.

    ``tensors`` may be a nested state dict with other values, too; see ``dcp_writing.write_checkpoint``.
    """
    from shardwell.weights.dcp_writing import write_checkpoint

    with staged(folder, markers=(".metadata",), is_exported=lambda name: name.endswith(".distcp")) as stage:
        write_checkpoint(stage, tensors, values)


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the size of all values."""
    return sum(map(_size_bytes, tensors.values()))


@contextmanager
def staged(folder: Path, *, markers: Collection[str], is_exported: Callable[[str], bool]) -> Iterator[Path]:
    """Yields a folder on the same disk; files written to it are moved into ``folder`` when all are complete.

    A reader of ``folder`` finds a marker only if every file of one export is present, also after a crash. If the block
    raises, for example because the disk is full, ``folder`` does not change.

    Args:
        folder: Destination of the files. Created if it does not exist.
        markers: Files without which readers do not recognise the checkpoint. They are removed first and moved last.
        is_exported: Returns whether a file name belongs to an earlier export. Such files are removed.
    """
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        yield stage
        _sync(stage)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        if not existed:
            folder.rmdir()
        raise
    names = {path.name for path in stage.iterdir()}
    for marker in markers:
        (folder / marker).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in names and is_exported(path.name):
            path.unlink()
    for name in sorted(names, key=lambda name: (name in markers, name)):
        (stage / name).replace(folder / name)
    stage.rmdir()
    _sync(folder)


def _sync(folder: Path) -> None:
    """Makes the files of a folder and the folder itself durable."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _is_exported(name: str) -> bool:
    return _EXPORTED_FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    tensors: Mapping[str, torch.Tensor]


def _size_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _cut(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[_File]:
    """Distributes tensors over files, in order."""
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
    weight_map = {name: file.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": sum(total_bytes(file.tensors) for file in files)}, "weight_map": weight_map}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], values: Values, metadata: Mapping[str, str]) -> None:
    """Writes one file with the next values, which belong to ``tensors``."""
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        file.write(make_header(described, metadata))
        for expected in tensors:
            name, value = next(values)
            assert name == expected
            file.write(memory_of(value))
            del value  # before the next unit is gathered


def memory_of(value: torch.Tensor) -> memoryview:
    """Returns a view of a tensor's bytes, which is valid as long as the tensor."""
    flat = value.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
