"""Leases of trainers, and of work items: joining, renewal, expiry, revocation and fencing.

Note: [Expired and revoked leases]
    A trainer whose lease expires keeps its work items until another trainer wants them: it may only be suspended or
    disconnected, and its next request makes it live again. When another trainer waits for work, joins, or needs
    something that only the expired trainer can provide, the lease is revoked. The items of the trainer's replica then
    get new epochs, and every server fences the former epochs. Unfinished items are leased again only after that.

    The lease of a trainer that is disconnected expires early. If its process has ended for certain, the lease is
    revoked at once, so that fencing is done before another trainer waits. See Note: [Broken streams].

Note: [Ended runs]
    A trainer that joins after the last step, because it was lost while it exported the model, would wait for trainers
    of its replica that have left. Only the trainers know how many steps they want, and each may ask for more than
    those before it. So they report when a loop over the steps has ended. As long as the run commits nothing more, a
    trainer of an incomplete replica joins without the others. If its own loop has steps left, it waits then.

Note: [Trainers that come back after a rollback]
    A rollback ends all memberships, and the trainers join again. The run continues when all of them are back, or one
    lease after it is loaded. Otherwise the first one to join would compute the first item of the others, too. With
    error feedback their residuals would then be on the wrong trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import nullcontext
from dataclasses import replace

from shardwell_server.coordinator.connection import GRACE_S, ConnectionState
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.ranks.members import Member, TransportReport, UnreachableServer
from shardwell_server.coordinator.ranks.rank_assignment import Applicant
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.signals import poll
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.steps.step import Step, WorkItem
from shardwell_server.coordinator.steps.work import SynchronousWork
from shardwell_wire import fault_points
from shardwell_wire.connection.channel import RECONNECT_S
from shardwell_wire.errors import AccessError, NotFoundError, ShardwellError, StaleEpochError
from shardwell_wire.host.server_folders import has_ended
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_FENCE_RETRY_S = 0.5
_RETURN_POLL_S = 0.1

_RESTART_GRACE_S = RECONNECT_S + 1.0
"""Time in which trainers can open their streams after a coordinator restart, in seconds."""


class TrainerLeases:
    """Leases of the trainers of every run.

    Attributes:
        items: Leases of the work items.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state = state
        self.items = ItemLeases(state, servers)

    # Joining and leaving

    def find_or_create_run(self, name: str, settings: RunSettings, run_id: str = "") -> Run:
        """Returns the run of this name. Creates it if it does not exist.

        Args:
            settings: Settings that the run must have.
            run_id: Id of the run for which the caller's token is. Empty: the caller may join any run.

        Raises:
            AccessError: The run has another id.
            RunDeletedError: The run with this id was deleted, and none has this name now.
            RunMismatchError: The run has other settings.
        """
        self.check_token(name, run_id)
        run = self._state.runs.get(name)
        if run is None:
            run = self._state.create_run(name, settings, run_id)
            message = f"{settings.world}, seed {settings.seed}, starts with {settings.min_trainers} trainers"
            self._state.events.add(EventKind.RUN_CREATED, message, run=name)
        elif not (run.started or run.members.live or run.units or run.checkpoints.restore) and run.settings != settings:
            # A run with units, or one that is being loaded, keeps its settings: its shards depend on them.
            run.replace_settings(replace(settings, backups=settings.backups or run.settings.backups))
            run.changes.touch()
        run.settings.require_same(name, settings)
        return run

    def check_token(self, name: str, run_id: str) -> None:
        """Checks that a caller may join the run of this name, or create it. Arguments as of ``find_or_create_run``.

        Raises:
            AccessError: The run has another id.
            RunDeletedError: The run with this id was deleted, and none has this name now.
        """
        run = self._state.runs.get(name)
        if run is None:
            self._state.check_not_deleted(name, run_id)
        elif run_id not in ("", run.identity.run_id):
            raise AccessError(
                f"the token is for run {name!r} with id {run_id}, but this run has id {run.identity.run_id}: ask an "
                "operator for a token of this run",
                run=name,
                run_id=run.identity.run_id,
            )

    async def join(
        self, run: Run, applicant: Applicant, incarnation: str, wait_s: float, *, replaced_epoch: int = 0
    ) -> Member | None:
        """Makes a process a member of a run. A retried Join returns the existing membership.

        Args:
            run: The run.
            applicant: The trainer.
            incarnation: Identifies the membership.
            wait_s: Longest time to wait.
            replaced_epoch: Epoch of a membership of the same process, which the new one replaces. 0: none.

        Returns:
            None if another process of the same name may still be alive. The caller should retry.

        Raises:
            DuplicateError: That process is alive, or a live trainer plays the requested rank.
        """
        member = run.members.find(applicant.name, incarnation)
        if member is not None:
            return self.require_member(run, member.name, member.epoch)
        if not applicant.name:
            applicant = replace(applicant, name=run.members.free_name())
        former = run.members.by_name.get(applicant.name)
        if former is not None and former.epoch == replaced_epoch:
            return self._admit(run, applicant, incarnation, replaced=former)
        if former is not None and not await self._wait_for_request_or_expiry(run, former, wait_s):
            return None
        return self._admit(run, applicant, incarnation)

    async def _wait_for_request_or_expiry(self, run: Run, former: Member, wait_s: float) -> bool:
        """Waits until a process that may have died sends a request, or its lease expires. Returns False on timeout."""
        if not former.live or wait_s <= 0:
            return True
        last_seen_s = former.last_seen_s
        try:
            async with asyncio.timeout(wait_s):
                while former.live and former.last_seen_s == last_seen_s and not former.rpcs_in_progress:
                    # A request of the former process does not notify ``changed``, so check periodically.
                    await run.changed.wait(self._state.settings.lease_s / 10)
        except TimeoutError:
            return False
        return True

    def _admit(self, run: Run, applicant: Applicant, incarnation: str, *, replaced: Member | None = None) -> Member:
        started = run.started
        self.revoke(run, [member for member in run.members.expired if member is not replaced])
        if replaced is not None and run.members.is_current(replaced):
            run.revoke_lease(replaced, keeps_place=True)
        member = run.admit(applicant, incarnation)
        self.items.start_fencing(run)
        self._state.events.add(EventKind.TRAINER_JOINED, f"{member}, epoch {member.epoch}", run=run.name)
        if run.started and not started:
            owners = ", ".join(f"{rank}: {owner!r}" for rank, owner in sorted(run.owners.by_rank.items())[:64])
            self._state.events.add(EventKind.RUN_STARTED, f"ranks {owners}", run=run.name)
        return member

    async def wait_for_start(self, run: Run, member: Member, wait_s: float) -> bool:
        """Waits until the run has started and the member has the vacant items of its own ranks.

        With several trainers per replica, a spare also waits until a rank is free: it must know its coordinates to
        build its model. The owner of a rank waits until its replica is complete, because an incomplete replica cannot
        compute, unless the run has ended.

        A member that other trainers need not wait for gets items only when it asks for work. See ``Member.behind``.

        Returns:
            False after ``wait_s``.

        Raises:
            ConflictError: The run is to be loaded from a checkpoint, and none can be loaded.
            StaleEpochError: The membership was revoked meanwhile. The trainer may join again.
        """

        async def check() -> bool | None:
            run.check_not_deleted()
            if member.name not in run.members.by_name:  # removed before the start
                raise StaleEpochError(
                    f"{member} of run {run.name!r} was removed while it waited for the start, because it seemed to "
                    "have ended: join again",
                    run=run.name,
                    trainer=member.name,
                )
            run.require_member(member.name, member.epoch)
            if run.checkpoints.restore is not None:
                run.checkpoints.check_loadable(run.name)
                return None
            if not run.started or run.members.returning or run.owners.is_waiting_spare(member.name):
                return None
            if member.behind:
                return True
            if run.owners.missing_peers(member.name):
                return True if run.ended else None  # see Note: [Ended runs]
            return True if run.work.lease_own_items(member.name) else None

        return await poll(run.changed, check, wait_s) or False

    def leave(self, run: Run, member: Member, error: str = "") -> None:
        """Removes a trainer from the run. Its ranks become vacant.

        Args:
            error: The error that ended its script. Empty: none.
        """
        if error:
            member.note_error(error, run.owners.ranks_of(member.name))
        self._add_event(run, member, EventKind.TRAINER_LEFT, member.error or f"{member} left")
        self.revoke(run, [member])

    async def wait_for_return(self, run: Run) -> None:
        """Waits until all trainers have joined again after a rollback, at most for one lease.

        See Note: [Trainers that come back after a rollback].
        """
        give_up_s = self._state.clock() + self._state.settings.lease_s
        while run.members.returning and not run.deleted:
            late = self._state.clock() >= give_up_s
            gone = [name for name, former in run.members.returning.items() if late or has_ended(former.process)]
            if gone:
                run.members.give_up(gone)
                run.changed.notify()
            await run.changed.wait(_RETURN_POLL_S)

    # Connections

    async def keep_membership(self, run: Run, member: Member) -> AsyncGenerator[coordinator_pb2.KeepMembershipResponse]:
        """Yields the committed step and the placement, first at once and then when the trainer has to learn of them.

        The caller must close the iterator, or cancel its task, when the stream breaks.

        Raises:
            StaleEpochError: The membership has ended.
            RunDeletedError: The run was deleted.
        """
        with member.connection.stream(lambda: self._watch_disconnected(run, member)):
            told: tuple[int, int, int, coordinator_pb2.WantedResiduals | None, int] | None = None
            while not self._state.stopping:
                news = member.connection.news.next_change()
                if run.deleted or not run.members.is_current(member):
                    run.require_member(member.name, member.epoch)
                replica_epoch, wanted = run.owners.replica_epoch_of(member.name), run.wanted_residuals(member)
                if replica_epoch and (told is None or told[2] != replica_epoch):
                    await self._state.save_or_retry(run)  # a restarted coordinator must not issue the epoch again
                now = (run.committed_step, run.relocations.announced, replica_epoch, wanted, run.notices.newest)
                if told != now:
                    notices = run.notices.after(0 if told is None else told[4])
                    told = now
                    yield coordinator_pb2.KeepMembershipResponse(
                        committed_step=told[0],
                        placement=told[1],
                        replica_epoch=replica_epoch,
                        replica_error=run.owners.errors.get(replica_epoch, ""),
                        residuals=wanted,
                        notices=notices,
                    )
                await news.wait()

    def _watch_disconnected(self, run: Run, member: Member, grace_s: float = GRACE_S) -> None:
        """Expires the lease of a trainer without a stream, unless the trainer connects. See Note: [Broken streams]."""
        was_silent = member.silent_s(self._state.clock()) > self._state.settings.lease_s / 2

        async def watch() -> None:
            state = await member.connection.settled_state(member.process, was_silent=was_silent, grace_s=grace_s)
            if member.live and run.members.is_current(member) and not run.deleted:
                self._end_disconnected(run, member, state)

        if member.live and not member.connection.streams and not run.deleted and not self._state.stopping:
            self._state.tasks.start(watch())

    def _end_disconnected(self, run: Run, member: Member, state: ConnectionState) -> None:
        if state is ConnectionState.ENDED:
            self._add_event(run, member, EventKind.TRAINER_ENDED, f"{member}: its process has ended")
            member.revoked_because = "its process ended, and its work was reassigned"
            self.revoke(run, [member])
        elif state is ConnectionState.DISCONNECTED:
            self._expire(run, member, "closed its connection")
            self.revoke_unfinished(run)

    def report_corrupt(self, run: Run, member: Member, transport: TransportReport) -> None:
        """Adds an event about transfers whose bytes arrived with a wrong checksum."""
        servers = self._state.cluster.servers.values()
        server = next((repr(at.server_id) for at in servers if at.address == transport.address), "")
        self._state.events.add(
            EventKind.TRANSFERS_CORRUPT,
            f"{member} on host {member.host!r} and server {server} at {transport.address}: {transport.corrupt_count} "
            "transfers since the trainer joined arrived with a wrong checksum and were repeated. Check the memory and "
            "the network interfaces of both hosts",
            run=run.name,
        )

    # Renewal and expiry

    def require_member(self, run: Run, name: str, epoch: int) -> Member:
        """Returns the live member that sent a request. Restores an expired lease.

        Raises as ``Run.require_member``.
        """
        member = run.members.by_name.get(name)
        if member is not None and member.expired and member.epoch == epoch and not run.deleted:
            run.restore_lease(member)
            message = f"{member} sent a request after its lease expired"
            self._state.events.add(EventKind.TRAINER_RETURNED, message, run=run.name)
        return run.require_member(name, epoch)

    def renew_all(self) -> None:
        """Starts every lease again, after the coordinator could not receive requests.

        A lease starts when its trainer has had time to reconnect. Otherwise a short lease could expire earlier, and the
        first trainer to reconnect would get the other trainers' work.
        """
        for run in self._state.runs.values():
            for member in run.members.live.values():
                member.last_seen_s = self._state.clock() + RECONNECT_S
                if not member.rpcs_in_progress:  # a trainer that waits in Join has no stream yet
                    self._watch_disconnected(run, member, _RESTART_GRACE_S)

    def expire(self) -> None:
        """Expires the leases of silent trainers, and revokes leases whose work another trainer waits for."""
        now, lease_s = self._state.clock(), self._state.settings.lease_s
        for run in self._state.runs.values():
            for member in run.members.silent(now, lease_s):
                self._expire(run, member, f"sent no request for {member.silent_s(now):.1f} s")
            for member in list(run.members.live.values()):
                if not member.connection.streams and has_ended(member.process):  # before it opened a stream
                    self._end_disconnected(run, member, ConnectionState.ENDED)
            self.revoke_unfinished(run)
            self._revoke_cut_off(run)

    def _expire(self, run: Run, member: Member, why: str) -> None:
        self._add_event(run, member, EventKind.LEASE_EXPIRED, f"{member} {why}")
        if not run.started:
            run.revoke_lease(member)
        elif run.asynchronous:
            self.revoke(run, [member])  # any other trainer can compute its items when it starts its next one
        else:
            run.expire_lease(member)

    def _add_event(self, run: Run, member: Member, kind: EventKind, message: str) -> None:
        ranks = ", ".join(map(str, run.owners.ranks_of(member.name)))
        self._state.events.add(kind, message + (f"; vacant ranks: {ranks}" if ranks else ""), run=run.name)

    # Revocation

    def revoke(self, run: Run, members: Iterable[Member]) -> None:
        """Revokes the leases and work items of trainers. See Note: [Expired and revoked leases]."""
        for member in members:
            run.revoke_lease(member)
        self.items.start_fencing(run)

    def revoke_unfinished(self, run: Run) -> None:
        """Revokes expired leases on unfinished items if a replica waits for work, or a spare for a rank."""
        if not run.members.expired:
            return
        if run.owners.has_waiting_replica:
            self.revoke(run, [member for member in run.members.expired if run.work.computes(member.name)])
        if run.owners.has_waiting_spare:
            self.revoke(run, run.members.expired)

    def revoke_initializer(self, run: Run, layout: UnitLayout, *, wanted_by: Member) -> None:
        """Revokes the expired lease of the trainer that sends a unit's values, for a trainer that needs them."""
        initializer = run.initializer_of(layout)
        if initializer is not None and initializer.trainer != wanted_by.name:
            self.revoke(run, [member for member in run.members.expired if member.name == initializer.trainer])

    def revoke_for_commit(self, run: Run, step: Step, *, updates_on_trainers: bool) -> None:
        """Revokes expired leases that block the commit of a finished step.

        A trainer that should lead and has not proposed keeps its lease until another one leads in its place. If the
        optimizer runs on the trainers, each expired trainer blocks the commit: its optimizer partitions are not staged.

        Args:
            updates_on_trainers: True if the optimizer runs on the trainers.
        """
        if run.asynchronous or not (expired := run.members.expired):
            return
        pairs = zip(step.items[0].trainers, run.work.leaders(step), strict=False)
        replaced = {trainer for trainer, leader in pairs if leader != trainer and leader in step.proposals}
        self.revoke(run, [member for member in expired if updates_on_trainers or member.name in replaced])

    def _revoke_cut_off(self, run: Run) -> None:
        """Revokes leases of trainers that cannot reach a live server, if a waiting trainer can reach that server."""
        for member in list(run.members.live.values()):
            for cut in member.unreachable:
                if run.work.computes(member.name) and self._is_cut_off(run, member, cut):
                    server = next(at for at in self._state.cluster.servers.values() if at.address == cut.address)
                    for_s = self._state.clock() - cut.since_s
                    what = f"could not reach server {server.server_id!r} at {cut.address} for {for_s:.1f} s"
                    member.revoked_because = f"it {what}, and its work was reassigned"
                    message = f"{member} {what} ({cut.reason}): its work is reassigned to another trainer"
                    self._state.events.add(EventKind.TRAINER_CUT_OFF, message, run=run.name)
                    self.revoke(run, [member])

    def _is_cut_off(self, run: Run, member: Member, cut: UnreachableServer) -> bool:
        """True if this trainer could not reach a live server for longer than a lease, but a waiting trainer can."""
        cluster, lease_s = self._state.cluster, self._state.settings.lease_s
        owners = (cluster.servers.get(server_id) for server_id in run.units.servers)
        server = next((at for at in owners if at is not None and at.address == cut.address), None)
        if server is None or not server.live or cluster.silent_s(server) > lease_s / 2:
            return False  # the server itself may be the cause
        waiting = (run.members.by_name[name] for name in run.members.waiting_for_work if name != member.name)
        reachable = any(cut.address not in {at.address for at in other.unreachable} for other in waiting)
        return reachable and self._state.clock() - cut.since_s > lease_s


class ItemLeases:
    """Leases of the work items of every run."""

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    def start_fencing(self, run: Run) -> None:
        """Fences former trainers of work items in the background, then leases the vacant items."""
        if run.work.unfenced:
            self._state.tasks.start(run.calls.fencing(self._fence_all, run))

    async def _fence_all(self, run: Run) -> None:
        # The epochs of former trainers of a run that is loaded from a checkpoint are rejected by ``BeginRestore``.
        while not (run.deleted or run.checkpoints.restore) and (items := run.work.unfenced):
            # Store the new epochs before any server sees them: a restarted coordinator must not issue them again.
            await self._state.save_or_retry(run)
            fault_points.reach("coordinator.fence.before")
            try:
                await self.fence(run, items)
            except ShardwellError as error:
                run.fence_error = str(error)
                logger.warning("run %r: %s", run.name, error)
                await run.changed.wait(_FENCE_RETRY_S)
                continue
            run.fence_error = ""
            fault_points.reach("coordinator.fence.after")
            self.lease_vacant_items(run)
            run.changed.notify()

    async def fence(self, run: Run, items: list[WorkItem]) -> None:
        """Makes every server reject pushes under older epochs and attempts of the items' dp ranks."""
        # In an asynchronous run, no commit may take place between the choice of the version and the fence.
        async with run.calls.turn if run.asynchronous else nullcontext():
            await self._fence(run, items)

    async def _fence(self, run: Run, items: list[WorkItem]) -> None:
        # A server applies a fence to the step it is at. A server that has not updated yet would apply the fence of the
        # step in flight to the step before.
        await run.wait_until_updated()
        # Attempts start again in every step, and the step may have been committed while the items were stored.
        found = [(step, item) for item in items if (step := run.work.step_of(item)) is not None]
        if not found:
            return
        fences = [(item, item.epoch, item.attempt) for _, item in found]
        request = shard_pb2.FenceRequest(
            context=self._servers.context(run, run.committed_step),
            ranks=[_rank_fence(item, step.number if run.asynchronous else None) for step, item in found],
        )
        processes = [at for at in run.units.updated_processes if not self._is_replaced(run, at)]
        await asyncio.gather(*(self._fence_server(server_id, request) for server_id in dict(processes)))
        for item, epoch, attempt in fences:
            if (item.epoch, item.attempt) == (epoch, attempt):  # otherwise it has changed since
                item.fenced = True

    def _is_replaced(self, run: Run, process: tuple[str, str]) -> bool:
        """True if a server process is gone, and what it holds of a run does not count even if it returns."""
        cluster = self._state.cluster
        return cluster.is_gone(process) and not (cluster.may_return(process) and run.units.needs_updates(process))

    async def _fence_server(self, server_id: str, request: shard_pb2.FenceRequest) -> None:
        try:
            await self._servers.call(server_id, "Fence", request)
        except NotFoundError:
            return  # the server has no data of the run, so no push can succeed

    def start_twin(self, run: Run, member: Member) -> None:
        """Lets a waiting trainer compute the twin of a late item. Wakes the run's waiters when an item will be late.

        See Note: [Twin items] in ``work.py``.
        """
        work = run.work
        if not isinstance(work, SynchronousWork) or (found := work.next_late_item(excluding=member.name)) is None:
            return
        item, late_s = found
        remaining_s = late_s - self._state.clock()
        if remaining_s > 0:
            if not run.calls.waking.in_flight:
                self._state.tasks.start(run.calls.waking(run.changed.notify_after, remaining_s))
            return
        work.start_twin(item, member.name)
        message = (
            f"{item} of step {run.committed_step} is late at trainer {item.first_trainer!r}: trainer "
            f"{member.name!r} computes its twin item"
        )
        self._state.events.add(EventKind.WORK_COPIED, message, run=run.name)

    def lease_vacant_items(self, run: Run) -> None:
        """Leases vacant items to trainers that wait for work. In an asynchronous run, they ask for items."""
        if not isinstance(run.work, SynchronousWork):
            return
        for item in run.work.lease_vacant_items():
            trainers = ", ".join(f"trainer {name!r}" for name in item.trainers)
            message = f"{item} of step {run.committed_step} is leased to {trainers}"
            self._state.events.add(EventKind.WORK_LEASED, message, run=run.name)


def _rank_fence(item: WorkItem, version: int | None) -> shard_pb2.RankFence:
    """Returns the fence of an item. The contributions of a finished item count: the step may be prepared already.

    Args:
        version: The version that it reads. None: the version of the step.
    """
    attempt = 0 if item.state.is_finished else item.attempt
    return shard_pb2.RankFence(dp_rank=item.dp_rank, epoch=item.epoch, attempt=attempt, version=version)
