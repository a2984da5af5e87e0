"""A model's state cut into one part per trainer, none of which holds the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwell.module.parameter import owner_of
from shardwell.session.open_sessions import session_of
from shardwell.weights.state_dict import iter_full_state_dict
from shardwell_wire.errors import UsageError


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Consecutive rows of a tensor."""

    values: torch.Tensor
    """A copy, on the CPU; perhaps without rows."""
    offsets: tuple[int, ...]
    """Where its first element is in the whole tensor; all zero but the first."""
    whole_shape: tuple[int, ...]
    """Of the tensor."""


def sharded_state_dict(
    model: nn.Module, *, part: int | None = None, num_parts: int | None = None
) -> dict[str, TensorSlice | Any]:
    """One part of the model's state; the parts of all trainers together are ``full_state_dict``.

    Tensors are cut along dim 0 as FSDP2's ``Shard(0)`` and ``torch.chunk`` cut them; scalars, and extra state that is
    no tensor, are in part 0. One unit at a time is gathered. All values are of the version that the current step reads.

    Args:
        model: A model with sharded modules in it.
        part: Which part; by default this trainer's logical dp rank.
        num_parts: Into how many; by default the world's dp.

    Returns:
        Names, as ``full_state_dict`` has them, to slices.

    Raises:
        UsageError: There is no such part, or the trainer has no rank and did not say which.
    """
    if part is None or num_parts is None:
        part, num_parts = _place(model)
    if not 0 <= part < num_parts:
        raise UsageError(f"part {part} of {num_parts}: expected a part from 0 to {num_parts - 1}")
    state: dict[str, TensorSlice | Any] = {}
    for name, value in iter_full_state_dict(model):
        if isinstance(value, torch.Tensor) and value.dim():
            state[name] = _cut(value, part, num_parts)
        elif part == 0:
            is_scalar = isinstance(value, torch.Tensor)
            state[name] = TensorSlice(value, (), ()) if is_scalar else value
    return state


def _place(model: nn.Module) -> tuple[int, int]:
    first = next((item for item in model.parameters() if owner_of(item) is not None), None)
    session = None if first is None else session_of(first)
    if session is None or session.dp_rank is None:
        raise UsageError("this trainer has no logical dp rank in the model's run: pass part= and num_parts=")
    return session.dp_rank, session.world.dp


def _cut(value: torch.Tensor, part: int, num_parts: int) -> TensorSlice:
    length = -(-value.shape[0] // num_parts)
    start = min(part * length, value.shape[0])
    rows = value[start : start + length].clone()  # of the rows only: the rest is not to stay
    return TensorSlice(rows, (start, *(0 for _ in value.shape[1:])), tuple(value.shape))
