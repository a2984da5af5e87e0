"""Units of a shard server, reached over the socket transport, and a peer that sends arbitrary bytes."""

from __future__ import annotations

import socket
import struct
from contextlib import closing
from typing import Any

import torch

from shardwell.transport.base import into
from shardwell.transport.socket_transport import SocketTransport
from shardwell_wire.connection import socket_frames
from shardwell_wire.connection.socket_frames import Kind
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import (
    ShardwellError,
    from_status_details,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import (
    PLAIN,
    ShardServer,
    unit,
)


class ConnectedUnit:
    """One unit of a server, reached over the socket transport."""

    def __init__(self, server: ShardServer, layout: UnitLayout = PLAIN, **options: Any) -> None:
        self.server, self.one = server, unit(server, layout, **options)
        self.transport = SocketTransport(server.client, self.one.identity)

    def gather(self, version: int | None = None, *, timeout_s: float = 20.0, **fields: Any) -> tuple[int, torch.Tensor]:
        flat = torch.empty(self.one.size, dtype=torch.uint8)
        request = self.one.gather_request(version, **fields)
        size = request.stop_bytes - request.start_bytes or self.one.size
        target = chunk_streams.memory_at(flat.data_ptr(), size, flat)
        return self.transport.fetch_stream(request, into(target), timeout_s=timeout_s), flat[:size]

    def header(self, *, step: int = 0, rank: int = 0, epoch: int = 1, **changes: Any) -> shard_pb2.ReduceScatterHeader:
        fields = {
            "context": self.one.context(step, epoch),
            "unit": self.one.layout.unit,
            "dp_rank": rank,
            "parameter_indices": [segment.parameter_index for segment in self.one.segments],
            "start_bytes": self.one.start,
            "stop_bytes": self.one.stop,
        }
        return shard_pb2.ReduceScatterHeader(**{**fields, **changes})

    def push(self, gradients: list[torch.Tensor], **changes: Any) -> shard_pb2.ReduceScatterResponse:
        pieces = [chunk_streams.memory_at(each.data_ptr(), each.nbytes, each) for each in gradients]
        return self.transport.push_stream(self.header(**changes), pieces, timeout_s=20.0)

    def connections(self) -> int:
        return self.server.evaluate(lambda: len(self.server.sockets._connections))

    def assert_no_push_is_kept(self) -> None:
        """Checks that the server keeps nothing of a push, and that none is in flight."""
        shard = self.one.shard
        self.server.until(lambda: len(shard.streams) == 0, "no stream is open")
        assert self.server.evaluate(lambda: shard.gradient.contributions.by_rank) == {}
        assert (self.server.taken_bytes(), self.server.unreserved_bytes()) == (self.one.size, 0)


class closing_transport(closing[Any]):
    def __init__(self, connected: ConnectedUnit) -> None:
        super().__init__(connected.transport)
        self.connected = connected

    def __enter__(self) -> ConnectedUnit:
        return self.connected


class Peer:
    """A client that sends the bytes that a test chooses."""

    def __init__(self, connected: ConnectedUnit, *, hello: bytes | None = None) -> None:
        offer = connected.transport._offer
        self.socket = socket.create_connection(("127.0.0.1", offer.port), 20.0)
        self.send(socket_frames.hello(offer.token) if hello is None else hello)
        if hello is None:
            assert self.frame() == (Kind.WELCOME, b"")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def request(self, kind: Kind, message: Any) -> None:
        self.send(socket_frames.encode_request(kind, message, 1000.0))

    def push(self, connected: ConnectedUnit, *rest: bytes, **changes: Any) -> None:
        self.request(Kind.REDUCE_SCATTER, connected.header(**changes))
        self.send(*rest)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := self.socket.recv(size - len(data))):
            data += part
        return data

    def frame(self) -> tuple[Kind, bytes]:
        size, kind = struct.unpack("<IB", self.read(socket_frames.HEAD_BYTES))
        return Kind(kind), self.read(size)

    def error(self) -> ShardwellError:
        """Returns the next error of the server, skipping DATA."""
        for kind, payload in iter(self.frame, None):
            if kind is Kind.ERROR:
                return from_status_details(payload, "server")
            assert kind in (Kind.GATHERING, Kind.DATA)
        raise AssertionError

    def is_closed(self) -> bool:
        try:
            return self.read(1) == b""
        except ConnectionResetError:
            return True


def data(*payloads: bytes) -> bytes:
    return b"".join(struct.pack("<IB", len(payload), Kind.DATA) + payload for payload in payloads)


def end_of(payload: bytes) -> bytes:
    sender = socket_frames.StreamSender()
    sender.data([payload])
    return sender.end()


def assert_holds(flat: torch.Tensor, value: float) -> None:
    """Checks that every 32-bit float has a value."""
    assert bool((flat.view(torch.float32) == value).all())
