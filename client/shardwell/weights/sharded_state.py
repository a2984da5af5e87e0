"""A model's state cut into one part per trainer, none of which holds the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwell.module.unit import owner_of
from shardwell.session.session import Session, session_of
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
    version: int | None = None
    """Committed steps that it has had; None: not known."""


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
        Names, as ``full_state_dict`` has them, to slices; ``join_state_dicts`` makes one state of all parts.

    Raises:
        UsageError: There is no such part, or the trainer has no rank and did not say which.
    """
    session = _session(model)
    if part is None or num_parts is None:
        if session is None or session.dp_rank is None:
            raise UsageError("this trainer has no logical dp rank in the model's run: pass part= and num_parts=")
        part, num_parts = session.dp_rank, session.world.dp
    if not 0 <= part < num_parts:
        raise UsageError(f"part {part} of {num_parts}: expected a part from 0 to {num_parts - 1}")
    if session is not None:
        session.in_flight.settle()
    version = None if session is None else session.step
    state: dict[str, TensorSlice | Any] = {}
    for name, value in iter_full_state_dict(model):
        if isinstance(value, torch.Tensor) and value.dim():
            state[name] = _cut(value, part, num_parts, version)
        elif part == 0:
            is_scalar = isinstance(value, torch.Tensor)
            state[name] = TensorSlice(value, (), (), version) if is_scalar else value
    return state


def _session(model: nn.Module) -> Session | None:
    first = next((item for item in model.parameters() if owner_of(item) is not None), None)
    return None if first is None else session_of(first)


def _cut(value: torch.Tensor, part: int, num_parts: int, version: int | None) -> TensorSlice:
    length = -(-value.shape[0] // num_parts)
    start = min(part * length, value.shape[0])
    rows = value[start : start + length].clone()  # of the rows only: the rest is not to stay
    return TensorSlice(rows, (start, *(0 for _ in value.shape[1:])), tuple(value.shape), version)


def join_state_dicts(parts: Sequence[Mapping[str, TensorSlice | Any]]) -> dict[str, Any]:
    """Makes one state of all parts that ``sharded_state_dict`` gave, in any order; the bits of ``full_state_dict``.

    Args:
        parts: All of one step, of one ``num_parts``.

    Returns:
        Names to tensors, and to extra state that is no tensor; in the order of ``state_dict``.

    Raises:
        UsageError: Rows are missing or there twice, or the parts are of different steps or models.
    """
    if not parts:
        raise UsageError("join_state_dicts was given no parts")
    _check_versions(parts)
    in_order = max(parts, key=len)  # part 0 has every name
    found: dict[str, list[TensorSlice | Any]] = {name: [] for name in in_order}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: _join(name, values, len(parts)) for name, values in found.items()}


def _check_versions(parts: Sequence[Mapping[str, TensorSlice | Any]]) -> None:
    versions = {value.version: number for number, part in enumerate(parts) for value in _slices(part)}
    if len(versions) > 1:
        told = " and ".join(f"argument {number} of step {version}" for version, number in list(versions.items())[:2])
        raise UsageError(f"the parts are of different steps: {told}; every part must be taken in the same step")


def _slices(part: Mapping[str, TensorSlice | Any]) -> list[TensorSlice]:
    return [value for value in part.values() if isinstance(value, TensorSlice)]


def _join(name: str, values: Sequence[TensorSlice | Any], num_parts: int) -> Any:
    is_cut = all(isinstance(value, TensorSlice) and value.whole_shape for value in values)
    if not is_cut:
        if len(values) > 1:
            raise UsageError(f"{name!r} is in {len(values)} of the parts: a part is there twice", name=name)
        return values[0].values.clone() if isinstance(values[0], TensorSlice) else values[0]
    if len({(each.whole_shape, each.values.dtype) for each in values}) > 1:
        kinds = ", ".join(sorted({f"{each.whole_shape} of {each.values.dtype}" for each in values}))
        raise UsageError(f"{name!r} is {kinds} in different parts: they are of different models", name=name)
    slices, position = sorted(values, key=lambda each: (each.offsets, each.values.shape)), 0
    for each in slices:
        if len(each.values):
            _check_rows(name, position, each.offsets[0], num_parts)
            position += len(each.values)
    _check_rows(name, position, slices[0].whole_shape[0], num_parts)
    return torch.cat([each.values for each in slices])


def _check_rows(name: str, expected: int, found: int, num_parts: int) -> None:
    """Raises UsageError if the next rows of a tensor begin elsewhere than where those before end."""
    if found > expected:
        raise UsageError(
            f"rows [{expected}, {found}) of {name!r} are in none of the {num_parts} parts: pass all parts of one "
            "sharded_state_dict(..., num_parts=)",
            name=name,
        )
    if found < expected:
        raise UsageError(
            f"row {found} of {name!r} is in two of the {num_parts} parts: a part is there twice, or they are of "
            "different num_parts",
            name=name,
        )
