"""Background work on a run: what is stored, and which calls are in flight.

What the users of a run should see in the logs of its trainers, such as that a checkpoint was not saved.

The state of one run: members, rank assignments, units, commits and the step in flight.

Methods change the state at once, on the event loop and without I/O. Rpcs that wait for a change wait for ``changed``.
A change that must be durable before a trainer or server can observe it calls ``touch``. ``CoordinatorState.save`` then
stores the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from shardwell_server.coordinator.ranks.members import Member, Members, MemberState
from shardwell_server.coordinator.ranks.rank_assignment import (
    Applicant,
    RankAssignments,
    Replica,
    candidates,
    natural_key,
    waiting_replicas,
)
from shardwell_server.coordinator.ranks.rank_owners import RankOwners
from shardwell_server.coordinator.ranks.replica_stores import ReplicaStores
from shardwell_server.coordinator.runs.checkpoints import CheckpointSource, RunCheckpoints
from shardwell_server.coordinator.runs.units import DeclaredUnits, Initializer, Relocations, Unit
from shardwell_server.coordinator.settings import RunSettings, SharedCall, Signal
from shardwell_server.coordinator.steps.committed_steps import CommittedSteps
from shardwell_server.coordinator.steps.parallel_plan import require_same_plan
from shardwell_server.coordinator.steps.proposals import committed_optimizer, require_same_algorithms
from shardwell_server.coordinator.steps.step import Step
from shardwell_server.coordinator.steps.work import AsynchronousWork, SynchronousWork, WorkTimes
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.optimizer_checks import units_that_count
from shardwell_wire.errors import InvalidRequestError, RunDeletedError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2


@dataclass(slots=True)
class UnsavedChanges:
    """Counts the changes of a run that must be durable before anyone can observe them."""

    made: int = 0
    saved: int = 0
    saving: SharedCall[None] = field(default_factory=SharedCall)

    def note_made(self) -> None:
        """Counts a change."""
        self.made += 1

    def note_saved(self, made: int) -> None:
        """Records that the first ``made`` changes are durable."""
        self.saved = made


@dataclass(slots=True)
class StepCalls:
    """Background work on the step in flight. At most one call of each kind is in flight per run."""

    preparing: SharedCall[None] = field(default_factory=SharedCall)
    """Asks the servers to reduce the gradients."""
    committing: SharedCall[None] = field(default_factory=SharedCall)
    """Writes the commit record."""
    fencing: SharedCall[None] = field(default_factory=SharedCall)
    """Fences former trainers of work items on the servers."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held in an asynchronous run while items are fenced, and from the preparation of a step to its commit record: the
    servers prepare one step at a time."""
    waking: SharedCall[None] = field(default_factory=SharedCall)
    """Waits until a work item is late, then wakes the trainers that wait for work."""
    promoting: SharedCall[None] = field(default_factory=SharedCall)
    """Tells servers that they are the primaries of shards."""
    relocating: SharedCall[None] = field(default_factory=SharedCall)
    """Gives shards of lost servers to others."""
    building: SharedCall[None] = field(default_factory=SharedCall)
    """Builds and releases backups."""

    def stop_repeating(self) -> None:
        """Cancels the calls that are repeated until all servers have answered. Some of these may never answer."""
        self.fencing.cancel()
        self.promoting.cancel()


_KEPT = 8


class Notices:
    """The newest notices of a run. Not durable. Used on the event loop."""

    def __init__(self) -> None:
        self._newest = 0
        self._kept: list[coordinator_pb2.Notice] = []

    @property
    def newest(self) -> int:
        """Number of the newest notice. 0: there was none."""
        return self._newest

    def add(self, message: str, *, now: float, cause: str = "") -> None:
        """Adds a notice.

        Args:
            message: The text.
            now: Seconds since 1970. Numbers rise with it, so that they also rise when the coordinator restarts.
            cause: See the message ``Notice``.
        """
        self._newest = max(self._newest + 1, int(1000 * now))
        self._kept = [*self._kept, coordinator_pb2.Notice(number=self._newest, message=message, cause=cause)][-_KEPT:]

    def after(self, number: int) -> list[coordinator_pb2.Notice]:
        """Returns the notices with higher numbers, oldest first."""
        return [notice for notice in self._kept if notice.number > number]

    def forget_failures(self) -> None:
        """Forgets the notices with a cause, which is remedied: trainers that join later need not know."""
        self._kept = [notice for notice in self._kept if not notice.cause]


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
        self.work = self._new_work()
        self.calls = StepCalls()
        self.work_times = WorkTimes()
        self.commits = CommittedSteps()
        self.checkpoints = RunCheckpoints()
        self.notices = Notices()
        self.relocations = Relocations(self.units, self.checkpoints, self.changed, self.touch)
        self.fence_error = ""
        """Error of the last attempt to fence former trainers. Empty: it succeeded."""

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def asynchronous(self) -> bool:
        """True if each work item is committed by itself. See ``asynchronous_work.py``."""
        return self.settings.consistency.asynchronous

    @property
    def started(self) -> bool:
        """True if enough trainers have joined once."""
        return bool(self.work.steps)

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
        """Replaces the settings of a run that never started, has no units and no live trainer."""
        self.settings = settings
        self.work = self._new_work()
        self.touch()

    def _new_work(self) -> SynchronousWork | AsynchronousWork:
        return AsynchronousWork(self) if self.settings.consistency.asynchronous else SynchronousWork(self)

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
        """Makes the membership streams of trainers send the committed step, the placement and notices, if they have
        changed."""
        for member in members:
            member.connection.news.notify()

    def wanted_residuals(self, member: Member) -> coordinator_pb2.WantedResiduals | None:
        """Returns the checkpoint that wants a trainer's residuals of error feedback. None: there is none.

        The answer has no id while the checkpoint has no folder yet, or follows the one that is being written.
        """
        if not member.has_residuals or not self.committed_step or self.checkpoints.restore is not None:
            return None
        checkpoints, in_flight = self.checkpoints, self.checkpoints.in_flight
        if in_flight is not None and in_flight.wants_residuals_of(member.name):
            assert in_flight.step is not None
            return coordinator_pb2.WantedResiduals(
                step=in_flight.step, checkpoint_id=in_flight.checkpoint_id, url=in_flight.url
            )
        begins = in_flight is not None and not in_flight.has_folder
        if not begins and not checkpoints.is_next_due(self.committed_step):
            return None
        return coordinator_pb2.WantedResiduals(step=self.committed_step)

    # Members

    def admit(self, applicant: Applicant, incarnation: str) -> Member:
        """Adds a process as a member under a new epoch and assigns its ranks. Starts the run if it is complete.

        Raises:
            DuplicateError: A live trainer has the name or the requested rank.
            CapacityError: The run has too many live trainers.
        """
        self.members.check_name(applicant.name)
        self.members.check_count(self.settings.world.size)
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
            self.work.begin({})
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
        return {*self.rank_assignments.values(), *(trainer for item in self.work.items for trainer in item.trainers)}

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
        self.work.revoke_items_of(member.name)
        self._set_state(member, MemberState.GONE)
        if self.started and not keeps_place:
            self._change_replicas(member)

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
        ranks = self.work.played_ranks(name)
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
            trainer = self.work.first_trainers()[rank]
            name = trainer if trainer in live else self.lowest_live_trainer(rank)
            self.units.set_initializer(rank, Initializer(name, self.next_epoch()) if name is not None else None)
        return self.initializer_of(layout)

    def lowest_live_trainer(self, rank: int, preferred: Container[str] = ()) -> str | None:
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
    def is_loaded(self) -> bool:
        """True if the run has units, or is being loaded from a checkpoint: their shards depend on its settings."""
        return self.checkpoints.restore is not None or len(self.units) > 0

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
            self.work.begin({})
        self.touch()
        self.changed.notify()

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replica that owns each dp rank, live or gone. See Note: [Replicas] in ``replicas.py``."""
        return self.rank_owners.replicas(self.settings)

    def set_backups(self, backups: int) -> None:
        """Changes the number of backups of every shard."""
        self.settings = replace(self.settings, backups=backups)
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

    def advance(self, step: Step, record: CommitRecord, state: coordinator_pb2.RunState | None) -> None:
        """Starts the step after a step whose commit record is durable. The caller notifies ``changed``."""
        self.commits.append(record, state, self.units.updated_processes, self.clock())
        self.work.advance(step)
        # The response of an rpc in progress tells its trainer about the commit.
        self.tell(member for member in self.members if not member.rpcs_in_progress)

    async def wait_until_updated(self) -> None:
        """Returns when every server has acknowledged the update of the last commit, and its shards, and no former
        primary serves a shard any more.

        Servers whose acknowledgement is missing would reject requests about the next commit.
        """
        while self.commits.pending_updates or not self.relocations.settled:
            await self.changed.wait()

    async def wait_until_updated_for(self, limit_s: float) -> None:
        """As ``wait_until_updated``. Raises TimeoutError after ``limit_s``."""
        async with asyncio.timeout(limit_s):
            await self.wait_until_updated()
