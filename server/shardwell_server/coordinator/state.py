"""The coordinator's state: runs, shard servers and events. Loads the state from storage and stores its changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import starmap

from shardwell_server.coordinator.inspection.events import EventKind, EventLog
from shardwell_server.coordinator.placed_units import Initializer, Unit
from shardwell_server.coordinator.ranks.members import Member, MemberState, tell
from shardwell_server.coordinator.ranks.rank_assignment import ranks_of_items
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster
from shardwell_server.coordinator.settings import MAX_RUNS, RunSettings, Settings
from shardwell_server.coordinator.signals import BackgroundTasks
from shardwell_server.coordinator.steps.step import Step, WorkItem, WorkState, new_members
from shardwell_server.coordinator.steps.work import AsynchronousWork
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_server.coordinator.storage.records import (
    AddressRecord,
    CheckpointRecord,
    CommitRecord,
    InitializerRecord,
    MemberRecord,
    RankRecord,
    RunRecord,
    StoredRun,
    UnitRecord,
)
from shardwell_wire.connection.channel import retry_async
from shardwell_wire.errors import CapacityError, NotFoundError, RunDeletedError, ShardwellError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity, new_run_id
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)


@dataclass
class CoordinatorState:
    """Runs, shard servers and their storage. Used on one event loop, so it needs no locks.

    Args:
        storage: Stores the state.
        events: The event log.
        wall_clock: Returns seconds since 1970.
    """

    settings: Settings
    storage: Storage
    cluster: Cluster
    events: EventLog
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    runs: dict[str, Run] = field(default_factory=dict)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    stopping: bool = False
    """True when the coordinator has been asked to stop. It then ends all membership streams."""
    _deleted_last_epoch: int = 0
    """Highest epoch of a deleted run."""
    _deleted_run_ids: set[str] = field(default_factory=set)

    @classmethod
    async def load(
        cls, settings: Settings, storage: Storage, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> CoordinatorState:
        """Restores the state that former coordinators stored."""
        stored = await storage.load()
        cluster = Cluster(clock, settings.lease_s, stored.servers, storage.server_epoch)
        events = EventLog(wall_clock, stored.events, storage.keep_event)
        state = cls(settings, storage, cluster, events, clock, wall_clock)
        state.runs = {each.record.run: _restore_run(each, clock) for each in stored.runs}
        state._deleted_last_epoch = stored.deleted_last_epoch
        state._deleted_run_ids = set(stored.deleted_run_ids)
        return state

    @property
    def term(self) -> int:
        """Term of this coordinator. Shard servers reject requests of earlier terms."""
        return self.storage.term

    def stop(self) -> None:
        """Makes all membership streams end, because the coordinator has been asked to stop."""
        self.stopping = True
        for run in self.runs.values():
            tell(run.members)
        for server in self.cluster.servers.values():
            server.connection.news.notify()

    def require_run(self, name: str, run_id: str = "") -> Run:
        """Returns a run by name and, if given, id.

        Raises:
            NotFoundError: No run has this name.
            RunDeletedError: The run with this id was deleted.
        """
        run = self.runs.get(name)
        if run is not None and run_id in ("", run.identity.run_id):
            return run
        if run_id:
            another = f", and another run of this name, with id {run.identity.run_id}, exists" if run else ""
            raise RunDeletedError(
                f"run {name!r} was deleted (its id was {run_id}){another}: stop this process, or join again",
                run=name,
                run_id=run_id,
            )
        existing = ", ".join(sorted(self.runs)[:10]) or "none"
        raise NotFoundError(f"run {name!r} does not exist; existing runs: {existing}", run=name)

    def check_not_deleted(self, name: str, run_id: str) -> None:
        """Raises RunDeletedError if the run of a token was deleted."""
        if run_id in self._deleted_run_ids:
            raise RunDeletedError(
                f"run {name!r} was deleted (its id was {run_id}), and the token is for this run only: ask an operator "
                "for a new token (`shardwell token --role trainer`)",
                run=name,
                run_id=run_id,
            )

    def create_run(self, name: str, settings: RunSettings, run_id: str = "") -> Run:
        """Creates a run. Its epochs start above those of all deleted runs.

        Args:
            run_id: Id of the run, from the token of its first trainer. Empty: a new one.

        Raises:
            RunDeletedError: The run with this id was deleted.
            CapacityError: There are too many runs.
        """
        self.check_not_deleted(name, run_id)
        if len(self.runs) >= MAX_RUNS:
            raise CapacityError(
                f"run {name!r} cannot be created: {len(self.runs)} runs exist, expected at most {MAX_RUNS}; delete "
                "those that have ended (shardwell delete-run)",
                run=name,
            )
        identity = RunIdentity(name, run_id or new_run_id())
        run = self.runs[name] = Run(identity, settings, self.clock, self.wall_clock(), self._deleted_last_epoch)
        run.changes.touch()
        return run

    async def delete_run(self, run: Run) -> None:
        """Deletes a run. Returns when the deletion is durable."""
        run.deleted = True  # before the write, so that no other method stores the run meanwhile
        tell(run.members)
        try:
            await self.storage.delete_run(run.name, run.identity.run_id, run.changes.last_epoch)
        except ShardwellError:
            run.deleted = False
            tell(run.members)
            raise
        self._deleted_last_epoch = max(self._deleted_last_epoch, run.changes.last_epoch)
        self._deleted_run_ids.add(run.identity.run_id)
        self.runs.pop(run.name, None)
        run.changed.notify()

    async def save(self, run: Run) -> None:
        """Stores a run. Returns when all its changes so far are durable.

        Raises:
            RunDeletedError: The run was deleted.
            UnavailableError: The run could not be stored. The changes stay in memory and the next ``save`` stores them;
                until then no response may contain them.
        """
        wanted = run.changes.made
        while run.changes.saved < wanted:
            await run.changes.saving(self._save, run)

    # Each method that stores a part of a run first checks that the run was not deleted. Otherwise the run would exist
    # again after a restart.

    async def _save(self, run: Run) -> None:
        with self._saving(run) as units:
            await self.storage.save_run(_run_record(run), units)

    @contextmanager
    def _saving(self, run: Run) -> Iterator[list[UnitRecord]]:
        """Yields records of the units whose shards or backups changed since they were stored.

        The block stores these and the run. Its changes so far are then durable, and with them its placement. Changes
        during the block are not.
        """
        run.check_not_deleted()
        made, placement, unsaved = run.changes.made, run.relocations.count, set(run.units.unsaved)
        run.units.unsaved.clear()
        try:
            yield [_unit_record(unit) for unit in run.units if unit.index in unsaved]
        except ShardwellError:
            run.units.unsaved |= unsaved
            raise
        run.changes.saved = made
        if run.relocations.announce(placement):
            tell(run.members)

    async def save_or_retry(self, run: Run) -> None:
        """Calls ``save`` until it succeeds or the run is deleted. For background work."""
        try:
            await retry_async(lambda: self.save(run), errors=ShardwellError, check=raise_if_deleted)
        except RunDeletedError:
            return

    async def save_unit(self, run: Run, unit: Unit, *, published: bool = False) -> None:
        """Stores a unit that is placed, or published."""
        run.check_not_deleted()
        await self.storage.save_units(run.name, [replace(_unit_record(unit), published=published)])

    async def save_commit(
        self, run: Run, step: Step, record: CommitRecord, state: coordinator_pb2.RunState | None
    ) -> None:
        """Stores a commit record and, if it changed, the run's state. When this returns, the step is committed.

        Shards and backups that changed since the last ``save`` become durable together with the record. So does the
        next work item of an asynchronous run.
        """
        run.check_not_deleted()
        serialized = None if state is None or state is run.commits.state else state.SerializeToString()
        if not run.units.unsaved and not run.asynchronous:
            await self.storage.save_commit(run.name, record, serialized)
            return
        with self._saving(run) as units:
            await self.storage.save_commit(run.name, record, serialized, (_run_record(run, committed=step), units))

    async def save_iteration(self, run: Run) -> None:
        """Stores the tracked objects of ``Run.note_iteration``. Repeated until the next step is committed."""
        if (state := run.commits.state) is None:
            return

        async def attempt() -> None:
            while run.commits.writing and run.commits.state is state:
                await run.changed.wait()
            if run.commits.state is state and not run.deleted:
                await self.storage.save_state(run.name, run.committed_step - 1, state.SerializeToString())

        await retry_async(attempt, errors=ShardwellError, check=lambda error: logger.error("%s", error))

    def note_lost_versions(self, run: Run, versions: Iterable[int], why: str) -> None:
        """Records that servers lack versions that a run keeps for readers. The caller stores the run."""
        if lost := run.kept_versions.lose(versions, run.committed_step, why):
            run.changes.touch()
            self.events.add(EventKind.VERSIONS_LOST, lost, run=run.name)

    async def save_loaded(self, run: Run) -> None:
        """Stores a run that was loaded from a checkpoint, and the end of the restore, all at once."""
        with self._saving(run):
            record = replace(_run_record(run), checkpoints=run.checkpoints.after_restore_json())
            units, state = [_unit_record(unit) for unit in run.units], run.commits.state
            serialized = None if state is None else state.SerializeToString()
            await self.storage.save_loaded_run(record, units, list(run.commits.records), serialized)

    async def save_checkpoint(self, run: Run, record: CheckpointRecord) -> None:
        """Stores a checkpoint that is about to be written, or is complete."""
        run.check_not_deleted()
        await self.storage.save_checkpoint(run.name, record)

    async def delete_checkpoints(self, run: Run, checkpoint_ids: Collection[str]) -> None:
        """Deletes the records of checkpoints whose files were removed, or are damaged."""
        run.checkpoints.forget(checkpoint_ids)
        await self.storage.delete_checkpoints(run.name, checkpoint_ids)


def raise_if_deleted(error: Exception) -> None:
    """Logs why a run could not be stored, before the next attempt. Raises the error if the run was deleted."""
    if isinstance(error, RunDeletedError):
        raise error
    logger.error("%s", error)


def _run_record(run: Run, *, committed: Step | None = None) -> RunRecord:
    """Returns the part of a run that can change between commits.

    Args:
        committed: A step that is committed together with the record.
    """
    return RunRecord(
        run=run.name,
        run_id=run.identity.run_id,
        config=run.settings.to_proto().SerializeToString(),
        created=run.created,
        started=run.started,
        last_epoch=run.changes.last_epoch,
        members=tuple(
            MemberRecord(
                member.name,
                member.host,
                member.incarnation,
                member.epoch,
                member.requested_rank,
                member.state.value,
                member.accepts_reassigned_work,
                member.process,
                member.behind,
            )
            for member in run.members
        ),
        ranks=_rank_records(run, committed),
        addresses=tuple(starmap(AddressRecord, run.addresses.items())),
        initializers=tuple(
            InitializerRecord(rank, initializer.trainer, initializer.epoch)
            for rank, initializer in run.units.initializers.items()
        ),
        placement=run.relocations.count,
        rebalancing=run.relocations.rebalancing,
        checkpoints=run.checkpoints.to_json(),
        parallel_plan=None if run.parallel_plan is None else run.parallel_plan.SerializeToString(),
        created_by=run.created_by,
        created_on=run.created_on,
        ended_step=run.ended_step,
        published=run.kept_versions.to_json(),
    )


def _rank_records(run: Run, committed: Step | None) -> tuple[RankRecord, ...]:
    items = [(step.number, item) for step in run.work.steps for item in step.items.values()]
    if isinstance(run.work, AsynchronousWork) and committed is not None:
        next_item = run.work.next_item(committed)
        items[next_item.dp_rank] = (run.committed_step + 1, next_item)
    return tuple(
        RankRecord(
            member.global_rank,
            run.owners.by_rank[member.global_rank],
            member.trainer,
            item.epoch,
            version,
            item.attempt,
            item.last_attempt,
            item.state in (WorkState.VACANT, WorkState.ORPHANED),
            run.owners.replica_epochs.get(item.dp_rank, 0),
            item.number,
        )
        for version, item in items
        for member in item.members.values()
    )


def _unit_record(unit: Unit) -> UnitRecord:
    """Returns the record of a unit."""
    spec = unit.layout.to_proto().SerializeToString()
    return UnitRecord(unit.index, spec, unit.published, shards=unit.shards, backups=unit.backups)


def _restore_run(stored: StoredRun, clock: Callable[[], float]) -> Run:
    """Restores a run after a coordinator restart. ``TrainerLeases.renew_all`` then starts the leases again."""
    record, now = stored.record, clock()
    config = coordinator_pb2.RunConfig.FromString(record.config)
    identity, settings = RunIdentity(record.run, record.run_id), RunSettings.from_proto(config, world_size=0)
    run = Run(identity, settings, clock, record.created, record.last_epoch)
    for at in stored.units:
        layout = UnitLayout.from_proto(common_pb2.UnitSpec.FromString(at.spec))
        run.units.add(Unit(at.unit_index, layout, at.shards, at.published, at.backups))
    run.created_by, run.created_on, run.ended_step = record.created_by, record.created_on, record.ended_step
    run.kept_versions.restore(record.published)
    run.relocations.restore(record.placement, rebalancing=record.rebalancing)
    for initializer in record.initializers:
        run.units.set_initializer(initializer.global_rank, Initializer(initializer.trainer, initializer.epoch))
    run.commits.restore(stored.commits, stored.state, run.units.updated_processes, now)
    for member in record.members:
        run.members.add(
            Member(
                member.trainer,
                member.host,
                member.incarnation,
                member.epoch,
                now,
                member.requested_rank,
                MemberState(member.state),
                member.accepts_reassigned_work,
                joined_step=run.committed_step,
                process=member.process,
                behind=member.behind,
            )
        )
    run.addresses.update((at.name, at.address) for at in record.addresses)
    if record.parallel_plan is not None:
        run.parallel_plan = coordinator_pb2.ParallelPlan.FromString(record.parallel_plan)
    run.checkpoints.restore_facts(record.checkpoints, stored.checkpoints, now)
    if record.started:
        _restore_step(run, stored)
    return run


def _restore_step(run: Run, stored: StoredRun) -> None:
    ranks, now = stored.record.ranks, run.clock()
    present = {member.name for member in run.members if member.state is not MemberState.GONE}
    world = run.settings.world
    run.owners.restore(
        {rank.global_rank: rank.owner for rank in ranks},
        {world.coordinates(rank.global_rank).dp_rank: rank.replica_epoch for rank in ranks},
    )
    run.work.restore(
        _restore_items(world, ranks, present, now),
        {world.coordinates(rank.global_rank).dp_rank: rank.step for rank in ranks},
    )


def _restore_items(world: World, records: Collection[RankRecord], present: Set[str], now: float) -> dict[int, WorkItem]:
    """Returns the work items by dp rank. An item is leased again if all its trainers are present.

    Nothing is stored of finished items: their trainers report them again. Items whose trainers are gone start another
    attempt, because the servers may have gradients of the former one.
    """
    by_rank, items = {record.global_rank: record for record in records}, {}
    for dp_rank, ranks in enumerate(ranks_of_items(world)):
        record, trainers = by_rank[ranks[0]], [by_rank[rank].trainer for rank in ranks]
        leased = not record.vacant and present >= set(trainers)
        items[dp_rank] = WorkItem(
            dp_rank,
            new_members(ranks, trainers),
            record.epoch,
            record.attempt,
            record.number,
            state=WorkState.LEASED if leased else WorkState.VACANT,
            since_s=now,
            fenced=leased,
            last_attempt=record.last_attempt,
        )
        if not leased:
            items[dp_rank].attempt = items[dp_rank].next_attempt()
    return items
