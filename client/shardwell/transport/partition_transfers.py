"""Optimizer partitions: their place in a unit, their contents, and both as messages, streams and shared memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwell.transport.shared_vector import OpenFile, map_shared
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import UsageError
from shardwell_wire.host.shared_memory import opened
from shardwell_wire.model.layout import DTYPE_NAMES, DTYPE_NUMBERS, Segment, UnitLayout
from shardwell_wire.model.topology import state_places, values_offset
from shardwell_wire.v1 import common_pb2, shard_pb2

_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}

DescribedState = list[tuple[shard_pb2.StateTensor, torch.Tensor]]
"""The tensors of an optimizer's state and their descriptions, in the order of the stream."""


@dataclass(frozen=True)
class PartitionLocation:
    """The range of one data rank's optimizer partition that one server owns."""

    layout: UnitLayout
    dp_rank: int
    start_bytes: int
    """Half-open range of the unit's flat vector; not empty."""
    stop_bytes: int

    @property
    def segments(self) -> list[Segment]:
        """The segments of parameters in the range."""
        return self.layout.segments(self.start_bytes, self.stop_bytes)


@dataclass
class PartitionSegment:
    """The part of an optimizer partition at one location: one entry per parameter with elements in it, by index."""

    generation: int
    """Identifies the gradient. The server rejects values that were computed from an older one."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """Each [elements in the partition]."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of the parameters that have one. Each [elements in the partition]."""
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Optimizer state of each parameter: tensors and numbers by name."""

    @property
    def kept_bytes(self) -> int:
        """Size of the values and the state."""
        state = (value for entry in self.state.values() for value in entry.values())
        tensors = [*self.values.values(), *(value for value in state if isinstance(value, torch.Tensor))]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass
class SharedPartitionSegment(PartitionSegment):
    """A segment in a shared staging buffer. In-place updates of its tensors change what will be staged."""

    staging_buffer_id: int = 0
    """Identifies the buffer to the server."""
    described: list[shard_pb2.StateTensor] = field(default_factory=list)
    """The state tensors that the buffer has memory for."""
    shared_values: dict[int, torch.Tensor] = field(default_factory=dict)
    shared_state: list[torch.Tensor] = field(default_factory=list)

    def write_back(self, state: DescribedState) -> bool:
        """Copies tensors that the optimizer replaced into the buffer; returns False if the state does not fit."""
        if [description for description, _ in state] != self.described:
            return False
        for (_, tensor), place in zip(state, self.shared_state, strict=True):
            _copy_unless_same(tensor, place)
        for index in self.gradients:
            _copy_unless_same(self.values[index], self.shared_values[index])
        return True


@dataclass(frozen=True)
class CachedPartition:
    """Values and state that this trainer staged. They are stale if another trainer has staged the partition since."""

    request_id: str
    """The request that staged them."""
    part: PartitionSegment


def read_request(
    location: PartitionLocation, context: common_pb2.RequestContext, cached: CachedPartition | None = None
) -> shard_pb2.ReadPartitionRequest:
    """Returns the request for a partition."""
    return shard_pb2.ReadPartitionRequest(
        context=context,
        unit=location.layout.unit,
        dp_rank=location.dp_rank,
        start_bytes=location.start_bytes,
        stop_bytes=location.stop_bytes,
        cached_request_id="" if cached is None else cached.request_id,
    )


def describe_state(location: PartitionLocation, segment: PartitionSegment) -> DescribedState:
    """Returns an optimizer's state in the order of the stream.

    Raises:
        UsageError: An entry is neither a tensor nor a number.
    """
    return [
        _describe(location, index, name, value)
        for index, entry in segment.state.items()
        for name, value in entry.items()
    ]


def stage_header(
    location: PartitionLocation,
    context: common_pb2.RequestContext,
    segment: PartitionSegment,
    state: Iterable[tuple[shard_pb2.StateTensor, torch.Tensor]],
) -> shard_pb2.StagePartitionHeader:
    """Returns the header that announces new values and new state."""
    return shard_pb2.StagePartitionHeader(
        context=context,
        unit=location.layout.unit,
        dp_rank=location.dp_rank,
        start_bytes=location.start_bytes,
        stop_bytes=location.stop_bytes,
        generation=segment.generation,
        parameter_indices=sorted(segment.gradients),
        state=[description for description, _ in state],
    )


class IncomingPartition:
    """A partition that is being received: its tensors in the order of the stream.

    Args:
        cached: Used for values and state if the header says that they are current.
    """

    def __init__(
        self, location: PartitionLocation, header: shard_pb2.ReadPartitionHeader, cached: CachedPartition | None
    ) -> None:
        self._header, self._cached = header, cached if header.cache_is_current else None
        segments = {segment.parameter_index: segment for segment in location.segments}

        def empty_segment(index: int) -> torch.Tensor:
            segment, parameter = segments[index], location.layout.parameters[index]
            return torch.empty(segment.stop_element - segment.start_element, dtype=getattr(torch, parameter.dtype))

        self._values = {} if header.cache_is_current else {index: empty_segment(index) for index in segments}
        self._gradients = {index: empty_segment(index) for index in header.gradient_indices}
        self._state = [
            torch.empty(tuple(entry.shape), dtype=getattr(torch, DTYPE_NAMES[entry.dtype])) for entry in header.state
        ]
        targets = [*self._values.values(), *self._gradients.values(), *self._state]
        self.receiver = chunk_streams.StreamReceiver(
            list(map(memory_of, targets)), f"partition of unit {location.layout.unit!r}"
        )

    def finish(self) -> PartitionSegment:
        """Returns the partition. Raises ChunkError if the stream ended early."""
        self.receiver.require_complete()
        if self._cached is not None:
            kept = self._cached.part
            return PartitionSegment(self._header.generation, kept.values, self._gradients, kept.state)
        state = _state_by_parameter(self._header.state, self._state)
        return PartitionSegment(self._header.generation, self._values, self._gradients, state)


class StagingBuffer:
    """This process's mappings of the shared staging buffer for one location. For one thread at a time.

    Args:
        open_file: Opens a file of the server for reading and writing.
    """

    def __init__(self, location: PartitionLocation, open_file: OpenFile) -> None:
        self._location, self._open_file = location, open_file
        self._mapped: dict[str, torch.Tensor] = {}
        self.buffer_id = 0
        """Identifies the buffer to the server. 0: there is none yet."""

    def lay_out(self, answer: shard_pb2.OpenStagingBufferResponse, values: torch.Tensor) -> SharedPartitionSegment:
        """Returns a partition whose values and state are in the buffer.

        Args:
            answer: The server's response, which names the buffer's files.
            values: The current values, copied into the buffer. uint8. [stop_bytes - start_bytes]

        Raises:
            OSError: The buffer cannot be mapped.
        """
        header, location = answer.header, self._location
        self.buffer_id = answer.staging_buffer_id
        values_at = values_offset(location.start_bytes, location.stop_bytes)
        state_ranges, state_bytes = state_places(header.state)
        sizes = {answer.file: values_at + location.stop_bytes - location.start_bytes}
        if answer.state_file:
            sizes.update({answer.state_file: state_bytes, answer.new_state_file: state_bytes})
        # Files of the step before that the server no longer names are unmapped.
        self._mapped = {
            file: self._mapped[file] if file in self._mapped else self._map(file, sizes[file]) for file in sizes
        }
        gradients = self._mapped[answer.file]
        new_values = gradients[values_at:]
        new_values.copy_(values)
        if answer.state_file:
            self._mapped[answer.new_state_file].copy_(self._mapped[answer.state_file])
        shared_state = [
            _view(self._mapped[answer.new_state_file][start:stop], DTYPE_NAMES[entry.dtype], tuple(entry.shape))
            for entry, (start, stop) in zip(header.state, state_ranges, strict=True)
        ]
        segments = {segment.parameter_index: segment for segment in location.segments}
        shared_values = {index: self._cut(new_values, segment) for index, segment in segments.items()}
        return SharedPartitionSegment(
            header.generation,
            dict(shared_values),
            {index: self._cut(gradients, segments[index]) for index in header.gradient_indices},
            _state_by_parameter(header.state, shared_state),
            staging_buffer_id=answer.staging_buffer_id,
            described=list(header.state),
            shared_values=shared_values,
            shared_state=shared_state,
        )

    def _map(self, file: str, size_bytes: int) -> torch.Tensor:
        """Maps a whole file for reading and writing. uint8. [size_bytes]"""
        with opened(self._open_file(file, size_bytes=size_bytes)) as descriptor:
            memory = map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _cut(self, memory: torch.Tensor, segment: Segment) -> torch.Tensor:
        start = segment.start_bytes - self._location.start_bytes
        dtype = self._location.layout.parameters[segment.parameter_index].dtype
        return memory[start : start + segment.size_bytes].view(getattr(torch, dtype))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    return chunk_streams.memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def _state_by_parameter(
    entries: Iterable[shard_pb2.StateTensor], tensors: Iterable[torch.Tensor]
) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for entry, tensor in zip(entries, tensors, strict=True):
        state.setdefault(entry.parameter_index, {})[entry.name] = tensor.item() if entry.is_number else tensor
    return state


def _describe(
    location: PartitionLocation, index: int, name: object, value: object
) -> tuple[shard_pb2.StateTensor, torch.Tensor]:
    number = type(value) in _NUMBER_DTYPES
    tensor = torch.tensor(value, dtype=_NUMBER_DTYPES[type(value)]) if number else value
    dtype = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, torch.Tensor) else type(value).__name__
    if not isinstance(tensor, torch.Tensor) or not isinstance(name, str) or dtype not in DTYPE_NUMBERS:
        raise UsageError(
            f"parameter {location.layout.parameters[index].name!r}: its optimizer state {name!r} has type {dtype}; "
            "shard servers store only tensors and numbers under string names"
        )
    tensor = tensor.detach().cpu().contiguous()
    return shard_pb2.StateTensor(
        parameter_index=index, name=name, dtype=DTYPE_NUMBERS[dtype], shape=tensor.shape, is_number=number
    ), tensor


def _view(memory: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.view(getattr(torch, dtype)).view(shape)


def _copy_unless_same(tensor: torch.Tensor, place: torch.Tensor) -> None:
    if tensor.data_ptr() != place.data_ptr():
        place.copy_(tensor)
