"""Writes weights to files that other programs read, with one unit in memory at a time.

``save_safetensors`` and ``save_dcp`` export a sharded model. ``write_safetensors`` and ``write_dcp`` write values that
arrive one after another. The files of an export appear together.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwell.module.unit import owner_of
from shardwell.weights.loading import INDEX_NAME, SAFETENSORS_NAMES, SINGLE_NAME
from shardwell.weights.state_dict import mesh_of, of_one_version, read_values, written_by_one
from shardwell_wire.checkpoints.format import make_header
from shardwell_wire.errors import UsageError

Result = TypeVar("Result")
Values = Iterator[tuple[str, torch.Tensor]]

_EXPORTED_FILE = re.compile(rf"model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE_NAME)}|{re.escape(INDEX_NAME)}")


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes a model's parameters and persistent buffers as Hugging Face's libraries do.

    Writes ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``. Files of an earlier export are removed. The new files appear when all of them are
    complete. All values have the version that the current step reads. Call it on one trainer, between steps. If tensor
    parallelism splits parameters, call it on all trainers of one tensor group; the first of them writes.

    Args:
        model: A model with sharded modules.
        folder: Created if it does not exist.
        max_shard_bytes: Largest size of the tensors in one file. A larger tensor gets its own file.
        metadata: Additional strings for the headers of the files.

    Returns:
        The files with tensors. Empty on trainers that do not write.

    Raises:
        UsageError: A value cannot be stored (extra state that is not a tensor, or a dtype that the format does not
            support), or parameters are split over several meshes or mesh dims.
        VersionGoneError: As ``full_state_dict``.
        OSError: The files cannot be written, for example because the disk is full. The folder is unchanged.
        ConflictError: The trainer that writes for the tensor group failed.
    """
    tensors = _grouped_by_unit(_unique_tensors(model))

    def write(values: Values) -> list[Path]:
        return write_safetensors(
            Path(folder), tensors, values, max_shard_bytes=max_shard_bytes, metadata=metadata or {}
        )

    return _save(tensors, write) or []


def save_dcp(model: nn.Module, folder: str | Path) -> None:
    """Writes a model's parameters and persistent buffers as ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads the checkpoint in any number of processes, and ``dcp_to_torch_save``
    converts it to a ``torch.load`` file. Names are those of ``state_dict``; tied parameters are stored once. As with
    ``save_safetensors``, call it on one trainer or one tensor group, between steps. The files appear together.

    Args:
        model: A model with sharded modules.
        folder: Created if it does not exist.

    Raises:
        UsageError: A value cannot be stored (extra state that is not a tensor), or parameters are split over several
            meshes or mesh dims.
        VersionGoneError: As ``full_state_dict``.
        OSError: The files cannot be written. The folder is unchanged.
        ConflictError: The trainer that writes for the tensor group failed.
    """
    tensors = _grouped_by_unit(_unique_tensors(model))
    _save(tensors, lambda values: write_dcp(Path(folder), tensors, values))


def _save(tensors: Mapping[str, torch.Tensor], write: Callable[[Values], Result]) -> Result | None:
    mesh = mesh_of(tensors.values())
    if mesh is None:
        return of_one_version(tensors, lambda newest: write(read_values(tensors, newest=newest)))
    return written_by_one(mesh, read_values(tensors), write)


def _unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name. Tied parameters have their first name only."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name!r} is {type(value).__name__}, expected a tensor: save "
                "shardwell.full_state_dict(model) with torch.save",
                name=name,
            )
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _grouped_by_unit(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sorts tensors by unit, in the order of their first tensors, so that each unit is gathered once."""
    groups: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        owner = owner_of(tensor)
        groups.setdefault(owner.unit if owner else None, {})[name] = tensor
    return {name: tensor for group in groups.values() for name, tensor in group.items()}


# ---- files ----


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
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise UsageError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors files do not support", parameter=name
            )
    files = _cut(tensors, max_shard_bytes)
    with staged(
        folder, markers=(INDEX_NAME, SINGLE_NAME), is_exported=lambda name: bool(_EXPORTED_FILE.fullmatch(name))
    ) as stage:
        for name, contained in files.items():
            _write(stage / name, contained, values, {"format": "pt", **metadata})
        if len(files) > 1:
            (stage / INDEX_NAME).write_text(json.dumps(_index(files), indent=2, sort_keys=True) + "\n")
    return [folder / name for name in files]


def write_dcp(folder: Path, tensors: Mapping[str, Any], values: Values) -> None:
    """Writes a ``torch.distributed.checkpoint``. Arguments and OSError as in ``write_safetensors``.

    ``tensors`` may be a nested state dict with other values, too; see ``dcp.write_checkpoint``.
    """
    from shardwell.weights.dcp import write_checkpoint

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


def _size_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _cut(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Distributes tensors over files, in order. Returns the tensors of each file by its name."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        size = _size_bytes(tensor)
        if size > room and parts[-1]:
            parts.append({})
            room = max_bytes
        parts[-1][name] = tensor
        room -= size
    count = len(parts)
    if count == 1:
        return {SINGLE_NAME: parts[0]}
    return {f"model-{number:05}-of-{count:05}.safetensors": part for number, part in enumerate(parts, 1)}


def _index(files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    return {"metadata": {"total_size": sum(map(total_bytes, files.values()))}, "weight_map": weight_map}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], values: Values, metadata: Mapping[str, str]) -> None:
    """Writes one file with the next values, which belong to ``tensors``."""
    described = {name: (SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
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
