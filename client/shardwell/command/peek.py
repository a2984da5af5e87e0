"""A look at one parameter wherever its pieces live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from shardwell.session.coordinator_client import CoordinatorClient
from shardwell.transport.rpc import ServiceClient
from shardwell_wire.errors import NotFoundError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2


@dataclass(frozen=True, slots=True)
class Piece:
    """What one shard server says of its piece of a parameter."""

    server_id: str
    response: shard_pb2.PeekResponse


def peek_everywhere(
    coordinator: CoordinatorClient, request: shard_pb2.PeekRequest, *, timeout_s: float
) -> Sequence[Piece]:
    """Asks every server that holds a shard of the run.

    Args:
        coordinator: Knows who holds the run.
        request: What to look at.
        timeout_s: Deadline of each rpc.

    Returns:
        The pieces of the parameter in the order of their elements.

    Raises:
        NotFoundError: No such run, or no server has such a parameter.
        UnavailableError: A server that holds a part of the run cannot be reached from here.
    """
    listed = coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=request.run), timeout_s=timeout_s)
    holders = {shard.server_id: shard.address for unit in listed.units for shard in unit.shards}
    pieces, absence = [], None
    for server_id, address in holders.items():
        try:
            server = ServiceClient(
                address,
                shard_pb2.DESCRIPTOR.services_by_name["ShardService"],
                credentials=coordinator.credentials,
            )
            with closing(server):
                pieces.append(Piece(server_id, _peek(server_id, server, request, timeout_s)))
        except NotFoundError as error:
            absence = error
    if not pieces:
        raise absence or NotFoundError(f"run {request.run!r} has no units yet", run=request.run)
    return sorted(pieces, key=lambda piece: piece.response.start_element)


def _peek(
    server_id: str, server: ServiceClient, request: shard_pb2.PeekRequest, timeout_s: float
) -> shard_pb2.PeekResponse:
    try:
        response: shard_pb2.PeekResponse = server.call("Peek", request, timeout_s=timeout_s)
    except UnavailableError as error:
        raise UnavailableError(
            f"{server_id} at {server.address} cannot be reached from here, though the coordinator can: {error}",
            server=server_id,
        ) from error
    return response
