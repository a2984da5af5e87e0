"""One run on this server: its shards, its fences, and the step in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwell_server.shard.state.fences import Fences
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import NotFoundError, RunDeletedError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class PreparedStep:
    """A step whose gradients are reduced, or are being reduced."""

    step: int
    asked: bytes
    """The contributions that were named, and whether to skip them."""
    norm_type: float
    """Of the norms in the answer."""
    answer: shard_pb2.PrepareStepResponse | None
    """None while it is worked out."""


class Run:
    """One run.

    Args:
        identity: Its name and id.
    """

    def __init__(self, identity: RunIdentity) -> None:
        self.identity = identity
        self.name = identity.name
        self.shards: dict[str, UnitShard] = {}
        """By unit name."""
        self.released: dict[str, int] = {}
        """By unit name, the highest number of a placement that was taken back."""
        self.fences = Fences()
        self.prepared: PreparedStep | None = None
        self.duplicate_count = 0
        self.differing_duplicate_count = 0
        self.dropped = asyncio.Event()
        """Set once the run was deleted."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._lock = asyncio.Lock()

    def shard(self, unit: str) -> UnitShard:
        """Raises NotFoundError if the server has no shard of the unit."""
        if unit in self.shards:
            return self.shards[unit]
        known = ", ".join(sorted(self.shards)[:10])
        raise NotFoundError(
            f"run {self.name!r} has no unit {unit!r} on this server; it has {known or 'none'}", unit=unit
        )

    @property
    def published(self) -> list[UnitShard]:
        """The shards that have values. Others take no part in steps: of some the coordinator may know nothing."""
        return [shard for shard in self.shards.values() if shard.version is not None]

    @property
    def step(self) -> int:
        """The step in flight: the version that every published shard has reached."""
        return min((shard.version for shard in self.shards.values() if shard.version is not None), default=0)

    async def alone(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Does something that no other such work on the run may be mixed with.

        That is all that adds, reduces, applies or drops gradients.

        Raises:
            RunDeletedError: The run was deleted before its turn came.
        """
        async with self._lock:
            if self.dropped.is_set():
                raise RunDeletedError(f"run {self.name!r} was deleted", run=self.name)
            return await work()

    def soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does something ``alone`` that nobody waits for."""

        async def later() -> None:
            try:
                await self.alone(work)
            except RunDeletedError:
                return

        task = asyncio.ensure_future(later())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work on run %r failed", self.name, exc_info=error)

    def unprepare(self) -> None:
        """The step in flight is open again: contributions may change."""
        self.prepared = None

    def drop(self) -> None:
        """Forgets everything; call it ``alone``."""
        self.dropped.set()
        deleted = RunDeletedError(f"run {self.name!r} was deleted", run=self.name)
        for shard in self.shards.values():
            shard.drop(deleted)
        self.shards.clear()
