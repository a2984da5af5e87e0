"""Tensors inside the values that modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, nn.Module, type)


def find_tensors(*values: Any) -> list[torch.Tensor]:
    """All tensors in some values: in containers of any kind and in attributes of objects, but not in modules."""
    found: list[torch.Tensor] = []
    _find(values, found, set())
    return found


def _find(values: Iterable[Any], found: list[torch.Tensor], seen: set[int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not isinstance(value, _LEAVES) and id(value) not in seen:
            seen.add(id(value))
            _find(_items(value), found, seen)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copies a value with each tensor replaced; what holds no tensor that changes stays the same object.

    Lists, tuples, named tuples, dicts and dataclasses are entered, other objects are not.
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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: its shard of a ``DTensor``, else the tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def set_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Has a ``DTensor`` be of the dtype that its local part was given; any other tensor is already."""
    if tensor.dtype != dtype:
        typed: Any = torch.empty_like(tensor.detach(), dtype=dtype)
        tensor.data = typed  # which leaves alone what DTensor keeps beside it
        cast(Any, tensor)._spec = typed._spec


def share_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor's memory is that storage."""
    if tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
        return False
    same: bool = tensor.untyped_storage()._cdata == storage._cdata
    return same


def attribute_tensors(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Tensors that modules keep as plain attributes, such as an auxiliary loss."""
    return [value for module in modules for value in module.__dict__.values() if isinstance(value, torch.Tensor)]
