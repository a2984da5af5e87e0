"""The work items of a synchronous run: one step with one item per data rank, which are committed together."""

from __future__ import annotations

from collections.abc import Mapping

from shardwell_server.coordinator.runs.copies import next_late_item
from shardwell_server.coordinator.runs.replicas import Replica, distribute_items, ranks_of_items, waiting_replicas
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.work import Work
from shardwell_server.coordinator.runs.work_items import WorkItem, WorkState, new_members
from shardwell_wire.v1 import coordinator_pb2


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
        run = self._run
        live, replicas = run.members.live, run.replicas
        chosen = distribute_items(
            replicas,
            live.keys(),
            lambda name: live[name].accepts_reassigned_work is not False,
            expired={member.name for member in run.members.expired},
            behind={name for name, member in live.items() if member.behind},
        )
        items = {
            dp_rank: self._next_item(dp_rank, replica, replicas[dp_rank], previous.get(dp_rank))
            for dp_rank, replica in enumerate(chosen)
        }
        self.steps = (Step(run.committed_step, items, run.clock()),)

    def _next_item(self, dp_rank: int, replica: Replica | None, owners: Replica, before: WorkItem | None) -> WorkItem:
        run = self._run
        state = WorkState.LEASED if replica else WorkState.VACANT
        if before is None or before.trainers != replica:
            item = self._new_item(dp_rank, replica or owners, state, number=run.committed_step)
        else:  # A lease that continues keeps its epoch: only its trainers have ever seen that epoch.
            members = new_members(ranks_of_items(run.settings.world)[dp_rank], replica)
            item = WorkItem(dp_rank, members, before.epoch, number=run.committed_step, state=state, since_s=run.clock())
        item.fenced = replica is not None and (before is None or before.fenced)
        return item

    def restore(self, items: dict[int, WorkItem], versions: Mapping[int, int]) -> None:
        """See ``Work``."""
        run = self._run
        if any(version != run.committed_step for version in versions.values()):
            # The run was not stored after the last commit, because nothing else changed: lease the items as before.
            self.begin(items)
            items = self.step.items
        self.steps = (Step(run.committed_step, items, run.clock(), restored=True),)

    def advance(self, step: Step) -> None:
        """See ``Work``."""
        self.begin(step.items)

    def leaders(self, step: Step) -> list[str]:
        """See ``Work``.

        A leader is the trainer that computes its rank in dp rank 0's work item, if it has proposed, or if all trainers
        of the item are present. Otherwise these trainers may wait for the one that was lost. The leader is then a live
        trainer that owns a rank with the same tp rank and pp rank: if possible one that has proposed, and among those
        the owner of the lowest rank.
        """
        run = self._run
        found = []
        is_whole = all(self._is_present(step, step.items[0], name) for name in step.items[0].trainers)
        for rank, trainer in self.first_trainers().items():
            leads = is_whole or trainer in step.proposals
            other = None if leads else run.lowest_live_trainer(rank, preferred=step.proposals)
            found.append(other or (trainer if leads or run.members.by_name[trainer].expired else None))
        return [leader for leader in found if leader is not None] if all(found) else []

    def _is_present(self, step: Step, item: WorkItem, name: str) -> bool:
        """True if a trainer is present, and was already when one of its ranks was leased to it in this step."""
        member = self._run.members.live.get(name)
        if member is None or member.behind:
            return False
        return member.joined_step < step.number or member.epoch < item.epoch

    # ---- items ----

    def assigned_to(self, name: str) -> coordinator_pb2.StepWork:
        """See ``Work``."""
        step = self.step
        # All trainers of a replica must compute their items in the same order.
        leased = sorted(step.leased_to(name), key=lambda item: item.dp_rank)
        played = ((item, item.member_of(name)) for item in leased)
        replica_epoch = self._run.replica_epoch_of(name)
        items = [item.to_proto(member.global_rank, replica_epoch) for item, member in played if member is not None]
        if (copied := step.copied_by(name)) is not None:
            items.append(copied.copy_to_proto())
        return coordinator_pb2.StepWork(step=step.number, items=items, position=step.number)

    def lease_own_items(self, name: str) -> bool:
        """See ``Work``."""
        replicas, live = self._run.replicas, self._run.members.live
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
        run, leasable = self._run, self.step.leasable
        if not leasable or not run.members.waiting_for_work:
            return []
        pairs = list(zip(waiting_replicas(run.replicas, run.members.waiting_for_work), leasable, strict=False))
        for replica, item in pairs:
            self._lease(item, replica)
        if pairs:  # otherwise waiting trainers would wake each other without end
            run.changed.notify()
        return [item for _, item in pairs]

    def _lease(self, item: WorkItem, replica: Replica) -> None:
        self.step.lease(item, replica, self._run.next_epoch(), self._run.clock())
        for name in replica:
            self._run.members.stop_waiting_for_work(name)

    def revoke_items_of(self, name: str) -> None:
        """See ``Work``. A finished item counts without its trainer."""
        run = self._run
        for step in self.steps:
            step.drop_copies(name)
            for item in step.items_of(name):
                item.note_lost(name)
                if item.state is not WorkState.VACANT:
                    step.revoke(item, run.next_epoch(), run.clock())

    # ---- copies of late items ----

    def next_late_item(self, *, excluding: str) -> tuple[WorkItem, float] | None:
        """Returns the item that a trainer may copy next, and the clock time from which it is late."""
        run = self._run
        late_after_s, updated_s = run.work_times.late_after_s, run.commits.updated_s
        return next_late_item(self.step, run.members.by_name, late_after_s, updated_s, excluding=(excluding,))

    def start_copy(self, item: WorkItem, name: str) -> None:
        """Lets a trainer compute a copy of a late item."""
        run = self._run
        self.step.start_copy(item, name, run.next_epoch(), run.clock())
        run.members.stop_waiting_for_work(name)
