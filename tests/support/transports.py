"""Inputs of transports in tests: a shard's address, memory that fetches fill, and gradients to push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardwell.transport.base import (
    Arrived,
    BatchAnswers,
    GradientPart,
    Incoming,
    NearlyDone,
    PartHeader,
    Place,
    PreparedPush,
    PushedRange,
    ShardAddress,
    ShardRead,
    StreamTransport,
    ignore,
)
from shardwell.transport.resending import ReachedServer
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import OneUnit


def address_of(one: OneUnit, window: SharedVector | None = None) -> ShardAddress:
    """Returns the address of a unit's shard."""
    return ShardAddress(one.identity, one.layout, one.start, one.stop, window)


def part_header(header: shard_pb2.ReduceScatterHeader | None = None, **fields: Any) -> PartHeader:
    """Returns the fields of a header that all shards of a unit have in common."""
    common = shard_pb2.ReduceScatterHeader()
    common.CopyFrom(header or shard_pb2.ReduceScatterHeader(**fields))
    part = PartHeader(common, common.part, list(common.dropped_indices), common.context.request_id, list(common.summed))
    common.context.request_id = ""
    for name in ("unit", "part", "parameter_indices", "start_bytes", "stop_bytes", "dropped_indices", "summed"):
        common.ClearField(name)
    return part


def unsent(shard: ShardAddress, header: shard_pb2.ReduceScatterHeader, gradients: GradientPart) -> PreparedPush:
    """Returns a push with a header that may not fit the shard."""
    cut = PushedRange(header.unit, header.start_bytes, header.stop_bytes, header.parameter_indices)
    return PreparedPush(shard, cut, part_header(header), gradients)


@dataclass
class Target:
    """A shard's bytes, as stored. A ``FetchTarget``."""

    bytes: torch.Tensor
    wire_dtype: WireDtype = AS_STORED

    def incoming(self) -> AbstractContextManager[Incoming]:
        return nullcontext(Incoming(memory_at(self.bytes.data_ptr(), self.bytes.numel(), self.bytes)))

    def copy_from(self, window: SharedVector) -> None:
        self.bytes.copy_(window.bytes)


@dataclass
class Gradients:
    """One tensor per segment of a shard. A ``GradientPart``."""

    one: OneUnit
    tensors: Sequence[torch.Tensor]
    wire_dtype: WireDtype = AS_STORED

    def write_to(self, memory: memoryview) -> None:
        for at, tensor in zip(self.one.segments, self.tensors, strict=True):
            start, stop = at.start_bytes - self.one.start, at.stop_bytes - self.one.start
            memory[start:stop] = memory_at(tensor.data_ptr(), tensor.nbytes, tensor)

    @contextmanager
    def stream(self) -> Iterator[Sequence[memoryview]]:
        yield [memory_at(tensor.data_ptr(), tensor.nbytes, tensor) for tensor in self.tensors]


class FakeStream(StreamTransport):
    """A stream transport without a server. Tests override ``fetch_stream`` and ``push_stream``."""

    name, kind, broke = "fake", common_pb2.TRANSPORT_KIND_GRPC, False

    def fetch_stream(self, request: shard_pb2.GatherRequest, place: Place, **_: Any) -> int:
        raise NotImplementedError

    def push_stream(self, header: shard_pb2.ReduceScatterHeader, pieces: Sequence[memoryview], **_: Any) -> Any:
        raise NotImplementedError

    def control(self, request: shard_pb2.ReduceGradientBufferRequest, **_: Any) -> Any:
        raise NotImplementedError

    def fetch_batch(self, request: shard_pb2.GatherBatchRequest, answers: BatchAnswers, **_: Any) -> None:
        raise NotImplementedError

    def push_batch(self, request: shard_pb2.ReduceBatchRequest, **_: Any) -> Any:
        raise NotImplementedError

    def measure_stream(self, size_bytes: int, **_: Any) -> float:
        raise NotImplementedError

    def close(self) -> None:
        pass


class StreamedServer(ReachedServer):
    """A ``ServerConnection`` with a single stream transport."""

    copies_gradients = False

    def __init__(self, stream: StreamTransport) -> None:
        super().__init__("s:1")
        self.stream = stream

    def fetch(self, read: ShardRead, *, wait_s: float, timeout_s: float, nearly_done: NearlyDone = ignore) -> int:
        return self.stream.fetch(read, wait_s=wait_s, timeout_s=timeout_s, nearly_done=nearly_done)

    def copy_at_once(self, push: PreparedPush) -> PreparedPush | None:
        return None

    def prepare_push(self, push: PreparedPush) -> PreparedPush:
        return push

    def push(self, prepared: PreparedPush, *, timeout_s: float, nearly_done: NearlyDone = ignore) -> None:
        self.stream.push(prepared, timeout_s=timeout_s, nearly_done=nearly_done)

    def push_batch(self, prepared: Sequence[PreparedPush], *, wait_limit_s: float) -> list[bool]:
        for each in prepared:
            self.push(each, timeout_s=wait_limit_s)
        return [True] * len(prepared)

    def fetch_batch(self, reads: Sequence[ShardRead], arrived: Arrived, *, wait_limit_s: float) -> None:
        for number, each in enumerate(reads):
            arrived(number, self.fetch(each, wait_s=wait_limit_s, timeout_s=wait_limit_s))
