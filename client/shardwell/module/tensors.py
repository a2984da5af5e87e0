"""Functions that find tensors in nested values and return their local parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from shardwell_wire.boxes import Box

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, nn.Module, type)


def find_tensors(*values: Any) -> list[torch.Tensor]:
    """Returns all tensors in values: in containers of any kind and in attributes of objects, but not in modules."""
    found: list[torch.Tensor] = []
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            _find(values[position:], found)
            break
        found.append(value)
    return found


def _find(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    seen, open_values = set[int](), [iter(values)]  # no recursion: a linked list is deeper than Python's stack
    while open_values:
        for value in open_values[-1]:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif type(value) is tuple:  # the most frequent container, and a cycle has another one in it
                open_values.append(iter(value))
                break
            elif not isinstance(value, _LEAVES) and id(value) not in seen:
                seen.add(id(value))
                open_values.append(iter(_items(value)))
                break
        else:
            open_values.pop()


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copies a value and replaces each tensor. A part in which no tensor changes stays the same object.

    Enters lists, tuples, named tuples, dicts and dataclasses, and no other objects.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, function)) is not old}
        return _copy_with(value, changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {key: new for key, old in fields.items() if (new := map_tensors(old, function)) is not old}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _copy_with(mapping: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    if dataclasses.is_dataclass(mapping):
        return dataclasses.replace(mapping, **changed)
    copied = mapping.copy()
    copied.update(changed)
    return copied


def attribute_tensors(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Returns tensors that modules store as plain attributes, such as an auxiliary loss."""
    return [value for module in modules for value in module.__dict__.values() if isinstance(value, torch.Tensor)]


def share_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """True if a tensor's memory is the storage."""
    if tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
        return False
    same: bool = tensor.untyped_storage()._cdata == storage._cdata
    return same


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shard of a ``DTensor`` that this process holds; any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def set_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Sets the dtype of a ``DTensor`` to that of its new local part. Any other tensor has the dtype already."""
    if tensor.dtype != dtype:
        typed: Any = torch.empty_like(tensor.detach(), dtype=dtype)
        tensor.data = typed  # does not change DTensor's own attributes
        cast(Any, tensor)._spec = typed._spec


def is_split(tensor: torch.Tensor) -> bool:
    """True for a ``DTensor`` of which this process holds a part."""
    sharded: Any = tensor
    return hasattr(tensor, "placements") and any(
        not (placement.is_replicate() or placement.is_partial()) and sharded.device_mesh.size(axis) > 1
        for axis, placement in enumerate(sharded.placements)
    )


def local_box(tensor: torch.Tensor) -> Box:
    """Returns the part of a tensor that this process holds: of a ``DTensor`` its shard, otherwise the whole tensor."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return Box(shape, (0,) * len(shape), shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    local, offsets = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return Box(shape, tuple(offsets), tuple(local))
