"""The memory budget of a shard server: reservations, and the buffers that use them.

The default budget is a share of the memory that the process may use: the machine's, or the tightest limit of its
cgroups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from shardwell_server.shard.concurrency import in_thread
from shardwell_server.shard.memory.buffer_reuse import BufferPool, Sending, UnreservedMemory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_wire.errors import CapacityError

_SENDING_SHARE, _MAX_SENDING_BYTES = 1 / 16, 256 << 20
"""Limit of messages that clients have not read yet: a share of the budget, at most this many bytes."""

Result = TypeVar("Result")

ShardKey = tuple[str, str, int]
"""Key of a shard's reservation: run, unit, and first byte of the shard in the unit's flat vector."""

_OPTIMIZER_STATES = 2
"""Adam's two moments. Larger state, such as amsgrad's third moment, is added when it is allocated."""


def shard_need_bytes(
    shard_bytes: int, max_contributions: int, *, holds_buffers: bool = False, held_versions: int = 0
) -> int:
    """Returns the memory that a shard needs for parameters, optimizer state, contributions and their mean.

    A shard of buffers needs memory for its values, for those that data rank 0 pushed for the next version, and for the
    shared memory in which a trainer of this host writes them. Older versions, which readers or the work items of an
    asynchronous run read, need memory too.
    """
    if holds_buffers:
        return shard_bytes * (3 + held_versions)
    mean = 1 if max_contributions > 1 else 0
    return shard_bytes * (1 + _OPTIMIZER_STATES + max_contributions + mean + held_versions)


@dataclass(slots=True)
class _Reservation:
    shard_bytes: int
    need_bytes: int
    optimizer_bytes: int = 0
    """Size of the optimizer's state, now or after the next update."""
    workspace_bytes: int = 0
    """Memory that one update allocates and frees again."""
    kept_bytes: int = 0
    """Size of gradients that outlive a commit."""

    @property
    def total_bytes(self) -> int:
        return self.need_bytes + self.kept_bytes + max(0, self.optimizer_bytes - _OPTIMIZER_STATES * self.shard_bytes)


class BufferQuota:
    """Counts how many more buffers of one kind a shard's reservation covers. Further buffers need unreserved memory."""

    def __init__(self, count: int) -> None:
        self._free_count = count

    def try_acquire(self) -> bool:
        """Takes one buffer from the quota; returns False if the quota is used up."""
        if self._free_count == 0:
            return False
        self._free_count -= 1
        return True

    def release(self) -> None:
        """Returns one buffer to the quota."""
        self._free_count += 1


@dataclass(slots=True)
class Grant:
    """Permission to use one buffer for a shard, backed by the shard's reservation or by unreserved memory."""

    memory: Memory
    quota: BufferQuota
    size_bytes: int
    reserved: bool
    """True if the shard's reservation backs the grant."""

    def settle(self) -> None:
        """Moves the grant to the shard's reservation if its quota allows, which frees unreserved memory.

        Called when the buffer becomes long-lived.
        """
        if not self.reserved and self.quota.try_acquire():
            self.reserved = True
            self.memory.unreserved.release(self.size_bytes)

    def unsettle(self) -> bool:
        """Moves the grant to unreserved memory, which frees the shard's reservation. Returns False if none is free."""
        if self.reserved and self.memory.unreserved.try_acquire(self.size_bytes, discarding=True):
            self.reserved = False
            self.quota.release()
        return not self.reserved

    def acquire_buffer(self, size_bytes: int) -> torch.Tensor:
        """Returns a buffer from the pool. Releases the grant if there is none. [size_bytes]"""
        try:
            return self.memory.pool.acquire(size_bytes)
        except CapacityError:
            self.release()
            raise

    def incoming(self, size_bytes: int) -> IncomingBuffer:
        """As ``acquire_buffer``, with a buffer whose release also ends the grant."""
        return IncomingBuffer(self.acquire_buffer(size_bytes), self)

    def release(self) -> None:
        """Ends the grant."""
        if self.reserved:
            self.quota.release()
        else:
            self.memory.unreserved.release(self.size_bytes)


@dataclass(slots=True)
class IncomingBuffer:
    """Buffer into which a stream is received. Released when its ``with`` block ends, unless claimed."""

    buffer: torch.Tensor
    """uint8. [size_bytes]"""
    grant: Grant
    claimed: bool = False

    def __enter__(self) -> IncomingBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.claimed:
            self.release()

    @property
    def views(self) -> None:
        """See ``ContributionMemory``."""
        return None

    def check_adoptable(self, shard: object) -> None:
        """Does nothing: the buffer was acquired for the shard."""

    def claim(self) -> torch.Tensor:
        """Keeps the buffer beyond the block, until ``release``."""
        self.claimed = True
        self.grant.settle()
        return self.buffer

    def release(self) -> None:
        """Releases the buffer and its grant."""
        self.grant.memory.pool.release(self.buffer)
        self.grant.release()


class Memory:
    """Reservations against a budget, the buffers that use them, and the threads for tensor work on these buffers.

    Used on the event loop.

    In addition to the shards' reservations, one buffer of the largest shard is set aside as unreserved memory, for
    streams and old versions. See ``UnreservedMemory``.

    Args:
        budget_bytes: Limit for everything together.
        threads: Pool for tensor work. None: the event loop's own threads.
        shared: Shared memory for what trainers on this host may map. None: they map nothing.
    """

    def __init__(
        self, budget_bytes: int, threads: ThreadPoolExecutor | None = None, shared: SharedMemory | None = None
    ) -> None:
        self.budget_bytes, self.threads, self.shared = budget_bytes, threads, shared
        self.sending = Sending(min(_MAX_SENDING_BYTES, int(budget_bytes * _SENDING_SHARE)))
        self.pool = BufferPool(budget_bytes)
        self.unreserved = UnreservedMemory()
        self._reservations: dict[ShardKey, _Reservation] = {}
        self._needs_bytes = 0
        self._workspace_bytes = 0
        """Workspace of the largest update: a run updates its units one after the other."""
        self._optimizer_bytes = 0
        self._shared_bytes = 0
        self._update_limits()

    @property
    def reserved_bytes(self) -> int:
        """Reserved memory, plus unreserved memory that is set aside or in use."""
        return self._needs_bytes + self._workspace_bytes + max(self._largest_bytes(), self.unreserved.used_bytes)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    @property
    def used_bytes(self) -> int:
        """Memory in use for parameters, contributions, streams and optimizer state."""
        return self.pool.taken_bytes + self.pool.elsewhere_bytes + self.sending.used_bytes

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Does tensor work in a thread. A cancelled caller waits, because a thread cannot be stopped."""
        return await in_thread(self.threads, work)

    # ---- reservations ----

    def reserve(
        self,
        key: ShardKey,
        shard_bytes: int,
        max_contributions: int,
        *,
        holds_buffers: bool = False,
        held_versions: int = 0,
    ) -> None:
        """Reserves memory for a shard.

        Args:
            key: The shard: run, unit and first byte.
            max_contributions: Number of contributions to one step.
            holds_buffers: True for a shard of buffers.
            held_versions: Number of versions besides the newest that readers and work items may read.

        Raises:
            CapacityError: The shard does not fit; nothing changed.
        """
        run, unit, _ = key
        need = shard_need_bytes(
            shard_bytes, max_contributions, holds_buffers=holds_buffers, held_versions=held_versions
        )
        # If this is the largest shard, the unreserved memory must grow to the size of the shard.
        set_aside = max(self._largest_bytes(), self.unreserved.used_bytes)
        total = need + max(0, shard_bytes - set_aside)
        if total > self.free_bytes:
            older = f", and {held_versions} older versions" if held_versions else ""
            what, less = (
                (f"{shard_bytes} of buffers, and twice as many for their next values{older}", "use smaller buffers")
                if holds_buffers
                else (
                    f"{shard_bytes} of parameters, with optimizer state and {max_contributions} gradients{older}",
                    "keep fewer versions (keep_versions) or use fewer data ranks" if older else "use fewer data ranks",
                )
            )
            raise CapacityError(
                f"unit {unit!r} of run {run!r} needs {total} bytes on this server ({what}), but only {self.free_bytes} "
                f"bytes of its budget of {self.budget_bytes} are free: add shard servers, raise --memory-budget, or "
                f"{less}",
                unit=unit,
                needed_bytes=total,
                free_bytes=self.free_bytes,
            )
        self._reservations[key] = _Reservation(shard_bytes, need)
        self._update_limits()

    def reserve_optimizer(self, key: ShardKey, optimizer_bytes: int, workspace_bytes: int) -> None:
        """Reserves memory for the next update of a shard, before that memory is allocated.

        Args:
            key: The shard, as in ``reserve``.
            optimizer_bytes: Size of the optimizer's state after the update.
            workspace_bytes: Memory that the update allocates and frees again.

        Raises:
            CapacityError: The memory does not fit; nothing changed.
        """
        reservation, (run, unit, _) = self._reservations[key], key
        wanted = replace(reservation, optimizer_bytes=optimizer_bytes, workspace_bytes=workspace_bytes)
        more = wanted.total_bytes - reservation.total_bytes + max(0, workspace_bytes - self._workspace_bytes)
        if more > 0 and more > self.free_bytes:
            raise CapacityError(
                f"the optimizer's state of unit {unit!r} of run {run!r} needs {optimizer_bytes} bytes on this server, "
                f"and its update {workspace_bytes} more: {more} bytes beyond the reservation, but only "
                f"{self.free_bytes} bytes of the budget of {self.budget_bytes} are free. The step is not committed: "
                "add shard servers, raise --memory-budget, or use an optimizer with less state",
                unit=unit,
                needed_bytes=more,
                free_bytes=self.free_bytes,
            )
        self._reservations[key] = wanted
        self._update_limits()

    def check_import(self, key: ShardKey, optimizer_bytes: int, what: str) -> None:
        """Raises CapacityError if optimizer state that is about to be received does not fit.

        Args:
            key: The shard, as in ``reserve``.
        """
        reservation = self._reservations[key]
        more = replace(reservation, optimizer_bytes=optimizer_bytes).total_bytes - reservation.total_bytes
        if more > self.free_bytes:
            raise CapacityError(
                f"{what}: the optimizer's state has {optimizer_bytes} bytes, {more} beyond the reservation, but only "
                f"{self.free_bytes} bytes of the budget of {self.budget_bytes} are free: add shard servers, or raise "
                "--memory-budget",
                needed_bytes=more,
                free_bytes=self.free_bytes,
            )

    def reserve_kept(self, key: ShardKey, kept_bytes: int) -> None:
        """Reserves memory for gradients that outlive a commit. Replaces the earlier size.

        Raises:
            CapacityError: The memory does not fit; nothing changed.
        """
        reservation, (run, unit, _) = self._reservations.get(key), key
        if reservation is None:
            return  # the run was deleted
        more = kept_bytes - reservation.kept_bytes
        if more > 0 and more > self.free_bytes:
            raise CapacityError(
                f"unit {unit!r} of run {run!r} needs {more} bytes beyond its reservation on this server, to keep "
                f"gradients for another optimizer's step, but only {self.free_bytes} bytes of the budget of "
                f"{self.budget_bytes} are free. The step is not committed: add shard servers, raise --memory-budget, "
                "or call zero_grad of the other optimizer before this step",
                unit=unit,
                needed_bytes=more,
                free_bytes=self.free_bytes,
            )
        reservation.kept_bytes = kept_bytes
        self._update_limits()

    def note_optimizer(self, key: ShardKey, optimizer_bytes: int) -> None:
        """Records the size of a shard's optimizer state. A larger state enlarges the shard's reservation."""
        reservation = self._reservations[key]
        if reservation.optimizer_bytes != optimizer_bytes:
            reservation.optimizer_bytes = optimizer_bytes
            self._update_limits()

    def note_shared(self, size_bytes: int) -> None:
        """Records a change in the use of shared memory, which reservations cover. Negative: freed."""
        self._shared_bytes += size_bytes
        self._update_elsewhere()

    def release(self, keys: Iterable[ShardKey]) -> int:
        """Releases the reservations of shards; returns the bytes that became free."""
        before = self.reserved_bytes
        for key in keys:
            del self._reservations[key]
        self._update_limits()
        return before - self.reserved_bytes

    # ---- buffers ----

    def incoming_spare(self, size_bytes: int, what: str) -> IncomingBuffer:
        """Acquires a buffer that nothing depends on, such as that of a copy of a work item.

        The buffer uses unreserved memory only. It leaves enough for one buffer of the largest shard, which the streams
        of other contributions may need.

        Raises:
            CapacityError: No such memory is free, or the operating system has none.
        """
        if not self.unreserved.try_acquire(size_bytes, keep_bytes=self._largest_bytes()):
            raise CapacityError(f"{what}: {size_bytes} bytes beyond the reservations are not free")
        return Grant(self, BufferQuota(0), size_bytes, reserved=False).incoming(size_bytes)

    async def incoming(self, size_bytes: int, quota: BufferQuota, *, wait_s: float, what: str) -> IncomingBuffer:
        """Acquires a buffer for one stream.

        Args:
            quota: Quota of the shard's reservation. If it is used up, the call waits for unreserved memory.

        Raises:
            CapacityError: No memory became free in time, or the operating system has none.
        """
        reserved = quota.try_acquire()
        if not reserved:
            await self.unreserved.acquire(size_bytes, wait_s, what)
        return Grant(self, quota, size_bytes, reserved).incoming(size_bytes)

    def incoming_at_once(self, size_bytes: int, quota: BufferQuota) -> IncomingBuffer | None:
        """As ``incoming``, without waiting. The caller releases the buffer unless it is claimed. None: none is free."""
        reserved = quota.try_acquire()
        if not reserved and not self.unreserved.try_acquire(size_bytes):
            return None
        try:
            return Grant(self, quota, size_bytes, reserved).incoming(size_bytes)
        except CapacityError:
            return None

    def grant(self, size_bytes: int, quota: BufferQuota, what: str) -> Grant:
        """Grants memory for one buffer without waiting. The caller allocates the buffer.

        Raises:
            CapacityError: No memory is free.
        """
        reserved = quota.try_acquire()
        if not reserved and not self.unreserved.try_acquire_evicting(size_bytes):
            raise CapacityError(f"{what}: {size_bytes} bytes beyond the reservation do not fit the memory budget")
        return Grant(self, quota, size_bytes, reserved)

    async def acquire(self, size_bytes: int, wait_s: float, what: str) -> torch.Tensor:
        """Acquires a buffer in unreserved memory, until ``release_buffer``. [size_bytes]

        Raises:
            CapacityError: No memory became free in time, or the operating system has none.
        """
        await self.unreserved.acquire(size_bytes, wait_s, what)
        return Grant(self, BufferQuota(0), size_bytes, reserved=False).acquire_buffer(size_bytes)

    def try_acquire(self, size_bytes: int, *, discarding: bool = False) -> torch.Tensor | None:
        """As ``UnreservedMemory.try_acquire``, with a buffer. None: no memory is free."""
        if not self.unreserved.try_acquire(size_bytes, discarding=discarding):
            return None
        try:
            return Grant(self, BufferQuota(0), size_bytes, reserved=False).acquire_buffer(size_bytes)
        except CapacityError:
            return None

    def release_buffer(self, buffer: torch.Tensor, *, reusable: bool = True) -> None:
        """Releases a buffer that ``acquire`` or ``try_acquire`` returned. If not ``reusable``, the pool forgets it."""
        (self.pool.release if reusable else self.pool.detach)(buffer)
        self.unreserved.release(buffer.numel())

    # ---- limits ----

    def _largest_bytes(self) -> int:
        return max((reservation.shard_bytes for reservation in self._reservations.values()), default=0)

    def _update_limits(self) -> None:
        reservations = self._reservations.values()
        self._needs_bytes = sum(reservation.total_bytes for reservation in reservations)
        self._workspace_bytes = max((reservation.workspace_bytes for reservation in reservations), default=0)
        self._optimizer_bytes = sum(reservation.optimizer_bytes for reservation in reservations)
        self._update_elsewhere()
        self.unreserved.set_limit(
            max(self._largest_bytes(), self.budget_bytes - self._needs_bytes - self._workspace_bytes)
        )

    def _update_elsewhere(self) -> None:
        self.pool.elsewhere_bytes = self._optimizer_bytes + self._shared_bytes


DEFAULT_SHARE = 0.8
"""Default budget, as a share of the memory that this process may use."""


def default_budget_bytes(servers_on_host: int = 1, *, own_limits: bool = False) -> int:
    """Returns 80 % of what this process may use: its share of the machine's memory, or of the limit of its cgroups.

    Args:
        servers_on_host: Number of shard servers that divide this memory evenly.
        own_limits: Whether the limits of the cgroups are for this server alone, and are not divided.
    """
    return int(usable_memory_bytes(servers_on_host, own_limits=own_limits) * DEFAULT_SHARE)


_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
"""Names of the files with limits, by type of file system: ``cgroup2`` is version 2, ``cgroup`` is version 1."""


def usable_memory_bytes(processes: int = 1, *, own_limits: bool = False) -> int:
    """Returns the memory that each of several processes of this machine may use.

    Args:
        processes: Number of processes that divide the memory evenly.
        own_limits: Whether the limits of this process's cgroups are for it alone. False: the processes divide them too.
    """
    machine: int = psutil.virtual_memory().total
    limits = cgroup_limits()
    return min([machine // processes, *(limit if own_limits else limit // processes for limit in limits)])


def cgroup_limits(proc: Path = Path("/proc/self")) -> list[int]:
    """Returns the memory limits, in bytes, of this process's cgroups and of all cgroups that contain them.

    Slurm and systemd nest cgroups and often limit an outer cgroup only.

    Args:
        proc: The process's directory in ``/proc``.
    """
    limits = []
    for folder, names in _folders(proc):
        for name in names:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                limits.append(int(text))
    return limits


@dataclass(frozen=True)
class _Mount:
    """A mounted cgroup hierarchy, as this process sees it."""

    kind: str
    root: Path
    """Path of the cgroup that is mounted at ``point``."""
    point: Path


def _folders(proc: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the directory of each cgroup, innermost first, with the names of its limit files."""
    try:
        own = dict(_own_cgroups((proc / "cgroup").read_text()))
        mounts = list(_mounts((proc / "mountinfo").read_text()))
    except OSError:
        return  # not Linux
    for mount in mounts:
        path = own.get(mount.kind)
        if path is None:
            continue
        # In a container without a cgroup namespace, the path is relative to the host's root, but the mount shows the
        # container's own cgroup.
        inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else Path()
        folder = mount.point / inside
        while True:
            yield folder, _LIMIT_FILES[mount.kind]
            if folder == mount.point:
                break
            folder = folder.parent


def _own_cgroups(text: str) -> Iterator[tuple[str, Path]]:
    """Yields this process's cgroup in each hierarchy that can limit memory."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", Path(path)
        elif "memory" in controllers.split(","):
            yield "cgroup", Path(path)


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield _Mount(kind, Path(_unescaped(fields[3])), Path(_unescaped(fields[4])))


def _unescaped(path: str) -> str:
    """Decodes the octal escapes that ``mountinfo`` uses for spaces and similar characters."""
    return path.encode().decode("unicode_escape")
