"""Which trainers compute which work items of a run, and the steps in flight that these items belong to.

``SynchronousWork`` has one step with the items of all data ranks. ``AsynchronousWork`` has one step per data rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from shardwell_server.coordinator.runs.checkpoints import RunCheckpoints
from shardwell_server.coordinator.runs.committed_steps import CommittedSteps
from shardwell_server.coordinator.runs.copies import WorkTimes
from shardwell_server.coordinator.runs.members import Member, Members, MemberState
from shardwell_server.coordinator.runs.replicas import Replica, ranks_of_items
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work_items import FinishedWork, WorkItem, WorkState, new_members
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.waiting import Signal
from shardwell_wire.v1 import coordinator_pb2


class WorkingRun(Protocol):
    """The parts of a run that its work depends on. See ``Run``."""

    settings: RunSettings
    clock: Callable[[], float]
    changed: Signal
    members: Members
    commits: CommittedSteps
    checkpoints: RunCheckpoints
    work_times: WorkTimes

    @property
    def committed_step(self) -> int: ...

    @property
    def replicas(self) -> Sequence[Replica]: ...

    def touch(self) -> None: ...

    def next_epoch(self) -> int: ...

    def ranks_of(self, name: str) -> list[int]: ...

    def replica_epoch_of(self, name: str) -> int: ...

    def lowest_live_trainer(self, rank: int, preferred: Container[str] = ()) -> str | None: ...


class Work(ABC):
    """The work items of one run.

    Args:
        run: The run.
    """

    def __init__(self, run: WorkingRun) -> None:
        self._run = run
        self.steps: tuple[Step, ...] = ()
        """The steps in flight. Empty until the run starts."""

    @property
    def items(self) -> list[WorkItem]:
        """The work items of all steps in flight, by data rank."""
        return [item for step in self.steps for item in step.items.values()]

    @property
    def unfenced(self) -> list[WorkItem]:
        """Items whose former trainers may still push to a server."""
        return [item for step in self.steps for item in step.unfenced]

    def is_in_flight(self, step: Step) -> bool:
        """True if a step is neither committed nor replaced."""
        return any(each is step for each in self.steps)

    def step_of(self, item: WorkItem) -> Step | None:
        """Returns the step in flight that has a work item. None: the item is committed."""
        return next((step for step in self.steps if step.items.get(item.dp_rank) is item), None)

    def computes(self, name: str) -> bool:
        """True if a trainer still has to compute a work item."""
        return any(step.leased_to(name) for step in self.steps)

    def played_ranks(self, name: str) -> list[int]:
        """Returns the logical ranks that a trainer plays in the steps in flight."""
        items = [item for step in self.steps for item in step.items_of(name)]
        return sorted(member.global_rank for item in items if (member := item.member_of(name)) is not None)

    def first_trainers(self) -> dict[int, str]:
        """Returns the trainers that compute dp rank 0's work item, by global rank in the order of tp and pp ranks."""
        return {rank: member.trainer for rank, member in self.items[0].members.items()}

    # ---- steps ----

    @abstractmethod
    def begin(self, previous: Mapping[int, WorkItem]) -> None:
        """Starts the steps that read the newest version.

        Args:
            previous: The items of the previous step, by data rank. Their leases continue. Empty: none.
        """

    @abstractmethod
    def restore(self, items: dict[int, WorkItem], versions: Mapping[int, int]) -> None:
        """Restores the steps in flight after a coordinator restart. ``rank_owners`` must be restored.

        Args:
            items: Work items as stored, by data rank.
            versions: The version that each item reads.
        """

    @abstractmethod
    def advance(self, step: Step) -> None:
        """Starts the step after a step that is committed."""

    @abstractmethod
    def leaders(self, step: Step) -> list[str]:
        """Returns the trainers whose proposals are committed together: one for each tp rank and pp rank.

        Returns:
            The leaders in the order of tp ranks and pp ranks. Empty: all trainers that can lead for a rank are gone.
        """

    def restart(self) -> None:
        """Starts a new attempt of every item of the steps in flight. See ``Step.restart``.

        Items of trainers that are gone get new epochs, so that what these trainers may still push is rejected.
        """
        run = self._run
        for step in self.steps:
            step.restart(run.clock())
        present = {member.name for member in run.members if member.state is not MemberState.GONE}
        for item in self.items:
            if not present >= set(item.trainers):
                item.epoch = run.next_epoch()
        run.touch()
        run.changed.notify()

    # ---- items ----

    @abstractmethod
    def assigned_to(self, name: str) -> coordinator_pb2.StepWork:
        """Returns the items that a trainer has to compute now."""

    @abstractmethod
    def lease_own_items(self, name: str) -> bool:
        """Leases the vacant items of a trainer's own ranks to its replica, if the replica is complete.

        Returns:
            False if the items are not fenced yet.
        """

    @abstractmethod
    def revoke_items_of(self, name: str) -> None:
        """Revokes the work items that a lost trainer's replica computes.

        They get new epochs, and must be fenced on the servers before they can be leased again.
        """

    def finish_items(
        self,
        member: Member,
        step: Step,
        finished: Sequence[FinishedWork],
        written_buffers: Mapping[int, dict[tuple[int, int], int]],
    ) -> bool:
        """Marks what a trainer has finished in a step. Returns True if these were the last ones."""
        run = self._run
        now = run.clock()
        for item in (work.item for work in finished):
            if item.copy is None:
                if not step.restored:
                    run.work_times.add((now - item.since_s) / len(finished))
                continue
            copy_wins = item.copy.trainer == member.name
            run.work_times.add(now - (item.copy.since_s if copy_wins else item.since_s))
            loser = run.members.by_name.get(item.first_trainer if copy_wins else item.copy.trainer)
            if loser is not None:
                loser.note_behind(True)
            run.touch()
        are_last = step.finish(finished, now, written_buffers, trainer=member.name)
        if step.unfenced:  # items were restarted: see Note: [Sums of items]
            run.touch()
            run.changed.notify()
        return are_last

    def reset_item(self, step: Step, item: WorkItem, request_id: str) -> None:
        """Starts a new attempt of an item, and of finished items whose trainers are lost and cannot reset them."""
        run = self._run
        now = run.clock()
        step.reset(item, request_id, now)
        for other in step.items.values():
            if other.trainer_lost:
                step.reset(other, "", now)
                step.revoke(other, run.next_epoch(), now)
        run.touch()
        run.changed.notify()

    def _new_item(self, dp_rank: int, trainers: Replica, state: WorkState, *, number: int = 0) -> WorkItem:
        """Returns an item with a new epoch."""
        run = self._run
        members = new_members(ranks_of_items(run.settings.world)[dp_rank], trainers)
        return WorkItem(dp_rank, members, run.next_epoch(), number=number, state=state, since_s=run.clock())
