"""One run: its trainers, rank assignments, units and the step in flight. The state machine, without any I/O.

Methods change state at once; who waits for a change waits on ``changed``. What must be durable
before anybody is told is marked by ``touch`` and written by ``CoordinatorState.save``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwell_server.coordinator.runs.members import Member, Membership
from shardwell_server.coordinator.runs.proposals import (
    StepProposal,
    committed_optimizer,
    require_same,
    require_same_algorithms,
)
from shardwell_server.coordinator.runs.rank_assignment import (
    Applicant,
    RankAssignments,
    assign,
    claim,
    distribute,
    natural_key,
)
from shardwell_server.coordinator.runs.step import Item, Step, WorkState
from shardwell_server.coordinator.runs.units import DeclaredUnits, Unit
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.coordinator.storage.storage import KEPT_COMMITS
from shardwell_server.coordinator.waiting import SharedCall, Signal
from shardwell_server.hyperparameters import units_that_count
from shardwell_wire.errors import DuplicateError, HyperparameterMismatchError, RunDeletedError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2


@dataclass(slots=True)
class PendingUpdate:
    """A server that has not acknowledged the update of the last commit yet."""

    step: int
    since_s: float
    error: str = ""
    """What the last try met."""


class Run:
    """One run.

    Args:
        identity: Its name, unique among the runs that are there, and its id.
        settings: What it is.
        clock: Monotonic seconds.
        created: Seconds since 1970.
        last_epoch: Its epochs are higher.
    """

    def __init__(
        self,
        identity: RunIdentity,
        settings: RunSettings,
        clock: Callable[[], float],
        created: float,
        last_epoch: int = 0,
    ) -> None:
        self.identity, self.settings, self.created = identity, settings, created
        self.name = name = identity.name
        self.clock = clock
        self.created_s = clock()
        self.changed = Signal()
        self.members = Membership(name)
        self.rank_assignments: RankAssignments = {}
        """Owner of each logical rank, gone or not; empty until the run starts."""
        self.step: Step | None = None
        """The step in flight; None until the run starts."""
        self.units = DeclaredUnits(name)
        self.commits: deque[CommitRecord] = deque(maxlen=KEPT_COMMITS)
        self.state: coordinator_pb2.RunState | None = None
        self.addresses: dict[str, str] = {}
        self.initializer: tuple[str, int] | None = None
        """Trainer that sends initial values, and the epoch it does so under."""
        self.last_epoch = last_epoch
        self.deleted = False
        self.changes, self.saved_changes = 0, 0
        """Counts of changes made and of those that are durable."""
        self.ready_to_work: dict[str, None] = {}
        """Trainers that wait for any work item, in order of arrival."""
        self.updates: dict[str, PendingUpdate] = {}
        """By server, while the last commit's update is not done everywhere."""
        self.placing: dict[str, SharedCall[Unit | None]] = {}
        """By name, the units that are being placed."""
        self.placing_turn = asyncio.Lock()
        self.saving: SharedCall[None] = SharedCall()
        self.recording: SharedCall[None] = SharedCall()
        self.preparing: SharedCall[None] = SharedCall()
        self.committing: SharedCall[None] = SharedCall()
        self.writing_commit = False
        """The commit record is on its way to the disk: too late to begin work anew."""
        self.fencing: SharedCall[None] = SharedCall()
        self.fence_error = ""
        """What the last try to fence former holders met."""

    @property
    def committed_step(self) -> int:
        """Committed steps so far: the number of the step in flight."""
        return self.commits[-1].step + 1 if self.commits else 0

    def touch(self) -> None:
        """Something changed that must be durable before anybody is told."""
        self.changes += 1

    def next_epoch(self) -> int:
        self.last_epoch += 1
        self.touch()
        return self.last_epoch

    # Trainers

    def admit(self, applicant: Applicant, incarnation: str) -> Member:
        """Takes a new process in as a member, under a new epoch, and gives it its rank assignments.

        Raises:
            DuplicateError: The name or the requested rank is taken by a live trainer.
        """
        self.members.check_name(applicant.name)
        if self.step is not None:
            self.rank_assignments.update(self._claim(applicant))
        elif applicant.requested_rank is not None and applicant.requested_rank in self._pinned():
            raise DuplicateError(
                f"rank {applicant.requested_rank} of run {self.name!r} is asked for by another trainer already: "
                "give every trainer its own, or none",
                global_rank=applicant.requested_rank,
            )
        member = Member(
            applicant.name,
            applicant.host,
            incarnation,
            self.next_epoch(),
            self.clock(),
            applicant.requested_rank,
            joined_step=self.committed_step,
        )
        self.members.members.pop(applicant.name, None)
        self.members.members[applicant.name] = member
        self.members.forget(keep=self._involved())
        if self.step is None and len(self.members.live) >= self.settings.min_trainers:
            self._start()
        self.changed.notify()
        return member

    def _involved(self) -> set[str]:
        """Trainers that own a rank or were the last to hold one."""
        items = self.step.items.values() if self.step is not None else ()
        return {*self.rank_assignments.values(), *(item.holder for item in items)}

    def _claim(self, applicant: Applicant) -> RankAssignments:
        return claim(
            self.rank_assignments,
            self.members.live,
            applicant,
            pinned=self._pinned(),
            expected=self.settings.min_trainers,
            shared=self.settings.trains,
        )

    def _pinned(self) -> set[int]:
        return {at.requested_rank for at in self.members if at.live and at.requested_rank is not None}

    def _start(self) -> None:
        live = self.members.live.values()
        applicants = [Applicant(at.name, at.host, at.requested_rank) for at in live]
        self.rank_assignments = assign(self.settings.world, applicants)
        self.begin_step(0, {})

    def lapse(self, member: Member) -> None:
        """A trainer's lease ran out. It keeps its work until another trainer wants it; then it is to be dropped."""
        member.live, member.lapsed = False, True
        self.ready_to_work.pop(member.name, None)
        self.touch()
        self.changed.notify()

    def revive(self, member: Member) -> None:
        """A trainer whose lease lapsed is heard of again. Nobody has taken its work, so its epochs are still good."""
        member.live, member.lapsed = True, False
        self.touch()
        self.changed.notify()

    def drop(self, member: Member) -> None:
        """A trainer is gone: its rank assignments become vacant, though its name keeps its claim to them.

        Its items get a new epoch and are vacant; they must be fenced before they are offered.
        """
        member.live = member.lapsed = False
        self.ready_to_work.pop(member.name, None)
        if self.step is None:
            del self.members.members[member.name]
        else:
            for item in self.step.items.values():
                if item.holder == member.name and item.state is not WorkState.VACANT:
                    self.step.vacate(item, self.next_epoch(), self.clock())
        self.touch()
        self.changed.notify()

    def check_not_deleted(self) -> None:
        """Raises RunDeletedError if the run was deleted."""
        if self.deleted:
            raise RunDeletedError(
                f"run {self.name!r} was deleted (its id was {self.identity.run_id})",
                run=self.name,
                run_id=self.identity.run_id,
            )

    def require(self, name: str, epoch: int) -> Member:
        """A live member by name and epoch.

        Raises:
            NotFoundError: There is no such trainer.
            RunDeletedError: The run was deleted.
            StaleEpochError: Its lease ran out, it left, or another process has its name now.
        """
        self.check_not_deleted()
        return self.members.require(name, epoch)

    def require_live(self, name: str) -> Member:
        """A live member by name, for requests that carry the epoch of something else. Raises as ``require``."""
        member = self.members.members.get(name)
        return self.require(name, member.epoch if member is not None else 0)

    def ranks_of(self, name: str) -> list[int]:
        """The logical ranks that are a trainer's own."""
        return sorted(rank for rank, owner in self.rank_assignments.items() if owner == name)

    def who(self, name: str) -> str:
        """A trainer and the ranks it plays, for messages."""
        ranks = [item.global_rank for item in self.step.played_by(name)] if self.step is not None else []
        return f"rank {', '.join(map(str, sorted(ranks))) or 'none'} (trainer {name!r})"

    def choose_initializer(self) -> tuple[str, int] | None:
        """The trainer that sends initial values, with its epoch; another one only if it is gone.

        It holds the lowest rank's item, or stands in: the live trainer with the lowest rank of its own.
        """
        live = self.members.live
        if self.initializer is None or self.initializer[0] not in live:
            holder = self._require_step().items[0].holder
            name = holder if holder in live else self._first_player()
            self.initializer = (name, self.next_epoch()) if name is not None else None
        return self.initializer

    def _first_player(self) -> str | None:
        ranks = {name: min(self.ranks_of(name), default=len(self.rank_assignments)) for name in self.members.live}
        return min(ranks, key=lambda name: (ranks[name], natural_key(name)), default=None)

    # The step in flight

    def _require_step(self) -> Step:
        assert self.step is not None, "the run has not started"
        return self.step

    def begin_step(self, number: int, former: dict[int, Item]) -> Step:
        """Leases the items of a step; ``former`` are those of the step before."""
        now = self.clock()
        live = self.members.live
        holders = distribute(self.rank_assignments, live, lambda name: live[name].accepts_work is not False)
        lapsed = {member.name for member in self.members.lapsed}
        for rank, owner in self.rank_assignments.items():
            if holders[rank] is None and owner in lapsed:  # nobody else takes it
                holders[rank] = owner
        items = {}
        for rank, holder in holders.items():
            before, dp_rank = former.get(rank), self.settings.world.coordinates(rank).dp_rank
            # A lease that goes on keeps its epoch: nobody else knows of it.
            epoch = before.epoch if before is not None and before.holder == holder else self.next_epoch()
            item = Item(rank, dp_rank, holder or self.rank_assignments[rank], epoch, since_s=now)
            item.fenced = before is None or before.fenced
            if holder is None:
                item.state, item.fenced = WorkState.VACANT, False
            items[rank] = item
        self.step = Step(number, items, now)
        return self.step

    def unfenced(self) -> Iterator[Item]:
        """Items whose former holder may still reach servers."""
        return (item for item in self._require_step().items.values() if not item.fenced)

    def offer(self) -> list[Item]:
        """Leases vacant items to trainers that wait for any: one each, spares first. Returns them."""
        offered = self._require_step().offered
        if not offered or not self.ready_to_work:
            return []
        owners = set(self.rank_assignments.values())
        waiting = sorted(self.ready_to_work, key=lambda name: name in owners)
        pairs = list(zip(waiting, offered, strict=False))
        for name, item in pairs:
            self.take(item, name)
        self.changed.notify()
        return [item for _, item in pairs]

    def take(self, item: Item, name: str) -> None:
        """Leases one vacant item."""
        self._require_step().lease(item, name, self.next_epoch(), self.clock())
        self.ready_to_work.pop(name, None)

    def take_own(self, name: str) -> bool:
        """Leases the vacant items of a trainer's own ranks to it; False while they are not fenced yet."""
        step = self._require_step()
        own = [
            item
            for item in step.items.values()
            if item.state is WorkState.VACANT and self.rank_assignments[item.global_rank] == name
        ]
        if not all(item.fenced for item in own):
            return False
        for item in own:
            self.take(item, name)
        return True

    def work_of(self, name: str) -> coordinator_pb2.StepWork:
        """What a trainer has to compute now."""
        step = self._require_step()
        return coordinator_pb2.StepWork(step=step.number, items=[item.to_proto() for item in step.held_by(name)])

    def reset(self, item: Item, request_id: str) -> None:
        """Begins an item anew; and those whose holders are gone, for nobody else could ever begin those anew."""
        step, now = self._require_step(), self.clock()
        step.reset(item, request_id, now)
        for other in step.items.values():
            if other.orphaned:
                step.reset(other, "", now)
                step.vacate(other, self.next_epoch(), now)
        self.touch()
        self.changed.notify()

    def check_algorithms(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Raises ConflictError if the run's optimizer state is another algorithm's."""
        for record in reversed(self.commits):
            former = committed_optimizer(record.optimizer)
            require_same_algorithms(former, optimizer, self.units.layouts)
            if len(units_that_count(former, len(self.units))) == len(self.units):
                return  # else other optimizers took the steps before

    def decision(self) -> StepProposal | None:
        """The hyper-parameters that count: those of whoever plays the lowest logical rank."""
        decider = self.decider()
        return None if decider is None else self._require_step().step_proposals.get(decider)

    def decider(self) -> str | None:
        """Name of the trainer whose hyper-parameters count in the step in flight."""
        step = self._require_step()
        holder = step.items[0].holder
        member = self.members.members.get(holder)
        if (member is not None and member.live) or holder in step.step_proposals:
            return holder
        return self._first_player()

    def step_proposal(self, step_proposal: StepProposal) -> None:
        """Takes a trainer's hyper-parameters.

        Raises:
            HyperparameterMismatchError: They differ from those that count.
        """
        step_proposals = self._require_step().step_proposals
        step_proposals[step_proposal.trainer] = step_proposal
        if (decision := self.decision()) is not None:
            try:
                require_same(decision, step_proposal, self.units.layouts)
            except HyperparameterMismatchError:
                # It must not count later, should its trainer come to decide.
                del step_proposals[step_proposal.trainer]
                raise

    def advance(self, record: CommitRecord, state: coordinator_pb2.RunState | None) -> None:
        """The commit record of the step in flight is durable: the next one begins."""
        former = self._require_step().items
        self.commits.append(record)
        self.state = state
        self.updates = {server: PendingUpdate(record.step, self.clock()) for server in self.units.servers}
        self.begin_step(record.step + 1, former)
        self.changed.notify()

    async def updated(self) -> None:
        """Returns once the last commit's update is done on every server."""
        while self.updates:
            await self.changed.wait()

    def commit_of(self, step: int) -> CommitRecord | None:
        """The record of a committed step; None if it is too long ago."""
        return next((record for record in self.commits if record.step == step), None)
