"""Ways for bytes beside the rpcs: which kinds this server offers, and which are open."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2


class TransportOffer(Protocol):
    """One kind of transport."""

    def open(self, run: RunIdentity) -> AbstractAsyncContextManager[shard_pb2.OpenTransportResponse]:
        """A transport for one trainer and one run, there until the context is left.

        Args:
            run: Requests over the transport are about this very run only, not about another one of its name.

        Returns:
            What the trainer is told.

        Raises:
            CapacityError: There is no room for another transport.
        """
        ...
