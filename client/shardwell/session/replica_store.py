"""The store in which the trainers of a replica meet, which the coordinator serves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from shardwell.session.coordinator_store import CoordinatorStore
from shardwell.session.membership import Membership
from shardwell_wire.v1 import coordinator_pb2


class ReplicaStore(CoordinatorStore):
    """The store of the trainers of one replica. It ends when the trainers of the replica change.

    Waits end with ``DeadlineError`` after ``wait_limit_s``, and all calls with ``StaleEpochError`` when the trainers of
    the replica have changed.

    Args:
        membership: This trainer's membership in the run.
        replica_epoch: Epoch of the replica whose store this is.
    """

    def __init__(self, membership: Membership, replica_epoch: int) -> None:
        super().__init__()
        self._membership, self._replica_epoch = membership, replica_epoch

    def set_timeout(self, timeout: timedelta) -> None:
        """Has no effect: all waits end after ``wait_limit_s``."""

    def clone(self) -> ReplicaStore:
        """Returns a store with the same contents."""
        return self

    def _call(self, rpc_name: str, request: Any) -> Any:
        self._address(request)
        return self._membership.call(rpc_name, request)

    def _wait_for(self, request: coordinator_pb2.StoreGetRequest) -> coordinator_pb2.StoreGetResponse:
        self._address(request)
        found: coordinator_pb2.StoreGetResponse = self._membership.poll(
            "StoreGet",
            request,
            lambda answer: answer.found,
            what=f"the other trainers of the replica ({request.keys[0]!r})",
        )
        return found

    def _address(self, request: Any) -> None:
        request.context.CopyFrom(self._membership.context(0))
        request.trainer, request.replica_epoch = self._membership.trainer, self._replica_epoch
