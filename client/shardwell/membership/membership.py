"""A trainer's membership in a run: joining, calls to the coordinator under the membership, joining again, leaving.

Also compares the epoch of the replica's process group with the newest epoch of the replica.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from shardwell.membership.heartbeats import Heartbeats, ItemInWork, MembershipStream, RunNotices, TrainerReports
from shardwell.options import JoinConfig
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.connection.protocol_versions import check_chosen, own_versions
from shardwell_wire.errors import (
    ConflictError,
    DeadlineError,
    DuplicateError,
    ReplicaLostError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    UsageError,
)
from shardwell_wire.host.server_folders import own_identity
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.topology import World
from shardwell_wire.security.credentials import Credentials, MemberCredentials
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

_POLL_S = 10.0
"""Longest server-side wait of one rpc. A restarted coordinator is noticed within this time."""

_REPLICA_POLL_S = 1.0
"""The same for rpcs that a void process group ends."""

_MAX_ADMISSIONS = 6
"""How often a trainer asks to be admitted, if its membership ends again and again before the start."""

_MAX_REJOINS = 5
"""Memberships in a row that may lapse without a commit in between. More often, the cause is not going to disappear."""

_ASK_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 2.0

Lease = coordinator_pb2.WorkItem | coordinator_pb2.PartitionWork | coordinator_pb2.DeclareUnitResponse
"""A lease that the coordinator gave to this trainer: its epoch, and the proof that shard servers need."""


class Membership:
    """One trainer's membership in a run. Joins in the constructor, then sends heartbeats from a background thread.

    Thread-safe. Once the membership has ended, every call raises the error that ended it.

    A membership *lapses* if the trainer lost its lease, or if the run was rolled back. ``rejoin`` then starts another
    one under the same name. Until then, requests to the coordinator raise StaleEpochError, and weights can be read.

    Attributes:
        valid: True if the membership has neither lapsed nor ended for good.
        lapsed: True if the membership is over and ``rejoin`` may start another one.
        reports: What the heartbeats report.
        when_news: Called in any thread when ``committed_step`` or ``placement`` has risen. Must return at once.
        when_residuals_wanted: Called in any thread while a checkpoint wants residuals of error feedback, more than
            once. Must return at once.
        when_lapsed: Called in any thread, once per membership that lapses.
        when_ended: Called once, in any thread, when the membership has ended for good.

    Args:
        config: Options of the trainer.
        advise: Returns advice if the first calls do not reach the coordinator. Raises if waiting is pointless.

    Raises:
        RunMismatchError: The run exists with another world, seed or number of trainers.
        DuplicateError: A live trainer has this name or plays the requested rank.
        DeadlineError: Too few trainers joined in ``wait_limit_s``.
    """

    def __init__(
        self,
        config: JoinConfig,
        coordinator: CoordinatorClient,
        advise: Callable[[UnavailableError], str] = lambda error: "",
    ) -> None:
        self._config, self._coordinator = config, coordinator
        self._token = MemberCredentials.of(coordinator.credentials)
        coordinator.credentials = self._token
        self._lapse: StaleEpochError | None = None
        self._ended: ShardwellError | None = None
        self.valid, self.lapsed, self._rejoins_in_a_row = False, False, 0
        self._over = threading.Event()
        """Set when the current membership is over. Ends the threads that keep it."""
        self._incarnation = ""
        """Names the membership that this process asks for, so that a repeated ``Join`` is the same one."""
        self.token_expired = False
        """Whether the membership has lapsed because its token was not renewed in time. No server answers then."""
        self.reports = TrainerReports()
        self._notices = RunNotices(config.run)
        self.when_news: Callable[[], None] = lambda: None
        self.when_residuals_wanted: Callable[[coordinator_pb2.WantedResiduals], None] = lambda wanted: None
        self.when_lapsed: Callable[[], None] = lambda: None
        self.when_ended: Callable[[], None] = lambda: None
        self._news_lock = threading.Lock()
        self.replica_epoch = ReplicaEpoch()
        self.committed_step = 0
        """Number of committed steps, as far as the coordinator has told outside of the training thread's rpcs."""
        self.placement = 0
        """The newest placement of the run's shards that the coordinator has told."""
        # Random ids of their own would cost more than the rest of a push's context.
        self._request_prefix, self._request_numbers = uuid.uuid4().hex, itertools.count()
        self._has_joined, self._advise = False, advise
        joined = self._join()
        self._has_joined = True
        self.identity = RunIdentity(config.run, joined.run_id)
        self.run = config.run
        self.world = World.from_proto(joined.config.world)
        self.seed: int = joined.config.seed
        self._start(joined)

    def _join(
        self, former: coordinator_pb2.JoinResponse | None = None, *, same: bool = False
    ) -> coordinator_pb2.JoinResponse:
        """Asks the coordinator to admit this trainer. Returns when the run has started.

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
        what = f"run {config.run!r} to start"
        for left in reversed(range(_MAX_ADMISSIONS)):
            try:
                response: coordinator_pb2.JoinResponse = self.poll(
                    "Join", request, lambda answer: answer.started, what=what
                )
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

    def _start(self, joined: coordinator_pb2.JoinResponse) -> None:
        """Starts the membership that the coordinator granted."""
        self.trainer: str = joined.trainer
        self.epoch: int = joined.epoch
        self._over, self._lapse, self.lapsed = threading.Event(), None, False
        self.valid = self._ended is None
        self.committed_step, self.reports.ended_iteration = joined.committed_step, None
        self._note_joined(joined)
        self._start_keeping(joined.lease_s)

    def _note_joined(self, joined: coordinator_pb2.JoinResponse) -> None:
        """Records the state of the membership."""
        self.joined = joined
        self.rank_assignments: tuple[coordinator_pb2.RankAssignment, ...] = tuple(joined.rank_assignments)
        first = self.rank_assignments[0].coordinates if self.rank_assignments else common_pb2.Coordinates()
        self.pp_rank, self.cp_rank = first.pp_rank, first.cp_rank
        """Pipeline rank and context-parallel rank of all logical ranks of this trainer. 0 if it has none."""
        self.replica_epoch.announce(joined.replica_epoch)
        self._token.renew(joined.token)
        self.token_expired = False
        self._note_news(joined.committed_step, joined.placement)
        self._notices.show(joined.notices)

    def _start_keeping(self, lease_s: float) -> None:
        """Starts the threads that keep the membership which the last join began."""
        run, run_id, trainer, epoch = self.run, self.identity.run_id, self.trainer, self.epoch
        # Threads of a former membership may report its end late; the epoch shows that it is not the present one.
        end = partial(self._end, epoch=epoch)
        self._heartbeats = Heartbeats(
            self._coordinator,
            coordinator_pb2.HeartbeatRequest(
                run=run, run_id=run_id, trainer=trainer, epoch=epoch, protocol=own_versions()
            ),
            self.reports,
            lease_s=lease_s,
            note_news=self._note_message,
            end=end,
            stop=self._over,
        )
        self._stream = MembershipStream(
            self._coordinator,
            coordinator_pb2.KeepMembershipRequest(
                run=run,
                run_id=run_id,
                trainer=trainer,
                epoch=epoch,
                has_residuals=self._config.transfers.push_error_feedback,
            ),
            note_news=self._note_message,
            end=end,
        )

    @property
    def credentials(self) -> Credentials:
        """Credentials that every rpc to the cluster carries: this trainer's token, which is renewed with its lease."""
        return self._token

    @property
    def coordinator_address(self) -> str:
        """Address of the coordinator, host:port."""
        return self._coordinator.present_address

    @property
    def host(self) -> str:
        """Name of this trainer's host."""
        return self._config.host

    @property
    def wait_limit_s(self) -> float:
        """Longest wait for the other trainers."""
        return self._config.waits.wait_limit_s

    # ---- calls ----

    def context(self, step: int, lease: Lease | None = None) -> common_pb2.RequestContext:
        """Returns the context of a mutating request, with a new request id.

        Args:
            step: The step.
            lease: The lease that allows the request. None: the membership.
        """
        return common_pb2.RequestContext(
            run=self.run,
            run_id=self.identity.run_id,
            epoch=self.epoch if lease is None else lease.epoch,
            step=step,
            request_id=f"{self._request_prefix}-{next(self._request_numbers)}",
            lease_proof=b"" if lease is None else lease.lease_proof,
        )

    def call(self, rpc_name: str, request: Any, *, member: bool = True, limit_s: float | None = None) -> Any:
        """Calls the coordinator. Retries for ``wait_limit_s`` while the coordinator is unavailable.

        Args:
            rpc_name: The rpc.
            request: Its request.
            member: Whether to raise StaleEpochError if the membership has lapsed.
            limit_s: A shorter limit than ``wait_limit_s``. None: there is none.
        """
        if member:
            self.require_valid()
        self.check()
        waits = self._config.waits
        until_s = time.monotonic() + (waits.wait_limit_s if limit_s is None else limit_s)
        return self._call(rpc_name, request, waits.rpc_timeout_s, until_s)

    def poll(
        self,
        rpc_name: str,
        request: Any,
        done: Callable[[Any], Any],
        *,
        what: str,
        with_replica: bool = False,
        limit_s: float | None = None,
    ) -> Any:
        """Repeats an rpc with ``wait_s`` and ``waiting_for`` until ``done(response)`` is true; returns this response.

        Args:
            request: Its request; ``wait_s`` is set here.
            done: Returns whether the response is final.
            what: What the rpc waits for, for messages.
            with_replica: True if the trainer cannot go on without its replica. A response that is not final then raises
                an error if the replica's process group is void. A final one counts: a trainer of the replica may have
                left because the run has ended. See Note: [Void process groups].
            limit_s: A shorter limit than ``wait_limit_s``. None: there is none.

        Raises:
            DeadlineError: Not done within the limit. The message says what the coordinator waits for.
            StaleEpochError: The membership has lapsed.
            ReplicaLostError: The replica's process group is void.
        """
        is_join = rpc_name == "Join"  # it is sent without a membership
        log_level = logging.WARNING if is_join else logging.INFO  # the user may have started too few trainers
        waits, replica = self._config.waits, self.replica_epoch
        started = last_report = time.monotonic()
        until_s = started + waits.wait_limit_s
        done_until_s = until_s if limit_s is None else started + limit_s
        while True:
            has_group = with_replica and replica.formed > 0
            is_void = has_group and replica.is_void  # before the rpc, whose response may be final
            longest_s = _REPLICA_POLL_S if has_group else _POLL_S
            request.wait_s = wait_s = 0.0 if is_void else max(0.0, min(longest_s, done_until_s - time.monotonic()))
            if is_join:
                self.check()
            elif not self.valid:
                self.require_valid()
            response = self._call(rpc_name, request, wait_s + waits.rpc_timeout_s, until_s)
            if getattr(response, "placement", 0) > self.placement:
                self._note_news(0, response.placement)
            if done(response):
                return response
            if is_void:
                raise replica.lost_error()
            now, reasons = time.monotonic(), "; ".join(getattr(response, "waiting_for", ()))
            if now >= done_until_s:
                raise DeadlineError(f"waited {now - started:.0f} s for {what}: {reasons}", waiting_for=reasons)
            if now - last_report > _POLL_S / 2:
                logger.log(log_level, "waiting for %s (%.0f s): %s", what, now - started, reasons)
                last_report = now

    def _call(self, rpc_name: str, request: Any, timeout_s: float, until_s: float) -> Any:
        """Calls the coordinator, and retries until ``until_s``, by ``time.monotonic``, while it is unavailable.

        Logs a warning after ``warn_after_s``: the address may be wrong. An error of an rpc other than ``Join`` may end
        the membership.
        """
        retry_for_s = max(0.0, min(self._config.waits.warn_after_s, until_s - time.monotonic()))
        call = partial(self._coordinator.call, rpc_name, request, timeout_s=timeout_s, until_s=until_s)
        try:
            try:
                return call(retry_for_s=retry_for_s)
            except UnavailableError as error:
                advice = "" if self._has_joined else self._advise(error)
                if (left_s := until_s - time.monotonic()) <= 0:
                    raise
                logger.warning("%s; retrying for %.0f s%s", error, left_s, advice)
            try:
                return call(retry_for_s=left_s)
            except UnavailableError as error:
                raise UnavailableError(f"{error}{advice}", **error.data) from error
        except StaleEpochError:
            if rpc_name != "Join":
                self.ask()  # the request may concern one work item only
            raise
        except (RunDeletedError, UnauthenticatedError) as error:
            if rpc_name != "Join":
                self._end(error)
                self.require_valid()
            raise

    def list_units(self) -> coordinator_pb2.ListUnitsResponse:
        """Returns the run's units and the present owners of their shards. Works without a valid membership, too.

        Raises:
            ConflictError: The run cannot be loaded from any checkpoint. This ends the membership.
            UnavailableError: The run is being loaded, or the coordinator does not answer.
        """
        self.check()
        request = coordinator_pb2.ListUnitsRequest(run=self.run)
        try:
            response: coordinator_pb2.ListUnitsResponse = self._coordinator.call(
                "ListUnits", request, timeout_s=self._config.waits.rpc_timeout_s
            )
        except ConflictError as error:
            self._end(error)
            raise
        return response

    def start_item(self, step: int, global_rank: int) -> None:
        """Records that this trainer computes a work item, which another trainer may copy if it takes long."""
        self.reports.item = ItemInWork(step, global_rank, time.monotonic())

    def end_item(self) -> None:
        """Records that this trainer computes no work item."""
        self.reports.item = None

    @property
    def computes_item(self) -> bool:
        """True between ``start_item`` and ``end_item``."""
        return self.reports.item is not None

    def exchange_address(self, step: int, name: str, address: str | None) -> str:
        """Publishes an address under a name; without an address, waits until another trainer publishes one."""
        request = coordinator_pb2.ExchangeAddressRequest(
            context=self.context(step), trainer=self.trainer, name=name, address=address
        )
        response: coordinator_pb2.ExchangeAddressResponse = self.poll(
            "ExchangeAddress", request, lambda answer: answer.HasField("address"), what=f"the address {name!r}"
        )
        return response.address

    # ---- the lease ----

    def check(self) -> None:
        """Raises the error that ended the membership, if it has ended for good."""
        if (ended := self._ended) is not None:
            raise type(ended)(str(ended), **ended.data) from ended

    def require_valid(self) -> None:
        """Raises the error that ended the membership, also if it has only lapsed."""
        self.check()
        if (lapse := self._lapse) is not None:
            raise StaleEpochError(str(lapse), **lapse.data) from lapse

    def ask(self) -> None:
        """Sends a heartbeat at once, to learn whether the membership is still valid and where the shards are.

        Returns normally if the membership has lapsed, or if the coordinator does not answer.

        Raises:
            RunDeletedError: The run was deleted.
            ConflictError: A shard server has lost its shards of the run.
        """
        self._ask()

    def ask_residuals(self) -> coordinator_pb2.WantedResiduals | None:
        """Returns the checkpoint that wants this trainer's residuals of error feedback. None: there is none.

        Its id is empty if the checkpoint is about to begin.
        """
        if self._ended is not None:
            return None
        try:
            news = self._ask()
        except ShardwellError:
            return None
        return news.residuals if news is not None and news.HasField("residuals") else None

    def _ask(self) -> coordinator_pb2.HeartbeatResponse | None:
        """See ``ask``. Returns the answer, if there is one."""
        self.check()
        if not self.valid:
            return None
        heartbeats = self._heartbeats  # another thread may start the next membership meanwhile
        try:
            return heartbeats.send(_ASK_TIMEOUT_S)
        except (StaleEpochError, UnauthenticatedError) as error:
            self._end(error, heartbeats.epoch)
        except (RunDeletedError, ConflictError) as error:
            self._end(error)
            raise
        except ShardwellError as error:
            logger.info("the coordinator did not answer a heartbeat: %s", error)
        return None

    def note_commit(self) -> None:
        """Records that the run has committed a step with this trainer as a member."""
        self._rejoins_in_a_row = 0
        if self._token.tls is not None:
            self._token.tls.is_in_use = True

    def give_up(self, reason: str) -> None:
        """Makes the membership lapse, because this trainer is going to join again. No effect if it is over already."""
        if self.valid:
            self._note_lapse(StaleEpochError(reason))

    def _note_lapse(self, error: StaleEpochError) -> None:
        self._lapse, self.lapsed, self.valid = error, True, False
        self._over.set()

    def refresh(self) -> coordinator_pb2.JoinResponse:
        """Asks the coordinator for the present state of this membership, which also replaces ``joined``.

        Raises:
            StaleEpochError: The membership has lapsed.
            DeadlineError: A trainer of the replica is gone, and was not replaced in ``wait_limit_s``.
        """
        self.require_valid()
        joined = self._join(self.joined, same=True)
        if joined.epoch == self.epoch:
            self._note_joined(joined)
        else:  # the coordinator had revoked the former membership, and this trainer did not know it yet
            self._over.set()
            self._stream.close()
            self._start(joined)
        return joined

    def rejoin(self) -> coordinator_pb2.JoinResponse:
        """Starts another membership under the same name after this one has lapsed. Called by the training thread.

        Raises:
            StaleEpochError: The name belongs to another process now, or memberships lapse again and again.
            RunDeletedError: The run was deleted.
            DeadlineError: The run did not admit the trainer in ``wait_limit_s``.
        """
        self.check()
        lapse = self._lapse
        assert lapse is not None
        self._rejoins_in_a_row += 1
        if self._rejoins_in_a_row > _MAX_REJOINS:
            self._end_for_good(
                StaleEpochError(
                    f"trainer {self.trainer!r} lost its membership in run {self.run!r} {_MAX_REJOINS + 1} times in a "
                    f"row without a commit in between, so it stops. The last time: {lapse}",
                    **lapse.data,
                )
            )
            self.check()
        logger.warning("trainer %r joins run %r again: %s", self.trainer, self.run, lapse)
        self._over.set()
        self._stream.close()
        try:
            joined = self._join(self.joined)
        except DuplicateError as error:  # another process has this trainer's name and place
            self._end_for_good(StaleEpochError(f"{lapse}; {error}", **lapse.data))
            self.check()
        except RunDeletedError as error:
            self._end_for_good(error)
            raise
        self._start(joined)
        return joined

    def report_device(self, device: coordinator_pb2.TrainerDevice) -> str:
        """Reports the device that this trainer is going to use.

        Returns:
            Name of another trainer that uses it, while one of the two does not share it. Empty: there is none.
        """
        self.reports.device = device
        answer = self._ask()
        user = "" if answer is None else answer.device_user
        if user:
            self.reports.device = None
        return user

    def note_loop(self, ended_step: int | None) -> None:
        """Records that the training loop has begun, or at which number of committed steps it has ended.

        The coordinator learns the end at once: a trainer of this replica that joins later need not wait for this one.
        """
        self.reports.ended_step = ended_step
        if ended_step is not None and self.world.replica_size > 1:
            with suppress(ShardwellError):  # whatever it is, the loop has ended
                self.ask()

    def report_iteration(self, step: int, tracked: dict[str, str]) -> None:
        """Reports the tracked objects at the end of an iteration, with which trainers that join continue.

        Args:
            step: The last committed step of the iteration.
            tracked: See ``RunState.tracked_json``.
        """
        self.reports.ended_iteration = coordinator_pb2.RunState(step=step, tracked_json=tracked)
        if self._ask() is not None:
            self.reports.ended_iteration = None  # otherwise the next heartbeat reports it

    def leave(self, error: str = "") -> None:
        """Leaves the run, so that the coordinator reassigns the ranks at once. No effect after the membership ended.

        Args:
            error: The error that ended the training script, for the other trainers of the replica. Empty: none.
        """
        self._over.set()
        self._heartbeats.join(self._config.waits.rpc_timeout_s)
        if self.valid:
            request = coordinator_pb2.LeaveRequest(
                run=self.run,
                run_id=self.identity.run_id,
                trainer=self.trainer,
                epoch=self.epoch,
                error=error,
                ended_step=self.reports.ended_step,
            )
            try:
                self._coordinator.call("Leave", request, timeout_s=_LEAVE_TIMEOUT_S)
            except ShardwellError as failure:
                logger.info("the coordinator did not confirm that trainer %r left: %s", self.trainer, failure)
        self._stream.close()
        self._close(
            StaleEpochError(
                "the session is closed: join again with shardwell.join, and shard a model that is constructed again"
            )
        )

    def disown(self) -> None:
        """Ends the membership in a forked process. The process that joined keeps it."""
        self._close(
            UsageError(
                "this process was forked from a trainer and is not a member of its run: compute in the process that "
                "called shardwell.join, or join in this process under another name"
            )
        )

    def _note_message(self, news: coordinator_pb2.HeartbeatResponse | coordinator_pb2.KeepMembershipResponse) -> None:
        self._note_news(news.committed_step, news.placement)
        if isinstance(news, coordinator_pb2.HeartbeatResponse):
            self._token.renew(news.token)
        else:
            self.replica_epoch.announce(news.replica_epoch, news.replica_error)
            self._notices.show(news.notices)
            if news.HasField("calls"):
                self._coordinator.use_calls(news.calls)
        if news.HasField("residuals"):
            self.when_residuals_wanted(news.residuals)

    def _note_news(self, committed_step: int, placement: int) -> None:
        with self._news_lock:
            risen = committed_step > self.committed_step or placement > self.placement
            self.committed_step = max(self.committed_step, committed_step)
            self.placement = max(self.placement, placement)
        if risen:
            self.when_news()

    def _end(self, error: ShardwellError, epoch: int | None = None) -> None:
        """Ends the membership, for good unless the trainer can join again.

        Args:
            error: Why.
            epoch: The membership that the error concerns. None: the current one.
        """
        if isinstance(error, UnauthenticatedError) and self._token.is_member:
            self.token_expired = True
            error = StaleEpochError(f"the token of trainer {self.trainer!r} was not renewed in time: {error}")
        if not isinstance(error, StaleEpochError):
            self._end_for_good(error)
        elif self.valid and not self._over.is_set() and epoch in (None, self.epoch):
            logger.warning("trainer %r is no longer a member of run %r: %s", self.trainer, self.run, error)
            self._note_lapse(error)
            self.when_lapsed()

    def _end_for_good(self, error: ShardwellError) -> None:
        """Ends the membership for good, unless it has ended or this trainer is leaving."""
        if self._ended is None and (not self._over.is_set() or self._lapse is not None):
            logger.error("trainer %r is no longer a member of run %r: %s", self.trainer, self.run, error)
            self._close(error)
            self._over.set()
            self.when_ended()

    def _close(self, error: ShardwellError) -> None:
        """Ends the membership for good at the trainer's own wish: without a callback."""
        self._ended, self.lapsed, self.valid = error, False, False


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
        ``ReplicaGroup.require_same_item`` raises. If it computes a work item, or is in ``ReplicaGroup.in_use``,
        ``ReplicaGroup`` ends the group's connections, and the collective in which it waits fails.

    Epochs of a run only rise, so announcements may arrive in any order.

    Attributes:
        when_void: Called when the group becomes void, in the thread that learns it. Must return at once.
    """

    def __init__(self) -> None:
        self._announced = self._dp_rank = 0
        self.formed = 0
        """Epoch of the process group with the other trainers of the replica. 0: this trainer has none."""
        self.error = ""
        """Error with which a trainer has left since the group was formed, and its ranks. Empty: none is known."""
        self._changed = threading.Condition()
        self.when_void: Callable[[], None] = lambda: None

    @property
    def is_void(self) -> bool:
        """True if the trainer has a process group, and the trainers of its replica have changed since it was formed."""
        return 0 < self.formed < self._announced

    def announce(self, epoch: int, error: str = "") -> None:
        """Records an epoch that the coordinator announced.

        Args:
            epoch: The epoch. 0: the trainer has no replica with other trainers.
            error: With which error a trainer has left, and its ranks, if the replica has the epoch for this reason.
        """
        with self._changed:
            risen, self._announced = epoch > self._announced, max(epoch, self._announced)
            self.error = error or self.error
            self._changed.notify_all()
        if risen and self.is_void:
            self.when_void()

    def wait_until_void(self, limit_s: float) -> bool:
        """Waits until the process group is void; returns whether it is.

        A collective may fail before the coordinator tells why.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.is_void, limit_s)

    def form(self, epoch: int, dp_rank: int) -> None:
        """Records that the process group of an epoch exists.

        Args:
            epoch: The epoch. 0: the trainer is a replica by itself.
            dp_rank: Names the replica in messages.
        """
        self.formed, self._dp_rank, self.error = epoch, dp_rank, ""

    def close(self) -> None:
        """Records that the process group is closed."""
        self.formed = 0

    def require_valid(self) -> None:
        """Raises ReplicaLostError if the process group is void."""
        if self.is_void:
            raise self.lost_error()

    def lost_error(self) -> ReplicaLostError:
        """Returns the error for a void process group."""
        epochs = f"(epoch {self.formed}, now {self._announced})"
        if self.error:
            return ReplicaLostError(
                f"{self.error}. The process group of replica {self._dp_rank} is void {epochs}: remove the cause, and "
                f"{START_AGAIN}"
            )
        return ReplicaLostError(
            f"a trainer of replica {self._dp_rank} was lost or replaced, so the replica's process group is void "
            f"{epochs}: {START_AGAIN}"
        )
