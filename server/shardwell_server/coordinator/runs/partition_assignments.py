"""Who updates which optimizer partitions of a step, if the optimizer runs on the trainers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from shardwell_server.coordinator.runs.work_items import WorkItem, sum_of_attempts
from shardwell_wire.v1 import coordinator_pb2


class PartitionAssignments:
    """Which trainers update the optimizer partitions of a step, and which partitions are staged.

    Each trainer updates the partitions of the logical ranks whose work it finished. All inputs of an update are on the
    servers, so any trainer that has the same units can update them. The partitions of a trainer that is gone go to the
    next trainer of the same tp rank and pp rank that asks to commit, once the former trainer is fenced. If one trainer
    of a replica is gone, the servers reject the leases of all of them, so their partitions are assigned anew, too.

    Args:
        items: All work items of the step, by dp rank.
    """

    def __init__(self, items: Mapping[int, WorkItem]) -> None:
        self._items = items
        self._places = {rank: (item, position) for item in items.values() for position, rank in enumerate(item.members)}
        """Work item of each global rank, and the rank's position in the replica."""
        self._staged: dict[int, int] = {}
        """``Step.attempts`` when each global rank's partitions were last staged."""
        self._substitutes: dict[int, tuple[str, int]] = {}
        """Trainers that update the partitions of ranks whose own trainer is gone, and the epochs of their leases."""

    def clear(self) -> None:
        """Invalidates everything that was staged, because the gradient changes."""
        self._staged.clear()
        self._substitutes.clear()

    @property
    def all_staged(self) -> bool:
        """True if the partitions of every rank are staged."""
        return not self._unstaged()

    def note(self, reports: Iterable[coordinator_pb2.PartitionWork]) -> bool:
        """Records staged partitions. Ignores reports of former leases and attempts. Returns True if any was new."""
        any_new, attempts = False, sum_of_attempts(self._items)
        for report in reports:
            rank = report.global_rank
            if rank not in self._places or (report.epoch, report.attempts) != (self._epoch(rank), attempts):
                continue
            any_new = any_new or self._staged.get(rank) != attempts
            self._staged[rank] = attempts
        return any_new

    def assign(
        self, trainer: str, position: int | None, live: Collection[str], next_epoch: Callable[[], int]
    ) -> list[coordinator_pb2.PartitionWork]:
        """Returns the partitions that a trainer must stage now, including partitions of gone trainers.

        Args:
            trainer: Name of the trainer, which has proposed the step.
            position: Its position in its replica. None: it owns no rank.
            live: Names of the live trainers.
            next_epoch: Returns a new epoch.
        """
        work, attempts = [], sum_of_attempts(self._items)
        for rank in self._unstaged():
            item, place = self._places[rank]
            if self._trainer(rank, live) is None and item.fenced and place == position:
                self._substitutes[rank] = trainer, next_epoch()
            if self._trainer(rank, live) == trainer:
                work.append(coordinator_pb2.PartitionWork(global_rank=rank, epoch=self._epoch(rank), attempts=attempts))
        return work

    def waiting_for(self, live: Collection[str]) -> list[str]:
        """Returns one line per rank whose partitions are not staged."""
        lines = []
        for rank in self._unstaged():
            item, _ = self._places[rank]
            trainer = self._trainer(rank, live)
            if trainer is not None:
                status = f"trainer {trainer!r} is updating them"
            elif item.members[rank].trainer in live and len(item.members) > 1:
                status = f"trainer {item.lost_trainer!r} of the same replica is gone"
            else:
                status = f"trainer {item.members[rank].trainer!r} is gone"
            lines.append(f"optimizer partitions of rank {rank}: {status}")
        return lines

    def _unstaged(self) -> list[int]:
        attempts = sum_of_attempts(self._items)
        return [rank for rank in self._places if self._staged.get(rank) != attempts]

    def _epoch(self, rank: int) -> int:
        """Returns the epoch of the lease on a rank's partitions."""
        if (substitute := self._substitutes.get(rank)) is not None:
            return substitute[1]
        return self._places[rank][0].epoch

    def _trainer(self, rank: int, live: Collection[str]) -> str | None:
        """Returns the live trainer that updates a rank's partitions. None: they must be assigned anew."""
        item, _ = self._places[rank]
        if (substitute := self._substitutes.get(rank)) is not None:
            return substitute[0] if substitute[0] in live else None
        trainer = item.members[rank].trainer
        return None if item.trainer_lost or trainer not in live else trainer
