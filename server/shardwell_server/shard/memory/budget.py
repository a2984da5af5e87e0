"""How much memory a server may use, what is set aside for whom, and buffers that are used again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import torch

from shardwell_server.shard.memory.buffer_pool import BufferPool
from shardwell_server.shard.memory.host_memory import usable_memory_bytes
from shardwell_server.shard.memory.sending import Sending
from shardwell_server.shard.memory.staging import Staging
from shardwell_wire.errors import CapacityError

DEFAULT_SHARE = 0.8
"""Part of the machine's or container's memory that a server takes as its budget by default."""

_SENDING_SHARE, _MOST_SENDING_BYTES = 1 / 16, 256 << 20
"""Part of the budget that messages may take which clients have not read yet, and its upper limit."""

_OPTIMIZER_STATES = 2
"""Adam's two moments. What takes more (amsgrad's third) is added once it is there."""


def default_budget_bytes(servers_on_host: int = 1) -> int:
    """80 % of what this process may use: the machine's memory, or the tightest limit of its cgroups.

    Args:
        servers_on_host: Shard servers that share it evenly.
    """
    return int(usable_memory_bytes() * DEFAULT_SHARE) // servers_on_host


def shard_need_bytes(shard_bytes: int, dp: int, *, holds_buffers: bool = False) -> int:
    """What a shard may come to use: parameters, optimizer state, contributions and their sum.

    A shard of buffers has its values and those that data rank 0 pushed for the next version.
    """
    if holds_buffers:
        return 2 * shard_bytes
    return shard_bytes * (1 + _OPTIMIZER_STATES + dp + (1 if dp > 1 else 0))


@dataclass(slots=True)
class _Reservation:
    shard_bytes: int
    need_bytes: int
    optimizer_bytes: int = 0
    """What the optimizer's state takes now, or is about to."""
    workspace_bytes: int = 0
    """What one update allocates and frees again."""
    kept_bytes: int = 0
    """Gradients that outlive a commit."""

    @property
    def total_bytes(self) -> int:
        return self.need_bytes + self.kept_bytes + max(0, self.optimizer_bytes - _OPTIMIZER_STATES * self.shard_bytes)


class Cover:
    """How many buffers of one kind a shard's reservation covers; others need staging room.

    Args:
        count: That many.
    """

    def __init__(self, count: int) -> None:
        self._free_count = count

    def take(self) -> bool:
        """Has one more buffer covered, if that is possible."""
        if self._free_count == 0:
            return False
        self._free_count -= 1
        return True

    def give(self) -> None:
        """One buffer less is covered."""
        self._free_count += 1


@dataclass(slots=True)
class Room:
    """Room for one buffer of a shard: covered by its reservation, or staged."""

    memory: Memory
    cover: Cover
    size_bytes: int
    covered: bool

    def settle(self) -> None:
        """The buffer stays: has it covered if that is possible by now, so that others find staging room."""
        if not self.covered and self.cover.take():
            self.covered = True
            self.memory.staging.give(self.size_bytes)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """A buffer that uses it, from the pool; if there is none the room is given back. [size_bytes]"""
        try:
            return self.memory.pool.take(size_bytes)
        except CapacityError:
            self.give()
            raise

    def give(self) -> None:
        """Gives the room back."""
        if self.covered:
            self.cover.give()
        else:
            self.memory.staging.give(self.size_bytes)


@dataclass(slots=True)
class IncomingBuffer:
    """Where a stream is received; given back when its block ends, unless it is kept."""

    buffer: torch.Tensor
    """uint8. [size_bytes]"""
    room: Room
    kept: bool = False

    def keep(self) -> torch.Tensor:
        """The buffer stays, until ``give_back``."""
        self.kept = True
        self.room.settle()
        return self.buffer

    def give_back(self) -> None:
        """Gives the buffer back, and its room."""
        self.room.memory.pool.give(self.buffer)
        self.room.give()


class Memory:
    """Reservations against a budget, and the buffers that live in them.

    Besides the shards' own needs room for one buffer of the largest shard is set aside: for streams
    and old versions that no reservation covers (see ``Staging``).

    Args:
        budget_bytes: What all of it together may take.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.sending = Sending(min(_MOST_SENDING_BYTES, int(budget_bytes * _SENDING_SHARE)))
        self.pool = BufferPool(budget_bytes)
        self.staging = Staging()
        self._reservations: dict[tuple[str, str], _Reservation] = {}
        self._needs_bytes = 0
        self._workspace_bytes = 0
        """Of the update that needs the most: those of one run come one after the other."""
        self._optimizer_bytes = 0
        self._shared_bytes = 0
        self._update_limits()

    @property
    def reserved_bytes(self) -> int:
        """What is set aside, or lent beyond that."""
        return self._needs_bytes + self._workspace_bytes + max(self._largest_bytes(), self.staging.used_bytes)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    @property
    def used_bytes(self) -> int:
        """Parameters, contributions, streams being received or sent, and optimizer state now."""
        return self.pool.taken_bytes + self.pool.elsewhere_bytes + self.sending.used_bytes

    def reserve(self, run: str, unit: str, shard_bytes: int, dp: int, *, holds_buffers: bool = False) -> None:
        """Sets memory aside for a shard.

        Raises:
            CapacityError: It does not fit; nothing is set aside.
        """
        need = shard_need_bytes(shard_bytes, dp, holds_buffers=holds_buffers)
        lent = max(self._largest_bytes(), self.staging.used_bytes)
        total = need + max(0, shard_bytes - lent)
        if total > self.free_bytes:
            what, less = (
                (f"{shard_bytes} of buffers, and as many for their next values", "use smaller buffers")
                if holds_buffers
                else (
                    f"{shard_bytes} of parameters, with optimizer state and the gradients of {dp} ranks",
                    "use fewer data ranks",
                )
            )
            raise CapacityError(
                f"unit {unit!r} of run {run!r} needs {total} bytes here ({what}), but {self.free_bytes} of the budget "
                f"of {self.budget_bytes} are free: add shard servers, raise --memory-budget, or {less}",
                unit=unit,
                needed_bytes=total,
                free_bytes=self.free_bytes,
            )
        self._reservations[run, unit] = _Reservation(shard_bytes, need)
        self._update_limits()

    def reserve_optimizer(self, run: str, unit: str, optimizer_bytes: int, workspace_bytes: int) -> None:
        """Sets memory aside for the state that a shard's next update needs, before it is allocated.

        Args:
            run: Name of the run.
            unit: Name of the unit.
            optimizer_bytes: What the state will take.
            workspace_bytes: What the update allocates and frees again.

        Raises:
            CapacityError: It does not fit; nothing is set aside.
        """
        reservation = self._reservations[run, unit]
        wanted = replace(reservation, optimizer_bytes=optimizer_bytes, workspace_bytes=workspace_bytes)
        more = wanted.total_bytes - reservation.total_bytes + max(0, workspace_bytes - self._workspace_bytes)
        if more > 0 and more > self.free_bytes:
            raise CapacityError(
                f"the optimizer's state of unit {unit!r} of run {run!r} needs {optimizer_bytes} bytes here, and its "
                f"update {workspace_bytes} more: {more} bytes beyond what is reserved, but {self.free_bytes} of the "
                f"budget of {self.budget_bytes} are free. The step is not committed: add shard servers, raise "
                "--memory-budget, or use an optimizer with less state",
                unit=unit,
                needed_bytes=more,
                free_bytes=self.free_bytes,
            )
        self._reservations[run, unit] = wanted
        self._update_limits()

    def reserve_kept(self, run: str, unit: str, kept_bytes: int) -> None:
        """Sets memory aside for gradients that outlive a commit; the size replaces what was set aside before.

        Raises:
            CapacityError: It does not fit; nothing changed.
        """
        reservation = self._reservations.get((run, unit))
        if reservation is None:
            return  # the run was deleted
        more = kept_bytes - reservation.kept_bytes
        if more > 0 and more > self.free_bytes:
            raise CapacityError(
                f"the gradients of unit {unit!r} of run {run!r} that another optimizer's step will use need {more} "
                f"bytes here beyond what is reserved, but {self.free_bytes} of the budget of {self.budget_bytes} are "
                "free. The step is not committed: add shard servers, raise --memory-budget, or call zero_grad of the "
                "other optimizer before this step",
                unit=unit,
                needed_bytes=more,
                free_bytes=self.free_bytes,
            )
        reservation.kept_bytes = kept_bytes
        self._update_limits()

    def note_optimizer(self, run: str, unit: str, optimizer_bytes: int) -> None:
        """Says how much a shard's optimizer state takes; its reservation grows if that is more than was set aside."""
        reservation = self._reservations[run, unit]
        if reservation.optimizer_bytes != optimizer_bytes:
            reservation.optimizer_bytes = optimizer_bytes
            self._update_limits()

    def note_shared(self, size_bytes: int) -> None:
        """Says how much shared memory a shard came to use, or gave back if negative; reservations cover it."""
        self._shared_bytes += size_bytes
        self._update_elsewhere()

    def release(self, run: str) -> int:
        """Gives back what a run had; returns how much."""
        before = self.reserved_bytes
        self._reservations = {key: value for key, value in self._reservations.items() if key[0] != run}
        self._update_limits()
        return before - self.reserved_bytes

    def release_unit(self, run: str, unit: str) -> None:
        """Gives back what one unit of a run had."""
        del self._reservations[run, unit]
        self._update_limits()

    @asynccontextmanager
    async def incoming(
        self, size_bytes: int, cover: Cover, *, wait_s: float, what: str
    ) -> AsyncIterator[IncomingBuffer]:
        """A buffer for one stream.

        Args:
            size_bytes: Its size.
            cover: What a reservation covers; beyond that it waits for room.
            wait_s: How long.
            what: Names the stream in errors.

        Raises:
            CapacityError: Other streams did not leave room in time, or the system has no memory.
        """
        covered = cover.take()
        if not covered:
            await self.staging.take(size_bytes, wait_s, what)
        room = Room(self, cover, size_bytes, covered)
        incoming = IncomingBuffer(room.buffer(size_bytes), room)
        try:
            yield incoming
        finally:
            if not incoming.kept:
                incoming.give_back()

    def try_room(self, size_bytes: int, cover: Cover, what: str) -> Room:
        """Room for one buffer, now.

        Raises:
            CapacityError: There is none.
        """
        covered = cover.take()
        if not covered and not self.staging.try_take_pressing(size_bytes):
            raise CapacityError(f"{what}: no room for {size_bytes} bytes beyond what is reserved")
        return Room(self, cover, size_bytes, covered)

    async def lend(self, size_bytes: int, wait_s: float, what: str) -> torch.Tensor:
        """A buffer in staging room, until ``take_back``. [size_bytes]

        Raises:
            CapacityError: There was no room in time, or the system has no memory.
        """
        await self.staging.take(size_bytes, wait_s, what)
        return Room(self, Cover(0), size_bytes, covered=False).buffer(size_bytes)

    def try_lend(self, size_bytes: int) -> torch.Tensor | None:
        """``lend``, if that is possible now and nobody waits for room."""
        if not self.staging.try_take(size_bytes):
            return None
        try:
            return Room(self, Cover(0), size_bytes, covered=False).buffer(size_bytes)
        except CapacityError:
            return None

    def take_back(self, buffer: torch.Tensor) -> None:
        """What was lent is not needed any more."""
        self.pool.give(buffer)
        self.staging.give(buffer.numel())

    def _largest_bytes(self) -> int:
        return max((reservation.shard_bytes for reservation in self._reservations.values()), default=0)

    def _update_limits(self) -> None:
        reservations = self._reservations.values()
        self._needs_bytes = sum(reservation.total_bytes for reservation in reservations)
        self._workspace_bytes = max((reservation.workspace_bytes for reservation in reservations), default=0)
        self._optimizer_bytes = sum(reservation.optimizer_bytes for reservation in reservations)
        self._update_elsewhere()
        self.staging.set_limit(
            max(self._largest_bytes(), self.budget_bytes - self._needs_bytes - self._workspace_bytes)
        )

    def _update_elsewhere(self) -> None:
        self.pool.elsewhere_bytes = self._optimizer_bytes + self._shared_bytes
