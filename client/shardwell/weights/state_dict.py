"""The whole model's values, gathered unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwell.memory.allocator import trim
from shardwell.module.tensors import local_part
from shardwell.module.unit import Unit, owner_of
from shardwell.session.session import settle
from shardwell.weights.tensor_parallel import whole


def full_state_dict(model: nn.Module, *, ema: bool = False) -> dict[str, Any]:
    """The model's state as a plain PyTorch ``state_dict``: same names, same order, on the CPU.

    Args:
        model: A model with sharded modules in it.
        ema: The moving average of the weights (``optimizer.ema_decay``) instead of the weights. Buffers and
            parameters that are not optimised are as they are.

    Returns:
        Copies of all parameters, under tied names too, and of persistent buffers. Loads with
        ``load_state_dict`` into the model as it was before ``fully_shard``. Parameters split by tensor
        parallelism are put together, so all ranks that hold parts must call.

    Raises:
        StepStateError: The moving average is wanted, and no step was averaged.
    """
    return dict(iter_full_state_dict(model, ema=ema))


def iter_full_state_dict(model: nn.Module, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
    """``full_state_dict`` one value at a time: holds one unit, however large the model is.

    Args:
        model: A model with sharded modules in it.
        ema: As ``full_state_dict``.

    Yields:
        Names and values in the order of ``state_dict``. A unit whose parameters are not next to each
        other in that order is gathered more than once.
    """
    # With keep_vars nothing is computed with the parameters, and modules that add to or rename their state do so.
    yield from read_values(model.state_dict(keep_vars=True), ema=ema)


def read_values(state: Mapping[str, Any], *, ema: bool = False) -> Iterator[tuple[str, Any]]:
    """The values of a state with the parameters themselves in it, in its order: holds one unit."""
    settle(value for value in state.values() if isinstance(value, torch.Tensor))
    gathered: Unit | None = None
    flat = torch.empty(0)
    for name, value in state.items():
        owner = owner_of(value) if isinstance(value, torch.Tensor) else None
        if owner is not None:
            if owner.unit is not gathered:
                gathered, flat = None, torch.empty(0)
                trim()  # streams leave holes in the heaps, which would add up over the units
                gathered, flat = owner.unit, owner.unit.gather_average() if ema else owner.unit.gather_copy()
            yield name, whole(owner.unit.read(flat, owner.index), value)
        elif isinstance(value, torch.Tensor):
            yield name, whole(local_part(value.detach()), value)
        else:
            yield name, value
