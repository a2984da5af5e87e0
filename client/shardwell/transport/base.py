"""How bytes get from this trainer to one shard server and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2, shard_pb2

Nearly = Callable[[], None]
"""Told by a transfer when little of it is left to be moved, so that the next may begin: once, or more often."""

NEARLY_BYTES = 1 << 20
"""That is little: it keeps 100 MB/s busy for 10 ms, in which a request gets to most servers and its answer back."""

KINDS = ("shm", "socket", "grpc")
"""All kinds of transports, the fastest first."""


KIND_NUMBERS = {
    "shm": common_pb2.TRANSPORT_KIND_SHM,
    "socket": common_pb2.TRANSPORT_KIND_SOCKET,
    "grpc": common_pb2.TRANSPORT_KIND_GRPC,
}
"""As they are named on the wire."""


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds that a list such as ``shm,grpc`` names, in its order. Raises UsageError for others."""
    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise UsageError(f"transports={text!r}: expected some of {', '.join(KINDS)}, the preferred one first")
    if "shm" in kinds[1:]:
        raise UsageError(
            f"transports={text!r}: shm is of use in the first place only, where it is possible it is the fastest"
        )
    return kinds


def unheard() -> None:
    """Nobody waits for a transfer to be nearly done."""


class Transport(Protocol):
    """A way to one shard server. May be shared between threads."""

    kind: str
    """``shm``, ``socket`` or ``grpc``."""

    def gather(
        self,
        request: shard_pb2.GatherRequest,
        target: memoryview,
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly: Nearly = unheard,
    ) -> int:
        """Fetches one version of a shard, waiting until it exists.

        Args:
            request: What to fetch.
            target: Receives the stream, as ``request.wire_dtype`` has it.
            timeout_s: Deadline of one try.
            retry_for_s: How long to try again while the server is unavailable.
            nearly: Told when at most ``NEARLY_BYTES`` are missing.

        Returns:
            The version fetched.

        Raises:
            VersionGoneError: A newer version has replaced it.
            DeadlineError: It did not come to exist in time.
        """
        ...

    def reduce_scatter(
        self,
        header: shard_pb2.ReduceScatterHeader,
        pieces: Sequence[memoryview],
        *,
        timeout_s: float,
        retry_for_s: float,
        nearly: Nearly = unheard,
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes one part of a contribution: the segments of its parameters, without padding.

        Args:
            header: What it is of.
            pieces: Its bytes, as ``header.wire_dtype`` has them.
            timeout_s: Deadline of one try.
            retry_for_s: How long to try again while the server is unavailable.
            nearly: Told when the system has taken all of it.
        """
        ...

    def reduce_gradient_buffer(
        self, request: shard_pb2.ReduceGradientBufferRequest, *, timeout_s: float, retry_for_s: float
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """Has the server take one part of a contribution that lies in memory it shares.

        Raises:
            ConflictError: The transport that the gradient buffer is of is closed.
        """
        ...

    def measure(self, size_bytes: int, *, timeout_s: float) -> float:
        """Receives bytes without meaning; returns bytes per second."""
        ...

    @property
    def broke(self) -> bool:
        """Whether it ended though nobody gave it up: another may be opened."""
        ...

    def close(self) -> None:
        """Gives the transport up; what is in flight fails."""
        ...
