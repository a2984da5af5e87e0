"""Calls to the coordinator."""

from __future__ import annotations

from shardwell.transport.rpc import ServiceClient
from shardwell_wire.credentials import Credentials
from shardwell_wire.v1 import coordinator_pb2


class CoordinatorClient(ServiceClient):
    """Calls ``shardwell_wire.v1.CoordinatorService`` at ``host:port``.

    Args:
        address: host:port.
        credentials: As of ``ServiceClient``; those who call shard servers of the cluster use ``self.credentials``.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        super().__init__(address, service, credentials=credentials)
