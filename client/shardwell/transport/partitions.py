"""How a partition's values, gradient and optimizer state travel between a trainer and one shard server, as streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwell.transport.grpc_transport import ShardClient
from shardwell_wire import codec
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import DTYPE_NAMES, DTYPE_NUMBERS, Segment, UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2

_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class PartitionLocation:
    """The part of one data rank's partition of a unit that one server owns."""

    layout: UnitLayout
    dp_rank: int
    start_bytes: int
    """Half-open range of the unit's flat vector; not empty."""
    stop_bytes: int

    @property
    def segments(self) -> list[Segment]:
        """The parts of parameters in it."""
        return self.layout.segments(self.start_bytes, self.stop_bytes)


@dataclass
class PartitionSegment:
    """What an optimizer needs of a partition: one entry per parameter that has elements in it, by layout index."""

    generation: int
    """Names the gradient, for the server."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """Each [elements in the partition]."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of the parameters that have one; likewise."""
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What the optimizer keeps of a parameter: tensors and numbers by name."""

    @property
    def kept_bytes(self) -> int:
        """What values and state take."""
        state = (value for entry in self.state.values() for value in entry.values())
        tensors = [*self.values.values(), *(value for value in state if isinstance(value, torch.Tensor))]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class CachedPartition:
    """Values and state that were staged from here, and of which the server may have no others by now."""

    request_id: str
    """Of the request that staged them."""
    part: PartitionSegment


def read_request(
    place: PartitionLocation, context: common_pb2.RequestContext, held: CachedPartition | None = None
) -> shard_pb2.ReadPartitionRequest:
    """What asks for a partition."""
    return shard_pb2.ReadPartitionRequest(
        context=context,
        unit=place.layout.unit,
        dp_rank=place.dp_rank,
        start_bytes=place.start_bytes,
        stop_bytes=place.stop_bytes,
        cached_request_id="" if held is None else held.request_id,
    )


def read_partition(
    client: ShardClient,
    place: PartitionLocation,
    context: common_pb2.RequestContext,
    *,
    timeout_s: float,
    held: CachedPartition | None = None,
) -> PartitionSegment:
    """Fetches a partition of a prepared step; of one that is held here and is still what the server has, the gradient.

    Raises:
        StepStateError: The step is not prepared, or not any more.
        StaleEpochError: The partition went to another trainer.
    """
    request = read_request(place, context, held)

    def fetch() -> PartitionSegment:
        incoming = None
        for data in client.byte_response_stub("ReadPartition")(request, timeout=timeout_s):
            message, chunk = codec.decode_message(data, shard_pb2.ReadPartitionResponse)
            incoming = incoming or _Incoming(place, message.header, held)
            incoming.receiver.feed(chunk)
        assert incoming is not None
        return incoming.finish()

    return client.attempt(fetch, retry_for_s=timeout_s)


def describe_state(
    place: PartitionLocation, part: PartitionSegment
) -> list[tuple[shard_pb2.StateTensor, torch.Tensor]]:
    """An optimizer's state as it is sent, in a row.

    Raises:
        UsageError: Something in it is neither a tensor nor a number.
    """
    return [
        _describe(place, index, name, value) for index, entry in part.state.items() for name, value in entry.items()
    ]


def stage_header(
    place: PartitionLocation,
    context: common_pb2.RequestContext,
    part: PartitionSegment,
    state: Iterable[tuple[shard_pb2.StateTensor, torch.Tensor]],
) -> shard_pb2.StagePartitionHeader:
    """What announces new values and new state."""
    return shard_pb2.StagePartitionHeader(
        context=context,
        unit=place.layout.unit,
        dp_rank=place.dp_rank,
        start_bytes=place.start_bytes,
        stop_bytes=place.stop_bytes,
        generation=part.generation,
        parameter_indices=sorted(part.gradients),
        state=[description for description, _ in state],
    )


def stage_partition(
    client: ShardClient,
    place: PartitionLocation,
    context: common_pb2.RequestContext,
    part: PartitionSegment,
    *,
    timeout_s: float,
    share_state: bool = False,
) -> None:
    """Sends the new values of the parameters that have a gradient, and the whole new state.

    Args:
        client: Calls the server.
        place: Of the partition.
        context: Names the request; what it sends may be held under its id.
        part: What is sent.
        timeout_s: How long it may take.
        share_state: Whether the state shall be found in shared memory next time.

    Raises:
        StepStateError: The gradient is another by now.
        StaleEpochError: The partition went to another trainer.
        NonFiniteError: A value is NaN or infinity.
        CapacityError: The server has no room for it.
    """
    state = describe_state(place, part)
    header = stage_header(place, context, part, state)
    header.share_state = share_state
    tensors = [part.values[index] for index in sorted(part.gradients)] + [tensor for _, tensor in state]
    first = shard_pb2.StagePartitionRequest(header=header)

    def send() -> None:
        stream = codec.encode_stream(first, [_memory(tensor) for tensor in tensors])
        client.byte_request_stub("StagePartition")(stream, timeout=timeout_s)

    client.attempt(send, retry_for_s=timeout_s)


class _Incoming:
    """A partition that is being received: tensors in the order of the stream."""

    def __init__(
        self, place: PartitionLocation, header: shard_pb2.ReadPartitionHeader, held: CachedPartition | None
    ) -> None:
        self._header, self._held = header, held if header.cache_is_current else None
        segments = {segment.parameter_index: segment for segment in place.segments}

        def like(index: int) -> torch.Tensor:
            segment, parameter = segments[index], place.layout.parameters[index]
            return torch.empty(segment.stop_element - segment.start_element, dtype=getattr(torch, parameter.dtype))

        self._values = {} if header.cache_is_current else {index: like(index) for index in segments}
        self._gradients = {index: like(index) for index in header.gradient_indices}
        self._state = [
            torch.empty(tuple(entry.shape), dtype=getattr(torch, DTYPE_NAMES[entry.dtype])) for entry in header.state
        ]
        targets = [*self._values.values(), *self._gradients.values(), *self._state]
        self.receiver = codec.StreamReceiver(list(map(_memory, targets)), f"partition of unit {place.layout.unit!r}")

    def finish(self) -> PartitionSegment:
        """What came; raises ChunkError if the stream ended early."""
        self.receiver.require_complete()
        if self._held is not None:
            kept = self._held.part
            return PartitionSegment(self._header.generation, kept.values, self._gradients, kept.state)
        state: dict[int, dict[str, Any]] = {}
        for entry, tensor in zip(self._header.state, self._state, strict=True):
            value = tensor.item() if entry.is_number else tensor
            state.setdefault(entry.parameter_index, {})[entry.name] = value
        return PartitionSegment(self._header.generation, self._values, self._gradients, state)


def _memory(tensor: torch.Tensor) -> memoryview:
    return codec.memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def _describe(
    place: PartitionLocation, index: int, name: object, value: object
) -> tuple[shard_pb2.StateTensor, torch.Tensor]:
    """How one entry of an optimizer's state is sent.

    Raises:
        UsageError: It is neither a tensor nor a number.
    """
    number = type(value) in _NUMBER_DTYPES
    tensor = torch.tensor(value, dtype=_NUMBER_DTYPES[type(value)]) if number else value
    dtype = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, torch.Tensor) else type(value).__name__
    if not isinstance(tensor, torch.Tensor) or not isinstance(name, str) or dtype not in DTYPE_NUMBERS:
        raise UsageError(
            f"the optimizer keeps {name!r} of type {dtype} for parameter {place.layout.parameters[index].name!r}: "
            "only tensors and numbers under string names can be kept on the shard servers"
        )
    tensor = tensor.detach().cpu().contiguous()
    return shard_pb2.StateTensor(
        parameter_index=index, name=name, dtype=DTYPE_NUMBERS[dtype], shape=tensor.shape, is_number=number
    ), tensor
