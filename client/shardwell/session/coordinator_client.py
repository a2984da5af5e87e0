"""Client of the coordinator's service."""

from __future__ import annotations

from shardwell.transport.rpc import ServiceClient
from shardwell_wire.credentials import Credentials
from shardwell_wire.v1 import coordinator_pb2


class CoordinatorClient(ServiceClient):
    """Calls ``CoordinatorService``.

    Args:
        address: host:port.
        credentials: See ``ServiceClient``. Calls to the cluster's shard servers carry ``self.credentials``, too.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        super().__init__(address, service, credentials=credentials)
