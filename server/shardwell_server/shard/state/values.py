"""The values of one shard: its readable versions, their readers, and updates in place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardwell_server.shard.concurrency import InThread
from shardwell_server.shard.memory.budget import Grant, IncomingBuffer, Memory
from shardwell_server.shard.memory.shared_memory import ShardFile, SharedMemory
from shardwell_server.shard.state.held_versions import HeldVersions
from shardwell_server.shard.state.snapshots import Snapshots, VersionBytes
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    ShardwellError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.shared_segment import UPDATING


class LiveBuffer:
    """The memory of a shard's newest version. Its address never changes.

    Args:
        received: The initial values. Their buffer is claimed.
        shared: Shared memory to move the values to, if trainers on this host may map them.
        what: Names the shard in errors.
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
            file: The file.
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


class Values:
    """The newest version of one shard, and snapshots of older versions that still have readers.

    Used on the event loop. Snapshots are evictable; see ``Snapshots``.

    Args:
        what: Names the shard in errors.
        unit: Name of the unit, for errors.
        memory: Memory for snapshots.
        shared: Shared memory for the values, if trainers on this host may map them.
        held_count: Number of older versions that the shard's reservation covers.
    """

    def __init__(self, what: str, unit: str, memory: Memory, shared: SharedMemory | None, held_count: int = 0) -> None:
        self.version: int | None = None
        """The newest published version."""
        self.changed_version = 0
        """The newest version whose bytes may differ from the version before."""
        self.current: VersionBytes | None = None
        self.live: LiveBuffer | None = None
        self.initial_epoch = -1
        """Epoch under which the unpublished initial values were received."""
        self._what, self._unit = what, unit
        self._memory, self._shared = memory, shared
        self._snapshots = Snapshots(what, unit, memory)
        """Older versions with readers."""
        self.held = HeldVersions(what, unit, memory, held_count, self._snapshots)
        """Older versions that work items of an asynchronous run still read."""
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
        self.live = LiveBuffer(received, self._shared, self._what)
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

    def take_up(self, live: LiveBuffer, version: int) -> None:
        """Continues with the values of a former process.

        Args:
            live: The values.
            version: Their version. If the file does not show it, the update to the next version was interrupted: no
                version is readable until that update is repeated.
        """
        assert self.live is None and live.file is not None
        self.live, self.version, self.changed_version = live, version, version
        self._updating = live.file.shown != version
        self._becoming = version + 1 if self._updating else None
        self.current = VersionBytes(live.buffer, version + 1 if self._updating else version)
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
        self, version: int, in_thread: InThread, *, changes: bool = True, hold: bool = False
    ) -> AsyncIterator[None]:
        """Lets the block change the values in place. When the block ends, they are the given version.

        If ``changes`` is False, the block leaves the values as they are. If ``hold`` is True, the version before stays
        readable in ``held``.

        If the block raises, the values belong to neither version, and readers wait. The caller must repeat the block
        until it succeeds. If an error occurs before the block, nothing has changed.
        """
        assert self.live is not None and self.current is not None
        self._updating = True  # from here on no new read can start
        if self._becoming != version:  # a repeated update has already moved the readers
            before = self.current
            before.newest = False  # what is encoded from it from here on must not be kept for the next version
            try:
                await self._move_readers(in_thread, hold=hold)
            except BaseException:
                before.newest, self._updating = True, False
                self._notify()
                raise
            self._becoming = version
            # Before the first byte changes. See Note: [Memory ordering] in ``shared_segment.py``.
            self.live.show(UPDATING)
        yield
        self.end_in_place(version, changes=changes)

    async def _move_readers(self, in_thread: InThread, *, hold: bool) -> None:
        """Moves the readers of the current version to a held version or a snapshot, or revokes it without memory."""
        assert self.live is not None and self.current is not None and self.version is not None
        before, live, copy = self.current, self.live.buffer, None
        if hold:
            memory = self.held.allocate(self.live.size_bytes)
            await in_thread(lambda: memory.copy_(live))
            self.held.add(self._replace_current())
            return
        if before.readers:
            self._snapshots.evict(pinned_too=False)
            copy = self._memory.try_acquire(self.live.size_bytes)
        if copy is not None:
            target = copy
            try:
                await in_thread(lambda: target.copy_(live))
            except BaseException:
                self._memory.release_buffer(copy)
                raise
        self._replace_current()
        if copy is not None:
            before.buffer = copy
            self._snapshots.add(before)
        elif before.readers:
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
