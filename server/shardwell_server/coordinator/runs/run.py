"""The state of one run: members, rank assignments, units, commits and the step in flight.

Methods change the state at once, on the event loop and without I/O. Rpcs that wait for a change wait for ``changed``.
A change that must be durable before a trainer or server can observe it calls ``touch``. ``CoordinatorState.save`` then
stores the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from shardwell_server.coordinator.runs.background_calls import StepCalls, UnsavedChanges
from shardwell_server.coordinator.runs.checkpoints import CheckpointSource, RunCheckpoints
from shardwell_server.coordinator.runs.committed_steps import CommittedSteps
from shardwell_server.coordinator.runs.copies import WorkTimes, next_late_item
from shardwell_server.coordinator.runs.item_starts import choose_item, position
from shardwell_server.coordinator.runs.members import Member, Members, MemberState
from shardwell_server.coordinator.runs.parallel_plan import require_same_plan
from shardwell_server.coordinator.runs.proposals import committed_optimizer, require_same_algorithms
from shardwell_server.coordinator.runs.rank_assignment import Applicant, RankAssignments, natural_key
from shardwell_server.coordinator.runs.rank_owners import RankOwners
from shardwell_server.coordinator.runs.relocations import Relocations
from shardwell_server.coordinator.runs.replica_stores import ReplicaStores
from shardwell_server.coordinator.runs.replicas import (
    Replica,
    candidates,
    distribute_items,
    ranks_of_items,
    waiting_replicas,
)
from shardwell_server.coordinator.runs.step import Step
from shardwell_server.coordinator.runs.units import DeclaredUnits, Initializer, Unit
from shardwell_server.coordinator.runs.work_items import FinishedWork, WorkItem, WorkState, new_members
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.coordinator.waiting import Signal
from shardwell_server.optimizer_checks import units_that_count
from shardwell_wire.errors import InvalidRequestError, RunDeletedError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2

MAX_ADDRESSES = 1024
"""Most addresses that the trainers of one run may exchange."""


class Run:
    """One run.

    Args:
        identity: Name and id. The name is unique among existing runs.
        settings: Settings of the run.
        clock: Returns monotonic seconds.
        created: Creation time in seconds since 1970.
        last_epoch: All epochs of the run are higher than this one.
    """

    def __init__(
        self,
        identity: RunIdentity,
        settings: RunSettings,
        clock: Callable[[], float],
        created: float,
        last_epoch: int = 0,
    ) -> None:
        self.identity, self.settings, self.clock, self.created = identity, settings, clock, created
        self.created_s = clock()
        self.deleted = False
        self.changed = Signal()
        self.unsaved = UnsavedChanges()
        self.last_epoch = last_epoch
        self.members = Members(identity.name)
        self.rank_owners = RankOwners(self.next_epoch)
        self.replica_stores = ReplicaStores()
        self.addresses: dict[str, str] = {}
        """Addresses that trainers exchange, by name."""
        self.parallel_plan: coordinator_pb2.ParallelPlan | None = None
        """How the models are divided over tensor and pipeline ranks. None: no trainer has reported it."""
        self.units = DeclaredUnits(identity.name)
        self.steps: tuple[Step, ...] = ()
        """The steps in flight: one with all work items, or in an asynchronous run one for each data rank, in their
        order. Empty until the run starts."""
        self.calls = StepCalls()
        self.work_times = WorkTimes()
        self.commits = CommittedSteps()
        self.checkpoints = RunCheckpoints()
        self.relocations = Relocations(self.units, self.checkpoints, self.changed, self.touch)
        self.fence_error = ""
        """Error of the last attempt to fence former trainers. Empty: it succeeded."""

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def asynchronous(self) -> bool:
        """True if each work item is committed by itself. See Note: [Asynchronous runs] in ``item_starts.py``."""
        return self.settings.consistency.asynchronous

    @property
    def started(self) -> bool:
        """True if enough trainers have joined once."""
        return bool(self.steps)

    @property
    def items(self) -> list[WorkItem]:
        """The work items of all steps in flight, by data rank."""
        return [item for step in self.steps for item in step.items.values()]

    def is_in_flight(self, step: Step) -> bool:
        """True if a step is neither committed nor replaced."""
        return any(each is step for each in self.steps)

    def step_of(self, item: WorkItem) -> Step | None:
        """Returns the step in flight that has a work item. None: the item is committed."""
        return next((step for step in self.steps if step.items.get(item.dp_rank) is item), None)

    def computes(self, name: str) -> bool:
        """True if a trainer still has to compute a work item."""
        return any(step.leased_to(name) for step in self.steps)

    @property
    def unfenced(self) -> list[WorkItem]:
        """Items whose former trainers may still push to a server."""
        return [item for step in self.steps for item in step.unfenced]

    @property
    def committed_step(self) -> int:
        """Number of committed steps, which is also the newest version and the number of the next commit."""
        return self.commits.count

    @property
    def rank_assignments(self) -> RankAssignments:
        """Owner of each logical rank, live or gone. Empty until the run starts."""
        return self.rank_owners.by_rank

    def touch(self) -> None:
        """Marks the run as changed, so that the next ``save`` stores it."""
        self.unsaved.note_made()

    def next_epoch(self) -> int:
        """Returns a new epoch, higher than all former ones."""
        self.last_epoch += 1
        self.touch()
        return self.last_epoch

    def note_saved(self, made: int, placement: int) -> None:
        """Records that the first ``made`` changes are durable, and with them a placement."""
        self.unsaved.note_saved(made)
        if self.relocations.announce(placement):
            self.tell(self.members)

    def replace_settings(self, settings: RunSettings) -> None:
        """Replaces the settings of a run that never started and has no live trainer."""
        self.settings = settings
        self.touch()

    def set_deleted(self, deleted: bool) -> None:
        """Marks the run as deleted, or undoes this if the deletion could not be stored."""
        self.deleted = deleted
        self.tell(self.members)

    def check_not_deleted(self) -> None:
        """Raises RunDeletedError if the run was deleted."""
        if self.deleted:
            raise RunDeletedError(
                f"run {self.name!r} was deleted (its id was {self.identity.run_id})",
                run=self.name,
                run_id=self.identity.run_id,
            )

    def set_address(self, name: str, address: str) -> None:
        """Publishes an address for the other trainers. Raises InvalidRequestError if there are too many."""
        if len(self.addresses) >= MAX_ADDRESSES and name not in self.addresses:
            raise InvalidRequestError(f"run {self.name!r} already has {MAX_ADDRESSES} addresses: use fewer names")
        if self.addresses.get(name) != address:
            self.addresses[name] = address
            self.touch()
            self.changed.notify()

    def declare_parallel_plan(self, trainer: str, plan: coordinator_pb2.ParallelPlan) -> None:
        """Sets the run's parallel plan. Raises RunMismatchError if the run has another one."""
        if self.parallel_plan is None:
            self.parallel_plan = plan
            self.touch()
        else:
            require_same_plan(self.name, self.parallel_plan, trainer, plan)

    def tell(self, members: Iterable[Member]) -> None:
        """Makes the membership streams of trainers send the committed step and the placement, if they have changed."""
        for member in members:
            member.connection.news.notify()

    def wanted_residuals(self, member: Member) -> coordinator_pb2.WantedResiduals | None:
        """Returns the checkpoint that wants a trainer's residuals of error feedback. None: there is none."""
        if not member.has_residuals or not self.committed_step or self.checkpoints.restore is not None:
            return None
        in_flight = self.checkpoints.in_flight
        if in_flight is None or in_flight.step is None:
            begins = in_flight is not None or self.checkpoints.is_due(self.committed_step)
            return coordinator_pb2.WantedResiduals(step=self.committed_step) if begins else None
        if not in_flight.step or in_flight.residuals.complete or member.name in in_flight.residuals.by_trainer:
            return None
        return coordinator_pb2.WantedResiduals(
            step=in_flight.step, checkpoint_id=in_flight.checkpoint_id, url=in_flight.url
        )

    # Members

    def admit(self, applicant: Applicant, incarnation: str) -> Member:
        """Adds a process as a member under a new epoch and assigns its ranks. Starts the run if it is complete.

        Raises:
            DuplicateError: A live trainer has the name or the requested rank.
        """
        self.members.check_name(applicant.name)
        requested_ranks = self.members.requested_ranks
        if self.started:
            self.rank_owners.claim(self.settings, self.members.live, applicant, requested_ranks)
        else:
            self.rank_owners.check_request(self.name, self.settings, applicant, requested_ranks)
        member = Member(
            applicant.name,
            applicant.host,
            incarnation,
            self.next_epoch(),
            self.clock(),
            applicant.requested_rank,
            joined_step=self.committed_step,
            process=applicant.process,
        )
        member.note_behind(self._is_dispensable(applicant.name))
        self.members.add(member)
        self.members.give_up([applicant.name])
        self.members.prune(keep=self._trainers_with_ranks())
        if not self.started and len(self.members.live) >= self.settings.min_trainers:
            self.rank_owners.start(self.settings, self.members.live.values())
            self._begin({})
        elif self.started:
            self._change_replicas(member)
        self.changed.notify()
        return member

    def _change_replicas(self, member: Member) -> None:
        """Renews the replica of a trainer that came or went, and gives spares the places that are free."""
        former = self.rank_owners.renew_replicas(self.settings, {member.name})
        placed = self.rank_owners.place_spares(self.settings, self.members)
        for name in placed - {member.name}:
            self.members.by_name[name].note_behind(self._is_dispensable(name))
        self._announce_replicas({*former, *placed})

    def renew_replica(self, name: str) -> None:
        """Gives a trainer's replica a new epoch: its trainers have to set up again what they share."""
        self._announce_replicas(self.rank_owners.renew_replicas(self.settings, {name}))

    def _announce_replicas(self, trainers: Set[str]) -> None:
        """Ends the stores of former replica epochs, and tells trainers their new epochs."""
        self.replica_stores.keep(self.rank_owners.replica_epochs.values())
        self.tell(self.members.by_name[name] for name in trainers if name in self.members.by_name)

    def is_waiting_spare(self, name: str) -> bool:
        """True if a trainer owns no rank and cannot compute anything until it does, because tp * pp > 1."""
        return self.settings.world.replica_size > 1 and not self.rank_owners.owns_ranks(name)

    def missing_peers(self, name: str) -> list[str]:
        """Returns the trainers of a trainer's replica that are gone, or whose leases have expired."""
        if self.settings.world.replica_size == 1:
            return []
        live = self.members.live
        return [peer for peer in self.rank_owners.replica_of(name, self.settings) if peer not in live]

    @property
    def has_waiting_replica(self) -> bool:
        """True if a replica waits for work, and can compute any item at once."""
        waiting = self.members.waiting_for_work
        return bool(waiting) and bool(waiting_replicas(self.replicas, waiting))

    @property
    def has_waiting_spare(self) -> bool:
        """True if a live trainer waits for a rank."""
        return self.started and any(map(self.is_waiting_spare, self.members.live))

    def replica_epoch_of(self, name: str) -> int:
        """Returns the epoch of a trainer's replica. See Note: [Replica epochs] in ``rank_owners.py``."""
        return self.rank_owners.replica_epoch_of(name, self.settings)

    def _is_dispensable(self, name: str) -> bool:
        """True if the run need not wait for a trainer that joins now: others compute its items until it asks for work.

        A trainer that never asked for work before, in a plain loop, gets its items when it joins.
        """
        former = self.members.by_name.get(name)
        asks = former is None or former.accepts_reassigned_work is not False
        if not self.started or self.asynchronous or not asks:
            return False
        accepting = {at.name for at in self.members.live.values() if not at.behind and at.accepts_reassigned_work}
        return bool(candidates(self.replicas, accepting - {name}))

    def _trainers_with_ranks(self) -> set[str]:
        """Returns the trainers that own a rank or computed it last."""
        return {*self.rank_assignments.values(), *(trainer for item in self.items for trainer in item.trainers)}

    def expire_lease(self, member: Member) -> None:
        """Marks a lease as expired. The trainer keeps its work items until another trainer wants them."""
        self._set_state(member, MemberState.EXPIRED)

    def restore_lease(self, member: Member) -> None:
        """Makes an expired lease valid again. The trainer's work was not reassigned, so its epochs are still valid."""
        self._set_state(member, MemberState.LIVE)

    def revoke_lease(self, member: Member, *, keeps_place: bool = False) -> None:
        """Revokes a trainer's lease, and the work items that its replica computes.

        A trainer that joins under its name gets its ranks back. The items get new epochs. They must be fenced on the
        servers before they can be leased again.

        Args:
            member: The trainer.
            keeps_place: True if the trainer is admitted again at once. Otherwise a spare may take its place.
        """
        if not self.started:
            self.members.remove(member)
        for step in self.steps:
            step.drop_copies(member.name)
            for item in step.items_of(member.name):
                item.note_lost(member.name)
                if item.state is not WorkState.VACANT and not (self.asynchronous and step.recording):
                    self._revoke(step, item)
        self._set_state(member, MemberState.GONE)
        if self.started and not keeps_place:
            self._change_replicas(member)

    def _revoke(self, step: Step, item: WorkItem) -> None:
        """Revokes an item. In an asynchronous run, its next trainer computes it from the newest version.

        The finished item of a synchronous step counts without its trainer. That of an asynchronous run is computed
        again, because only its trainer could have proposed the step.
        """
        if self.asynchronous and item.state is WorkState.FINISHED:
            step.reset(item, "", self.clock())
        step.revoke(item, self.next_epoch(), self.clock())
        if self.asynchronous:
            step.read_version(self.committed_step)

    def _set_state(self, member: Member, state: MemberState) -> None:
        self.members.set_state(member, state)
        self.touch()
        self.changed.notify()

    def require_member(self, name: str, epoch: int) -> Member:
        """Returns a live member by name and epoch.

        Raises:
            NotFoundError: The run never had a trainer of this name.
            RunDeletedError: The run was deleted.
            StaleEpochError: The lease was revoked, the trainer left, or another process has the name now.
        """
        self.check_not_deleted()
        return self.members.require(name, epoch)

    def require_live(self, name: str) -> Member:
        """Returns a live member by name, for requests that carry a work item's epoch. Raises as ``require_member``."""
        member = self.members.by_name.get(name)
        return self.require_member(name, member.epoch if member is not None else 0)

    def ranks_of(self, name: str) -> list[int]:
        """Returns the logical ranks that a trainer owns."""
        return self.rank_owners.ranks_of(name)

    def describe_trainer(self, name: str) -> str:
        """Returns a trainer and the ranks it plays in this step, for messages."""
        items = [item for step in self.steps for item in step.items_of(name)]
        ranks = sorted(member.global_rank for item in items if (member := item.member_of(name)) is not None)
        return f"rank {', '.join(map(str, ranks)) or 'none'} (trainer {name!r})"

    def note_fence_error(self, error: str) -> None:
        """Records why the last attempt to fence former trainers failed. Empty: it succeeded."""
        self.fence_error = error

    def rank_of_unit(self, layout: UnitLayout) -> int:
        """Returns the rank of dp rank 0 that holds a unit, and whose trainer sends its initial values."""
        return self.settings.world.global_rank(tp_rank=layout.tp_rank, pp_rank=layout.pp_rank)

    def initializer_of(self, layout: UnitLayout) -> Initializer | None:
        """Returns the trainer that was chosen last to send the initial values of a unit."""
        return self.units.initializers.get(self.rank_of_unit(layout))

    def choose_initializer(self, layout: UnitLayout) -> Initializer | None:
        """Returns the trainer that sends a unit's initial values. Chooses another one only if the former one is gone.

        The initializer is the trainer that computes the unit in dp rank 0's work item, or else the live trainer that
        owns the lowest rank with the same tp rank and pp rank.
        """
        live, rank, former = self.members.live, self.rank_of_unit(layout), self.initializer_of(layout)
        if former is None or former.trainer not in live:
            trainer = self._first_trainers()[rank]
            name = trainer if trainer in live else self._lowest_live_trainer(rank)
            self.units.set_initializer(rank, Initializer(name, self.next_epoch()) if name is not None else None)
        return self.initializer_of(layout)

    def _first_trainers(self) -> dict[int, str]:
        """Returns the trainers that compute dp rank 0's work item, by global rank in the order of tp and pp ranks."""
        members = self.items[0].members
        return {rank: member.trainer for rank, member in members.items()}

    def _lowest_live_trainer(self, rank: int, preferred: Container[str] = ()) -> str | None:
        """Returns the live trainer that owns the lowest rank with the tp rank and pp rank of a rank.

        Prefers the given trainers, then those that are not behind. With tp = pp = 1, a spare is the last choice.
        """
        live, world = self.members.live, self.settings.world
        lowest: dict[str, int] = {} if world.tp * world.pp > 1 else dict.fromkeys(live, world.size)
        for peer in reversed(world.group(rank, "dp")):
            if (owner := self.rank_assignments.get(peer, "")) in live:
                lowest[owner] = peer

        def preference(name: str) -> tuple[Any, ...]:
            return name not in preferred, live[name].behind, lowest[name], natural_key(name)

        return min(lowest, key=preference, default=None)

    # Checkpoints

    @property
    def filled_from(self) -> CheckpointSource | None:
        """The checkpoint from which new units are filled. None: the run was not loaded from a checkpoint with
        other units, or has committed a step since."""
        source = self.checkpoints.source
        return source if source is not None and source.step == self.committed_step else None

    def load(
        self, units: Sequence[Unit], records: Sequence[CommitRecord], state: coordinator_pb2.RunState | None
    ) -> None:
        """Replaces units, commits and state by those of a checkpoint, and starts the step that follows.

        All work items get new epochs. ``RunCheckpoints.restore`` must be set: until it is cleared, no trainer learns
        of the change.
        """
        assert self.checkpoints.restore is not None
        self.units.load(units)
        self.relocations.forget_plans()
        self.commits.load(records, state)
        self.relocations.raise_count()
        if self.started:
            self._begin({})
        self.touch()
        self.changed.notify()

    # The steps in flight

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replica that owns each dp rank, live or gone. See Note: [Replicas] in ``replicas.py``."""
        return self.rank_owners.replicas(self.settings)

    @property
    def _step(self) -> Step:
        """The step in flight of a synchronous run."""
        (step,) = self.steps
        return step

    def _begin(self, previous: dict[int, WorkItem]) -> None:
        """Starts the steps that read the newest version. ``previous`` contains the items of the previous step."""
        if self.asynchronous:
            owners = enumerate(self.replicas)
            items = (self._vacant_item(dp_rank, replica) for dp_rank, replica in owners)
            self.steps = tuple(Step(self.committed_step, {item.dp_rank: item}, self.clock()) for item in items)
        else:
            self.steps = (self._next_step(previous),)

    def _vacant_item(self, dp_rank: int, trainers: Replica) -> WorkItem:
        members = new_members(ranks_of_items(self.settings.world)[dp_rank], trainers)
        return WorkItem(dp_rank, members, self.next_epoch(), state=WorkState.VACANT, since_s=self.clock())

    def _next_step(self, previous: dict[int, WorkItem]) -> Step:
        """Returns the next step of a synchronous run, and leases its items."""
        live, replicas = self.members.live, self.replicas
        chosen = distribute_items(
            replicas,
            live.keys(),
            lambda name: live[name].accepts_reassigned_work is not False,
            expired={member.name for member in self.members.expired},
            behind={name for name, member in live.items() if member.behind},
        )
        items = {
            dp_rank: self._new_item(dp_rank, replica, replicas[dp_rank], previous.get(dp_rank))
            for dp_rank, replica in enumerate(chosen)
        }
        return Step(self.committed_step, items, self.clock())

    def _new_item(self, dp_rank: int, replica: Replica | None, owners: Replica, before: WorkItem | None) -> WorkItem:
        # A lease that continues keeps its epoch: only its trainers have ever seen that epoch.
        epoch = before.epoch if before is not None and before.trainers == replica else self.next_epoch()
        return WorkItem(
            dp_rank,
            new_members(ranks_of_items(self.settings.world)[dp_rank], replica or owners),
            epoch,
            number=self.committed_step,
            state=WorkState.LEASED if replica else WorkState.VACANT,
            since_s=self.clock(),
            fenced=replica is not None and (before is None or before.fenced),
        )

    def restore_steps(self, items: dict[int, WorkItem], versions: Mapping[int, int]) -> None:
        """Restores the steps in flight after a coordinator restart. ``rank_owners`` must be restored.

        Args:
            items: Work items as stored, by dp rank.
            versions: The version that each item reads.
        """
        now, newest = self.clock(), self.committed_step
        if self.asynchronous:
            self.steps = tuple(
                Step(newest if item.state is WorkState.VACANT else versions[dp_rank], {dp_rank: item}, now)
                for dp_rank, item in sorted(items.items())
            )
        elif any(version != newest for version in versions.values()):
            # The run was not stored after the last commit, because nothing else changed: lease the items as before.
            self._begin(items)
        else:
            self.steps = (Step(newest, items, now),)

    def lease_vacant_items(self) -> list[WorkItem]:
        """Leases vacant items to replicas that wait for work: one item each, spares first. Returns the items.

        Unlike ``distribute_items``, this compares no loads: a waiting replica has no unfinished item.
        """
        leasable = [] if self.asynchronous else self._step.leasable
        if not leasable or not self.members.waiting_for_work:
            return []
        pairs = list(zip(waiting_replicas(self.replicas, self.members.waiting_for_work), leasable, strict=False))
        for replica, item in pairs:
            self._lease(item, replica)
        if pairs:  # otherwise waiting trainers would wake each other without end
            self.changed.notify()
        return [item for _, item in pairs]

    def _lease(self, item: WorkItem, replica: Replica) -> None:
        self._step.lease(item, replica, self.next_epoch(), self.clock())
        for name in replica:
            self.members.stop_waiting_for_work(name)

    def start_item(self, name: str) -> bool:
        """Leases to a trainer of an asynchronous run the item that it computes next. Returns False if there is none."""
        if any(step.items_of(name) and not step.is_vacant for step in self.steps):
            return True
        item = self._choose_item(name, self.items)
        if item is None:
            return False
        step = self.steps[item.dp_rank]
        step.lease(item, (name,), self.next_epoch(), self.clock())
        self.members.stop_waiting_for_work(name)
        self.touch()
        return True

    def _choose_item(self, name: str, items: Sequence[WorkItem]) -> WorkItem | None:
        live = self.members.live
        limit = live[name].item_limit if name in live else None
        return choose_item(name, items, self._owners, live, self.settings.consistency, limit)

    def has_all_items(self, member: Member) -> bool:
        """True if all items that a trainer of an asynchronous run wants of its data ranks are committed."""
        return member.item_limit is not None and position(member.name, self.items, self._owners) >= member.item_limit

    @property
    def _owners(self) -> dict[int, str]:
        """Owner of each data rank, in a run whose replicas have one trainer."""
        return {dp_rank: name for dp_rank, (name,) in enumerate(self.replicas)}

    # Copies of late items

    def finish_items(
        self,
        member: Member,
        step: Step,
        finished: Sequence[FinishedWork],
        written_buffers: Mapping[int, dict[tuple[int, int], int]],
    ) -> bool:
        """Marks what a trainer has finished in a step. Returns True if these were the last ones."""
        now = self.clock()
        for item in (work.item for work in finished):
            if item.copy is None:
                self.work_times.add((now - item.since_s) / len(finished))
                continue
            copy_wins = item.copy.trainer == member.name
            self.work_times.add(now - (item.copy.since_s if copy_wins else item.since_s))
            loser = self.members.by_name.get(item.first_trainer if copy_wins else item.copy.trainer)
            if loser is not None:
                loser.note_behind(True)
            self.touch()
        are_last = step.finish(finished, now, written_buffers, trainer=member.name)
        if step.unfenced:  # items were restarted: see Note: [Sums of items]
            self.touch()
            self.changed.notify()
        return are_last

    def next_late_item(self, *, excluding: str) -> tuple[WorkItem, float] | None:
        """Returns the item that a trainer may copy next, and the clock time from which it is late."""
        late_after_s, updated_s = self.work_times.late_after_s, self.commits.updated_s
        return next_late_item(self._step, self.members.by_name, late_after_s, updated_s, excluding=(excluding,))

    def start_copy(self, item: WorkItem, name: str) -> None:
        """Lets a trainer compute a copy of a late item."""
        self._step.start_copy(item, name, self.next_epoch(), self.clock())
        self.members.stop_waiting_for_work(name)

    def lease_own_items(self, name: str) -> bool:
        """Leases the vacant items of a trainer's own ranks to its replica, if the replica is complete.

        Returns:
            False if the items are not fenced yet.
        """
        if self.asynchronous:
            own = [self.items[rank] for rank in self.ranks_of(name)]
            return self.start_item(name) or all(item.fenced for item in own)
        step, replicas, live = self._step, self.replicas, self.members.live
        vacant = ((item, replicas[item.dp_rank]) for item in step.items.values() if item.state is WorkState.VACANT)
        found = [(item, replica) for item, replica in vacant if name in replica and live.keys() >= set(replica)]
        if not all(item.fenced for item, _ in found):
            return False
        for item, replica in found:
            self._lease(item, replica)
        return True

    def work_of(self, name: str) -> coordinator_pb2.StepWork:
        """Returns the items that a trainer has to compute now."""
        if self.asynchronous:
            return self._item_of(name)
        step = self._step
        # All trainers of a replica must compute their items in the same order.
        leased = sorted(step.leased_to(name), key=lambda item: item.dp_rank)
        played = ((item, item.member_of(name)) for item in leased)
        replica_epoch = self.replica_epoch_of(name)
        items = [item.to_proto(member.global_rank, replica_epoch) for item, member in played if member is not None]
        if (copied := step.copied_by(name)) is not None:
            items.append(copied.copy_to_proto())
        return coordinator_pb2.StepWork(step=step.number, items=items, position=step.number)

    def _item_of(self, name: str) -> coordinator_pb2.StepWork:
        """Returns the item that a trainer of an asynchronous run has to compute now."""
        at = position(name, self.items, self._owners)
        for step in self.steps:
            for item in step.leased_to(name):
                return coordinator_pb2.StepWork(step=step.number, items=[item.to_proto()], position=at)
        return coordinator_pb2.StepWork(step=self.committed_step, position=at)

    def reset_item(self, step: Step, item: WorkItem, request_id: str) -> None:
        """Starts a new attempt of an item, and of finished items whose trainers are lost and cannot reset them."""
        now = self.clock()
        step.reset(item, request_id, now)
        for other in step.items.values():
            if other.trainer_lost:
                step.reset(other, "", now)
                step.revoke(other, self.next_epoch(), now)
        self.touch()
        self.changed.notify()

    def set_backups(self, backups: int) -> None:
        """Changes the number of backups of every shard."""
        self.settings = replace(self.settings, backups=backups)
        self.touch()
        self.changed.notify()

    def restart_step(self) -> None:
        """Starts a new attempt of every item of the step in flight. See ``Step.restart``.

        Items of trainers that are gone get new epochs, so that what these trainers may still push is rejected.
        """
        for step in self.steps:
            step.restart(self.clock())
        present = {member.name for member in self.members if member.state is not MemberState.GONE}
        for item in self.items:
            if not present >= set(item.trainers):
                item.epoch = self.next_epoch()
        self.touch()
        self.changed.notify()

    # Commits

    def check_algorithms(self, optimizer: common_pb2.OptimizerStep) -> None:
        """Raises ConflictError if a parameter has optimizer state of another algorithm."""
        for record in reversed(self.commits.records):
            before = committed_optimizer(record.optimizer)
            require_same_algorithms(before, optimizer, self.units.layouts)
            if len(units_that_count(before, len(self.units))) == len(self.units):
                return  # this optimizer updated all units; otherwise earlier steps used other optimizers

    def leaders(self, step: Step) -> list[str]:
        """Returns the trainers whose proposals are committed together: one for each tp rank and pp rank.

        A leader is the trainer that computes its rank in dp rank 0's work item, if it has proposed, or if all trainers
        of the item are present. Otherwise these trainers may wait for the one that was lost. The leader is then a live
        trainer that owns a rank with the same tp rank and pp rank: if possible one that has proposed, and among those
        the owner of the lowest rank. In an asynchronous run, only the trainer of a step's item leads.

        Returns:
            The leaders in the order of tp ranks and pp ranks. Empty: all trainers that can lead for a rank are gone.
        """
        if self.asynchronous:
            return [item.first_trainer for item in step.items.values()]
        found = []
        is_whole = all(self._computes(step, step.items[0], name) for name in step.items[0].trainers)
        for rank, trainer in self._first_trainers().items():
            leads = is_whole or trainer in step.proposals
            other = None if leads else self._lowest_live_trainer(rank, preferred=step.proposals)
            found.append(other or (trainer if leads or self.members.by_name[trainer].expired else None))
        return [leader for leader in found if leader is not None] if all(found) else []

    def _computes(self, step: Step, item: WorkItem, name: str) -> bool:
        """True if a trainer is present, and was already when one of its ranks was leased to it in this step."""
        member = self.members.live.get(name)
        if member is None or member.behind:
            return False
        return member.joined_step < step.number or member.epoch < item.epoch

    def next_item(self, step: Step) -> WorkItem:
        """Returns the item after that of an asynchronous step, leased to the same trainer if it may start."""
        (before,) = step.items.values()
        item = WorkItem(
            before.dp_rank,
            new_members([before.first_rank], [before.first_trainer]),
            before.epoch,
            number=before.number + 1,
            state=WorkState.VACANT,
            since_s=self.clock(),
        )
        others = [item if at is before else at for at in self.items]
        if before.first_trainer in self.members.live and self._choose_item(before.first_trainer, others) is item:
            item.state = WorkState.LEASED
        return item

    def advance(self, step: Step, record: CommitRecord, state: coordinator_pb2.RunState | None) -> None:
        """Starts the step after a step whose commit record is durable."""
        self.commits.append(record, state, self.units.updated_processes, self.clock())
        if self.asynchronous:
            after = Step(self.committed_step, {item.dp_rank: item for item in [self.next_item(step)]}, self.clock())
            self.steps = tuple(after if each is step else each for each in self.steps)
            for each in self.steps:
                if each.is_vacant:
                    each.read_version(self.committed_step)
        else:
            self._begin(step.items)
        self.changed.notify()
        # The response of an rpc in progress tells its trainer about the commit.
        self.tell(member for member in self.members if not member.rpcs_in_progress)

    async def wait_until_updated(self) -> None:
        """Returns when every server has acknowledged the update of the last commit, and its shards.

        Servers whose acknowledgement is missing would reject requests about the next commit.
        """
        while self.commits.pending_updates or self.relocations.unconfirmed:
            await self.changed.wait()

    async def wait_until_updated_for(self, limit_s: float) -> None:
        """As ``wait_until_updated``. Raises TimeoutError after ``limit_s``."""
        async with asyncio.timeout(limit_s):
            await self.wait_until_updated()
