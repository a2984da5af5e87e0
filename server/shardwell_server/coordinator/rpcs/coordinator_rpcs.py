"""What the coordinator's rpcs share: the core that they call, checks of requests, and tokens and proofs of answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, TypeVar

from google.protobuf.message import Message

from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.inspection.stall import Stall, explain_stall
from shardwell_server.coordinator.ranks.members import Member
from shardwell_server.coordinator.rendezvous import TORCHRUN, Stores
from shardwell_server.coordinator.run import Run
from shardwell_server.serving.call_server import CallServer
from shardwell_server.serving.rpc import MAX_WAIT_S, Call, RequestLog
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.security.tokens import INITIALIZER, LIFETIME_S, ClusterKey, Identity, Role
from shardwell_wire.v1 import coordinator_pb2

_Answer = TypeVar("_Answer", coordinator_pb2.RegisterServerResponse, coordinator_pb2.HeartbeatServerResponse)


_Lease = coordinator_pb2.WorkItem | coordinator_pb2.PartitionWork


class Issuer:
    """Issues tokens and proofs. Without a key, it issues none."""

    def __init__(self, key: ClusterKey | None) -> None:
        self.key = key

    def token(self, run: Run, member: Member) -> str:
        """Returns a token for a trainer in its run. Empty: the cluster has no key."""
        if self.key is None:
            return ""
        return self.key.mint(Role.TRAINER, run=run.name, run_id=run.identity.run_id, member=member.name)

    def renewed_token(self, run: Run, member: Member, caller: Identity | None) -> str:
        """Returns a new token for a trainer whose lease is renewed. Empty: the caller's token is valid for long."""
        if self.key is None or caller is None or caller.expires_s - self.key.clock() > LIFETIME_S / 2:
            return ""
        return self.token(run, member)

    def prove_leases(self, run: Run, leases: Iterable[_Lease]) -> None:
        """Adds the proofs that shard servers need to leases of logical ranks, which go to the trainer that has them."""
        if self.key is not None:
            for lease in leases:
                dp_rank = run.settings.world.coordinates(lease.global_rank).dp_rank
                lease.lease_proof = self.key.lease_proof(run.identity.run_id, dp_rank, lease.epoch)

    def prove_initializer(self, run: Run, response: coordinator_pb2.DeclareUnitResponse) -> None:
        """Adds the proof that the caller must send the initial values of a unit."""
        if self.key is not None:
            response.lease_proof = self.key.lease_proof(run.identity.run_id, INITIALIZER, response.epoch)

    def prove(self, answer: _Answer, nonce: bytes) -> _Answer:
        """Adds the proof that the coordinator, and no other process at its address, has answered a shard server."""
        if self.key is not None:
            answer.proof = self.key.answer_proof(nonce, answer.SerializeToString(deterministic=True))
        return answer


class CoordinatorRpcs:
    """Base class of the rpcs of one topic. ``CoordinatorServicer`` inherits those of all topics.

    Args:
        coordinator: The core that executes them.
        key: Key of the cluster, with which tokens for trainers and proofs are made. None: every caller is admitted.
        calls: Takes calls beside gRPC. None: nothing does.
    """

    def __init__(
        self, coordinator: Coordinator, key: ClusterKey | None = None, calls: CallServer | None = None
    ) -> None:
        self._issuer = Issuer(key)
        self._coordinator, self._state, self._calls = coordinator, coordinator.state, calls
        self._requests = RequestLog()
        self._torchrun_stores = Stores(TORCHRUN, coordinator.state.clock)

    def _exact_run(self, request: Any) -> Run:
        """Returns the run that a request names by name and id. A later run of the same name has another id."""
        if not request.run_id:
            raise InvalidRequestError(f"run_id is empty: send the id of run {request.run!r} that Join returned")
        return self._state.require_run(request.run, request.run_id)

    def _explain_stall(self, run: Run) -> Stall:
        """Returns what a run waits for."""
        return explain_stall(run, self._state.cluster, self._state.clock(), self._state.settings.min_servers)

    def _member(self, request: Any, *, membership_epoch: bool = True) -> tuple[Run, Member]:
        """Returns the run and the live trainer that sent a request.

        Args:
            request: A request with a context and a trainer.
            membership_epoch: True if the context's epoch is that of the membership. Otherwise the caller checks it.
        """
        context = request.context
        run = self._exact_run(context)
        known = run.members.by_name.get(request.trainer)
        epoch = context.epoch if membership_epoch or known is None else known.epoch
        member = self._coordinator.trainers.require_member(run, request.trainer, epoch)
        # After the membership check, so that stale trainers cannot fill the log of request ids.
        self._requests.check(context.request_id, fingerprint(request))
        return run, member


def wait_limit(call: Call, wanted_s: float) -> float:
    """Returns how long an rpc may wait in seconds: ``wanted_s``, but at most its deadline and ``MAX_WAIT_S``."""
    check_seconds("wait_s", wanted_s)
    return min(call.remaining_s(wanted_s), MAX_WAIT_S)


def check_seconds(what: str, value: float) -> None:
    """Raises InvalidRequestError if a field with a duration is negative or not finite."""
    if not 0 <= value < math.inf:
        raise InvalidRequestError(f"{what} is {value}: expected a finite number of at least 0")


def fingerprint(request: Message) -> bytes:
    """Returns a digest that is equal for retries of a request, even if ``wait_s`` differs."""
    bare = type(request)()
    bare.CopyFrom(request)
    if "wait_s" in request.DESCRIPTOR.fields_by_name:
        bare.ClearField("wait_s")
    name = request.DESCRIPTOR.full_name.encode()
    return blake2b(name + bare.SerializeToString(deterministic=True), digest_size=16).digest()
