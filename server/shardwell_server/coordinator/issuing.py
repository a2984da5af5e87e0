"""What the coordinator issues with the cluster's key: tokens of trainers, and proofs of leases and of its answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.run import Run
from shardwell_wire.tokens import INITIALIZER, LIFETIME_S, ClusterKey, Identity, Role
from shardwell_wire.v1 import coordinator_pb2

_Answer = TypeVar("_Answer", coordinator_pb2.RegisterServerResponse, coordinator_pb2.HeartbeatServerResponse)


_Lease = coordinator_pb2.WorkItem | coordinator_pb2.PartitionWork


class Issuer:
    """Issues tokens and proofs. Without a key, it issues none.

    Args:
        key: Key of the cluster.
    """

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key

    def token(self, run: Run, member: Member) -> str:
        """Returns a token for a trainer in its run. Empty: the cluster has no key."""
        if self._key is None:
            return ""
        return self._key.mint(Role.TRAINER, run=run.name, run_id=run.identity.run_id, member=member.name)

    def renewed_token(self, run: Run, member: Member, caller: Identity | None) -> str:
        """Returns a new token for a trainer whose lease is renewed. Empty: the caller's token is valid for long."""
        if self._key is None or caller is None or caller.expires_s - self._key.clock() > LIFETIME_S / 2:
            return ""
        return self.token(run, member)

    def prove_leases(self, run: Run, leases: Iterable[_Lease]) -> None:
        """Adds the proofs that shard servers need to leases of logical ranks, which go to the trainer that has them."""
        if self._key is not None:
            for lease in leases:
                dp_rank = run.settings.world.coordinates(lease.global_rank).dp_rank
                lease.lease_proof = self._key.lease_proof(run.identity.run_id, dp_rank, lease.epoch)

    def prove_initializer(self, run: Run, response: coordinator_pb2.DeclareUnitResponse) -> None:
        """Adds the proof that the caller must send the initial values of a unit."""
        if self._key is not None:
            response.lease_proof = self._key.lease_proof(run.identity.run_id, INITIALIZER, response.epoch)

    def prove(self, answer: _Answer, nonce: bytes) -> _Answer:
        """Adds the proof that the coordinator, and no other process at its address, has answered a shard server."""
        if self._key is not None:
            answer.proof = self._key.answer_proof(nonce, answer.SerializeToString(deterministic=True))
        return answer
