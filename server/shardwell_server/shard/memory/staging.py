"""Room for what no reservation covers: who gets it, who waits, who must give way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shardwell_wire.errors import CapacityError


class Staging:
    """Counts bytes up to a limit; who finds no room waits in line.

    Four things take room here: values that replace a shard's initial values, parts that are added to
    a contribution, what readers are sent that is not the values themselves (encodings and averages),
    and a version that readers still hold after the next one exists. What is of an older version gives
    way to the others, for its readers may be arbitrarily slow.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.make_room: Callable[[], None] = lambda: None
        """Called before anybody waits: gives back what old versions hold."""
        self._limit_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    def set_limit(self, limit_bytes: int) -> None:
        """Changes the limit, which is never less than the largest shard."""
        self._limit_bytes = limit_bytes
        self._admit()

    def try_take(self, size_bytes: int) -> bool:
        """Takes room if there is some now and nobody waits for it."""
        if self._waiting or self.used_bytes + size_bytes > self._limit_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def try_take_pressing(self, size_bytes: int) -> bool:
        """Takes room if there is some now, or once old versions have given way."""
        if self.try_take(size_bytes):
            return True
        self.make_room()
        return self.try_take(size_bytes)

    async def take(self, size_bytes: int, wait_s: float, what: str) -> None:
        """Takes room, in the order of asking.

        Raises:
            CapacityError: There was none in time; ``what`` wanted it.
        """
        if self.try_take_pressing(size_bytes):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            self._leave(size_bytes, turn)
            raise CapacityError(
                f"{what}: waited {wait_s:.1f} s for {size_bytes} bytes to receive it into; other streams hold "
                f"{self.used_bytes} of {self._limit_bytes}: try again, raise --memory-budget, or add shard servers"
            ) from None
        except BaseException:
            self._leave(size_bytes, turn)
            raise

    def give(self, size_bytes: int) -> None:
        """Gives room back."""
        self.used_bytes -= size_bytes
        self._admit()

    def _leave(self, size_bytes: int, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.give(size_bytes)  # its turn came at the moment it gave up
            return
        self._waiting.remove((size_bytes, turn))
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self._limit_bytes:
            size_bytes, turn = self._waiting.popleft()
            if turn.done():  # cancelled a moment ago; it leaves by itself
                self._waiting.appendleft((size_bytes, turn))
                return
            self.used_bytes += size_bytes
            turn.set_result(None)
