"""Who updates which optimizer partitions of a step, if the optimizer runs on the trainers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from shardwell_server.coordinator.runs.work_items import WorkItem, sum_of_attempts
from shardwell_wire.v1 import coordinator_pb2


class PartitionAssignments:
    """Which trainers update the optimizer partitions of a step, and which partitions are staged.

    Each trainer updates the partitions of the ranks whose work it finished. The partitions of a trainer that is gone
    go to the next trainer that asks to commit, once the former trainer is fenced. Any trainer can update any
    partition, because all inputs are on the servers. Only runs with one rank per dp rank have optimizer partitions.

    Args:
        items: All work items of the step, by dp rank.
    """

    def __init__(self, items: Mapping[int, WorkItem]) -> None:
        self._items = items
        self._staged: dict[int, tuple[int, int]] = {}
        """``(epoch, attempts)`` under which each dp rank's partitions were last staged."""
        self._substitutes: dict[int, str] = {}
        """Trainers that update the partitions of dp ranks whose own trainer is gone."""

    def clear(self) -> None:
        """Invalidates everything that was staged, because the gradient changes."""
        self._staged.clear()
        self._substitutes.clear()

    @property
    def all_staged(self) -> bool:
        """True if the partitions of every rank are staged."""
        return not any(self._unstaged())

    def note(self, reports: Iterable[coordinator_pb2.PartitionWork]) -> bool:
        """Records staged partitions. Ignores reports of former trainers and attempts. Returns True if any was new."""
        any_new, attempts = False, sum_of_attempts(self._items)
        for report in reports:
            item, key = self._items.get(report.dp_rank), (report.epoch, report.attempts)
            if item is None or key != (item.epoch, attempts):
                continue
            any_new = any_new or self._staged.get(report.dp_rank) != key
            self._staged[report.dp_rank] = key
        return any_new

    def assign(
        self, trainer: str, live: Collection[str], next_epoch: Callable[[], int]
    ) -> list[coordinator_pb2.PartitionWork]:
        """Returns the partitions that a trainer must stage now, including partitions of gone trainers."""
        work, attempts = [], sum_of_attempts(self._items)
        for item in self._unstaged():
            if self._trainer(item, live) is None and item.fenced:
                self._substitutes[item.dp_rank] = trainer
                item.epoch = next_epoch()  # overrides what a former substitute may still stage
            if self._trainer(item, live) == trainer:
                work.append(coordinator_pb2.PartitionWork(dp_rank=item.dp_rank, epoch=item.epoch, attempts=attempts))
        return work

    def waiting_for(self, live: Collection[str]) -> list[str]:
        """Returns one line per rank whose partitions are not staged."""
        lines = []
        for item in self._unstaged():
            trainer = self._trainer(item, live)
            gone = f"trainer {item.first_trainer!r} is gone"
            status = gone if trainer is None else f"trainer {trainer!r} is updating them"
            lines.append(f"optimizer partitions of rank {item.dp_rank}: {status}")
        return lines

    def _unstaged(self) -> list[WorkItem]:
        attempts = sum_of_attempts(self._items)
        return [item for rank, item in self._items.items() if self._staged.get(rank, (0, -1))[1] != attempts]

    def _trainer(self, item: WorkItem, live: Collection[str]) -> str | None:
        """Returns the live trainer that updates a rank's partitions. None: that trainer is gone."""
        substitute = self._substitutes.get(item.dp_rank)
        if substitute is not None:
            return substitute if substitute in live else None
        return None if item.trainer_lost or item.first_trainer not in live else item.first_trainer
