"""A partition in shared memory: where its server laid the gradient, and where the new values and the new state go."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwell.transport.partitions import PartitionLocation, PartitionSegment
from shardwell.transport.shared_vector import map_shared
from shardwell_wire.layout import DTYPE_NAMES, Segment
from shardwell_wire.partitions import state_places, values_offset
from shardwell_wire.shared_files import file_size, open_in_folder, opened
from shardwell_wire.v1 import shard_pb2


@dataclass
class StagingBufferPart(PartitionSegment):
    """A partition on a staging buffer. What is changed in place lies where it is staged from."""

    staging_buffer: int = 0
    """Names it, for the server."""
    described: list[shard_pb2.StateTensor] = field(default_factory=list)
    """The state that there is room for."""
    values_in_staging_buffer: dict[int, torch.Tensor] = field(default_factory=dict)
    state_in_staging_buffer: list[torch.Tensor] = field(default_factory=list)

    def lay_back(self, state: list[tuple[shard_pb2.StateTensor, torch.Tensor]]) -> bool:
        """Copies to the staging buffer what the optimizer put elsewhere; False if the state does not fit there."""
        if [description for description, _ in state] != self.described:
            return False
        for (_, tensor), place in zip(state, self.state_in_staging_buffer, strict=True):
            _copy_unless_same(tensor, place)
        for index in self.gradients:
            _copy_unless_same(self.values[index], self.values_in_staging_buffer[index])
        return True


class StagingBuffer:
    """This trainer's staging buffer for one part of a partition, as far as it is mapped.

    Args:
        place: Of the partition.
    """

    def __init__(self, place: PartitionLocation) -> None:
        self._place = place
        self._mapped: dict[str, torch.Tensor] = {}

    def lay_out(self, answer: shard_pb2.OpenStagingBufferResponse, values: torch.Tensor) -> StagingBufferPart:
        """A partition to be updated in place.

        Args:
            answer: What the server said.
            values: The present values, anywhere. uint8. [stop_bytes - start_bytes]

        Raises:
            OSError: The staging buffer cannot be mapped here.
        """
        header, place = answer.header, self._place
        values_at = values_offset(place.start_bytes, place.stop_bytes)
        state_ranges, state_bytes = state_places(header.state)
        sizes = {answer.path: values_at + place.stop_bytes - place.start_bytes}
        if answer.state_path:
            sizes.update({answer.state_path: state_bytes, answer.new_state_path: state_bytes})
        # Those of the step before that are not named any more are unmapped.
        self._mapped = {path: self._mapped[path] if path in self._mapped else _map(path, sizes[path]) for path in sizes}
        staging_buffer = self._mapped[answer.path]
        new_values = staging_buffer[values_at:]
        new_values.copy_(values)
        if answer.state_path:
            self._mapped[answer.new_state_path].copy_(self._mapped[answer.state_path])
        in_staging_buffer = [
            _view(self._mapped[answer.new_state_path][start:stop], DTYPE_NAMES[entry.dtype], tuple(entry.shape))
            for entry, (start, stop) in zip(header.state, state_ranges, strict=True)
        ]
        state: dict[int, dict[str, Any]] = {}
        for entry, tensor in zip(header.state, in_staging_buffer, strict=True):
            state.setdefault(entry.parameter_index, {})[entry.name] = tensor.item() if entry.is_number else tensor
        segments = {segment.parameter_index: segment for segment in place.segments}
        own = {index: self._cut(new_values, segment) for index, segment in segments.items()}
        return StagingBufferPart(
            header.generation,
            dict(own),
            {index: self._cut(staging_buffer, segments[index]) for index in header.gradient_indices},
            state,
            staging_buffer=answer.staging_buffer_id,
            described=list(header.state),
            values_in_staging_buffer=own,
            state_in_staging_buffer=in_staging_buffer,
        )

    def _cut(self, memory: torch.Tensor, segment: Segment) -> torch.Tensor:
        start = segment.start_bytes - self._place.start_bytes
        dtype = self._place.layout.parameters[segment.parameter_index].dtype
        return memory[start : start + segment.size_bytes].view(getattr(torch, dtype))


def _view(memory: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.view(getattr(torch, dtype)).view(shape)


def _copy_unless_same(tensor: torch.Tensor, place: torch.Tensor) -> None:
    if tensor.data_ptr() != place.data_ptr():
        place.copy_(tensor)


def _map(path: str, size_bytes: int) -> torch.Tensor:
    """A whole file, to be read and written. uint8. [size_bytes]"""
    with opened(open_in_folder(path, write=True, size_bytes=file_size(size_bytes))) as descriptor:
        return torch.frombuffer(map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)
