"""Fencing: which leases, attempts and coordinator terms a shard server rejects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from shardwell_wire.errors import AccessError, StaleEpochError
from shardwell_wire.v1 import shard_pb2


class Fences:
    """The oldest epoch and attempt that one run accepts from each logical dp rank.

    Only the coordinator raises these bounds; the numbers in a push do not. Epochs never fall. Attempts start at 0 in
    every step.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._attempts: dict[int, tuple[int, int]] = {}
        """By rank: a step, and the oldest attempt in it."""
        self._floor = 0
        """Epochs below this one are rejected for every rank."""

    def epoch(self, dp_rank: int) -> int:
        """Returns the oldest epoch that is accepted."""
        return max(self._floor, self._epochs.get(dp_rank, 0))

    def attempt(self, dp_rank: int, step: int) -> int:
        """Returns the oldest attempt that is accepted in a step."""
        of_step, attempt = self._attempts.get(dp_rank, (0, 0))
        return attempt if step == of_step else 0

    def restart(self, min_epoch: int) -> None:
        """Rejects all epochs below ``min_epoch``, and forgets attempts, because steps are repeated."""
        self._floor = max(self._floor, min_epoch)
        self._attempts = {}

    def check_epoch(self, dp_rank: int, epoch: int) -> None:
        """Raises StaleEpochError if a lease on a rank is over."""
        oldest = self.epoch(dp_rank)
        if epoch < oldest:
            raise StaleEpochError(
                f"the lease on rank {dp_rank} with epoch {epoch} is over: its lease now has epoch {oldest}",
                dp_rank=dp_rank,
                epoch=epoch,
                newest=oldest,
            )

    def raise_all(self, step: int, ranks: Iterable[shard_pb2.RankFence]) -> list[tuple[int, int]]:
        """Applies the coordinator's fences; returns ``(dp_rank, attempt)`` for each attempt that rose.

        Fences of an earlier step raise epochs only. A fence that names a version is about the item that reads it.
        A fence whose epoch is over may have been delayed until the run was loaded from a checkpoint: its attempt is one
        of a step that is repeated, and says nothing about the new attempts.
        """
        risen = []
        for fence in ranks:
            self._epochs[fence.dp_rank] = max(self.epoch(fence.dp_rank), fence.epoch)
            bound = (fence.version if fence.HasField("version") else step, fence.attempt)
            if fence.attempt and fence.epoch >= self._floor and bound > self._attempts.get(fence.dp_rank, (0, 0)):
                self._attempts[fence.dp_rank] = bound
                risen.append((fence.dp_rank, fence.attempt))
        return risen


class CoordinatorTerm:
    """The newest term that this server's coordinator has confirmed.

    The term in a request proves nothing, because anyone can send a request. A later term is accepted only after the
    coordinator has confirmed it.

    Args:
        ask: Asks the coordinator for its term and passes the answer to ``learn``. Raises UnavailableError or
            DeadlineError if the coordinator does not answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask, self._newest = ask, 0

    def learn(self, term: int) -> None:
        """Records a term from the coordinator itself. An older term changes nothing."""
        self._newest = max(self._newest, term)

    def is_newest(self, term: int) -> bool:
        """True if no later term is known. Only the current coordinator's answers may drop runs."""
        return term == self._newest

    async def check(self, term: int) -> None:
        """Admits requests of the current coordinator only.

        Args:
            term: Term in the request.

        Raises:
            StaleEpochError: A later coordinator has taken over.
            AccessError: The server's coordinator does not have this term.
            UnavailableError: The term is later than the known one, and the coordinator cannot be asked.
        """
        if term > self._newest:
            await self._ask()
        if term > self._newest:
            raise AccessError(
                f"the request has coordinator term {term}, but this server's coordinator has term {self._newest}: send "
                "the request to a server that is registered with your coordinator",
                epoch=self._newest,
            )
        if term < self._newest:
            raise StaleEpochError(
                f"coordinator term {term} is over, the current term is {self._newest}", epoch=self._newest
            )
