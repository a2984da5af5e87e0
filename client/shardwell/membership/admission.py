"""Epoch of a trainer's replica: the newest that the coordinator announced, and that of the process group.

Rpcs of the coordinator that are repeated: until a response is final, or while the coordinator is unavailable.

Asks the coordinator to admit a trainer to its run: the ``Join`` rpc.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from shardwell.options import JoinConfig, WaitOptions
from shardwell.transport.rpc import CoordinatorClient
from shardwell_wire.connection.protocol_versions import check_chosen, own_versions
from shardwell_wire.errors import (
    DeadlineError,
    ReplicaLostError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)
from shardwell_wire.host.server_folders import own_identity
from shardwell_wire.security.credentials import MemberCredentials
from shardwell_wire.v1 import coordinator_pb2

START_AGAIN = (
    "run the training in session.run_replica(train), which then forms the replica again, or start this trainer again "
    "(shardwell launch --restart does)"
)
"""Advice to a trainer whose replica has lost a trainer."""


class ReplicaEpoch:
    """Compares the epoch in which a trainer formed its replica's process group with the newest epoch. Thread-safe.

    Note: [Void process groups]
        The replica gets a new epoch when one of its trainers is lost or replaced. A process group that was formed in an
        older epoch is *void*: its collectives cannot end. The trainer must raise ReplicaLostError, wherever it is. If
        it waits for the coordinator in a step, ``Membership.poll`` raises. If it starts a work item,
        ``ReplicaGroup.require_same_item`` raises. If it computes a work item, ``ReplicaGroup`` ends the group's
        connections, and the collective in which it waits fails.

    Epochs of a run only rise, so announcements may arrive in any order.

    Attributes:
        when_void: Called when the group becomes void, in the thread that learns it. Must return at once.
    """

    def __init__(self) -> None:
        self._announced = self._formed = self._dp_rank = 0
        self._lock = threading.Lock()
        self.when_void: Callable[[], None] = lambda: None

    @property
    def has_group(self) -> bool:
        """True if the trainer has a process group with other trainers."""
        return self._formed > 0

    @property
    def is_void(self) -> bool:
        """True if the trainer has a process group, and the trainers of its replica have changed since it was formed."""
        return 0 < self._formed < self._announced

    def announce(self, epoch: int) -> None:
        """Records an epoch of which the coordinator told. 0: the trainer has no replica with other trainers."""
        with self._lock:
            risen, self._announced = epoch > self._announced, max(epoch, self._announced)
        if risen and self.is_void:
            self.when_void()

    def form(self, epoch: int, dp_rank: int) -> None:
        """Records that the process group of an epoch exists.

        Args:
            epoch: The epoch. 0: the trainer is a replica by itself.
            dp_rank: Names the replica in messages.
        """
        self._formed, self._dp_rank = epoch, dp_rank

    def close(self) -> None:
        """Records that the process group is closed."""
        self._formed = 0

    def require_valid(self) -> None:
        """Raises ReplicaLostError if the process group is void."""
        if self.is_void:
            raise self.lost_error()

    def lost_error(self) -> ReplicaLostError:
        """Returns the error for a void process group."""
        return ReplicaLostError(
            f"a trainer of replica {self._dp_rank} was lost or replaced, so the replica's process group is void (epoch "
            f"{self._formed}, now {self._announced}): {START_AGAIN}"
        )


logger = logging.getLogger(__name__)

_POLL_S = 10.0
"""Longest server-side wait of one rpc. A restarted coordinator is noticed within this time."""

_REPLICA_POLL_S = 1.0
"""The same for rpcs that a void process group ends."""


def poll(
    call: Callable[[Any, float, float], Any],
    request: Any,
    done: Callable[[Any], bool],
    *,
    what: str,
    waits: WaitOptions,
    log_level: int = logging.INFO,
    replica: ReplicaEpoch | None = None,
) -> Any:
    """Repeats an rpc with ``wait_s`` and ``waiting_for`` until ``done(response)`` is true; returns this response.

    Args:
        call: ``(request, timeout_s, until_s) -> response``; ``until_s`` is that of ``retry_and_warn``.
        request: The request; ``wait_s`` is set here.
        done: Returns whether the response is final.
        what: What the rpc waits for, for messages.
        waits: Limits.
        log_level: Level of messages about the wait.
        replica: The replica without which the trainer cannot go on. None: it does not matter.

    Raises:
        DeadlineError: Not done within ``wait_limit_s``. The message says what the coordinator waits for.
        ReplicaLostError: The replica's process group is void, and the response is not final.
    """
    started = last_report = time.monotonic()
    until_s = started + waits.wait_limit_s
    while True:
        is_void = replica is not None and replica.is_void  # before the rpc, whose response may be final
        longest_s = _REPLICA_POLL_S if replica is not None and replica.has_group else _POLL_S
        request.wait_s = 0.0 if is_void else max(0.0, min(longest_s, until_s - time.monotonic()))
        response = call(request, request.wait_s + waits.rpc_timeout_s, until_s)
        if done(response):
            return response
        if replica is not None and is_void:
            raise replica.lost_error()
        now, reasons = time.monotonic(), "; ".join(getattr(response, "waiting_for", ()))
        if now >= until_s:
            raise DeadlineError(f"waited {now - started:.0f} s for {what}: {reasons}", waiting_for=reasons)
        if now - last_report > _POLL_S / 2:
            logger.log(log_level, "waiting for %s (%.0f s): %s", what, now - started, reasons)
            last_report = now


def retry_and_warn(call: Callable[..., Any], waits: WaitOptions, until_s: float | None = None) -> Any:
    """Retries a call for ``wait_limit_s``. Logs a warning after ``warn_after_s``: the address may be wrong.

    Args:
        call: Takes ``retry_for_s``, how long to retry while the coordinator is unavailable, and ``until_s``, when the
            last attempt ends.
        waits: Limits.
        until_s: Time by ``time.monotonic`` when the last attempt ends. None: after ``wait_limit_s``.
    """
    started = time.monotonic()
    until_s = started + waits.wait_limit_s if until_s is None else until_s
    try:
        return call(retry_for_s=min(waits.warn_after_s, max(0.0, until_s - started)), until_s=until_s)
    except UnavailableError as error:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise
        logger.warning("%s; retrying for %.0f s", error, left_s)
    return call(retry_for_s=left_s, until_s=until_s)


_MAX_ADMISSIONS = 6
"""How often a trainer asks to be admitted, if its membership ends again and again before the start."""


class Admission:
    """Sends the ``Join`` requests of one trainer.

    Args:
        config: Options of the trainer.
        coordinator: The coordinator.
        token: Credentials of the trainer.
        check: Called before each rpc. Raises if the trainer must not join.
        note_placement: Called with the placement of each response.
    """

    def __init__(
        self,
        config: JoinConfig,
        coordinator: CoordinatorClient,
        token: MemberCredentials,
        *,
        check: Callable[[], None],
        note_placement: Callable[[int], None],
    ) -> None:
        self._config, self._coordinator, self._token = config, coordinator, token
        self._check, self._note_placement = check, note_placement
        self._incarnation = ""

    def join(
        self, former: coordinator_pb2.JoinResponse | None = None, *, same: bool = False
    ) -> coordinator_pb2.JoinResponse:
        """Joins the run. Returns when the run has started.

        Args:
            former: The last membership of this process, which joins as the same trainer, with any rank that is free.
            same: True: asks for the state of the membership ``former``. False: starts another one, which replaces it.
        """
        config = self._config
        if not same:
            self._incarnation = uuid.uuid4().hex
        request = coordinator_pb2.JoinRequest(
            run=config.run,
            config=config.run_config(),
            resume=config.resume if former is None else "",
            rewrap=config.rewrap,
            trainer=config.trainer if former is None else former.trainer,
            host=config.host,
            global_rank=config.global_rank if former is None else None,
            world_size=config.world_size,
            incarnation=self._incarnation,
            process=own_identity(),
            protocol=own_versions(),
            run_id="" if former is None else former.run_id,
            replaced_epoch=0 if former is None else former.epoch,
        )
        for left in reversed(range(_MAX_ADMISSIONS)):
            try:
                response = self._send(request)
                break
            except UnauthenticatedError:
                if not self._token.is_member or not left:
                    raise
                # The token has expired. Without it, the coordinator waits until the former membership's lease ends.
                self._token.forget()
                request.replaced_epoch = 0
            except StaleEpochError as error:
                # The membership ended while this trainer waited for the start: the run was rolled back, or the
                # coordinator took this process for ended. Another process that has the name is a DuplicateError.
                if same or not left:
                    raise
                logger.warning("joining run %r again: %s", config.run, error)
                self._incarnation = request.incarnation = uuid.uuid4().hex
        check_chosen(response.protocol_version, self._coordinator.address)
        return response

    def _send(self, request: coordinator_pb2.JoinRequest) -> coordinator_pb2.JoinResponse:
        response: coordinator_pb2.JoinResponse = poll(
            self._call,
            request,
            lambda answer: answer.started,
            what=f"run {self._config.run!r} to start",
            waits=self._config.waits,
            log_level=logging.WARNING,  # the user may have started too few trainers
        )
        return response

    def _call(self, request: Any, timeout_s: float, until_s: float) -> Any:
        self._check()
        call = partial(self._coordinator.call, "Join", request, timeout_s=timeout_s)
        response = retry_and_warn(call, self._config.waits, until_s)
        self._note_placement(response.placement)
        return response
