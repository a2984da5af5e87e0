"""Trainers come, are heard of, and go: memberships, leases, and fencing those who are gone."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.runs.members import Member, Unreachable
from shardwell_server.coordinator.runs.rank_assignment import Applicant
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Item, Step
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.channel import RECONNECT_S
from shardwell_wire.errors import NotFoundError, ShardwellError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_RETRY_S = 0.5

_MAX_UNREACHABLE, _MAX_REASON_LENGTH = 64, 300
"""What is noted of a trainer's report about servers that it cannot reach."""


class Trainers:
    """The trainers of every run.

    Args:
        state: The runs.
        servers: The shard servers, which are told whom to refuse.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    def run_for(self, name: str, settings: RunSettings) -> Run:
        """The run of that name, made if it is new.

        Raises:
            RunMismatchError: It is another one than asked for.
        """
        run = self._state.runs.get(name)
        if run is None:
            run = self._state.create_run(name, settings)
            message = f"{settings.world}, seed {settings.seed}, starts with {settings.min_trainers} trainers"
            self._state.events.add(EventKind.RUN_CREATED, message, run=name)
        elif run.step is None and not run.members.live and run.settings != settings:
            # It never started and nobody is in it any more: it may as well be another one.
            run.settings = settings
            run.touch()
        run.settings.require_same(name, settings)
        return run

    async def join(self, run: Run, applicant: Applicant, incarnation: str, wait_s: float) -> Member | None:
        """Makes a process a member of a run; a retry finds the membership it has.

        Returns:
            None: the former process of that name may still be alive; ask again.

        Raises:
            DuplicateError: It is alive, or a live trainer plays the rank asked for.
        """
        member = run.members.find(applicant.name, incarnation)
        if member is not None:
            return self.hear(run, member.name, member.epoch)
        if not applicant.name:
            applicant = replace(applicant, name=run.members.free_name())
        former = run.members.members.get(applicant.name)
        if former is not None and former.live and wait_s > 0 and not await self._was_heard(run, former, wait_s):
            return None
        return self._admit(run, applicant, incarnation)

    async def _was_heard(self, run: Run, former: Member, wait_s: float) -> bool:
        """Waits until a process that may have died is heard of again or its lease runs out."""
        heard_s = former.heard_s
        try:
            async with asyncio.timeout(wait_s):
                while former.live and former.heard_s == heard_s and not former.rpcs_in_progress:
                    await run.changed.wait(self._state.settings.lease_s / 10)
        except TimeoutError:
            return False
        return True

    async def wait_for_rank_assignments(self, run: Run, member: Member, wait_s: float) -> bool:
        """Waits until the run has started and the vacant items of the member's own ranks are its."""

        async def seated() -> bool | None:
            run.require(member.name, member.epoch)
            return True if run.step is not None and run.take_own(member.name) else None

        return await poll(run.changed, seated, wait_s) or False

    def _admit(self, run: Run, applicant: Applicant, incarnation: str) -> Member:
        started = run.step is not None
        self.reclaim(run, run.members.lapsed)
        member = run.admit(applicant, incarnation)
        self._state.events.add(EventKind.TRAINER_JOINED, f"{member}, epoch {member.epoch}", run=run.name)
        if run.step is not None and not started:
            rank_assignments = ", ".join(
                f"{rank}: {owner!r}" for rank, owner in sorted(run.rank_assignments.items())[:64]
            )
            self._state.events.add(EventKind.RUN_STARTED, f"ranks {rank_assignments}", run=run.name)
        return member

    def hear(self, run: Run, name: str, epoch: int) -> Member:
        """The live member that a request comes from.

        A member whose lease lapsed is live again: it was stopped or cut off, but nobody has taken its work. Raises as
        ``Run.require`` does.
        """
        member = run.members.members.get(name)
        if member is not None and member.lapsed and member.epoch == epoch and not run.deleted:
            run.revive(member)
            self._state.events.add(EventKind.TRAINER_RETURNED, f"{member} is heard of again", run=run.name)
        return run.require(name, epoch)

    def reclaim(self, run: Run, members: Iterable[Member]) -> None:
        """Takes the work of lapsed trainers from them for good, because another trainer wants it."""
        for member in members:
            run.drop(member)
        self.start_fencing(run)

    def reclaim_unfinished(self, run: Run) -> None:
        """Takes back what lapsed trainers have not finished, if a trainer waits for work."""
        if run.step is not None and run.ready_to_work:
            self.reclaim(run, [member for member in run.members.lapsed if run.step.held_by(member.name)])

    def reclaim_for_commit(self, run: Run, step: Step, *, on_trainers: bool) -> None:
        """Takes back what the commit of a finished step needs from lapsed trainers.

        Args:
            run: The run.
            step: The step in flight.
            on_trainers: Whether the optimizer runs on the trainers, each of which then updates its partitions.
        """
        decider = step.items[0].holder
        self.reclaim(
            run,
            [
                at
                for at in run.members.lapsed
                if on_trainers or (at.name == decider and decider not in step.step_proposals)
            ],
        )

    def note_unreachable(self, member: Member, reports: Iterable[coordinator_pb2.UnreachableServer]) -> None:
        """Takes note of the shard servers that a trainer cannot reach."""
        now = self._state.clock()
        member.unreachable = tuple(
            Unreachable(report.address, now - max(0.0, report.for_s), report.reason[:_MAX_REASON_LENGTH])
            for report in itertools.islice(reports, _MAX_UNREACHABLE)
        )

    def reclaim_cut_off(self, run: Run) -> None:
        """Gives the work of trainers that are cut off from a live server to trainers that wait and can reach it."""
        if run.step is None:
            return
        for member in list(run.members.live.values()):
            for cut in member.unreachable:
                if run.step.held_by(member.name) and self._is_cut_off(run, member, cut):
                    server = next(at for at in self._state.cluster.servers.values() if at.address == cut.address)
                    what = f"could not reach server {server.server_id!r} at {cut.address}"
                    for_s = self._state.clock() - cut.since_s
                    member.gone_because = f"it {what} for {for_s:.1f} s, and another trainer took its work"
                    message = f"{member} {what} for {for_s:.1f} s ({cut.reason}): its work goes to another"
                    self._state.events.add(EventKind.TRAINER_CUT_OFF, message, run=run.name)
                    self.reclaim(run, [member])

    def _is_cut_off(self, run: Run, member: Member, cut: Unreachable) -> bool:
        """Whether a server that the coordinator hears of is out of a trainer's reach, but not of a waiting one's."""
        cluster, lease_s = self._state.cluster, self._state.settings.lease_s
        owners = (cluster.servers.get(server_id) for server_id in run.units.servers)
        server = next((at for at in owners if at is not None and at.address == cut.address), None)
        if server is None or not server.live or cluster.silent_s(server) > lease_s / 2:
            return False  # it is the server that is silent
        waiting = (run.members.members[name] for name in run.ready_to_work if name != member.name)
        others = any(cut.address not in {at.address for at in other.unreachable} for other in waiting)
        return others and self._state.clock() - cut.since_s > lease_s

    def leave(self, run: Run, member: Member) -> None:
        """A trainer gives its ranks back."""
        self._tell(run, member, EventKind.TRAINER_LEFT, f"{member} left")
        self.reclaim(run, [member])

    def expire(self) -> None:
        """Lets the leases of silent trainers lapse; their work goes to a trainer that waits for some."""
        now, lease_s = self._state.clock(), self._state.settings.lease_s
        for run in self._state.runs.values():
            for member in run.members.expired(now, lease_s):
                message = f"{member} was not heard of for {member.silent_s(now):.1f} s"
                self._tell(run, member, EventKind.LEASE_EXPIRED, message)
                if run.step is None:
                    run.drop(member)
                else:
                    run.lapse(member)
            self.reclaim_unfinished(run)
            self.reclaim_cut_off(run)

    def renew_all(self) -> None:
        """Begins every lease anew: the coordinator itself was not listening.

        The lease begins when the trainer can be connected again. Else a short one could run out before, and the first
        trainer that comes back would take the work of the others.
        """
        for run in self._state.runs.values():
            for member in run.members.live.values():
                member.heard_s = self._state.clock() + RECONNECT_S

    def _tell(self, run: Run, member: Member, kind: EventKind, message: str) -> None:
        ranks = ", ".join(map(str, run.ranks_of(member.name)))
        self._state.events.add(kind, message + (f"; vacant ranks: {ranks}" if ranks else ""), run=run.name)

    def start_fencing(self, run: Run) -> None:
        """Has the servers refuse former holders of vacant items, then offers the items; in the background."""
        if run.step is not None and any(run.unfenced()):
            self._state.tasks.start(run.fencing(lambda: self._fence_all(run)))

    async def _fence_all(self, run: Run) -> None:
        while not run.deleted and (items := list(run.unfenced())):
            await self._state.save_or_retry(run)
            try:
                await self.fence(run, items)
            except ShardwellError as error:
                run.fence_error = str(error)
                logger.warning("run %r: %s", run.name, error)
                await asyncio.sleep(_RETRY_S)
                continue
            run.fence_error = ""
            self.offer(run)
            run.changed.notify()

    async def fence(self, run: Run, items: list[Item]) -> None:
        """Has every server refuse older epochs and attempts of some items' ranks."""
        step = run.step
        # A server that has yet to update must not take the fence of a step to come for the present one's.
        await run.updated()
        if step is None or step is not run.step:
            return
        told = [(item, item.epoch, item.attempt) for item in items]
        request = shard_pb2.FenceRequest(
            context=self._servers.context(run, step.number),
            ranks=[
                shard_pb2.RankFence(dp_rank=item.dp_rank, epoch=epoch, attempt=attempt) for item, epoch, attempt in told
            ],
        )
        await asyncio.gather(*(self._fence_server(server_id, request) for server_id in run.units.servers))
        for item, epoch, attempt in told:
            if (item.epoch, item.attempt) == (epoch, attempt):
                item.fenced = True

    async def _fence_server(self, server_id: str, request: shard_pb2.FenceRequest) -> None:
        try:
            await self._servers.call(server_id, "Fence", request)
        except NotFoundError:
            # It holds nothing of the run: there is nothing to keep anybody from.
            return

    def offer(self, run: Run) -> None:
        """Leases vacant items to trainers that wait for work."""
        for item in run.offer():
            message = f"rank {item.global_rank} of step {run.committed_step} goes to trainer {item.holder!r}"
            self._state.events.add(EventKind.WORK_LEASED, message, run=run.name)
