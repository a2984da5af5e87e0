"""How trainers say that they reach the shard servers; kept for people only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import common_pb2, coordinator_pb2

MAX_TRANSPORTS = 4096
"""A trainer has one per shard server."""
_MAX_ADDRESS = 300


@dataclass(frozen=True, slots=True)
class TransportReport:
    """How one trainer reaches one shard server."""

    address: str
    """host:port of the server."""
    kind: int
    """A ``TransportKind``."""
    bytes_per_s: float
    """Measured when it was opened. 0: not measured."""

    @classmethod
    def from_proto(cls, transports: Sequence[coordinator_pb2.TransportReport]) -> tuple[Self, ...]:
        """Reads and checks what a trainer reports.

        Raises:
            InvalidRequestError: There are too many, or a field is impossible.
        """
        if len(transports) > MAX_TRANSPORTS:
            raise InvalidRequestError(f"{len(transports)} transports: expected at most {MAX_TRANSPORTS}")
        for transport in transports:
            if not 0 < len(transport.address) <= _MAX_ADDRESS or not transport.address.isprintable():
                shown = transport.address[:_MAX_ADDRESS]
                raise InvalidRequestError(f"transport to {shown!r}: expected a printable host:port")
            if transport.kind not in common_pb2.TransportKind.values() or not transport.kind:
                raise InvalidRequestError(f"transport to {transport.address}: kind={transport.kind} is none")
            if not 0 <= transport.bytes_per_s < math.inf:
                raise InvalidRequestError(
                    f"transport to {transport.address}: bytes_per_s={transport.bytes_per_s}: expected at least 0"
                )
        return tuple(cls(transport.address, transport.kind, transport.bytes_per_s) for transport in transports)

    def to_proto(self, server_id: str) -> coordinator_pb2.TransportReport:
        return coordinator_pb2.TransportReport(
            address=self.address,
            kind=common_pb2.TransportKind.ValueType(self.kind),
            bytes_per_s=round(self.bytes_per_s),
            server_id=server_id,
        )
