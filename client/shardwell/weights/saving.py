"""Exports of a sharded model to files that other programs read, one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwell.module.unit import owner_of
from shardwell.weights.checkpoint_files import Values, write_dcp, write_safetensors
from shardwell.weights.state_dict import read_values
from shardwell.weights.tensor_parallel import mesh_of, written_by_one
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

    The folder gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``; of an earlier export nothing is left. The files appear when all of them are
    complete. All values are of the version that the current step reads. One trainer is enough; call it between steps.
    Where tensor parallelism splits parameters, all trainers of one tensor group call it, and the first of them writes.

    Args:
        model: A model with sharded modules in it.
        folder: Made if it does not exist.
        max_shard_bytes: Of the tensors in one file; a larger tensor has a file of its own.
        metadata: Further strings for the files' headers.

    Returns:
        The files with tensors; none on a trainer that only gave its parts.

    Raises:
        UsageError: A value cannot be stored: extra state that is no tensor, or a dtype that the format has not; or
            parameters are split over several meshes or dims of one.
        VersionGoneError: Other trainers committed a step meanwhile.
        OSError: The files cannot be written, as when the disk is full; the folder is as it was.
        ConflictError: The trainer that writes for this one could not.
    """
    tensors = _in_order_of_units(_unique_tensors(model))

    def write(values: Values) -> list[Path]:
        return write_safetensors(
            Path(folder), tensors, values, max_shard_bytes=max_shard_bytes, metadata=metadata or {}
        )

    return _write(tensors, write) or []


def save_dcp(model: nn.Module, folder: str | Path) -> None:
    """Writes a model's parameters and persistent buffers as ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads it in any number of processes, and ``dcp_to_torch_save`` makes a
    ``torch.load`` file of it. Names are those of ``state_dict``; tied parameters are stored once. As for
    ``save_safetensors``: one trainer calls it, or one tensor group, between steps, and the files appear together.

    Args:
        model: A model with sharded modules in it.
        folder: Made if it does not exist.

    Raises:
        UsageError: A value cannot be stored: extra state that is no tensor; or parameters are split over several
            meshes or dims of one.
        VersionGoneError: Other trainers committed a step meanwhile.
        OSError: The files cannot be written; the folder is as it was.
        ConflictError: The trainer that writes for this one could not.
    """
    tensors = _in_order_of_units(_unique_tensors(model))
    _write(tensors, lambda values: write_dcp(Path(folder), tensors, values))


def _write(tensors: Mapping[str, torch.Tensor], write: Callable[[Values], Result]) -> Result | None:
    mesh = mesh_of(tensors.values())
    values = read_values(tensors)
    return write(values) if mesh is None else written_by_one(mesh, values, write)


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
