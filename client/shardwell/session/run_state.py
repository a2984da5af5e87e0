"""State that belongs to the run though a trainer makes it: changed buffers and tracked objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwell_wire import codec
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import DTYPE_NAMES, DTYPE_NUMBERS
from shardwell_wire.v1 import common_pb2


class RunBuffers:
    """Buffers that change in training, such as BatchNorm statistics.

    Every work item starts from the committed values; the lowest logical rank's become the next ones.

    Args:
        modules: Gives ``(name, module)`` of every sharded module, whenever asked.
    """

    def __init__(self, modules: Callable[[], Iterable[tuple[str, nn.Module]]]) -> None:
        self._modules = modules
        self._committed: dict[str, torch.Tensor] = {}
        self._restored: dict[str, torch.Tensor] = {}
        self._changing: set[str] = set()
        self._next: dict[str, torch.Tensor] = {}

    def begin_item(self) -> None:
        """Sets every buffer to its committed value, noting new buffers' values as committed."""
        with torch.no_grad():
            for name, buffer in self._live():
                committed = self._committed.get(name)
                if committed is None:
                    committed = self._restored.pop(name, None)
                    self._committed[name] = buffer.detach().clone() if committed is None else committed
                if committed is not None and not torch.equal(buffer.cpu(), committed.cpu()):
                    buffer.copy_(committed)

    def end_item(self) -> None:
        """Keeps the values that the current item, the lowest logical rank's, left behind."""
        for name, buffer in self._live():
            committed = self._committed.get(name)
            if name in self._changing or committed is None or not torch.equal(buffer.cpu(), committed.cpu()):
                self._changing.add(name)
                self._next[name] = buffer.detach().clone()

    def to_proto(self) -> dict[str, common_pb2.TensorValue]:
        """The values to store with the commit."""
        return {name: to_tensor_value(value) for name, value in self._next.items()}

    def committed(self, values: Mapping[str, common_pb2.TensorValue]) -> None:
        """Takes over the values that a commit made the run's."""
        self._next.clear()
        tensors = {name: from_tensor_value(value) for name, value in values.items()}
        self._changing.update(tensors)
        with torch.no_grad():
            for name, buffer in self._live():
                if (tensor := tensors.pop(name, None)) is not None:
                    if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
                        raise UsageError(
                            f"buffer {name!r} is {tuple(buffer.shape)} {buffer.dtype} here, "
                            f"but {tuple(tensor.shape)} {tensor.dtype} in the run: the models differ"
                        )
                    self._committed[name] = tensor
                    buffer.copy_(tensor)
        self._restored.update(tensors)

    def _live(self) -> Iterable[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for prefix, module in self._modules():
            for path, owner in module.named_modules():
                for name, buffer in owner._buffers.items():
                    if buffer is None or name in owner._non_persistent_buffers_set or id(buffer) in seen:
                        continue
                    if str(buffer.dtype).removeprefix("torch.") not in DTYPE_NUMBERS:
                        continue
                    seen.add(id(buffer))
                    yield ".".join(part for part in (prefix, path, name) if part), buffer


def to_tensor_value(tensor: torch.Tensor) -> common_pb2.TensorValue:
    """A small tensor as a message."""
    dense = tensor.detach().cpu().contiguous()
    return common_pb2.TensorValue(
        dtype=DTYPE_NUMBERS[str(dense.dtype).removeprefix("torch.")],
        shape=dense.shape,
        data=bytes(codec.memory_at(dense.data_ptr(), dense.nbytes)),
    )


def from_tensor_value(value: common_pb2.TensorValue) -> torch.Tensor:
    """A tensor from a message; raises UsageError if its size does not match its shape."""
    tensor = torch.empty(tuple(value.shape), dtype=getattr(torch, DTYPE_NAMES[value.dtype]))
    if tensor.nbytes != len(value.data):
        raise UsageError(f"a buffer of {tensor.nbytes} bytes came as {len(value.data)} bytes")
    codec.copy_bytes(codec.memory_at(tensor.data_ptr(), tensor.nbytes), 0, value.data)
    return tensor


class TrackedObjects:
    """Objects whose ``state_dict`` is stored with every commit and restored when a trainer joins.

    Args:
        stored: JSON text by name, from the last commit.
    """

    def __init__(self, stored: Mapping[str, str]) -> None:
        self._stored = dict(stored)
        self._objects: dict[str, Any] = {}
        self.restored = False
        """Whether anything was restored: the trainer then goes once through the end of that step."""

    def track(self, objects: Mapping[str, Any]) -> None:
        """Adds objects by name and restores those that the run has state of.

        Raises:
            UsageError: An object has no ``state_dict`` and ``load_state_dict``, or its state is not
                made of plain numbers, strings, lists and maps with string keys.
        """
        for name, tracked in objects.items():
            if not callable(getattr(tracked, "state_dict", None)) or not callable(
                getattr(tracked, "load_state_dict", None)
            ):
                raise UsageError(f"track({name}=...): {type(tracked).__name__} has no state_dict and load_state_dict")
            self._objects[name] = tracked
            self._capture(name, tracked)
            if name in self._stored:
                self._restore(tracked, json.loads(self._stored[name]))
                self.restored = True

    def to_json(self) -> dict[str, str]:
        """The present state of every tracked object."""
        return {name: self._capture(name, tracked) for name, tracked in self._objects.items()}

    def _capture(self, name: str, tracked: Any) -> str:
        state: dict[str, Any] = {"state_dict": tracked.state_dict()}
        if (groups := _param_groups(tracked)) is not None:
            state["hyperparameters"] = [_plain_group(group) for group in groups]
        _require_plain(state["state_dict"], f"{name}.state_dict()")
        return json.dumps(state)

    def _restore(self, tracked: Any, state: dict[str, Any]) -> None:
        tracked.load_state_dict(state["state_dict"])
        # A scheduler's state alone does not set the learning rate it had reached.
        for group, values in zip(_param_groups(tracked) or (), state.get("hyperparameters", ()), strict=False):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _param_groups(tracked: Any) -> list[dict[str, Any]] | None:
    groups = getattr(getattr(tracked, "optimizer", tracked), "param_groups", None)
    return groups if isinstance(groups, list) else None


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _require_plain(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{path} has the key {key!r}: keys must be strings to be stored with the run")
            _require_plain(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UsageError(
            f"{path} is a {type(value).__name__}: only numbers, strings, lists and maps are stored with the run"
        )
