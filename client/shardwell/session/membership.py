"""A trainer's place in a run, and the lease that keeps it."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardwell.session.config import JoinConfig
from shardwell.session.coordinator_client import CoordinatorClient
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import (
    ConflictError,
    DeadlineError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    UsageError,
)
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

_POLL_S = 10.0
"""Length of one poll of a waiting rpc; a restarted coordinator is noticed within it."""

_ASK_TIMEOUT_S = 5.0


class Membership:
    """One trainer's membership in a run; keeps the lease from a background thread.

    Thread-safe. Every call raises what ended the membership once it has ended.

    Args:
        config: Whom to join and as what.
        coordinator: The coordinator.

    Raises:
        RunMismatchError: The run exists with another world, seed or number of trainers.
        DuplicateError: A live trainer has this name, or the rank asked for.
        DeadlineError: Not enough trainers came in ``config.waits.wait_limit_s``.
    """

    def __init__(self, config: JoinConfig, coordinator: CoordinatorClient) -> None:
        self._config, self._coordinator = config, coordinator
        self._ended: ShardwellError | None = None
        self._report: Callable[[], Sequence[coordinator_pb2.UnreachableServer]] = tuple
        self._when_ended: Callable[[], None] = lambda: None
        joined = self._join()
        self.identity = RunIdentity(config.run, joined.run_id)
        self.run = config.run
        self.trainer: str = joined.trainer
        self.epoch: int = joined.epoch
        self.world = World.from_proto(joined.config.world)
        self.seed: int = joined.config.seed
        self.rank_assignments: tuple[coordinator_pb2.RankAssignment, ...] = tuple(joined.rank_assignments)
        self.joined = joined
        self._lease_s: float = joined.lease_s
        self.transport_reports: Callable[[], Sequence[coordinator_pb2.TransportReport]] = tuple
        """How this trainer reaches the shard servers; called with each heartbeat, in the thread of heartbeats."""
        self._stop = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_lease, name="shardwell-heartbeat", daemon=True)
        self._heartbeat.start()

    @property
    def credentials(self) -> Credentials:
        """What calls to the cluster carry."""
        return self._coordinator.credentials

    def context(self, step: int, *, epoch: int | None = None) -> common_pb2.RequestContext:
        """What a mutating request carries; a fresh request id each time."""
        return common_pb2.RequestContext(
            run=self.run,
            run_id=self.identity.run_id,
            epoch=self.epoch if epoch is None else epoch,
            step=step,
            request_id=uuid.uuid4().hex,
        )

    def call(self, rpc_name: str, request: Any) -> Any:
        """Calls the coordinator, riding out its restarts for ``wait_limit_s``."""
        self.check()
        return self._call(rpc_name, request, timeout_s=self._config.waits.rpc_timeout_s)

    def poll(
        self, rpc_name: str, request: Any, done: Callable[[Any], bool], *, what: str, report: int = logging.INFO
    ) -> Any:
        """Repeats a waiting rpc (one with ``wait_s`` and ``waiting_for``) until ``done(response)``.

        ``report`` is the level at which it is logged what is waited for.

        Raises:
            DeadlineError: Not done within ``wait_limit_s``; names what was waited for.
        """
        started = last_report = time.monotonic()
        while True:
            self.check()
            request.wait_s = min(_POLL_S, self._config.waits.wait_limit_s)
            response = self._call(rpc_name, request, timeout_s=request.wait_s + self._config.waits.rpc_timeout_s)
            if done(response):
                return response
            now, reasons = time.monotonic(), "; ".join(getattr(response, "waiting_for", ()))
            if now - started > self._config.waits.wait_limit_s:
                raise DeadlineError(f"waited {now - started:.0f} s for {what}: {reasons}", waiting_for=reasons)
            if now - last_report > _POLL_S / 2:
                logger.log(report, "waiting for %s (%.0f s): %s", what, now - started, reasons)
                last_report = now

    def exchange_address(self, step: int, name: str, address: str | None) -> str:
        """Publishes an address under a name, or waits until another trainer of the run does."""
        request = coordinator_pb2.ExchangeAddressRequest(
            context=self.context(step), trainer=self.trainer, name=name, address=address
        )
        response: coordinator_pb2.ExchangeAddressResponse = self.poll(
            "ExchangeAddress", request, lambda answer: answer.HasField("address"), what=f"the address {name!r}"
        )
        return response.address

    def check(self) -> None:
        """Raises what ended the membership, if anything did."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended), **self._ended.data) from self._ended

    def attach(
        self,
        *,
        report: Callable[[], Sequence[coordinator_pb2.UnreachableServer]],
        when_ended: Callable[[], None],
    ) -> None:
        """Connects the membership with the data plane.

        Args:
            report: The servers that cannot be reached now, for the heartbeat.
            when_ended: Called once, in any thread, when the membership has ended.
        """
        self._report, self._when_ended = report, when_ended

    def ask(self) -> None:
        """Asks the coordinator whether this trainer can go on.

        Returns also if the coordinator does not answer.

        Raises:
            RunDeletedError: The run was deleted.
            ConflictError: A shard server has lost its shards of the run.
            StaleEpochError: This trainer has lost its lease.
        """
        self.check()
        try:
            self._beat(_ASK_TIMEOUT_S)
        except (StaleEpochError, RunDeletedError, ConflictError) as error:
            self._end(error)
            raise
        except ShardwellError as error:
            logger.info("the coordinator could not be asked: %s", error)

    def leave(self) -> None:
        """Gives the ranks back at once; harmless when the membership has ended."""
        self._stop.set()
        self._heartbeat.join(timeout=self._config.waits.rpc_timeout_s)
        if self._ended is None:
            request = coordinator_pb2.LeaveRequest(
                run=self.run, run_id=self.identity.run_id, trainer=self.trainer, epoch=self.epoch
            )
            try:
                self._coordinator.call("Leave", request, timeout_s=2.0)
            except ShardwellError as error:
                logger.info("could not say goodbye to the coordinator: %s", error)
        self._ended = StaleEpochError("the session is closed")

    def disown(self) -> None:
        """In a process that was forked from the one that joined, which keeps the place."""
        self._ended = UsageError(
            "this process was forked from a trainer and has no part in its run: compute in the process that called "
            "shardwell.join, or join here under another name"
        )

    def _join(self) -> coordinator_pb2.JoinResponse:
        config = self._config
        request = coordinator_pb2.JoinRequest(
            run=config.run,
            config=coordinator_pb2.RunConfig(
                world=config.world.to_proto(),
                seed=config.seed,
                min_trainers=config.min_trainers or 0,
                num_layers=config.num_layers,
            ),
            trainer=config.trainer,
            host=config.host,
            global_rank=config.global_rank,
            world_size=config.world_size,
            incarnation=uuid.uuid4().hex,
        )
        response: coordinator_pb2.JoinResponse = self.poll(
            "Join",
            request,
            lambda answer: answer.started,
            what=f"run {config.run!r} to start",
            report=logging.WARNING,  # a person may have started too few trainers
        )
        return response

    def _call(self, rpc_name: str, request: Any, *, timeout_s: float) -> Any:
        try:
            return self._call_patiently(partial(self._coordinator.call, rpc_name, request, timeout_s=timeout_s))
        except (StaleEpochError, RunDeletedError) as error:
            self._end(error)
            raise

    def _call_patiently(self, call: Callable[..., Any]) -> Any:
        limit_s = self._config.waits.wait_limit_s
        try:
            return call(retry_for_s=min(self._config.waits.warn_after_s, limit_s))
        except UnavailableError as error:
            if limit_s <= self._config.waits.warn_after_s:
                raise
            logger.warning("%s; trying on for %.0f s", error, limit_s)
        return call(retry_for_s=limit_s)

    def _keep_lease(self) -> None:
        reached = True
        while not self._stop.wait(self._lease_s / 3):
            try:
                self._beat(self._lease_s / 3)
                reached = True
            except (StaleEpochError, RunDeletedError, ConflictError) as error:
                self._end(error)
                return
            except ShardwellError as error:
                if reached:
                    logger.warning("the coordinator does not answer, trying on: %s", error)
                reached = False

    def _beat(self, timeout_s: float) -> None:
        request = coordinator_pb2.HeartbeatRequest(
            run=self.run,
            run_id=self.identity.run_id,
            trainer=self.trainer,
            epoch=self.epoch,
            transports=self.transport_reports(),
            unreachable=self._report(),
        )
        self._coordinator.call("Heartbeat", request, timeout_s=timeout_s)

    def _end(self, error: ShardwellError) -> None:
        if self._ended is None and not self._stop.is_set():
            logger.error("trainer %r lost its place in run %r: %s", self.trainer, self.run, error)
            self._ended = error
            self._when_ended()
