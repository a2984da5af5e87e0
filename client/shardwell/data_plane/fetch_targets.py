"""Memory that receives the values of one fetch, in the stored dtypes or in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from shardwell.data_plane.kept_streams import DecodedStream, KeptStream, receiving
from shardwell.memory.buffers import BufferPool
from shardwell.transport.base import Incoming, ShardAddress, Since
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.encoding import wire_dtypes
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.encoding.shard_changes import ShardChanges, Span
from shardwell_wire.encoding.streams import InVector, RangePlans, StreamPlan
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2


@dataclass(slots=True, eq=False)
class RangeTarget:
    """Memory laid out like the shard, in the stored dtypes. A ``FetchTarget``."""

    plans: RangePlans
    wire_dtype: WireDtype
    start_bytes: int
    memory: memoryview
    buffers: BufferPool
    kept: KeptStream | DecodedStream | None = None
    """The stream that this trainer has already. None: it keeps none."""

    def incoming(self) -> AbstractContextManager[Incoming]:
        if self.wire_dtype == AS_STORED:
            return nullcontext(Incoming(self.memory))
        return receiving(self._plan().size_bytes, self.decode, self.buffers, self.kept)

    def is_kept(self, version: int) -> bool:
        """Whether the kept stream has a version now."""
        return isinstance(self.kept, KeptStream) and self.kept.shows(version)

    def read_kept(self, version: int | None) -> bool:
        """Decodes the kept stream if it has a version; returns whether it does."""
        return isinstance(self.kept, KeptStream) and self.kept.read(version, self.decode)

    def decode(self, stream: memoryview) -> None:
        """Decodes a whole stream."""
        self._plan().decode(stream, InVector(self.memory, self.start_bytes))

    def encode(self, stream: memoryview) -> None:
        """Encodes the values."""
        self._plan().encode(InVector(self.memory, self.start_bytes), stream)

    def _plan(self) -> StreamPlan:
        return self.plans.plan(None, self.wire_dtype)

    def copy_from(self, window: SharedVector) -> None:
        if self.wire_dtype == AS_STORED:
            bytes_tensor(self.memory).copy_(window.bytes)
            return
        source, target = InVector(_memory_of(window), self.start_bytes), InVector(self.memory, self.start_bytes)
        self._plan().round_trip(source, target)


class IncomingChanges(Incoming):
    """What has changed in a shard since a version, or its whole stream. Also the ``FetchTarget`` that receives it.

    Args:
        spans: The segments of the shard in its stream.
        whole: Receives the whole shard, if the server sends it.
    """

    def __init__(self, spans: Sequence[Span], since: Since, whole: RangeTarget, stream_bytes: int, what: str) -> None:
        self._spans, self.since, self._whole, self._what = spans, since, whole, what
        self.wire_dtype, self._stream_bytes, self._received = whole.wire_dtype, stream_bytes, bytearray()
        self._takes_differences, self._has_changes, self._has_differences = since.has_values, False, False
        self.changes: ShardChanges | None = None
        """What has changed. None: ``whole`` has the values."""

    def incoming(self) -> AbstractContextManager[Incoming]:
        return nullcontext(self)

    def copy_from(self, window: SharedVector) -> None:
        self._whole.copy_from(window)

    def place(self, version: int, deltas: shard_pb2.StreamDeltas | None) -> memoryview:
        """See ``Incoming``."""
        sizes = [] if deltas is None else list(deltas.sizes_bytes)
        self._has_changes, self.received_bytes = bool(sizes), sum(sizes) if sizes else self._stream_bytes
        if self.received_bytes > self._stream_bytes:
            raise CorruptDataError(
                f"{self._what}: the server announces {self.received_bytes} bytes of changes, expected at most "
                f"{self._stream_bytes}"
            )
        self._has_differences = self._takes_differences and deltas is not None and deltas.has_differences
        self._received = bytearray(self.received_bytes)
        return memoryview(self._received)

    def finish(self) -> None:
        """See ``Incoming``."""
        if self._has_changes:
            received, size_bytes = self._received, self._stream_bytes
            self.changes = ShardChanges.decode(self._spans, received, size_bytes, self._what, self._has_differences)
        elif self.wire_dtype == AS_STORED:
            self._whole.memory[:] = self._received
        else:
            self._whole.decode(memoryview(self._received))


@dataclass(slots=True, eq=False)
class CastTarget:
    """A unit's flat vector in other dtypes than the stored ones. A ``FetchTarget``."""

    address: ShardAddress
    plans: RangePlans
    wire_dtype: WireDtype
    buffers: BufferPool
    layout: UnitLayout
    """The dtypes to deliver."""
    memory: memoryview
    """The whole flat vector. [layout.size_bytes]"""
    kept: KeptStream | None = None
    """The stream that this trainer has already. None: it keeps none."""

    def incoming(self) -> AbstractContextManager[Incoming]:
        is_stored = self.wire_dtype == AS_STORED and not self._travels_as_delivered()
        size_bytes = (
            self.address.stop_bytes - self.address.start_bytes
            if is_stored
            else self.plans.plan(None, self.wire_dtype).size_bytes
        )
        return receiving(size_bytes, self.deliver_stored if is_stored else self.deliver, self.buffers, self.kept)

    def is_kept(self, version: int) -> bool:
        """Whether the kept stream has a version now."""
        return self.kept is not None and self.kept.shows(version)

    def read_kept(self, version: int | None) -> bool:
        """Delivers the kept stream if it has a version; returns whether it does."""
        return self.kept is not None and self.kept.read(version, self.deliver)

    def deliver(self, stream: memoryview) -> None:
        """Converts a whole encoded stream."""
        if not self._travels_as_delivered():
            with self._stored() as stored:
                stored.decode(stream)
            return
        outs = [out.view(torch.uint8) for out in self._outs()]
        copy_all(torch.split(bytes_tensor(stream), [out.numel() for out in outs]), outs)

    def deliver_stored(self, memory: memoryview) -> None:
        """Converts values in the stored dtypes, laid out like the shard."""
        copy_all(self._views_of(memory), self._outs())

    def copy_from(self, window: SharedVector) -> None:
        if self.wire_dtype == AS_STORED or self._travels_as_delivered():
            copy_all(self._views_of(_memory_of(window)), self._outs())
            return
        with self._stored() as stored:
            stored.copy_from(window)

    @contextmanager
    def _stored(self) -> Iterator[RangeTarget]:
        """Returns a target in the stored dtypes. Its values are cast when the context ends without an error."""
        start_bytes, stop_bytes = self.address.start_bytes, self.address.stop_bytes
        with self.buffers.acquired(stop_bytes - start_bytes) as memory:
            yield RangeTarget(self.plans, self.wire_dtype, start_bytes, memory, self.buffers)
            self.deliver_stored(memory)

    def _travels_as_delivered(self) -> bool:
        """Whether the values have the delivered dtypes on the wire."""
        return all(
            own.dtype == other.dtype
            if own.dtype != "float32"
            else wire_dtypes.GATHER_NAMES.get(other.dtype) == self.wire_dtype
            for own, other in zip(self.address.layout.parameters, self.layout.parameters, strict=True)
        )

    def _views_of(self, memory: memoryview) -> list[torch.Tensor]:
        return views(self.plans, self.address.layout, memory, self.address.start_bytes)

    def _outs(self) -> list[torch.Tensor]:
        return views(self.plans, self.layout, self.memory, 0)


CopyToDevice = Callable[[int, torch.Tensor], None]
"""Copies a part of a unit's flat vector, as it is stored, to a GPU, and waits for the copy: ``(start_bytes, part)``.

The part may be in memory that is registered with CUDA. uint8. [part_bytes]
"""


@dataclass(slots=True, eq=False)
class DeviceTarget:
    """A shard's range of a vector on a GPU, which casts the stored values itself. A ``FetchTarget``."""

    start_bytes: int
    stop_bytes: int
    copy: CopyToDevice
    buffers: BufferPool
    wire_dtype = AS_STORED
    kept = None

    def incoming(self) -> AbstractContextManager[Incoming]:
        # The shard has moved out of this process's memory since the fetch was prepared.
        return receiving(self.stop_bytes - self.start_bytes, self.deliver_stored, self.buffers)

    def deliver_stored(self, memory: memoryview) -> None:
        """Copies values in the stored dtypes, laid out like the shard."""
        self.copy(self.start_bytes, bytes_tensor(memory))

    def copy_from(self, window: SharedVector) -> None:
        source = window.registered
        self.copy(self.start_bytes, window.bytes if source is None else source)


def views(plans: RangePlans, layout: UnitLayout, memory: memoryview, start_bytes: int) -> list[torch.Tensor]:
    """Returns the range's segments of parameters as views of memory.

    Args:
        layout: The dtypes of the memory.
        memory: Laid out like a part of the layout's flat vector.
        start_bytes: Offset of the memory in the flat vector.
    """
    whole, views = bytes_tensor(memory), []
    for segment in plans.segments(None):
        parameter, start = layout.parameters[segment.parameter_index], layout.starts[segment.parameter_index]
        first, size = start - start_bytes, parameter.item_size
        part = whole[first + segment.start_element * size : first + segment.stop_element * size]
        views.append(part.view(getattr(torch, parameter.dtype)))
    return views


def copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies tensors, and casts them to the dtypes of their targets."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _memory_of(window: SharedVector) -> memoryview:
    return memory_at(window.bytes.data_ptr(), window.bytes.numel(), window.bytes)
