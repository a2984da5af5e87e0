"""What the update of a step needs, as a primary sends it to its backups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from shardwell_server.shard.requests.peers import tensor_memory
from shardwell_server.shard.state.buffer_shard import BufferShard
from shardwell_server.shard.state.replication import StepContent
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.chunk_streams import Buffer
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2

_GRADIENT = shard_pb2.STEP_CONTENT_GRADIENT
_CONTRIBUTIONS = shard_pb2.STEP_CONTENT_CONTRIBUTIONS
_PARTITIONS = shard_pb2.STEP_CONTENT_PARTITIONS

_Writer: TypeAlias = Callable[[UnitShard, shard_pb2.ReplicateStepHeader, common_pb2.OptimizerStep | None], list[Buffer]]


def contents_of(
    shard: UnitShard, optimizer: common_pb2.OptimizerStep | None
) -> list[tuple[StepContent, tuple[object, ...]]]:
    """Returns what a backup needs for the step in flight, each with a value that changes when the content changes."""
    found: list[tuple[StepContent, tuple[object, ...]]] = []
    on_trainers = optimizer is not None and runs_on_trainers(optimizer.algorithm)
    reduced = shard.reduced
    if not isinstance(shard, BufferShard) and reduced is not None and not reduced.skipped and not on_trainers:
        found.append((_GRADIENT, ()))
    if numbers := _replicated_numbers(shard, optimizer):
        found.append((_CONTRIBUTIONS, tuple(sorted(numbers))))
    if on_trainers and shard.partitions.staged:
        found.append((_PARTITIONS, (shard.partitions.stage_count,)))
    return found


def _replicated_numbers(shard: UnitShard, optimizer: common_pb2.OptimizerStep | None) -> set[int]:
    """Returns the segments of which the backup needs the gradient of each rank: see ``UnitShard.kept_numbers``."""
    if isinstance(shard, BufferShard):
        wanted = set(range(len(shard.segments)))
    elif optimizer is None:
        return set()
    else:
        groups = next((unit.group_indices for unit in optimizer.units if unit.unit_index == shard.index), None)
        wanted = set(shard.kept_numbers(groups))
    present = set[int]().union(*(each.present for each in shard.contributions.by_rank.values()))
    return wanted & present


def _write_gradient(
    shard: UnitShard, header: shard_pb2.ReplicateStepHeader, optimizer: common_pb2.OptimizerStep | None
) -> list[Buffer]:
    assert shard.reduced is not None
    pieces: list[Buffer] = []
    for segment, gradient in zip(shard.segments, shard.reduced.gradients, strict=True):
        if gradient is not None:
            header.gradient_indices.append(segment.parameter_index)
            pieces.append(tensor_memory(gradient))
    return pieces


def _write_contributions(
    shard: UnitShard, header: shard_pb2.ReplicateStepHeader, optimizer: common_pb2.OptimizerStep | None
) -> list[Buffer]:
    pieces: list[Buffer] = []
    numbers = _replicated_numbers(shard, optimizer)
    for contributor, contribution in sorted(shard.contributions.by_rank.items()):
        own = sorted(numbers & contribution.present)
        header.contributions.add(
            contributor=contributor, parameter_indices=[shard.segments[number].parameter_index for number in own]
        )
        pieces += [tensor_memory(contribution.views[number]) for number in own]
    return pieces


def _write_partitions(
    shard: UnitShard, header: shard_pb2.ReplicateStepHeader, optimizer: common_pb2.OptimizerStep | None
) -> list[Buffer]:
    pieces: list[Buffer] = []
    for rank, staged in sorted(shard.partitions.staged.items()):
        header.partitions.add(
            dp_rank=rank,
            parameter_indices=[segment.parameter_index for segment in staged.segments],
            state=staged.state.tensors,
            request_id=staged.state.request_id,
        )
        pieces += [tensor_memory(values) for values in staged.values]
        pieces += staged.state.pieces
    return pieces


_WRITERS: dict[StepContent, _Writer] = {
    _GRADIENT: _write_gradient,
    _CONTRIBUTIONS: _write_contributions,
    _PARTITIONS: _write_partitions,
}


def write_step(
    shard: UnitShard, header: shard_pb2.ReplicateStepHeader, optimizer: common_pb2.OptimizerStep | None
) -> list[Buffer]:
    """Completes the header of a stream for one kind of content, and returns the memory to send.

    Args:
        shard: The primary.
        header: Names the kind of content.
        optimizer: The optimizer that is expected to update the step. None: not known yet.
    """
    return _WRITERS[header.content](shard, header, optimizer)
