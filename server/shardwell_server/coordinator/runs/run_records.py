"""A run to rows and back."""

from __future__ import annotations

from collections.abc import Callable

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.run import PendingUpdate, Run
from shardwell_server.coordinator.runs.step import Item, Step, WorkState
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.storage.records import (
    FinishedRecord,
    MemberRecord,
    RankRecord,
    RunRecord,
    StoredRun,
    UnitRecord,
)
from shardwell_wire.layout import UnitLayout
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2


def to_record(run: Run) -> RunRecord:
    """What must be durable of a run before anybody is told of it."""
    initializer, initializer_epoch = run.initializer or (None, 0)
    return RunRecord(
        run=run.name,
        run_id=run.identity.run_id,
        config=run.settings.to_proto().SerializeToString(),
        created=run.created,
        started=run.step is not None,
        last_epoch=run.last_epoch,
        initializer=initializer,
        initializer_epoch=initializer_epoch,
        members=tuple(
            MemberRecord(
                at.name,
                at.host,
                at.incarnation,
                at.epoch,
                at.requested_rank,
                at.live,
                at.lapsed,
                at.accepts_work,
            )
            for at in run.members
        ),
        ranks=_rank_records(run),
        addresses=tuple(run.addresses.items()),
    )


def _rank_records(run: Run) -> tuple[RankRecord, ...]:
    if run.step is None:
        return ()
    return tuple(
        RankRecord(rank, run.rank_assignments[rank], item.holder, item.epoch, run.step.number, item.attempt)
        for rank, item in sorted(run.step.items.items())
    )


def unit_record(unit: Unit, *, published: bool = False) -> UnitRecord:
    """A unit that has been placed, or published."""
    return UnitRecord(unit.index, unit.layout.to_proto().SerializeToString(), published, unit.shards)


def finished_records(step: Step) -> list[FinishedRecord]:
    """The items of a step that is finished."""
    return [
        FinishedRecord(item.global_rank, item.attempt, finished_item(item).SerializeToString())
        for item in step.items.values()
    ]


def finished_item(item: Item) -> coordinator_pb2.FinishedItem:
    """How a finished item was reported."""
    return coordinator_pb2.FinishedItem(
        global_rank=item.global_rank,
        epoch=item.epoch,
        attempt=item.attempt,
        units=[common_pb2.UnitParts(unit_index=unit, part_count=count) for unit, count in sorted(item.parts.items())],
    )


def from_stored(stored: StoredRun, clock: Callable[[], float]) -> Run:
    """A run of an earlier term; ``Trainers.renew_all`` begins the leases of its live trainers."""
    record = stored.record
    config = coordinator_pb2.RunConfig.FromString(record.config)
    identity, settings = RunIdentity(record.run, record.run_id), RunSettings.from_proto(config, world_size=0)
    run = Run(identity, settings, clock, record.created, record.last_epoch)
    run.members.members = {
        at.trainer: Member(
            at.trainer,
            at.host,
            at.incarnation,
            at.epoch,
            clock(),
            at.requested_rank,
            live=at.live,
            lapsed=at.lapsed,
            accepts_work=at.accepts_work,
            joined_step=stored.commits[-1].step + 1 if stored.commits else 0,
        )
        for at in record.members
    }
    run.addresses = dict(record.addresses)
    if record.initializer is not None:
        run.initializer = (record.initializer, record.initializer_epoch)
    for at in stored.units:
        layout = UnitLayout.from_proto(common_pb2.UnitSpec.FromString(at.spec))
        run.units.add(Unit(at.unit_index, layout, at.shards, at.published))
    run.commits.extend(stored.commits)
    if stored.state is not None:
        run.state = coordinator_pb2.RunState.FromString(stored.state)
    if stored.commits:
        run.updates = {server: PendingUpdate(stored.commits[-1].step, clock()) for server in run.units.servers}
    if record.started:
        _restore_step(run, stored)
    return run


def _restore_step(run: Run, stored: StoredRun) -> None:
    record, now, number = stored.record, run.clock(), run.committed_step
    run.rank_assignments = {rank.global_rank: rank.owner for rank in record.ranks}
    there = {member.name for member in run.members if member.live or member.lapsed}
    items = {}
    for rank in record.ranks:
        dp_rank = run.settings.world.coordinates(rank.global_rank).dp_rank
        item = Item(rank.global_rank, dp_rank, rank.holder, rank.epoch, rank.attempt, since_s=now)
        if rank.holder not in there:
            item.state, item.fenced = WorkState.VACANT, False
        items[rank.global_rank] = item
    if all(rank.step == number for rank in record.ranks):
        step = run.step = Step(number, items, now)
    else:
        # Nothing has changed since the commit before: the work is given out as it was.
        step = run.begin_step(number, items)
    reports = {at.global_rank: at for at in stored.finished}
    if all(rank in reports and reports[rank].attempt == item.attempt for rank, item in step.items.items()):
        parts = {
            rank: {unit.unit_index: unit.part_count for unit in coordinator_pb2.FinishedItem.FromString(at.parts).units}
            for rank, at in reports.items()
        }
        step.finish([(step.items[rank], parts[rank]) for rank in parts], now)
        for item in step.items.values():
            item.orphaned = item.holder not in there
        step.recorded = True
