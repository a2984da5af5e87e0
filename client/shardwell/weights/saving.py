"""Exports of a sharded model to files that other programs read, one unit in memory at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwell.module.parameter import owner_of
from shardwell.weights.safetensors_file import INDEX_NAME, SINGLE_NAME, is_storable, make_header
from shardwell.weights.staged_files import staged
from shardwell.weights.state_dict import read_values
from shardwell_wire.errors import UsageError

_OF_AN_EXPORT = re.compile(rf"model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE_NAME)}|{re.escape(INDEX_NAME)}")


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes a model's parameters and persistent buffers as Hugging Face's libraries do.

    The folder gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``; of an earlier export nothing is left. The files appear when all of them are
    complete. All values are of the version that the current step reads. One trainer is enough; call it between steps.

    Args:
        model: A model with sharded modules in it.
        folder: Made if it does not exist.
        max_shard_bytes: Of the tensors in one file; a larger tensor has a file of its own.
        metadata: Further strings for the files' headers.

    Returns:
        The files with tensors.

    Raises:
        UsageError: A value cannot be stored: extra state that is no tensor, or a dtype that the format has not.
        VersionGoneError: Other trainers committed a step meanwhile.
        OSError: The files cannot be written, as when the disk is full; the folder is as it was.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: expected at least 1")
    folder = Path(folder)
    tensors = _in_order_of_units(_unique_tensors(model))
    for name, tensor in tensors.items():
        if not is_storable(tensor.dtype):
            raise UsageError(f"{name!r} is of {tensor.dtype}, which safetensors files can not have", parameter=name)
    files = _cut(tensors, max_shard_bytes)
    with staged(folder, markers=(INDEX_NAME, SINGLE_NAME), is_ours=_is_of_an_export) as stage:
        values = read_values(tensors)
        for file in files:
            _write(stage / file.name, file.tensors, values, {"format": "pt", **(metadata or {})})
        if len(files) > 1:
            (stage / INDEX_NAME).write_text(json.dumps(_index(files), indent=2, sort_keys=True) + "\n")
    return [folder / file.name for file in files]


def save_dcp(model: nn.Module, folder: str | Path) -> None:
    """Writes a model's parameters and persistent buffers as ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads it in any number of processes, and ``dcp_to_torch_save`` makes a
    ``torch.load`` file of it. Names are those of ``state_dict``; tied parameters are stored once. As for
    ``save_safetensors``: one trainer calls it, between steps, and the files appear together.

    Args:
        model: A model with sharded modules in it.
        folder: Made if it does not exist.

    Raises:
        UsageError: A value cannot be stored: extra state that is no tensor.
        VersionGoneError: Other trainers committed a step meanwhile.
        OSError: The files cannot be written; the folder is as it was.
    """
    from shardwell.weights.dcp_writing import write_checkpoint

    tensors = _in_order_of_units(_unique_tensors(model))
    with staged(Path(folder), markers=(".metadata",), is_ours=lambda name: name.endswith(".distcp")) as stage:
        write_checkpoint(stage, tensors, read_values(tensors))


def _is_of_an_export(name: str) -> bool:
    return _OF_AN_EXPORT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    tensors: Mapping[str, torch.Tensor]


def _unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, whatever memory they have, and buffers by name; of tied ones the first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name!r} is {type(value).__name__}, no tensor: save shardwell.full_state_dict(model) with torch.save",
                name=name,
            )
        if hasattr(value, "placements"):
            raise UsageError(
                f"{name!r} is split by tensor parallelism: have all of its ranks call shardwell.iter_full_state_dict",
                parameter=name,
            )
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _in_order_of_units(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """So that each unit is gathered once: units in the order of their first tensors."""
    groups: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        owner = owner_of(tensor)
        groups.setdefault(owner.unit if owner else None, {})[name] = tensor
    return {name: tensor for group in groups.values() for name, tensor in group.items()}


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
    sizes = (_size_bytes(tensor) for file in files for tensor in file.tensors.values())
    places = {name: file.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": places}


def _write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Iterator[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Writes one file with the next values, which are of these tensors."""
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        file.write(make_header(described, metadata))
        for expected in tensors:
            name, value = next(values)
            assert name == expected
            file.write(memory_of(value))


def memory_of(value: torch.Tensor) -> memoryview:
    """A tensor's bytes where they lie; they stay while the tensor does."""
    flat = value.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
