"""Which coordinator a shard server obeys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from shardwell_wire.errors import AccessError, StaleEpochError


class CoordinatorTerm:
    """The newest term that this server's coordinator told it of itself.

    What a request claims is no proof, since anybody can send one: a later term is believed only once the coordinator
    itself confirms it.

    Args:
        ask: Asks the coordinator for its term, which is told to ``learn``. Raises UnavailableError or DeadlineError if
            it does not answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask, self._newest = ask, 0

    def learn(self, term: int) -> None:
        """Takes the coordinator's own word; one that another has replaced changes nothing."""
        self._newest = max(self._newest, term)

    def is_newest(self, term: int) -> bool:
        """Whether no later term is known: only the present coordinator's answers may drop anything."""
        return term == self._newest

    async def check(self, term: int) -> None:
        """Admits a request of the present coordinator.

        Args:
            term: What the request claims.

        Raises:
            StaleEpochError: Another coordinator has replaced that one.
            AccessError: It is not the term of this server's coordinator.
            UnavailableError: It is a later one than known, and the coordinator cannot be asked.
        """
        if term > self._newest:
            await self._ask()
        if term > self._newest:
            raise AccessError(
                f"this server's coordinator has term {self._newest}, so nobody may speak for term {term}: send this to "
                "a server that is registered with your coordinator",
                epoch=self._newest,
            )
        if term < self._newest:
            raise StaleEpochError(
                f"coordinator term {term} is over, the present one is {self._newest}", epoch=self._newest
            )
