"""How bytes get from this trainer to one shard server and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import grpc

from shardwell_wire.errors import DeadlineError, UsageError, from_rpc_error
from shardwell_wire.v1 import common_pb2, shard_pb2

if TYPE_CHECKING:
    from shardwell.shard_client import ShardClient

KINDS = ("shm", "socket", "grpc")
"""All kinds of lanes, the fastest first."""


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds that a list such as ``shm,grpc`` names, in its order. Raises UsageError for others."""
    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise UsageError(f"lanes={text!r}: expected some of {', '.join(KINDS)}, the preferred one first")
    return kinds


class Lane(Protocol):
    """A way to one shard server. May be shared between threads."""

    kind: str
    """``shm``, ``socket`` or ``grpc``."""

    def gather(
        self, request: shard_pb2.GatherRequest, target: memoryview, *, timeout_s: float, retry_for_s: float
    ) -> int:
        """Fetches one version of a shard, waiting until it exists.

        Args:
            request: What to fetch.
            target: Receives the stream, as ``request.wire_dtype`` has it.
            timeout_s: Deadline of one try.
            retry_for_s: How long to try again while the server is unavailable.

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
    ) -> shard_pb2.ReduceScatterResponse:
        """Pushes one part of a contribution: the segments of its parameters, without padding."""
        ...

    def close(self) -> None:
        """Gives the lane up; what is in flight fails."""
        ...


class LaneStream:
    """The rpc that keeps a lane open.

    Args:
        client: Calls the server.
        run: Name of the run.
        kind: Of the lane.
        timeout_s: How long the server may take to answer.

    Raises:
        ShardwellError: The server does not offer the lane, or cannot be reached.
    """

    def __init__(self, client: ShardClient, run: str, kind: common_pb2.LaneKind.ValueType, *, timeout_s: float) -> None:
        self._call = client.byte_response_stub("OpenLane")(shard_pb2.OpenLaneRequest(run=run, kind=kind))
        give_up = threading.Timer(timeout_s, self._call.cancel)
        give_up.daemon = True
        give_up.start()
        try:
            self.answer = shard_pb2.OpenLaneResponse.FromString(next(self._call))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                raise DeadlineError(f"{client.peer} did not open a lane within {timeout_s:g} s") from error
            raise from_rpc_error(error, client.peer) from error
        finally:
            give_up.cancel()

    def close(self) -> None:
        """The server closes the lane."""
        self._call.cancel()
