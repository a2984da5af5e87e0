"""Which leases and attempts on logical ranks are over."""

from __future__ import annotations

from collections.abc import Iterable

from shardwell_wire.errors import StaleEpochError
from shardwell_wire.v1 import shard_pb2


class Fences:
    """The oldest epoch and attempt that one run accepts of each logical dp rank.

    Epochs only rise; attempts are counted anew in every step. Both are the coordinator's word: what pushes say of
    themselves raises neither.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._step = 0
        """What the attempts are of."""

    def epoch(self, dp_rank: int) -> int:
        """The oldest epoch still accepted."""
        return self._epochs.get(dp_rank, 0)

    def attempt(self, dp_rank: int, step: int) -> int:
        """The oldest attempt still accepted in a step."""
        return self._attempts.get(dp_rank, 0) if step == self._step else 0

    def check_epoch(self, dp_rank: int, epoch: int) -> None:
        """Raises StaleEpochError if a lease on a rank is over."""
        oldest = self.epoch(dp_rank)
        if epoch < oldest:
            raise StaleEpochError(
                f"rank {dp_rank}: epoch {epoch} is over, its lease has epoch {oldest} now",
                dp_rank=dp_rank,
                epoch=epoch,
                newest=oldest,
            )

    def raise_all(self, step: int, ranks: Iterable[shard_pb2.RankFence]) -> list[tuple[int, int]]:
        """Takes the coordinator's word; returns ``(dp_rank, attempt)`` where an attempt rose.

        One that was said of an earlier step raises epochs only.
        """
        if step > self._step:
            self._attempts, self._step = {}, step
        risen = []
        for fence in ranks:
            self._epochs[fence.dp_rank] = max(self.epoch(fence.dp_rank), fence.epoch)
            if step == self._step and fence.attempt > self._attempts.get(fence.dp_rank, 0):
                self._attempts[fence.dp_rank] = fence.attempt
                risen.append((fence.dp_rank, fence.attempt))
        return risen
