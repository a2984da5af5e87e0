"""The work items of a run: which trainers compute which item, and the steps in flight that the items belong to.

``SynchronousWork`` has one step with the items of all data ranks, which are committed together. ``AsynchronousWork``
has one step per data rank, with one item each, which are committed one by one.

Note: [Twin items]
    A trainer that waits for the others may compute the twin of an item that is late: the same item once more. The twin
    has its own epoch and attempt, and the servers keep its contribution apart. The first of the two trainers that
    reports the finished item wins: the item takes the winner's epoch and attempt, which the manifest of ``PrepareStep``
    names. Both compute the same bits. Pushes of the other trainer are dropped, and its report has no effect.

    An item can only have a twin while its trainer says that it computes this item. A trainer that evaluates the model
    between two steps has not started its item, and relies on the run to wait for it. Both trainers must yield batches
    by ``step.batches``, because the trainer that loses goes on without an error only there.

    The loser computes its item to the end, in vain. Meanwhile the run does not wait for it: another trainer's proposal
    is committed, and its ranks are leased to others.

    The time during which servers make the version that the items need does not count: all trainers wait for it.

    Only items with one member have twins: a replica of several trainers computes none.

    At most one item of a run has a twin at a time: servers have memory for few contributions beyond those of all ranks.

Note: [Asynchronous runs]
    There is one ``Step`` per data rank, with one item each. A step's number is the version that its item reads. An item
    that no trainer computes reads the newest version: with every commit, its number becomes that version.

    A trainer computes one item at a time. When it asks for work, it gets the item with the lowest number among the
    items of its own ranks and of ranks whose owners are gone. If numbers are equal, the latter come first, because the
    trainer's loop ends with the last item of its own ranks. With bounded staleness, an item starts only if it is at
    most ``max_staleness`` items ahead of the item of the slowest data rank.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwell_server.coordinator.ranks.members import Member, MemberState
from shardwell_server.coordinator.ranks.rank_assignment import (
    RankOwners,
    Replica,
    distribute_items,
    ranks_of_items,
    waiting_replicas,
)
from shardwell_server.coordinator.run_checkpoints import RunCheckpoints
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.steps.committed_steps import CommittedSteps
from shardwell_server.coordinator.steps.step import FinishedWork, Step, WorkItem, WorkState, new_members
from shardwell_wire.errors import InvalidRequestError, StepRestartedError
from shardwell_wire.v1 import coordinator_pb2

_KEPT_TIMES, _LEAST_TIMES = 64, 3
_LATE_FACTOR, _LATE_MARGIN_S = 2.0, 0.5
"""An item is late after this multiple of the median time, plus this many seconds."""


@dataclass(slots=True)
class WorkTimes:
    """Times that trainers took for one work item each, in recent steps."""

    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))

    def add(self, seconds: float) -> None:
        """Adds the time of one item."""
        self._seconds.append(seconds)

    @property
    def late_after_s(self) -> float | None:
        """Time after which an item is late. None: too few times are known."""
        if len(self._seconds) < _LEAST_TIMES:
            return None
        return _LATE_FACTOR * statistics.median(self._seconds) + _LATE_MARGIN_S


def next_late_item(
    step: Step,
    members: Mapping[str, Member],
    late_after_s: float | None,
    updated_s: float | None,
    *,
    excluding: str = "",
) -> tuple[WorkItem, float] | None:
    """Returns the item that will be late first or is late already, and the clock time at which it is late.

    Args:
        members: The trainers of the run, by name.
        late_after_s: See ``WorkTimes.late_after_s``.
        updated_s: Clock time since which the servers have the step's version. None: not all of them have it.
        excluding: A trainer whose items are not considered.

    Returns:
        None if no item can have a twin.
    """
    if late_after_s is None or updated_s is None or step.twinned is not None or len(step.items[0].members) > 1:
        return None
    found: list[tuple[float, int]] = []
    for item in step.unfinished:
        trainer = item.first_trainer
        member = members.get(trainer)
        if member is None or item.state is not WorkState.LEASED or not item.fenced or trainer == excluding:
            continue
        at = member.in_progress
        if at is None or not member.accepts_reassigned_work:
            continue
        if (at.step, at.global_rank) == (step.number, item.first_rank):
            found.append((max(at.since_s, updated_s) + late_after_s, item.dp_rank))
    if not found:
        return None
    late_s, dp_rank = min(found)
    return step.items[dp_rank], late_s


class Work(ABC):
    """The work items of one run."""

    def __init__(
        self,
        settings: RunSettings,
        owners: RankOwners,
        commits: CommittedSteps,
        checkpoints: RunCheckpoints,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._owners, self._commits = settings, owners, commits
        self._members, self._changes = owners.members, owners.changes
        self._checkpoints, self._clock = checkpoints, clock
        self.times = WorkTimes()
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

    def describe_trainer(self, name: str) -> str:
        """Returns a trainer and the logical ranks that it plays in the steps in flight, for messages."""
        items = [item for step in self.steps for item in step.items_of(name)]
        ranks = sorted(member.global_rank for item in items if (member := item.member_of(name)) is not None)
        return f"rank {', '.join(map(str, ranks)) or 'none'} (trainer {name!r})"

    def first_trainers(self) -> dict[int, str]:
        """Returns the trainers that compute dp rank 0's work item, by global rank in the order of the replica."""
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
        """Restores the steps in flight after a coordinator restart. ``RankOwners`` must be restored.

        Args:
            items: Work items as stored, by data rank.
            versions: The version that each item reads.
        """

    @abstractmethod
    def advance(self, step: Step) -> None:
        """Starts the step after a step that is committed."""

    @abstractmethod
    def leaders(self, step: Step) -> list[str]:
        """Returns the trainers whose proposals are committed together: one for each cp, tp and pp rank.

        Returns:
            The leaders in the order of the replica's ranks. Empty: all trainers that can lead for a rank are gone.
        """

    def restart(self) -> None:
        """Starts a new attempt of every item of the steps in flight. See ``Step.restart``.

        Items of trainers that are gone get new epochs, so that what these trainers may still push is rejected.
        """
        for step in self.steps:
            step.restart(self._clock())
        present = {member.name for member in self._members if member.state is not MemberState.GONE}
        for item in self.items:
            if not present >= set(item.trainers):
                item.epoch = self._changes.next_epoch()
        self._changes.touch()
        self._changes.changed.notify()

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

    def finish_items(self, member: Member, step: Step, finished: Sequence[FinishedWork]) -> bool:
        """Marks items that a trainer has finished in a step. Returns True if all items of the step are finished now."""
        now = self._clock()
        for item in (work.item for work in finished):
            if (twin := item.twin) is None:
                if not step.restored:
                    self.times.add((now - item.since_s) / len(finished))
                continue
            twin_wins = twin.trainer == member.name
            self.times.add(now - (twin.since_s if twin_wins else item.since_s))
            loser = self._members.by_name.get(item.first_trainer if twin_wins else twin.trainer)
            if loser is not None:
                loser.note_behind(True)
            self._changes.touch()
        are_last = step.finish(finished, now, trainer=member.name)
        if step.unfenced:  # items were restarted: see Note: [Sums of items]
            self._changes.touch()
            self._changes.changed.notify()
        return are_last

    def locate_data(self, item: coordinator_pb2.WorkItem) -> coordinator_pb2.WorkItem:
        """Adds the position of the data rank's streams to an item of a step in flight, for the trainer that has it."""
        if (state := self._commits.state) is not None and item.dp_rank in state.data_positions:
            item.data_position = state.data_positions[item.dp_rank]
        return item

    def reset_item(self, step: Step, item: WorkItem, request_id: str) -> None:
        """Starts a new attempt of an item, and of finished items whose trainers are lost and cannot reset them."""
        now = self._clock()
        step.reset(item, request_id, now)
        for other in step.items.values():
            if other.state is WorkState.ORPHANED:
                step.reset(other, "", now)
                step.revoke(other, self._changes.next_epoch(), now)
        self._changes.touch()
        self._changes.changed.notify()

    def _new_item(self, dp_rank: int, trainers: Replica, state: WorkState, *, number: int = 0) -> WorkItem:
        """Returns an item with a new epoch."""
        members = new_members(ranks_of_items(self._settings.world)[dp_rank], trainers)
        return WorkItem(dp_rank, members, self._changes.next_epoch(), number=number, state=state, since_s=self._clock())


class SynchronousWork(Work):
    """The step in flight and its items. See ``Work``."""

    @property
    def step(self) -> Step:
        """The step in flight."""
        (step,) = self.steps
        return step

    # ---- steps ----

    def begin(self, previous: Mapping[int, WorkItem]) -> None:
        """See ``Work``. Leases the items to live trainers."""
        live, replicas = self._members.live, self._owners.replicas
        chosen = distribute_items(
            replicas,
            live.keys(),
            lambda name: live[name].accepts_reassigned_work is not False,
            expired={member.name for member in self._members.expired},
            behind={name for name, member in live.items() if member.behind},
        )
        items = {
            dp_rank: self._next_item(dp_rank, replica, replicas[dp_rank], previous.get(dp_rank))
            for dp_rank, replica in enumerate(chosen)
        }
        self.steps = (Step(self._commits.count, items, self._clock()),)

    def _next_item(self, dp_rank: int, replica: Replica | None, owners: Replica, before: WorkItem | None) -> WorkItem:
        state = WorkState.LEASED if replica else WorkState.VACANT
        if before is None or before.trainers != replica:
            item = self._new_item(dp_rank, replica or owners, state, number=self._commits.count)
        else:  # A lease that continues keeps its epoch: only its trainers have ever seen that epoch.
            members = new_members(ranks_of_items(self._settings.world)[dp_rank], replica)
            item = WorkItem(
                dp_rank, members, before.epoch, number=self._commits.count, state=state, since_s=self._clock()
            )
        item.fenced = replica is not None and (before is None or before.fenced)
        return item

    def restore(self, items: dict[int, WorkItem], versions: Mapping[int, int]) -> None:
        if any(version != self._commits.count for version in versions.values()):
            # The run was not stored after the last commit, because nothing else changed: lease the items as before.
            self.begin(items)
            items = self.step.items
        self.steps = (Step(self._commits.count, items, self._clock(), restored=True),)

    def advance(self, step: Step) -> None:
        self.begin(step.items)

    def leaders(self, step: Step) -> list[str]:
        """See ``Work``.

        A leader is the trainer that computes its rank in dp rank 0's work item, if it has proposed, or if all trainers
        of the item are present. Otherwise these trainers may wait for the one that was lost. The leader is then a live
        trainer that owns a rank with the same cp, tp and pp rank: if possible one that has proposed, and among those
        the owner of the lowest rank.
        """
        found = []
        is_whole = all(self._is_present(step, step.items[0], name) for name in step.items[0].trainers)
        for rank, trainer in self.first_trainers().items():
            leads = is_whole or trainer in step.proposals
            other = None if leads else self._owners.lowest_live_trainer(rank, preferred=step.proposals)
            found.append(other or (trainer if leads or self._members.by_name[trainer].expired else None))
        return [leader for leader in found if leader is not None] if all(found) else []

    def _is_present(self, step: Step, item: WorkItem, name: str) -> bool:
        """True if a trainer is present, and was already when one of its ranks was leased to it in this step."""
        member = self._members.live.get(name)
        if member is None or member.behind:
            return False
        return member.joined_step < step.number or member.epoch < item.epoch

    # ---- items ----

    def assigned_to(self, name: str) -> coordinator_pb2.StepWork:
        step = self.step
        # All trainers of a replica must compute their items in the same order.
        leased = sorted(step.leased_to(name), key=lambda item: item.dp_rank)
        played = ((item, item.member_of(name)) for item in leased)
        replica_epoch = self._owners.replica_epoch_of(name)
        items = [item.to_proto(member.global_rank, replica_epoch) for item, member in played if member is not None]
        if (twinned := step.twinned_by(name)) is not None:
            items.append(twinned.twin_to_proto())
        return coordinator_pb2.StepWork(step=step.number, items=map(self.locate_data, items), position=step.number)

    def lease_own_items(self, name: str) -> bool:
        replicas, live = self._owners.replicas, self._members.live
        vacant = ((item, replicas[item.dp_rank]) for item in self.items if item.state is WorkState.VACANT)
        found = [(item, replica) for item, replica in vacant if name in replica and live.keys() >= set(replica)]
        if not all(item.fenced for item, _ in found):
            return False
        for item, replica in found:
            self._lease(item, replica)
        return True

    def lease_vacant_items(self) -> list[WorkItem]:
        """Leases vacant items to replicas that wait for work: one item each, spares first. Returns the items.

        Unlike ``distribute_items``, this compares no loads: a waiting replica has no unfinished item.
        """
        leasable = self.step.leasable
        if not leasable or not self._members.waiting_for_work:
            return []
        pairs = list(
            zip(waiting_replicas(self._owners.replicas, self._members.waiting_for_work), leasable, strict=False)
        )
        for replica, item in pairs:
            self._lease(item, replica)
        if pairs:  # otherwise waiting trainers would wake each other without end
            self._changes.changed.notify()
        return [item for _, item in pairs]

    def _lease(self, item: WorkItem, replica: Replica) -> None:
        self.step.lease(item, replica, self._changes.next_epoch(), self._clock())
        for name in replica:
            self._members.waiting_for_work.pop(name, None)

    def revoke_items_of(self, name: str) -> None:
        """See ``Work``. A finished item counts without its trainer."""
        for step in self.steps:
            step.drop_twin(name)
            for item in step.items_of(name):
                item.note_lost(name)
                if item.state is not WorkState.VACANT:
                    step.revoke(item, self._changes.next_epoch(), self._clock())

    # ---- twin items ----

    def next_late_item(self, *, excluding: str) -> tuple[WorkItem, float] | None:
        """Returns the item whose twin a trainer may compute next, and the clock time from which it is late."""
        late_after_s, updated_s = self.times.late_after_s, self._commits.updated_s
        return next_late_item(self.step, self._members.by_name, late_after_s, updated_s, excluding=excluding)

    def start_twin(self, item: WorkItem, name: str) -> None:
        """Lets a trainer compute the twin of a late item."""
        self.step.start_twin(item, name, self._changes.next_epoch(), self._clock())
        self._members.waiting_for_work.pop(name, None)


class AsynchronousWork(Work):
    """The steps in flight, by data rank, with one item each. See Note: [Asynchronous runs]."""

    @property
    def numbers(self) -> list[int]:
        """Number of each data rank's next item, which is the number of its committed items."""
        return [item.number for item in self.items] or self._first_numbers

    @property
    def _first_numbers(self) -> list[int]:
        """Number of each data rank's first item: 0, unless the run was loaded from a checkpoint."""
        return list(self._checkpoints.first_items) or [0] * self._settings.world.dp

    # ---- steps ----

    def begin(self, previous: Mapping[int, WorkItem]) -> None:
        """See ``Work``. No item is leased: each trainer asks for its first one."""
        numbers = self._first_numbers
        items = (
            self._new_item(rank, replica, WorkState.VACANT, number=numbers[rank])
            for rank, replica in enumerate(self._owners.replicas)
        )
        self.steps = tuple(Step(self._commits.count, {item.dp_rank: item}, self._clock()) for item in items)

    def restore(self, items: dict[int, WorkItem], versions: Mapping[int, int]) -> None:
        """See ``Work``.

        If the run was stored while the commit record of an item was being written, the stored item is committed, and
        the next one follows.
        """
        now, newest = self._clock(), self._commits.count
        for record in self._commits.records:
            item = items.get(record.dp_rank)
            if record.trainer and item is not None and item.number <= record.item:
                members = new_members([item.first_rank], [item.first_trainer])
                items[item.dp_rank] = WorkItem(
                    item.dp_rank,
                    members,
                    item.epoch,
                    number=record.item + 1,
                    state=WorkState.VACANT,
                    since_s=now,
                    fenced=False,
                )
        self.steps = tuple(
            Step(newest if item.state is WorkState.VACANT else versions[dp_rank], {dp_rank: item}, now, restored=True)
            for dp_rank, item in sorted(items.items())
        )

    def advance(self, step: Step) -> None:
        """See ``Work``. The steps of other data ranks go on."""
        newest, item = self._commits.count, self.next_item(step)
        after = Step(newest, {item.dp_rank: item}, self._clock())
        self.steps = tuple(after if each is step else each for each in self.steps)
        for each in self.steps:
            if each.is_vacant:
                each.read_version(newest)

    def restart(self) -> None:
        """See ``Work``. The items read the newest version: servers may have lost the versions that they have read."""
        super().restart()
        for step in self.steps:
            step.read_version(self._commits.count)

    def next_item(self, step: Step) -> WorkItem:
        """Returns the item after that of a step, leased to the same trainer if it may start."""
        (before,) = step.items.values()
        item = WorkItem(
            before.dp_rank,
            new_members([before.first_rank], [before.first_trainer]),
            before.epoch,
            number=before.number + 1,
            state=WorkState.VACANT,
            since_s=self._clock(),
        )
        others = [item if at is before else at for at in self.items]
        if self._choose_item(before.first_trainer, others) is item:
            item.enter(WorkState.LEASED, item.since_s)
        return item

    def leaders(self, step: Step) -> list[str]:
        """See ``Work``. The trainer of the step's item."""
        return [item.first_trainer for item in step.items.values()]

    # ---- items ----

    def assigned_to(self, name: str) -> coordinator_pb2.StepWork:
        """See ``Work``. At most one item."""
        position = self._position(name)
        for step in self.steps:
            for item in step.leased_to(name) if not step.unfenced else ():
                found = self.locate_data(item.to_proto())
                return coordinator_pb2.StepWork(step=step.number, items=[found], position=position)
        return coordinator_pb2.StepWork(step=self._commits.count, position=position)

    def find_step(self, name: str, version: int, dp_rank: int, number: int) -> Step | None:
        """Returns the step of an item that a trainer computes from a version. None: the item is committed.

        Raises:
            InvalidRequestError: The run has no such data rank.
            StepRestartedError: The item is computed again from another version, because shards or the trainer were
                lost.
        """
        if dp_rank >= len(self.steps):
            raise InvalidRequestError(f"data rank {dp_rank} does not exist: the run has {len(self.steps)} data ranks")
        step, item = self.steps[dp_rank], self.items[dp_rank]
        if number < item.number:
            return None
        if (number, version) != (item.number, step.number) or step.is_vacant or not step.items_of(name):
            raise StepRestartedError(
                f"the gradients that trainer {name!r} computed for item {number} of data rank {dp_rank} from version "
                f"{version} are lost: item {item.number} is now computed from version {step.number}",
                step=step.number,
            )
        return step

    def start_item(self, name: str, *, own_only: bool = False) -> bool:
        """Leases to a trainer the item that it computes next.

        Args:
            own_only: True to choose among its own ranks only.

        Returns:
            False if there is none, or the servers have not fenced the item that the trainer has.
        """
        for step in self.steps:
            if step.items_of(name) and not step.is_vacant:
                return not step.unfenced
        item = self._choose_item(name, self.items, own_only=own_only)
        if item is None:
            return False
        self.steps[item.dp_rank].lease(item, (name,), self._changes.next_epoch(), self._clock())
        self._members.waiting_for_work.pop(name, None)
        self._changes.touch()
        return True

    def lease_own_items(self, name: str) -> bool:
        """See ``Work``. Starts one item, if one may start.

        Not one of a rank without an owner: its number may be higher than those of the trainer's loop, whose end the
        trainer has not told yet.
        """
        own = [self.items[rank] for rank in self._owners.ranks_of(name)]
        return self.start_item(name, own_only=True) or all(item.fenced for item in own)

    def has_all_items(self, member: Member) -> bool:
        """True if all items that a trainer wants of its data ranks are committed."""
        return member.item_limit is not None and self._position(member.name) >= member.item_limit

    def revoke_items_of(self, name: str) -> None:
        """See ``Work``. The next trainers compute the items from the newest version.

        A finished item is computed again, because only its trainer could have proposed the step. An item whose commit
        record is being stored is kept.
        """
        for step in self.steps:
            for item in step.items_of(name):
                item.note_lost(name)
                if item.state is WorkState.VACANT or step.recording:
                    continue
                if item.state.is_finished:
                    step.reset(item, "", self._clock())
                step.revoke(item, self._changes.next_epoch(), self._clock())
                step.read_version(self._commits.count)

    def _choose_item(self, name: str, items: Sequence[WorkItem], *, own_only: bool = False) -> WorkItem | None:
        """Returns the item that a trainer starts next. None: there is none for it, or the trainer is gone.

        Args:
            items: The items of all data ranks.
            own_only: True to choose among the trainer's own ranks only.
        """
        owners, live = self._owner_by_rank(), self._members.live
        if name not in live:
            return None
        limit = live[name].item_limit
        ahead, slowest = self._settings.consistency.max_staleness, min(item.number for item in items)
        free = [
            item
            for item in items
            if item.state is WorkState.VACANT
            and item.fenced
            and (owners[item.dp_rank] == name or (not own_only and owners[item.dp_rank] not in live))
            and (ahead is None or item.number - slowest <= ahead)
            and (limit is None or item.number < limit)
        ]
        return min(free, key=lambda item: (item.number, owners[item.dp_rank] == name, item.dp_rank), default=None)

    def _position(self, name: str) -> int:
        """Returns the number of committed items of a trainer's data ranks: the lowest; for a spare, of all ranks."""
        owners = self._owner_by_rank()
        own = [item.number for item in self.items if owners[item.dp_rank] == name]
        return min(own or [item.number for item in self.items])

    def _owner_by_rank(self) -> dict[int, str]:
        """Returns the owner of each data rank. Replicas have one trainer."""
        return {dp_rank: name for dp_rank, (name,) in enumerate(self._owners.replicas)}
