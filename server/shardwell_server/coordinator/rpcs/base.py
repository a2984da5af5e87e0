"""What the coordinator's rpcs share: the core that they call, and the checks of a request's run, trainer and id."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

from google.protobuf.message import Message

from shardwell_server.call_server import CallServer
from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.issuing import Issuer
from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.torchrun_stores import TorchrunStores
from shardwell_server.request_log import RequestLog
from shardwell_server.rpc import MAX_WAIT_S, Call
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.tokens import ClusterKey


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
        self._torchrun_stores = TorchrunStores(is_protected=key is not None, clock=coordinator.state.clock)

    def _exact_run(self, request: Any) -> Run:
        """Returns the run that a request names by name and id. A later run of the same name has another id."""
        if not request.run_id:
            raise InvalidRequestError(f"run_id is empty: send the id of run {request.run!r} that Join returned")
        return self._state.require_run(request.run, request.run_id)

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
