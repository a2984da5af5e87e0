"""One shard of a unit as this trainer reaches it: which transport its bytes take, and in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from shardwell.data_plane.encoded_gradients import EncodedGradients
from shardwell.data_plane.host_cache import CachedShard
from shardwell.memory.buffer_pool import BufferPool
from shardwell.transport.base import Nearly, unheard
from shardwell.transport.selector import ServerConnection
from shardwell.transport.shared_vector import SharedVector
from shardwell.transport.shm_transport import LaidPart
from shardwell_wire import wire_dtypes
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import CapacityError
from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.quantization_blocks import bytes_tensor
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.stream_plan import InParameters, InVector, RangePlans, StreamPlan
from shardwell_wire.v1 import shard_pb2
from shardwell_wire.wire_dtypes import AS_STORED, WireDtype

_IDLE_BYTES = 64 << 20

_RETRY_S = 2.0
"""How often the coordinator is asked, at least, why a server cannot be reached."""


@dataclass(frozen=True)
class Wire:
    """How one trainer's floats travel, and how long it waits."""

    gather_dtype: WireDtype = AS_STORED
    push_dtype: WireDtype = AS_STORED
    wait_limit_s: float = 600.0
    """The longest wait for a version to exist, or for a lost server to return."""
    encoded: BufferPool = field(default_factory=lambda: BufferPool(_IDLE_BYTES))
    """For what travels in another dtype."""


class RemoteShard:
    """The range of a unit's flat vector that one server owns.

    With a lossy dtype values are rounded on every transport, also where they do not travel: what comes out
    must not depend on the transport.

    Args:
        run: The run.
        layout: Of the unit.
        server: The owner.
        start_bytes: Half-open range of the flat vector.
        stop_bytes: Its end.
        wire: How values travel.
    """

    def __init__(
        self,
        run: RunIdentity,
        layout: UnitLayout,
        server: ServerConnection,
        start_bytes: int,
        stop_bytes: int,
        wire: Wire,
    ) -> None:
        self._run, self._layout, self.server, self._wire = run, layout, server, wire
        self.start_bytes, self.stop_bytes = start_bytes, stop_bytes
        self._plans = RangePlans(layout, start_bytes, stop_bytes)
        self.window: SharedVector | None = None
        """The shard in shared memory, if its server is on this host."""
        self.cached: CachedShard | None = None
        """The shard in this host's cache, as ``wire`` rounds it; if it has one, it is fetched into that only."""

    def narrowed(self, start_bytes: int, stop_bytes: int) -> RemoteShard:
        """A range inside this one, streamed as it is stored."""
        return RemoteShard(self._run, self._layout, self.server, start_bytes, stop_bytes, self._wire)

    @property
    def is_streamed(self) -> bool:
        """Whether it comes over a connection, as it is stored."""
        return self.window is None and self.cached is None and self._wire.gather_dtype == AS_STORED

    # ---- gathering ----

    def fetch(self, version: int | None, target: memoryview, nearly: Nearly = unheard, *, exact: bool = False) -> int:
        """Reads one version into ``target``, waiting until it exists; returns which.

        Args:
            version: None: the newest.
            target: Receives the range, padding included. [stop_bytes - start_bytes]
            nearly: See ``Transport``.
            exact: Without rounding.
        """
        wire_dtype = AS_STORED if exact else self._wire.gather_dtype
        if self.cached is not None and version is not None and wire_dtype == self._wire.gather_dtype:
            return self.cached.read(version, target, partial(self._fetch, version, wire_dtype))
        return self._fetch(version, wire_dtype, target, nearly)

    def _fetch(self, version: int | None, wire_dtype: WireDtype, target: memoryview, nearly: Nearly = unheard) -> int:
        if self.window is not None:
            return self._copy(self.window, version, wire_dtype, target)
        if wire_dtype == AS_STORED:
            return self._stream(version, wire_dtype, target, nearly)
        plan = self._plans.plan(None, wire_dtype)
        with self._wire.encoded.acquired(plan.size_bytes) as encoded:
            fetched = self._stream(version, wire_dtype, encoded, nearly)
            plan.decode(encoded, self._in_vector(target))
        return fetched

    def fetch_cast(self, version: int, layout: UnitLayout, target: memoryview, nearly: Nearly = unheard) -> int:
        """Reads one version as other dtypes than it is stored in, with as few copies as its way here allows.

        Args:
            version: Waited for until it exists.
            layout: The unit's parameters in the dtypes to deliver.
            target: The whole unit's flat vector in that layout; receives this shard's values. [layout.size_bytes]
            nearly: See ``Transport``.
        """
        outs = self._views(layout, target, 0)
        if (
            self.cached is None
            and self.window is not None
            and (not self._wire.gather_dtype or self._travels_as(layout))
        ):
            there = self._await_server(version)
            _copy(self._views(self._layout, _memory_of(self.window), self.start_bytes), outs)
            self.window.check(there)
            return there
        if self.cached is None and self.window is None and self._travels_as(layout):
            with self._wire.encoded.acquired(sum(out.nbytes for out in outs)) as encoded:
                fetched = self._stream(version, self._wire.gather_dtype, encoded, nearly)
                parts = torch.split(bytes_tensor(encoded), [out.nbytes for out in outs])
                _copy(parts, [out.view(torch.uint8) for out in outs])
            return fetched
        with self._wire.encoded.acquired(self.stop_bytes - self.start_bytes) as stored:
            fetched = self.fetch(version, stored, nearly)
            _copy(self._views(self._layout, stored, self.start_bytes), outs)
        return fetched

    def _travels_as(self, layout: UnitLayout) -> bool:
        """Whether the values have a layout's dtypes on the wire."""
        return all(
            own.dtype == other.dtype
            if own.dtype != "float32"
            else wire_dtypes.NAMES.get(other.dtype) == self._wire.gather_dtype
            for own, other in zip(self._layout.parameters, layout.parameters, strict=True)
        )

    def _views(self, layout: UnitLayout, memory: memoryview, start_bytes: int) -> list[torch.Tensor]:
        """The range's parts of parameters, in memory laid out like a layout's flat vector from a byte on."""
        whole, views = bytes_tensor(memory), []
        for segment in self._plans.segments(None):
            parameter, start = layout.parameters[segment.parameter_index], layout.starts[segment.parameter_index]
            first, size = start - start_bytes, parameter.item_size
            part = whole[first + segment.start_element * size : first + segment.stop_element * size]
            views.append(part.view(getattr(torch, parameter.dtype)))
        return views

    def fetch_average(self, version: int, target: memoryview) -> int:
        """``fetch`` of the values' moving average."""
        return self._stream(version, AS_STORED, target, ema=True)

    def await_version(self, version: int | None) -> int:
        """Waits until a shard that is read in place is of a version; returns which it is."""
        if self.cached is not None and version is not None:
            return self.cached.ensure(version, partial(self._fetch, version, self._wire.gather_dtype))
        return self._await_server(version)

    def count_hit(self) -> None:
        """The version wanted was there when somebody looked."""
        if self.cached is not None:
            self.cached.count_hit()

    def _await_server(self, version: int | None) -> int:
        if self.window is not None and version is not None and self.window.shows(version):
            return version
        limit_s = self._wire.wait_limit_s
        there = self.server.through_shm(
            lambda transport: transport.locate(
                self._layout.unit, version, timeout_s=limit_s, retry_for_s=min(_RETRY_S, limit_s)
            )
        )
        return there.version

    def _stream(
        self,
        version: int | None,
        wire_dtype: WireDtype,
        target: memoryview,
        nearly: Nearly = unheard,
        *,
        ema: bool = False,
    ) -> int:
        request = shard_pb2.GatherRequest(
            run=self._run.name,
            run_id=self._run.run_id,
            unit=self._layout.unit,
            version=version,
            start_bytes=self.start_bytes,
            stop_bytes=self.stop_bytes,
            wire_dtype=wire_dtype,
            ema=ema,
        )
        limit_s = self._wire.wait_limit_s
        fetched = self.server.streamed(
            lambda transport: transport.gather(
                request, target, timeout_s=limit_s, retry_for_s=min(_RETRY_S, limit_s), nearly=nearly
            )
        )
        self.server.count(received_bytes=len(target))
        return fetched

    def _copy(self, window: SharedVector, version: int | None, wire_dtype: WireDtype, target: memoryview) -> int:
        there = self._await_server(version)
        if wire_dtype == AS_STORED:
            bytes_tensor(target).copy_(window.bytes)
        else:
            source, arrived = self._in_vector(_memory_of(window)), self._in_vector(target)
            self._plans.plan(None, wire_dtype).carry(source, arrived)
        window.check(there)
        return there

    def _in_vector(self, memory: memoryview) -> InVector:
        return InVector(memory, self.start_bytes)

    # ---- pushing ----

    def begin_send(
        self, header: shard_pb2.ReduceScatterHeader, flats: Mapping[int, torch.Tensor]
    ) -> Callable[[Nearly], None]:
        """Takes this shard's part of gradients.

        Args:
            header: All but the range and the dtype.
            flats: Whole gradients by parameter index; contiguous, on the CPU, without a graph. Each [numel].

        Returns:
            What pushes it and says when it is nearly done; may be called in another thread. It holds the gradients
            only if they are streamed: those that go through shared memory are copied already.
        """
        indices = self._address(header)
        wire_dtype = self._wire.push_dtype
        hand_over = self._try_lay(
            header,
            lambda laid: self._plans.plan(indices, wire_dtype).carry(InParameters(flats), self._in_vector(laid)),
        )
        if hand_over is not None:
            return hand_over
        if wire_dtype == AS_STORED:
            return partial(self._send_as_stored, header, self._plans.segments(indices), flats)
        header.wire_dtype = wire_dtype
        return partial(self._encode_and_send, header, self._plans.plan(indices, wire_dtype), flats)

    def begin_send_encoded(
        self, header: shard_pb2.ReduceScatterHeader, gradients: EncodedGradients
    ) -> Callable[[Nearly], None]:
        """Takes this shard's part of gradients that are encoded; see ``begin_send``."""
        indices, wire_dtype = self._address(header), gradients.wire_dtype
        part = gradients.stream[self._plans.part_of_unit(indices, wire_dtype)]
        hand_over = self._try_lay(
            header, lambda laid: self._plans.plan(indices, wire_dtype).decode(part, self._in_vector(laid))
        )
        if hand_over is not None:
            return hand_over
        header.wire_dtype = wire_dtype
        return partial(self._stream_out, header, [part])

    def _address(self, header: shard_pb2.ReduceScatterHeader) -> tuple[int, ...]:
        """Completes a header; returns the indices of its parameters."""
        header.start_bytes, header.stop_bytes = self.start_bytes, self.stop_bytes
        return tuple(header.parameter_indices)

    def _try_lay(
        self, header: shard_pb2.ReduceScatterHeader, write: Callable[[memoryview], None]
    ) -> Callable[[Nearly], None] | None:
        """What pushes gradients that were written to shared memory; None if they are to be streamed."""
        if not self.server.pushes_through_shm:
            return None
        try:
            laid = self.server.through_shm(lambda transport: transport.lay(header, write))
        except (CapacityError, OSError) as error:
            self.server.stream_gradients(error)
            return None
        return partial(self._hand_over, laid)

    def _hand_over(self, laid: LaidPart, nearly: Nearly) -> None:
        try:
            self.server.through_shm(lambda transport: transport.hand_over(laid, self._reduce_gradient_buffer))
        except CapacityError as error:  # its transport broke, and another one has no gradient buffer for it
            self.server.stream_gradients(error)
            segments = self._plans.segments(tuple(laid.header.parameter_indices))
            self._stream_out(laid.header, [laid.memory(at.start_bytes, at.stop_bytes) for at in segments], nearly)

    def _reduce_gradient_buffer(
        self, request: shard_pb2.ReduceGradientBufferRequest
    ) -> shard_pb2.ReduceGradientBufferResponse:
        limit_s = self._wire.wait_limit_s
        return self.server.controlled(
            lambda transport: transport.reduce_gradient_buffer(
                request, timeout_s=limit_s, retry_for_s=min(_RETRY_S, limit_s)
            )
        )

    def _send_as_stored(
        self,
        header: shard_pb2.ReduceScatterHeader,
        segments: Sequence[Segment],
        flats: Mapping[int, torch.Tensor],
        nearly: Nearly,
    ) -> None:
        self._stream_out(header, [_memory_in(flats[at.parameter_index], at) for at in segments], nearly)

    def _encode_and_send(
        self, header: shard_pb2.ReduceScatterHeader, plan: StreamPlan, flats: Mapping[int, torch.Tensor], nearly: Nearly
    ) -> None:
        with self._wire.encoded.acquired(plan.size_bytes) as encoded:
            plan.encode(InParameters(flats), encoded)
            self._stream_out(header, [encoded], nearly)

    def _stream_out(self, header: shard_pb2.ReduceScatterHeader, data: Sequence[memoryview], nearly: Nearly) -> None:
        limit_s = self._wire.wait_limit_s
        self.server.streamed(
            lambda transport: transport.reduce_scatter(
                header, data, timeout_s=limit_s, retry_for_s=min(_RETRY_S, limit_s), nearly=nearly
            )
        )
        self.server.count(sent_bytes=sum(len(part) for part in data))


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _memory_of(window: SharedVector) -> memoryview:
    return memory_at(window.bytes.data_ptr(), window.bytes.numel())


def _memory_in(flat: torch.Tensor, segment: Segment) -> memoryview:
    """A part of a parameter. gRPC may still read it when its rpc has failed, and so nobody else keeps it."""
    return memory_at(flat.data_ptr() + segment.start_element * flat.itemsize, segment.size_bytes, flat)
