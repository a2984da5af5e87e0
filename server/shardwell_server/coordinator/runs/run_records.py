"""Conversion of a run to stored records and back."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardwell_server.coordinator.runs.members import Member, MemberState
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Step, WorkItem, WorkState
from shardwell_server.coordinator.runs.units import Initializer, Unit
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


def run_record(run: Run) -> RunRecord:
    """Returns the part of a run that ``Storage.save_run`` stores."""
    initializer = run.units.initializer
    return RunRecord(
        run=run.name,
        run_id=run.identity.run_id,
        config=run.settings.to_proto().SerializeToString(),
        created=run.created,
        started=run.step is not None,
        last_epoch=run.last_epoch,
        initializer=initializer.trainer if initializer is not None else None,
        initializer_epoch=initializer.epoch if initializer is not None else 0,
        members=tuple(
            MemberRecord(
                member.name,
                member.host,
                member.incarnation,
                member.epoch,
                member.requested_rank,
                member.state.value,
                member.accepts_reassigned_work,
            )
            for member in run.members
        ),
        ranks=_rank_records(run),
        addresses=tuple(run.addresses.items()),
    )


def _rank_records(run: Run) -> tuple[RankRecord, ...]:
    if run.step is None:
        return ()
    return tuple(
        RankRecord(rank, run.rank_assignments[rank], item.trainer, item.epoch, run.step.number, item.attempt)
        for rank, item in sorted(run.step.items.items())
    )


def unit_record(unit: Unit, *, published: bool = False) -> UnitRecord:
    """Returns the record of a unit that is placed, or published."""
    return UnitRecord(unit.index, unit.layout.to_proto().SerializeToString(), published, unit.shards)


def finished_records(step: Step) -> list[FinishedRecord]:
    """Returns the records of the items of a step whose items are all finished."""
    return [
        FinishedRecord(item.global_rank, item.attempt, item.to_finished_proto().SerializeToString())
        for item in step.items.values()
    ]


def restore_run(stored: StoredRun, clock: Callable[[], float]) -> Run:
    """Restores a run after a coordinator restart. ``TrainerLeases.renew_all`` then starts the leases again."""
    record, now = stored.record, clock()
    config = coordinator_pb2.RunConfig.FromString(record.config)
    identity, settings = RunIdentity(record.run, record.run_id), RunSettings.from_proto(config, world_size=0)
    run = Run(identity, settings, clock, record.created, record.last_epoch)
    for at in stored.units:
        layout = UnitLayout.from_proto(common_pb2.UnitSpec.FromString(at.spec))
        run.units.add(Unit(at.unit_index, layout, at.shards, at.published))
    if record.initializer is not None:
        run.units.set_initializer(Initializer(record.initializer, record.initializer_epoch))
    run.commits.restore(stored.commits, stored.state, run.units.servers, now)
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
            )
        )
    run.addresses.update(record.addresses)
    if record.started:
        _restore_step(run, stored)
    return run


def _restore_step(run: Run, stored: StoredRun) -> None:
    ranks, now, number = stored.record.ranks, run.clock(), run.committed_step
    present = {member.name for member in run.members if member.state is not MemberState.GONE}
    step = run.restore_step(
        {rank.global_rank: rank.owner for rank in ranks},
        {rank.global_rank: _restore_item(run, rank, present, now) for rank in ranks},
        in_flight=all(rank.step == number for rank in ranks),
    )
    finished = {at.global_rank: at for at in stored.finished}
    if all(rank in finished and finished[rank].attempt == item.attempt for rank, item in step.items.items()):
        step.restore_finished({rank: _restore_parts(at) for rank, at in finished.items()}, present, now)


def _restore_item(run: Run, rank: RankRecord, present: Collection[str], now: float) -> WorkItem:
    dp_rank = run.settings.world.coordinates(rank.global_rank).dp_rank
    leased = rank.trainer in present
    return WorkItem(
        rank.global_rank,
        dp_rank,
        rank.trainer,
        rank.epoch,
        rank.attempt,
        state=WorkState.LEASED if leased else WorkState.VACANT,
        since_s=now,
        fenced=leased,
    )


def _restore_parts(record: FinishedRecord) -> dict[int, int]:
    finished = coordinator_pb2.FinishedItem.FromString(record.parts)
    return {unit.unit_index: unit.part_count for unit in finished.units}
