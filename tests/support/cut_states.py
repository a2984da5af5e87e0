"""Cuts the exported state of shards anew, and joins it, as a checkpoint does that is loaded by other servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from shardwell_server.shard.unit.portable_state import PartState, ShardState, begin_import, finish_import
from shardwell_server.shard.unit.unit_shard import UnitShard


def restrict(state: ShardState, start_bytes: int, stop_bytes: int) -> ShardState:
    """Returns the state of a range within the state's range."""
    parts = {part.parameter_index: part for part in state.parts}
    cut = [
        _cut(parts[at.parameter_index], at.start_element, at.stop_element)
        for at in state.layout.segments(start_bytes, stop_bytes)
    ]
    return replace(state, start_bytes=start_bytes, stop_bytes=stop_bytes, parts=cut)


def merge(states: Sequence[ShardState]) -> ShardState:
    """Returns the joined state of adjacent ranges, which are in order."""
    parts: dict[int, list[PartState]] = {}
    for state in states:
        for part in state.parts:
            parts.setdefault(part.parameter_index, []).append(part)
    joined = [_join(pieces) for _, pieces in sorted(parts.items())]
    return replace(states[0], stop_bytes=states[-1].stop_bytes, parts=joined)


def fill(destination: ShardState, source: ShardState) -> None:
    """Copies a state into the memory that ``begin_import`` returned for it."""
    for (name, own), (other_name, other) in zip(destination.tensors(), source.tensors(), strict=True):
        assert name == other_name
        own.copy_(other)


def import_state(shard: UnitShard, state: ShardState, version: int) -> None:
    """Fills a reserved shard with a state, and publishes it as a version."""
    fill(begin_import(shard, state), state)
    finish_import(shard, version)


def _cut(part: PartState, start: int, stop: int) -> PartState:
    if (start, stop) == (part.start_element, part.stop_element):
        return part
    here = slice(start - part.start_element, stop - part.start_element)
    return replace(
        part,
        start_element=start,
        stop_element=stop,
        values=part.values[here],
        state={name: tensor[here] if tensor.ndim else tensor for name, tensor in part.state.items()},
        average=None if part.average is None else part.average[here],
        kept={rank: gradient[here] for rank, gradient in part.kept.items()},
    )


def _join(parts: Sequence[PartState]) -> PartState:
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        assert (part.algorithm, part.step_count) == (first.algorithm, first.step_count)
        assert (part.state.keys(), part.kept.keys()) == (first.state.keys(), first.kept.keys())
    averages = [part.average for part in parts if part.average is not None]
    assert len(averages) in (0, len(parts))
    return replace(
        first,
        stop_element=parts[-1].stop_element,
        values=torch.cat([part.values for part in parts]),
        state={name: _whole([part.state[name] for part in parts]) for name in first.state},
        average=torch.cat(averages) if averages else None,
        kept={rank: torch.cat([part.kept[rank] for part in parts]) for rank in first.kept},
    )


def _whole(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *others = tensors
    if first.ndim:
        return torch.cat([first, *others])
    assert all(torch.equal(first, other) for other in others)  # one number for the whole parameter
    return first
