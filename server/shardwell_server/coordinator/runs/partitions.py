"""Partitions of a step whose optimizer runs on the trainers: who updates which, and which are staged.

Each trainer updates the partitions of the ranks whose work it finished. The partitions of one that is gone go to the
first trainer that asks to commit, once the lost one is fenced. Partitions can be updated by anybody: all that goes
into them is on the servers.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwell_server.coordinator.runs.members import Member
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import Item, Step
from shardwell_wire.v1 import coordinator_pb2


def note_staged(run: Run, step: Step, reports: Iterable[coordinator_pb2.PartitionWork]) -> None:
    """Takes a trainer's word for what it has staged; what was given to another, or is of an earlier attempt, is not."""
    for report in reports:
        item = step.items.get(report.dp_rank)
        key = (report.epoch, report.attempts)
        if item is None or key != (item.epoch, step.attempts) or step.partitions.staged.get(report.dp_rank) == key:
            continue
        step.partitions.staged[report.dp_rank] = key
        run.changed.notify()


def all_staged(step: Step) -> bool:
    """Whether every rank's partitions are staged, as far as is known."""
    return not any(_unstaged(step))


def work_for(run: Run, member: Member, step: Step) -> list[coordinator_pb2.PartitionWork]:
    """The partitions that a trainer shall stage now; those of trainers that are gone become its own."""
    work = []
    for item in _unstaged(step):
        if _player(run, step, item) is None and item.fenced:
            step.partitions.stand_ins[item.dp_rank] = member.name
            item.epoch = run.next_epoch()
        if _player(run, step, item) == member.name:
            work.append(coordinator_pb2.PartitionWork(dp_rank=item.dp_rank, epoch=item.epoch, attempts=step.attempts))
    return work


def waiting_for(run: Run, step: Step) -> list[str]:
    """One line per partition that is not staged."""
    lines = []
    for item in _unstaged(step):
        player = _player(run, step, item)
        whose = f"trainer {item.holder!r} is gone" if player is None else f"trainer {player!r} updates it"
        lines.append(f"partition of rank {item.dp_rank}: {whose}")
    return lines


def _unstaged(step: Step) -> list[Item]:
    """Worlds that train have one rank per data rank, so an item's rank is its partition's."""
    attempts = step.attempts
    return [item for rank, item in step.items.items() if step.partitions.staged.get(rank, (0, -1))[1] != attempts]


def _player(run: Run, step: Step, item: Item) -> str | None:
    """The live trainer whose turn it is; None: whose it was is gone."""
    stand_in = step.partitions.stand_ins.get(item.dp_rank)
    if stand_in is not None:
        return stand_in if stand_in in run.members.live else None
    return None if item.orphaned or item.holder not in run.members.live else item.holder
