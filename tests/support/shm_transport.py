"""Units of a shard server, reached over the shared-memory transport."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any, Literal

import torch

from shardwell.transport.base import PreparedPush, StreamTransport
from shardwell.transport.grpc_transport import GrpcTransport
from shardwell.transport.shared_vector import SegmentLocation, SharedVector
from shardwell.transport.shm_transport import ShmTransport
from shardwell.transport.socket_transport import SocketTransport
from shardwell_server.shard.transports.shm_buffers import SharedGradientBuffer
from shardwell_server.shard.transports.shm_transport import PROOF_FILE_BYTES
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import OneUnit, ShardServer
from tests.support.transports import Gradients, address_of, unsent


def header(
    one: OneUnit, *, step: int = 0, rank: int = 0, epoch: int = 1, **changes: Any
) -> shard_pb2.ReduceScatterHeader:
    fields = {
        "context": one.context(step, epoch),
        "unit": one.layout.unit,
        "dp_rank": rank,
        "parameter_indices": [segment.parameter_index for segment in one.segments],
        "start_bytes": one.start,
        "stop_bytes": one.stop,
    }
    return shard_pb2.ReduceScatterHeader(**{**fields, **changes})


class ConnectedUnit:
    """One unit of a server, reached over the shared-memory transport.

    Args:
        one: The unit.
        control: Transport of the messages about gradient buffers.
    """

    def __init__(self, one: OneUnit, control: Literal["grpc", "socket"] = "grpc") -> None:
        self.one, self.server = one, one.server
        self.transport = ShmTransport(self.server.client, one.identity, self._control, timeout_s=20.0)
        self._ends = ExitStack()
        self._ends.callback(self.transport.close)
        self.control: StreamTransport = GrpcTransport(self.server.client)
        if control == "socket":
            self.control = self._ends.enter_context(closing(SocketTransport(self.server.client, one.identity)))

    def __enter__(self) -> ConnectedUnit:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def locate(self, version: int | None = None, *, timeout_s: float = 20.0) -> shard_pb2.LocateShardResponse:
        return self.transport.locate(address_of(self.one), version, timeout_s=timeout_s)

    def vector(self) -> SharedVector:
        file = self.locate().segment.file
        place = SegmentLocation(file, self.one.start, self.one.stop, self.transport.open_file)
        return SharedVector(self.one.layout.unit, [place])

    def header(self, **options: Any) -> shard_pb2.ReduceScatterHeader:
        return header(self.one, **options)

    def push(self, gradients: list[torch.Tensor], **changes: Any) -> None:
        self.transport.push(self.prepare(gradients, **changes), timeout_s=20.0)

    def prepare(self, gradients: list[torch.Tensor], **changes: Any) -> PreparedPush:
        part = Gradients(self.one, gradients)
        return self.transport.prepare_push(unsent(address_of(self.one), self.header(**changes), part))

    def _control(
        self, request: shard_pb2.ReduceGradientBufferRequest, timeout_s: float = 20.0
    ) -> shard_pb2.ReduceGradientBufferResponse:
        return self.control.control(request, timeout_s=timeout_s)

    def open_gradient_buffer(self, **changes: Any) -> shard_pb2.OpenGradientBufferResponse:
        identity = self.one.identity
        fields = {
            "run": identity.name,
            "run_id": identity.run_id,
            "unit": self.one.layout.unit,
            "transport_id": self.transport.session_id,
        }
        answer: shard_pb2.OpenGradientBufferResponse = self.server.call(
            "OpenGradientBuffer", shard_pb2.OpenGradientBufferRequest(**{**fields, **changes})
        )
        return answer

    def reduce(
        self, gradient_buffer: int, *, transport_id: str | None = None, **changes: Any
    ) -> shard_pb2.ReduceGradientBufferResponse:
        request = shard_pb2.ReduceGradientBufferRequest(
            header=self.header(**changes),
            transport_id=self.transport.session_id if transport_id is None else transport_id,
            gradient_buffer_id=gradient_buffer,
        )
        return self._control(request)

    def gradient_buffers(self) -> list[SharedGradientBuffer]:
        """Returns the server's gradient buffers of the session."""
        return self.server.evaluate(
            lambda: list(self.server.shm._open[self.transport.session_id]._gradient_buffers.values())
        )


def shared_bytes(server: ShardServer) -> int:
    """Returns the size of shards and gradient buffers, without the proof file that all sessions share."""
    return server.evaluate(lambda: _bytes_of_units(server))


def _bytes_of_units(server: ShardServer) -> int:
    """See ``shared_bytes``. Called on the server's event loop."""
    return server.store.memory._shared_bytes - bool(server.shm._open) * PROOF_FILE_BYTES


def assert_only_parameters(one: OneUnit) -> None:
    """Checks that no gradient buffer counts against the budget, and that nothing is staged."""
    server = one.server
    server.until(lambda: _bytes_of_units(server) == one.size, "gradient buffers are released")
    assert (server.taken_bytes(), server.unreserved_bytes()) == (0, 0)
    assert server.evaluate(lambda: one.shard.gradient.quota._free_count) == one.dp
