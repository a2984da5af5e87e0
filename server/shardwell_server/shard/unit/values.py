"""The values of one shard: its readable versions, their readers, and updates in place.

Older versions stay readable as snapshots, which can be evicted. Versions that the run keeps for readers, and in an
asynchronous run those that work items still read, are held. Each data rank then has a version that its item reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwell_server.shard.memory.budget import BufferQuota, Grant, IncomingBuffer, Memory
from shardwell_server.shard.memory.mapped_memory import ShardFile, SharedMemory
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    ShardwellError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.host.shared_memory import UPDATING
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)


class Values:
    """The newest version of one shard, and snapshots of older versions that still have readers.

    Used on the event loop. Snapshots are evictable; see ``Snapshots``.

    Args:
        held_count: Number of older versions that the shard's reservation covers.
    """

    def __init__(self, what: str, unit: str, memory: Memory, held_count: int = 0) -> None:
        self.version: int | None = None
        """The newest published version."""
        self.changed_version = 0
        """The newest version whose bytes may differ from the version before."""
        self.current: VersionBytes | None = None
        self.live: LiveBuffer | None = None
        self.initial_epoch = -1
        """Epoch under which the unpublished initial values were received."""
        self._what, self._unit = what, unit
        self._memory = memory
        self._snapshots = Snapshots(what, unit, memory)
        """Older versions with readers."""
        self.held = HeldVersions(what, unit, memory, held_count, self._snapshots)
        """Older versions that are kept for readers, or that work items of an asynchronous run still read."""
        self._updating = False
        self._becoming: int | None = None
        """Version that a started update is making in place."""
        self._failure: ShardwellError | None = None
        """Why the values have been dropped."""
        self._waiting: dict[asyncio.Event, None] = {}
        """See ``waking``. They are woken in the order in which they came."""

    # ---- reading ----

    async def read(self, version: int | None, wait_s: float) -> tuple[int, VersionBytes]:
        """Returns a version and its bytes. The caller must ``release`` them.

        Args:
            version: Version to read. None: the newest.
            wait_s: Seconds to wait for the version.

        Raises:
            VersionGoneError: The version has been overwritten.
            DeadlineError: The version does not exist yet.
            NotFoundError: The run was deleted during the call.
        """
        await self.wait_for(version, wait_s)
        return self.read_at_once(version)

    def read_at_once(self, version: int | None) -> tuple[int, VersionBytes]:
        """As ``read``, if the version is ``readable``."""
        self.check_not_dropped()
        assert self.version is not None and self.current is not None
        found = self.version if version is None else version
        older = self.held.find(found) or self._snapshots.find(found)
        bytes_read = self.current if found == self.version else older
        if bytes_read is None:
            raise self._overwritten(found, self.version)
        bytes_read.readers += 1
        return found, bytes_read

    def has(self, version: int) -> bool:
        """Returns whether a version is the newest, or an older one that can still be read."""
        is_newest = self.current is not None and self.current.version == version
        return bool(is_newest or self.held.find(version) or self._snapshots.find(version))

    def release(self, bytes_read: VersionBytes) -> None:
        """Ends one read."""
        self._snapshots.release(bytes_read)

    async def pin(self, version: int, wait_s: float) -> VersionBytes:
        """Reads a version that stays readable for more than one update, until ``unpin``. Raises as ``read`` does."""
        _, pinned = await self.read(version, wait_s)
        pinned.pins += 1
        return pinned

    def unpin(self, pinned: VersionBytes) -> None:
        """Ends one pin."""
        pinned.pins -= 1
        self.release(pinned)

    def evict(self) -> None:
        """Evicts the snapshots of older versions."""
        self._snapshots.evict()

    def check_not_dropped(self) -> None:
        """Raises the reason if the values have been dropped."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure), **self._failure.data)

    @property
    def updating(self) -> bool:
        """True while an update runs, and after a failed update until its repetition succeeds."""
        return self._updating

    def readable(self, version: int | None) -> bool:
        """True if ``read`` returns or raises without waiting."""
        if self._failure is not None:
            return True
        return not self._updating and self.version is not None and (version is None or self.version >= version)

    async def wait_for(self, version: int | None, wait_s: float) -> None:
        """Waits until ``readable``. Raises DeadlineError if the version does not exist after ``wait_s`` seconds."""
        if self.readable(version):
            return
        changed = asyncio.Event()
        try:
            with self.waking(changed):
                async with asyncio.timeout(wait_s):
                    while not self.readable(version):
                        changed.clear()
                        await changed.wait()
        except TimeoutError:
            wanted = "any version" if version is None else f"version {version}"
            newest = "none exists yet" if self.version is None else f"the newest is {self.version}"
            raise DeadlineError(
                f"waited {wait_s:.1f} s for {wanted} of {self._what}; {newest}",
                unit=self._unit,
                version=version,
                newest=self.version,
            ) from None

    @contextmanager
    def waking(self, event: asyncio.Event) -> Iterator[None]:
        """Sets an event whenever ``readable`` may have changed while the block runs."""
        self._waiting[event] = None
        try:
            yield
        finally:
            del self._waiting[event]

    def _overwritten(self, version: int, newest: int) -> VersionGoneError:
        return VersionGoneError(
            f"version {version} of {self._what} has been overwritten by version {newest}",
            unit=self._unit,
            version=version,
            newest=newest,
        )

    def _notify(self) -> None:
        """Wakes all waiting readers, which check the state themselves."""
        for event in self._waiting:
            event.set()

    # ---- publishing and updating ----

    def accept_initial(self, epoch: int, received: IncomingBuffer) -> None:
        """Accepts complete initial values. Replaces earlier unpublished ones."""
        assert self.version is None
        if self.live is not None:
            self.live.close()
        self.live = LiveBuffer(received, self._memory.shared, self._what)
        self.current, self.initial_epoch = VersionBytes(self.live.buffer, version=0), epoch

    def publish(self, epoch: int) -> int:
        """Publishes the initial values of an epoch as version 0. Idempotent; returns the newest version.

        Raises:
            StepStateError: The values of the epoch are not complete.
        """
        self.check_publishable(epoch)
        if self.version is not None:
            return self.version
        assert self.live is not None
        self.version = 0
        self.live.show(self.version)
        self._notify()
        return self.version

    def publish_version(self, version: int) -> None:
        """Publishes imported values as a version. The caller has filled ``live``."""
        assert self.version is None and self.live is not None and self.current is not None
        self.version = self.current.version = self.changed_version = version
        self.live.show(version)
        self._notify()

    def check_publishable(self, epoch: int) -> None:
        """Raises StepStateError unless the initial values of an epoch are complete, or a version is published."""
        if self.version is None and (self.live is None or self.initial_epoch != epoch):
            raise StepStateError(
                f"{self._what} cannot be published: the initial values of epoch {epoch} are not complete on this server"
            )

    def take_up(self, live: LiveBuffer, version: int, held: Sequence[ShardFile] = ()) -> None:
        """Continues with the values of a former process.

        Args:
            version: Their version. If the file does not show it, the update to the next version was interrupted: no
                version is readable until that update is repeated.
            held: Files of older versions.
        """
        assert self.live is None and live.file is not None
        self.live, self.version, self.changed_version = live, version, version
        self._updating = live.file.shown != version
        self._becoming = version + 1 if self._updating else None
        self.current = VersionBytes(live.buffer, version + 1 if self._updating else version)
        self.held.take_up(held, below=self.current.version)
        self._notify()

    @property
    def is_unread(self) -> bool:
        """True if ``begin_unread`` can be called: there is a version, and it has no readers."""
        return self.current is not None and not self._updating and not self.current.readers

    def begin_unread(self, version: int) -> None:
        """Begins to change the values in place, as ``becoming`` does, if the version before has no readers."""
        assert self.live is not None and self.is_unread
        self._updating = True
        self._replace_current()
        self._becoming = version
        self.live.show(UPDATING)

    def end_in_place(self, version: int, *, changes: bool) -> None:
        """Publishes the version that the values have become."""
        assert self.live is not None
        self.version = version
        if changes:
            self.changed_version = version
        self.live.show(version)
        self._updating = False
        self._notify()

    @asynccontextmanager
    async def becoming(
        self, version: int, *, changes: bool = True, hold: bool = False, for_readers: bool = False
    ) -> AsyncIterator[None]:
        """Lets the block change the values in place. When the block ends, they are the given version.

        If ``changes`` is False, the block leaves the values as they are. If ``hold`` is True, the version before stays
        readable in ``held``; with ``for_readers``, only if there is memory: training does not wait for readers.

        If the block raises, the values belong to neither version, and readers wait. The caller must repeat the block
        until it succeeds. If an error occurs before the block, nothing has changed.
        """
        assert self.live is not None and self.current is not None
        self._updating = True  # from here on no new read can start
        if self._becoming != version:  # a repeated update has already moved the readers
            before = self.current
            before.newest = False  # what is encoded from it from here on must not be kept for the next version
            try:
                await self._move_readers(hold=hold, for_readers=for_readers)
            except BaseException:
                before.newest, self._updating = True, False
                self._notify()
                raise
            self._becoming = version
            # Before the first byte changes. See Note: [Memory ordering] in ``shared_memory.py``.
            self.live.show(UPDATING)
        yield
        self.end_in_place(version, changes=changes)

    async def _move_readers(self, *, hold: bool, for_readers: bool) -> None:
        """Moves the readers of the current version to a held version or a snapshot, or revokes it without memory."""
        assert self.live is not None and self.current is not None and self.version is not None
        before, live, copy = self.current, self.live.buffer, None
        memory = None
        if hold:
            try:
                memory = self.held.allocate(self.live.size_bytes)
            except CapacityError as error:
                if not for_readers:
                    raise
                logger.warning("%s: version %s is not kept for readers: %s", self._what, self.version, error)
        if memory is not None:
            await self._memory.in_thread(lambda: memory.copy_(live))
            self.held.add(self._replace_current())
            return
        if before.readers:
            # Older snapshots that nobody has pinned make room for the new one.
            self._snapshots.evict(pinned_too=False)
            copy = self._memory.try_acquire(self.live.size_bytes, discarding=True)
        if copy is not None:
            target = copy
            try:
                await self._memory.in_thread(lambda: target.copy_(live))
            except BaseException:
                self._memory.release_buffer(copy)
                raise
        self._replace_current()
        if copy is not None:
            before.buffer = copy
            self._snapshots.add(before)
        elif before.readers:
            # Training does not wait for readers: without memory for a snapshot, they lose the version.
            before.revoked = self._overwritten(self.version, self.version + 1)

    def _replace_current(self) -> VersionBytes:
        """Makes the memory of the current version that of the next one. Returns the current version."""
        assert self.live is not None and self.current is not None and self.version is not None
        before = self.current
        before.newest, self.current = False, VersionBytes(self.live.buffer, self.version + 1)
        return before

    def drop(self, why: ShardwellError) -> None:
        """Drops all values. Waiting callers and readers get the error."""
        self._failure = why
        self._notify()
        self._snapshots.drop(why)
        self.held.drop(why)
        if self.current is not None and self.live is not None:
            self.current.revoked, self.current.newest = why, False
            self.live.close()
            self.current = self.live = None


class LiveBuffer:
    """The memory of a shard's newest version. Its address never changes.

    Args:
        received: The initial values. Their buffer is claimed.
        shared: Shared memory to move the values to, if trainers on this host may map them.
    """

    def __init__(self, received: IncomingBuffer, shared: SharedMemory | None, what: str) -> None:
        self.buffer = received.claim()
        self.file: ShardFile | None = None
        """The file in shared memory. None: the values are in ordinary memory."""
        self.why_not_shared = "the server shares no memory"
        self._grant = received.grant
        if shared is not None:
            self._move(shared, what)

    def _move(self, shared: SharedMemory, what: str) -> None:
        try:
            self.file = shared.create_shard_file(self.buffer.numel(), what)
        except CapacityError as error:
            self.why_not_shared = str(error)
            return
        self.file.buffer.copy_(self.buffer)
        memory = self._grant.memory
        memory.pool.release(self.buffer)
        memory.note_shared(self.buffer.numel())
        self.buffer = self.file.buffer

    @classmethod
    def from_file(cls, file: ShardFile, grant: Grant) -> LiveBuffer:
        """Returns the values that a former process left in shared memory.

        Args:
            grant: The memory's grant in the server's budget.
        """
        made = cls.__new__(cls)
        made.file, made.buffer, made._grant, made.why_not_shared = file, file.buffer, grant, ""
        grant.memory.note_shared(file.buffer.numel())
        return made

    @property
    def size_bytes(self) -> int:
        """Size of the shard."""
        return self.buffer.numel()

    def show(self, version: int) -> None:
        """Publishes the readable version, or ``UPDATING``, to trainers that map the values."""
        if self.file is not None:
            self.file.show(version)

    def close(self) -> None:
        """Releases the memory."""
        if self.file is None:
            self._grant.memory.pool.release(self.buffer)
        else:
            self.file.close()
            self._grant.memory.note_shared(-self.buffer.numel())
        self._grant.release()


# Note: [Moving versions]
# The newest version of a shard keeps its address, because trainers map it. When an update starts to change these bytes
# in place, readers of the former version continue in a snapshot. A reader must therefore call ``check`` and look up
# ``buffer`` again before every piece that it reads.


@dataclass(eq=False)
class VersionBytes:
    """The bytes of one version of a shard, and their readers. Used on the event loop. See Note: [Moving versions]."""

    buffer: torch.Tensor
    """uint8. [stop_bytes - start_bytes]"""
    version: int
    """Number of the version. For unpublished values, the version that they become when published."""
    readers: int = 0
    """The bytes stay unchanged while this is positive, unless they are revoked."""
    pins: int = 0
    """Number of readers that keep the version for more than one update."""
    revoked: ShardwellError | None = None
    """Why readers can no longer read the bytes."""
    newest: bool = True
    """False once another version replaces this one, or is about to."""
    reusable: bool = True
    """Whether the pool may give the memory to another owner after its release. False for an unlinked file."""

    def check(self) -> None:
        """Raises the reason if the bytes have been revoked. See Note: [Moving versions]."""
        if self.revoked is not None:
            raise self.revoked

    def memory(self, start: int, stop: int) -> memoryview:
        """Returns a range of the bytes at their current address."""
        return memory_at(self.buffer.data_ptr() + start, stop - start, self.buffer)


class Snapshots:
    """Evictable snapshots of one shard's bytes, each kept until its last reader is done.

    They use unreserved memory. Snapshots of older versions are evicted when other requests need the memory, because
    their readers may be arbitrarily slow. Used on the event loop.

    Args:
        memory: Memory from which the snapshots were acquired.
    """

    def __init__(self, what: str, unit: str, memory: Memory) -> None:
        self._what, self._unit, self._memory = what, unit, memory
        self._snapshots: list[VersionBytes] = []

    def find(self, version: int) -> VersionBytes | None:
        """Returns the snapshot of a version. None if there is none."""
        return next((snapshot for snapshot in self._snapshots if snapshot.version == version), None)

    def add(self, snapshot: VersionBytes) -> None:
        """Adds a complete snapshot. Frees it at once if it has no reader."""
        self._snapshots.append(snapshot)
        if snapshot.readers == 0:
            self._free(snapshot)

    def release(self, snapshot: VersionBytes) -> None:
        """Ends one read of a snapshot, or of bytes that may become one."""
        snapshot.readers -= 1
        if snapshot.readers == 0 and snapshot in self._snapshots:
            self._free(snapshot)

    def supersede(self, readable: Callable[[int], object]) -> None:
        """Marks all snapshots as older versions, because an update begins. ``readable`` as in ``evict``."""
        for snapshot in self._snapshots:
            snapshot.newest = False
        if self._memory.unreserved.has_waiters:
            self.evict(readable)

    def evict(self, readable: Callable[[int], object] = lambda version: None, *, pinned_too: bool = True) -> None:
        """Revokes the snapshots of older versions and frees their memory. ``readable`` tells what can be read again."""
        for snapshot in [s for s in self._snapshots if not s.newest and (pinned_too or not s.pins)]:
            self._revoke(snapshot, self._evicted(snapshot, readable))

    def drop(self, why: ShardwellError) -> None:
        """Revokes all snapshots. Their readers get the error."""
        for snapshot in list(self._snapshots):
            self._revoke(snapshot, why)

    def _revoke(self, snapshot: VersionBytes, why: ShardwellError) -> None:
        snapshot.revoked = why
        self._free(snapshot)

    def _free(self, snapshot: VersionBytes) -> None:
        self._snapshots.remove(snapshot)
        self._memory.release_buffer(snapshot.buffer, reusable=snapshot.reusable)

    def _evicted(self, snapshot: VersionBytes, readable: Callable[[int], object]) -> ShardwellError:
        what, why = f"version {snapshot.version} of {self._what}", "was evicted: other requests needed the memory"
        fields = {"unit": self._unit, "version": snapshot.version}
        if readable(snapshot.version):
            return UnavailableError(f"a copy of {what} {why}. Try again", **fields)
        return VersionGoneError(f"{what} has been overwritten, and its snapshot {why}", **fields)


class _HeldMemory(NamedTuple):
    buffer: torch.Tensor
    grant: Grant
    file: ShardFile | None
    """The file of the buffer. It shows the version, or ``UPDATING`` if it has none. None: ordinary memory."""


class HeldVersions:
    """Versions of one shard that stay readable until the run keeps them no more, and no work item reads them.

    They use the shard's reservation and are never evicted, unlike snapshots. If the next process of the server can take
    up shards, they are in files in shared memory, which are reused. Used on the event loop.

    Args:
        count: Number of versions that the shard's reservation covers.
        snapshots: Takes versions that still have readers when they are no longer held.
    """

    def __init__(self, what: str, unit: str, memory: Memory, count: int, snapshots: Snapshots) -> None:
        self._what, self._unit, self._memory, self._snapshots = what, unit, memory, snapshots
        self._quota = BufferQuota(count)
        self._held: dict[int, tuple[VersionBytes, _HeldMemory]] = {}
        self._next: _HeldMemory | None = None
        """Memory for the next version to be held."""
        self._spare: list[ShardFile] = []
        """Files without a version."""
        self.file_names: tuple[str, ...] = ()
        """Names of all files."""

    def find(self, version: int) -> VersionBytes | None:
        """Returns a held version. None if it is not held."""
        found = self._held.get(version)
        return None if found is None else found[0]

    @property
    def versions(self) -> list[int]:
        """The held versions, in order."""
        return sorted(self._held)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Returns memory for the next version to be held. Returns the same memory until ``add``. [size_bytes]

        Raises:
            CapacityError: There is no memory.
        """
        if self._next is None:
            grant = self._memory.grant(size_bytes, self._quota, f"an older version of {self._what}")
            file = self._spare.pop() if self._spare else self._new_file(size_bytes)
            self._next = _HeldMemory(grant.acquire_buffer(size_bytes) if file is None else file.buffer, grant, file)
        return self._next.buffer

    def _new_file(self, size_bytes: int) -> ShardFile | None:
        shared = self._memory.shared
        if shared is None or not shared.restartable:
            return None
        try:
            file = shared.create_shard_file(size_bytes, f"an older version of {self._what}", ".held")
        except CapacityError:
            return None  # SharedMemory logs the reason
        except OSError as error:
            logger.warning("an older version of %s is in ordinary memory, without a file: %s", self._what, error)
            return None
        self._note(file)
        return file

    def _note(self, file: ShardFile) -> None:
        self._memory.note_shared(file.buffer.numel())
        self.file_names = (*self.file_names, file.name)

    def receive(self, version: int, size_bytes: int) -> torch.Tensor:
        """Holds a version of an unpublished shard. Returns its memory, which the caller fills before it publishes.

        Raises:
            CapacityError: There is no memory.
        """
        self.allocate(size_bytes)
        return self.add(VersionBytes(torch.empty(0), version, newest=False)).buffer

    def take_up(self, files: Iterable[ShardFile], below: int) -> None:
        """Holds the versions below a number that a former process left in files, and reuses the other files."""
        for file in files:
            self._note(file)
            if not (0 <= file.shown < below and self._quota.try_acquire()):
                file.show(UPDATING)
                self._spare.append(file)
                continue
            grant = Grant(self._memory, self._quota, file.buffer.numel(), reserved=True)
            version = VersionBytes(file.buffer, file.shown, newest=False)
            self._held[version.version] = version, _HeldMemory(file.buffer, grant, file)

    def add(self, version: VersionBytes) -> VersionBytes:
        """Holds a version, whose bytes the caller has copied to the memory from ``allocate``. Returns it."""
        assert self._next is not None
        version.buffer = self._next.buffer
        if self._next.file is not None:
            self._next.file.show(version.version)
        self._held[version.version], self._next = (version, self._next), None
        return version

    def keep(self, versions: Collection[int]) -> None:
        """Releases all held versions except those given. Versions with readers become snapshots if memory is free."""
        for version in self._held.keys() - set(versions):
            found, memory = self._held[version]
            if found.readers and self._is_evictable(memory.grant):
                del self._held[version]
                if memory.file is not None:  # the pool counts the snapshot's buffer from now on
                    self._close(memory.file)
                    self._memory.pool.attach(found.buffer)
                    found.reusable = False
                self._snapshots.add(found)
                continue
            self._release(
                version,
                VersionGoneError(
                    f"version {version} of {self._what} is no longer held: the run keeps later versions, and no work "
                    "item reads it",
                    unit=self._unit,
                    version=version,
                ),
            )

    def _is_evictable(self, grant: Grant) -> bool:
        """Moves memory out of the shard's reservation, if there is other memory for it."""
        self._snapshots.evict(pinned_too=False)
        return grant.unsettle()

    def drop(self, why: ShardwellError) -> None:
        """Releases everything. Readers get the error."""
        for version in list(self._held):
            self._release(version, why)
        if self._next is not None:
            self._free(self._next)
            self._next = None
        for file in self._spare:
            self._close(file)
        self._spare.clear()

    def _release(self, version: int, why: ShardwellError) -> None:
        found, memory = self._held.pop(version)
        found.revoked = why
        self._free(memory)

    def _free(self, memory: _HeldMemory) -> None:
        if memory.file is None:
            self._memory.pool.release(memory.buffer)
        else:
            memory.file.show(UPDATING)
            self._spare.append(memory.file)
        memory.grant.release()

    def _close(self, file: ShardFile) -> None:
        file.close()
        self._memory.note_shared(-file.buffer.numel())
        self.file_names = tuple(name for name in self.file_names if name != file.name)


class RankVersions:
    """The version that each data rank's work item reads. Versions never fall."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._first = 0
        """The version with which the run started on this server."""

    def start_at(self, version: int) -> None:
        """Makes all ranks read at least this version: this process has no older one."""
        self._first = max(version, self._first)

    def of(self, dp_rank: int) -> int:
        """Returns the version that a rank's work item reads."""
        return max(self._versions.get(dp_rank, 0), self._first)

    def raise_to(self, dp_rank: int, version: int) -> None:
        """Makes a rank's next work item, or its restarted one, read a later version. An earlier one changes nothing."""
        self._versions[dp_rank] = max(version, self.of(dp_rank))

    def update(self, versions: Iterable[shard_pb2.RankVersion]) -> None:
        """Calls ``raise_to`` for several ranks."""
        for each in versions:
            self.raise_to(each.dp_rank, each.version)

    def needed(self, dp: int) -> set[int]:
        """Returns the versions that the work items of all ranks read."""
        return {self.of(dp_rank) for dp_rank in range(dp)}
