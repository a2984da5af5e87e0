"""Exports a sharded model to files that other programs read, with one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwell.module.unit import owner_of
from shardwell.weights.checkpoint_reader import Values, write_dcp, write_safetensors
from shardwell.weights.state_dict import mesh_of, of_one_version, read_values, written_by_one
from shardwell_wire.errors import UsageError

Result = TypeVar("Result")


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

    return _write(tensors, write) or []


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
    _write(tensors, lambda values: write_dcp(Path(folder), tensors, values))


def _write(tensors: Mapping[str, torch.Tensor], write: Callable[[Values], Result]) -> Result | None:
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
