"""The work items of an asynchronous run, which are committed one by one.

Note: [Asynchronous runs]
    There is one ``Step`` per data rank, with one item each. A step's number is the version that its item reads. An item
    that no trainer computes reads the newest version: with every commit, its number becomes that version.

    A trainer computes one item at a time. When it asks for work, it gets the item with the lowest number among the
    items of its own ranks and of ranks whose owners are gone. If numbers are equal, the latter come first, because the
    trainer's loop ends with the last item of its own ranks. With bounded staleness, an item starts only if it is at
    most ``max_staleness`` items ahead of the item of the slowest data rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work import Work
from shardwell_server.coordinator.runs.work_items import WorkItem, WorkState, new_members
from shardwell_wire.errors import InvalidRequestError, StepRestartedError
from shardwell_wire.v1 import coordinator_pb2


class AsynchronousWork(Work):
    """The steps in flight, by data rank, with one item each. See Note: [Asynchronous runs]."""

    @property
    def numbers(self) -> list[int]:
        """Number of each data rank's next item, which is the number of its committed items."""
        return [item.number for item in self.items] or self._first_numbers

    @property
    def _first_numbers(self) -> list[int]:
        """Number of each data rank's first item: 0, unless the run was loaded from a checkpoint."""
        return list(self._run.checkpoints.first_items) or [0] * self._run.settings.world.dp

    # ---- steps ----

    def begin(self, previous: Mapping[int, WorkItem]) -> None:
        """See ``Work``. No item is leased: each trainer asks for its first one."""
        run = self._run
        numbers = self._first_numbers
        items = (
            self._new_item(rank, replica, WorkState.VACANT, number=numbers[rank])
            for rank, replica in enumerate(run.replicas)
        )
        self.steps = tuple(Step(run.committed_step, {item.dp_rank: item}, run.clock()) for item in items)

    def restore(self, items: dict[int, WorkItem], versions: Mapping[int, int]) -> None:
        """See ``Work``.

        If the run was stored while the commit record of an item was being written, the stored item is committed, and
        the next one follows.
        """
        now, newest = self._run.clock(), self._run.committed_step
        for record in self._run.commits.records:
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
        newest, item = self._run.committed_step, self.next_item(step)
        after = Step(newest, {item.dp_rank: item}, self._run.clock())
        self.steps = tuple(after if each is step else each for each in self.steps)
        for each in self.steps:
            if each.is_vacant:
                each.read_version(newest)

    def restart(self) -> None:
        """See ``Work``. The items read the newest version: servers may have lost the versions that they have read."""
        super().restart()
        for step in self.steps:
            step.read_version(self._run.committed_step)

    def next_item(self, step: Step) -> WorkItem:
        """Returns the item after that of a step, leased to the same trainer if it may start."""
        (before,) = step.items.values()
        item = WorkItem(
            before.dp_rank,
            new_members([before.first_rank], [before.first_trainer]),
            before.epoch,
            number=before.number + 1,
            state=WorkState.VACANT,
            since_s=self._run.clock(),
        )
        others = [item if at is before else at for at in self.items]
        if self._choose_item(before.first_trainer, others) is item:
            item.state = WorkState.LEASED
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
                return coordinator_pb2.StepWork(step=step.number, items=[item.to_proto()], position=position)
        return coordinator_pb2.StepWork(step=self._run.committed_step, position=position)

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

    def start_item(self, name: str) -> bool:
        """Leases to a trainer the item that it computes next.

        Returns:
            False if there is none, or the servers have not fenced the item that the trainer has.
        """
        run = self._run
        for step in self.steps:
            if step.items_of(name) and not step.is_vacant:
                return not step.unfenced
        item = self._choose_item(name, self.items)
        if item is None:
            return False
        self.steps[item.dp_rank].lease(item, (name,), run.next_epoch(), run.clock())
        run.members.stop_waiting_for_work(name)
        run.touch()
        return True

    def lease_own_items(self, name: str) -> bool:
        """See ``Work``. Starts one item, if one may start."""
        own = [self.items[rank] for rank in self._run.ranks_of(name)]
        return self.start_item(name) or all(item.fenced for item in own)

    def has_all_items(self, member: Member) -> bool:
        """True if all items that a trainer wants of its data ranks are committed."""
        return member.item_limit is not None and self._position(member.name) >= member.item_limit

    def revoke_items_of(self, name: str) -> None:
        """See ``Work``. The next trainers compute the items from the newest version.

        A finished item is computed again, because only its trainer could have proposed the step. An item whose commit
        record is being stored is kept.
        """
        run = self._run
        for step in self.steps:
            for item in step.items_of(name):
                item.note_lost(name)
                if item.state is WorkState.VACANT or step.recording:
                    continue
                if item.state is WorkState.FINISHED:
                    step.reset(item, "", run.clock())
                step.revoke(item, run.next_epoch(), run.clock())
                step.read_version(run.committed_step)

    def _choose_item(self, name: str, items: Sequence[WorkItem]) -> WorkItem | None:
        """Returns the item that a trainer starts next. None: there is none for it, or the trainer is gone.

        Args:
            name: The trainer.
            items: The items of all data ranks.
        """
        run, owners, live = self._run, self._owners, self._run.members.live
        if name not in live:
            return None
        limit = live[name].item_limit
        ahead, slowest = run.settings.consistency.max_staleness, min(item.number for item in items)
        free = [
            item
            for item in items
            if item.state is WorkState.VACANT
            and item.fenced
            and (owners[item.dp_rank] == name or owners[item.dp_rank] not in live)
            and (ahead is None or item.number - slowest <= ahead)
            and (limit is None or item.number < limit)
        ]
        return min(free, key=lambda item: (item.number, owners[item.dp_rank] == name, item.dp_rank), default=None)

    def _position(self, name: str) -> int:
        """Returns the number of committed items of a trainer's data ranks: the lowest; for a spare, of all ranks."""
        owners = self._owners
        own = [item.number for item in self.items if owners[item.dp_rank] == name]
        return min(own or [item.number for item in self.items])

    @property
    def _owners(self) -> dict[int, str]:
        """Owner of each data rank. Replicas have one trainer."""
        return {dp_rank: name for dp_rank, (name,) in enumerate(self._run.replicas)}
