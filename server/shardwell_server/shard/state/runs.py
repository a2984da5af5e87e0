"""One run on this server: its shards, its fences, and the step in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwell_server.shard.state.fences import Fences
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import NotFoundError, RunDeletedError, StaleEpochError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class PreparedStep:
    """A step whose gradients are reduced, or are being reduced."""

    step: int
    manifest: bytes
    """The contributions that the coordinator named, and whether to skip them, in serialised form."""
    norm_type: float
    """Type of the norms in the answer."""
    answer: shard_pb2.PrepareStepResponse | None
    """None until the gradients are reduced."""


# Note: [Exclusive work on a run]
# Everything that adds, reduces, applies or drops gradients runs inside ``HostedRun.exclusively``, which holds one
# asyncio lock per run. Reads of values need no lock: ``Values`` gives each reader a version that stays unchanged.


class HostedRun:
    """The part of a run that this server hosts. Used on the event loop.

    Args:
        identity: Name and id of the run.
    """

    def __init__(self, identity: RunIdentity) -> None:
        self.identity = identity
        self.name = identity.name
        self.shards: dict[str, UnitShard] = {}
        """By unit name."""
        self.fences = Fences()
        self.prepared: PreparedStep | None = None
        self.duplicate_count = 0
        self.differing_duplicate_count = 0
        self.dropped = asyncio.Event()
        """Set when the run has been deleted."""
        self._released: dict[str, int] = {}
        """By unit name: the highest placement number that was released."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._lock = asyncio.Lock()

    # ---- shards ----

    def shard(self, unit: str) -> UnitShard:
        """Returns the shard of a unit. Raises NotFoundError if this server has none."""
        if unit in self.shards:
            return self.shards[unit]
        known = ", ".join(sorted(self.shards)[:10])
        raise NotFoundError(
            f"run {self.name!r} has no unit {unit!r} on this server; it has {known or 'none'}", unit=unit
        )

    @property
    def published(self) -> list[UnitShard]:
        """The shards that have values. Only these take part in steps: the coordinator may not know the others."""
        return [shard for shard in self.shards.values() if shard.version is not None]

    @property
    def step(self) -> int:
        """The step in flight: the lowest version of the published shards."""
        return min((shard.version for shard in self.shards.values() if shard.version is not None), default=0)

    def add_shard(self, shard: UnitShard) -> None:
        """Adds a newly reserved shard."""
        self.shards[shard.unit] = shard

    def remove_shard(self, shard: UnitShard, why: NotFoundError) -> None:
        """Drops a shard. Its readers and senders get the error."""
        shard.drop(why)
        del self.shards[shard.unit]

    def note_released(self, unit: str, placement: int) -> None:
        """Records that placements of a unit up to this number have been released."""
        self._released[unit] = max(placement, self._released.get(unit, 0))

    def check_placement(self, unit: str, placement: int) -> None:
        """Raises StaleEpochError if a placement of a unit has been released."""
        released = self._released.get(unit, -1)
        if placement <= released:
            raise StaleEpochError(
                f"placement {placement} of unit {unit!r} of run {self.name!r} was released, as were all up to "
                f"{released}: reserve the unit under a later placement",
                unit=unit,
            )

    # ---- the step in flight ----

    def is_prepared(self, step: int) -> bool:
        """True if a step is prepared or is being prepared. Such a step accepts no more gradients."""
        return self.prepared is not None and self.prepared.step == step

    def set_prepared(self, prepared: PreparedStep) -> None:
        """Records that a step is prepared or is being prepared."""
        self.prepared = prepared

    def clear_prepared(self) -> None:
        """Records that no step is prepared: gradients are accepted again."""
        self.prepared = None

    def count_duplicate(self, *, differs: bool) -> None:
        """Counts a gradient that was pushed again, and whether its bytes differ from the accepted ones."""
        self.duplicate_count += 1
        self.differing_duplicate_count += differs

    # ---- exclusive work ----

    async def exclusively(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Does work on the run's gradients while no other such work runs. See Note: [Exclusive work on a run].

        Raises:
            RunDeletedError: The run was deleted while the work waited for the lock.
        """
        async with self._lock:
            if self.dropped.is_set():
                raise RunDeletedError(f"run {self.name!r} was deleted", run=self.name)
            return await work()

    def schedule(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts ``exclusively`` in the background; logs errors."""

        async def run() -> None:
            try:
                await self.exclusively(work)
            except RunDeletedError:
                return

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work on run %r failed", self.name, exc_info=error)

    def drop(self) -> None:
        """Drops all shards. Call within ``exclusively``."""
        self.dropped.set()
        deleted = RunDeletedError(f"run {self.name!r} was deleted", run=self.name)
        for shard in self.shards.values():
            shard.drop(deleted)
        self.shards.clear()
