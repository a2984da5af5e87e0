"""An optimizer that is a function of flat tensors, on the trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shardwell.optimizers.partition_optimizer import PartitionOptimizer
from shardwell.transport.partitions import PartitionSegment
from shardwell_wire.errors import UsageError

FlatUpdate = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], Mapping[str, Any]], torch.Tensor]
"""Takes values, gradient, state and the settings of the group; returns the new values."""


class FlatClientSide(PartitionOptimizer):
    """A function that updates this rank's partition of the mean gradient, as flat tensors, on the trainer.

    In each step ``update(values, gradient, state, group)`` is called for every part of the partition: once per unit and
    shard server, and separately for parameters that differ in their group, dtype, or numbers in the state. The flat
    tensors hold the parameters that have a gradient, one after the other. All trainers must use the same function.

    Args:
        params: As of torch's optimizers: sharded parameters, or groups of them.
        update: Returns the new values, a tensor of the shape and the dtype of ``values``. It is called without
            gradient tracking, with

            - ``values``: the present values, a copy. [numel]
            - ``gradient``: their mean gradient, clipped, a copy. [numel]
            - ``state``: what ``update`` left in it in the step before; empty at first. It may hold tensors of shape
              [numel] and Python numbers by name. The shard servers keep it.
            - ``group``: the settings of the parameter group, such as ``group["lr"]``. Read only.
        keep_bytes: As of ``ClientSide``.
        **options: The default settings of groups, by name.

    Raises:
        UsageError: A parameter is not sharded, or ``update`` is not a function. ``step`` raises it if ``update``
            returns anything but a tensor of the right shape and dtype; no parameter changes then.
    """

    def __init__(self, params: ParamsT, update: FlatUpdate, *, keep_bytes: float = math.inf, **options: Any) -> None:
        if not callable(update) or isinstance(update, type):
            raise UsageError(
                f"FlatClientSide(update={update!r}): expected a function update(values, gradient, state, group); "
                "use ClientSide for a class of optimizers"
            )
        self._function, self._name = update, getattr(update, "__name__", type(update).__name__)
        super().__init__(params, options, name=f"flat/{self._name}", keep_bytes=keep_bytes)

    def _update_part(self, unit: str, part: PartitionSegment, groups: Sequence[int]) -> None:
        """Calls the function for the parameters of a part that have a gradient."""
        for members in _alike(part, groups):
            settings = self.param_groups[groups[members[0]]]
            group = MappingProxyType({name: value for name, value in settings.items() if name != "params"})
            # Copies, so that the function may keep or return any of them, whichever way the bytes travel.
            values = torch.cat([part.values[index] for index in members])
            gradient = torch.cat([part.gradients[index] for index in members])
            state = _flat_state(part, members)
            size, dtype, what = values.numel(), values.dtype, f"update {self._name!r} of unit {unit!r}"
            returned = self._function(values, gradient, state, group)
            _check(returned, size, dtype, f"{what} returned", unit)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    _check(value, size, value.dtype, f"{what} left in state[{name!r}]", unit)
            _put_back(part, members, returned, state)
        part.state = dict(sorted(part.state.items()))  # in the order of the layout


def _alike(part: PartitionSegment, groups: Sequence[int]) -> list[list[int]]:
    """The parameters with a gradient, by what one flat tensor or one state cannot hold two of."""
    found: dict[Any, list[int]] = {}
    for index, gradient in part.gradients.items():
        state = tuple(
            (name, str(value.dtype) if isinstance(value, torch.Tensor) else repr(value))
            for name, value in part.state.get(index, {}).items()
        )
        found.setdefault((groups[index], gradient.dtype, state), []).append(index)
    return list(found.values())


def _flat_state(part: PartitionSegment, members: Sequence[int]) -> dict[str, Any]:
    return {
        name: torch.cat([part.state[index][name] for index in members]) if isinstance(value, torch.Tensor) else value
        for name, value in part.state.get(members[0], {}).items()
    }


def _check(value: object, size: int, dtype: torch.dtype, what: str, unit: str) -> None:
    """Raises UsageError unless ``value`` is a flat tensor of a size and a dtype."""
    expected = f"a {dtype} tensor of shape [{size}]"
    got = (
        f"a {value.dtype} tensor of shape {list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    if got != expected:
        raise UsageError(
            f"{what} {got}: expected {expected}, as values has",
            unit=unit,
            expected=expected,
            actual=got,
        )


def _put_back(part: PartitionSegment, members: Sequence[int], values: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Copies flat values and state to the parameters' own. What the function keeps of them is not shared."""
    start = 0
    for index in members:
        stop = start + part.values[index].numel()
        part.values[index].copy_(values[start:stop])
        former = part.state.get(index, {})
        part.state[index] = {
            name: _copied(value[start:stop], former.get(name)) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        start = stop


def _copied(piece: torch.Tensor, place: Any) -> torch.Tensor:
    """A copy on the CPU: in ``place``, such as shared memory, if it is a tensor that fits."""
    if isinstance(place, torch.Tensor) and (place.shape, place.dtype) == (piece.shape, piece.dtype):
        return place.copy_(piece)
    return piece.detach().to("cpu", copy=True)
