"""Calls to the coordinator."""

from __future__ import annotations

from shardwell.data_plane.rpc import ServiceClient
from shardwell_wire.v1 import coordinator_pb2


class CoordinatorClient(ServiceClient):
    """Calls ``shardwell.v1.CoordinatorService`` at ``host:port``."""

    def __init__(self, address: str) -> None:
        super().__init__(address, coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"])
