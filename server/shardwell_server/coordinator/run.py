"""The state of one run: members, rank owners, units, commits and the step in flight.

Methods change the state at once, on the event loop and without I/O. Rpcs that wait for a change wait for ``changed``.
A change that must be durable before a trainer or server can observe it calls ``RunChanges.touch``.
``CoordinatorState.save`` then stores the run.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwell_server.coordinator.kept_versions import KeptVersions
from shardwell_server.coordinator.placed_units import DeclaredUnits, Initializer, Relocations, Unit
from shardwell_server.coordinator.ranks.members import Member, Members, MemberState, tell
from shardwell_server.coordinator.ranks.rank_assignment import Applicant, RankOwners, candidates
from shardwell_server.coordinator.readers import Readers
from shardwell_server.coordinator.run_checkpoints import CheckpointSource, RunCheckpoints
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.signals import RunChanges, SharedCall
from shardwell_server.coordinator.steps.committed_steps import CommittedSteps
from shardwell_server.coordinator.steps.reports import EqualGradients
from shardwell_server.coordinator.steps.step import Step
from shardwell_server.coordinator.steps.work import AsynchronousWork, SynchronousWork
from shardwell_server.coordinator.storage.records import KEPT_COMMITS, CommitRecord
from shardwell_wire.errors import RunDeletedError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import coordinator_pb2


class Run:
    """One run.

    Args:
        identity: Name and id. The name is unique among existing runs.
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
        self.changes = RunChanges(last_epoch)
        self.changed = self.changes.changed
        self.members = Members(identity.name)
        self.addresses: dict[str, str] = {}
        """Addresses that trainers exchange, by name."""
        self.parallel_plan: coordinator_pb2.ParallelPlan | None = None
        """How the models are divided over tensor and pipeline ranks. None: no trainer has reported it."""
        self.units = DeclaredUnits(identity.name, self.changes)
        self.commits = CommittedSteps()
        self.checkpoints = RunCheckpoints()
        self.relocations = Relocations(self.units, self.checkpoints, self.changes)
        self.calls = StepCalls()
        self.notices = Notices()
        self.equal_gradients = EqualGradients()
        self.ended_step: int | None = None
        """Number of committed steps at which a trainer's loop has ended. None: not known."""
        self.created_by, self.created_on = "", ""
        """The trainer that joined first, and its host. Empty: not known."""
        self.fence_error = ""
        """Error of the last attempt to fence former trainers. Empty: it succeeded."""
        self.replace_settings(settings)

    def replace_settings(self, settings: RunSettings) -> None:
        """Sets the settings of a run that never started, has no units and no live trainer."""
        self.settings = settings
        self.readers = Readers(settings.max_reader_lag)
        self.kept_versions = KeptVersions(self.name, settings.keep_versions)
        self.owners = RankOwners(settings, self.members, self.changes)
        work = AsynchronousWork if settings.consistency.asynchronous else SynchronousWork
        self.work: SynchronousWork | AsynchronousWork = work(
            settings, self.owners, self.commits, self.checkpoints, self.clock
        )

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def asynchronous(self) -> bool:
        """True if each work item is committed by itself. See Note: [Asynchronous runs]."""
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
    def ended(self) -> bool:
        """True if the loop of a trainer has ended and nothing was committed since. See Note: [Ended runs]."""
        return self.ended_step == self.committed_step and not self.asynchronous

    def note_ended(self, step: int) -> None:
        """Records that the training loop of a trainer has ended at a number of committed steps."""
        if step == self.committed_step != self.ended_step:
            self.ended_step = step
            self.changes.touch()  # stored with the next change, at the latest when the trainer leaves
            self.changed.notify()

    def note_iteration(self, ended: coordinator_pb2.RunState) -> bool:
        """Records the tracked objects at the end of the last committed step's loop body.

        Returns:
            True if they are new. The caller stores them: until then, a restarted coordinator has those of the commit.
        """
        state = self.commits.state
        is_next = state is not None and ended.step == state.step == self.committed_step - 1
        if state is None or not is_next or self.asynchronous or self.checkpoints.restore:
            return False
        if state.ended_tracked_json or not ended.tracked_json:
            return False
        # A copy: a checkpoint may be writing the former state in a thread.
        state = self.commits.state = copy.deepcopy(state)
        state.ended_tracked_json.update(ended.tracked_json)
        return True

    def check_not_deleted(self) -> None:
        """Raises RunDeletedError if the run was deleted."""
        if self.deleted:
            raise RunDeletedError(
                f"run {self.name!r} was deleted (its id was {self.identity.run_id})",
                run=self.name,
                run_id=self.identity.run_id,
            )

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
        if self.started:
            self.owners.claim(applicant)
        else:
            self.owners.check_request(applicant)
        member = Member(
            applicant.name,
            applicant.host,
            incarnation,
            self.changes.next_epoch(),
            self.clock(),
            applicant.requested_rank,
            joined_step=self.committed_step,
            process=applicant.process,
        )
        member.note_behind(self._is_dispensable(applicant.name))
        if not self.started and not self.created_by:
            self.created_by, self.created_on = member.name, member.host
        self.members.add(member)
        self.members.give_up([applicant.name])
        with_ranks = {*self.owners.by_rank.values(), *(name for item in self.work.items for name in item.trainers)}
        self.members.prune(keep=with_ranks)
        if not self.started and len(self.members.live) >= self.settings.min_trainers:
            self.owners.start()
            self.work.begin({})
        elif self.started:
            self._change_replicas(member)
        self.changed.notify()
        return member

    def _change_replicas(self, member: Member) -> None:
        """Renews the replica of a trainer that came or went, and gives spares the places that are free."""
        self.owners.renew_replicas({member.name}, member.error)
        for name in self.owners.place_spares(member.error) - {member.name}:
            self.members.by_name[name].note_behind(self._is_dispensable(name))

    def _is_dispensable(self, name: str) -> bool:
        """True if the run need not wait for a trainer that joins now: others compute its items until it asks for work.

        A trainer that never asked for work before, in a plain loop, gets its items when it joins.
        """
        former = self.members.by_name.get(name)
        asks = former is None or former.accepts_reassigned_work is not False
        if not self.started or self.asynchronous or not asks:
            return False
        accepting = {at.name for at in self.members.live.values() if not at.behind and at.accepts_reassigned_work}
        return bool(candidates(self.owners.replicas, accepting - {name}))

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
        self.changes.touch()
        self.changed.notify()

    def require_member(self, name: str, epoch: int | None = None) -> Member:
        """Returns a live member by name and epoch. Epoch None: for requests that carry a work item's epoch.

        Raises:
            NotFoundError: The run never had a trainer of this name.
            RunDeletedError: The run was deleted.
            StaleEpochError: The lease was revoked, the trainer left, or another process has the name now.
        """
        self.check_not_deleted()
        if epoch is None:
            member = self.members.by_name.get(name)
            epoch = member.epoch if member is not None else 0
        return self.members.require(name, epoch)

    def initializer_of(self, layout: UnitLayout) -> Initializer | None:
        """Returns the trainer that was chosen last to send the initial values of a unit."""
        return self.units.initializers.get(self._initializing_rank(layout))

    def _initializing_rank(self, layout: UnitLayout) -> int:
        return self.settings.world.global_rank(tp_rank=layout.tp_rank, pp_rank=layout.pp_rank)

    def choose_initializer(self, layout: UnitLayout) -> Initializer | None:
        """Returns the trainer that sends a unit's initial values. Chooses another one only if the former one is gone.

        The initializer is the trainer that computes the unit in dp rank 0's work item, or else the live trainer that
        owns the lowest rank with the same cp, tp and pp rank.
        """
        live, former = self.members.live, self.initializer_of(layout)
        if former is None or former.trainer not in live:
            rank = self._initializing_rank(layout)
            trainer = self.work.first_trainers()[rank]
            name = trainer if trainer in live else self.owners.lowest_live_trainer(rank)
            initializer = Initializer(name, self.changes.next_epoch()) if name is not None else None
            self.units.set_initializer(rank, initializer)
        return self.initializer_of(layout)

    def revoke_initializer(self, layout: UnitLayout) -> None:
        """Makes the initial values void that a trainer has sent. ``choose_initializer`` gives out another epoch."""
        self.units.set_initializer(self._initializing_rank(layout), None)

    # Checkpoints

    @property
    def filled_from(self) -> CheckpointSource | None:
        """The checkpoint from which new units are filled. None: the run was not loaded from a checkpoint with
        other units, or has committed a step since."""
        source = self.checkpoints.source
        return source if source is not None and source.step == self.committed_step else None

    def load(
        self, units: Sequence[Unit], records: Sequence[CommitRecord], state: coordinator_pb2.RunState | None
    ) -> str:
        """Replaces units, commits and state by those of a checkpoint, and starts the step that follows.

        Returns which published versions are lost by this, for users; see ``KeptVersions.lose``.

        All work items get new epochs. ``RunCheckpoints.restore`` must be set: until it is cleared, no trainer learns
        of the change.
        """
        assert self.checkpoints.restore is not None
        self.units.load(units)
        self.relocations.forget_plans()
        self.commits.load(records, state)
        lost_versions = self.kept_versions.start_anew(self.committed_step)
        self.relocations.raise_count()
        if self.started:
            self.work.begin({})
        self.changes.touch()
        self.changed.notify()
        return lost_versions

    # Commits

    def advance(self, step: Step, record: CommitRecord, state: coordinator_pb2.RunState | None) -> None:
        """Starts the step after a step whose commit record is durable. The caller notifies ``changed``."""
        self.commits.append(record, state, self.units.updated_processes, self.clock())
        acting = self.commits.acting[record.step] = dict[str, list[int]]()
        for item in step.items.values():
            for rank, played in item.members.items():
                trainer = self.members.by_name.get(played.trainer)
                is_live = trainer is not None and trainer.state is MemberState.LIVE
                name = played.trainer if is_live else self.owners.lowest_live_trainer(rank) or played.trainer
                acting.setdefault(name, []).append(rank)
        self.commits.acting.pop(record.step - KEPT_COMMITS, None)
        self.work.advance(step)
        # The response of an rpc in progress tells its trainer about the commit.
        tell(member for member in self.members if not member.rpcs_in_progress)

    def acting_ranks(self, number: int, member: Member) -> list[int]:
        """Returns ``ActingRanks.global_ranks`` of a trainer that may have joined after the commit of a step."""
        acting = self.commits.acting.get(number)
        is_last = number == self.committed_step - 1
        if acting is None:  # a former coordinator has committed it
            return self.owners.ranks_of(member.name) if is_last else []
        if not is_last:  # trainers that are gone now have acted before the next commit
            return sorted(acting.get(member.name, ()))
        gone = [rank for name, ranks in acting.items() if name not in self.members.live for rank in ranks]
        others = [rank for rank in gone if self.owners.lowest_live_trainer(rank) == member.name]
        return sorted({*acting.get(member.name, ()), *others})

    async def wait_until_updated(self) -> None:
        """Returns when every server has acknowledged the update of the last commit, and its shards, and no former
        primary serves a shard any more.

        Servers whose acknowledgement is missing would reject requests about the next commit.
        """
        while self.commits.pending_updates or not self.relocations.settled:
            await self.changed.wait()


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


_KEPT_NOTICES = 8


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
        notice = coordinator_pb2.Notice(number=self._newest, message=message, cause=cause)
        self._kept = [*self._kept, notice][-_KEPT_NOTICES:]

    def after(self, number: int) -> list[coordinator_pb2.Notice]:
        """Returns the notices with higher numbers, oldest first."""
        return [notice for notice in self._kept if notice.number > number]

    def forget_failures(self) -> None:
        """Forgets the notices with a cause, which is remedied: trainers that join later need not know."""
        self._kept = [notice for notice in self._kept if not notice.cause]
