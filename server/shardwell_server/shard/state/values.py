"""The values of one shard: which version can be read, who reads it, and how the next one takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardwell_server.shard.memory.budget import IncomingBuffer, Memory
from shardwell_server.shard.memory.shared_memory import SharedMemory
from shardwell_server.shard.state.parameters import Home, Parameters
from shardwell_server.shard.state.reader_copies import ReaderCopies
from shardwell_server.shard.threads import InThread
from shardwell_wire.errors import (
    DeadlineError,
    NotFoundError,
    ShardwellError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.shared_segment import UPDATING


class Values:
    """The newest version, in its place; in copies the one before, while somebody reads it, and those that are held.

    Copies take staging room, and give way to what needs it more.

    Used on the event loop.

    Args:
        what: Names the shard in errors.
        unit: The unit's name, for errors.
        memory: Where buffers come from.
        shared: Where values lie, if trainers shall be able to map them.
    """

    def __init__(self, what: str, unit: str, memory: Memory, shared: SharedMemory | None) -> None:
        self.version: int | None = None
        self.parameters: Parameters | None = None
        self.home: Home | None = None
        self.initial_epoch = -1
        """Under which the values that wait for publication came."""
        self._what, self._unit = what, unit
        self._memory, self._shared = memory, shared
        self._superseded = ReaderCopies(what, unit, memory)
        """Older versions."""
        self._updating = False
        self._becoming: int | None = None
        """The version that an update has begun to make in place."""
        self._failure: ShardwellError | None = None
        """Why there are no values any more."""
        self._changed = asyncio.Event()

    # ---- reading ----

    async def read(self, version: int | None, wait_s: float) -> tuple[int, Parameters]:
        """The bytes of a version, kept as they are until ``release`` or until they are revoked.

        Args:
            version: None: the newest there is.
            wait_s: How long to wait for it to exist.

        Raises:
            VersionGoneError: It has been overwritten.
            DeadlineError: It does not exist yet.
            NotFoundError: The run was deleted meanwhile.
        """
        if not self.readable(version):
            await self._until_readable(version, wait_s)
        # From here to the return nothing is awaited: no update can begin in between.
        self.check_whole()
        assert self.version is not None and self.parameters is not None
        found = self.version if version is None else version
        parameters = self.parameters if found == self.version else self._superseded.find(found)
        if parameters is None:
            raise self._gone(found, self.version)
        parameters.readers += 1
        return found, parameters

    def release(self, parameters: Parameters) -> None:
        """A reader is done."""
        self._superseded.release(parameters)

    async def hold(self, version: int, wait_s: float) -> Parameters:
        """``read``, of a version that is to last for more than one update; until ``let_go``."""
        _, parameters = await self.read(version, wait_s)
        parameters.holders += 1
        return parameters

    def let_go(self, parameters: Parameters) -> None:
        """A holder is done."""
        parameters.holders -= 1
        self.release(parameters)

    def make_room(self) -> None:
        """Takes older versions from those who still read them."""
        self._superseded.make_room()

    def check_whole(self) -> None:
        """Raises why there are no values any more: the run was deleted."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure), **self._failure.data)

    @property
    def updating(self) -> bool:
        """Whether the values are about to become the next version, or were when the update failed."""
        return self._updating

    def readable(self, version: int | None) -> bool:
        """Whether ``read`` would not wait."""
        if self._failure is not None:
            return True
        return not self._updating and self.version is not None and (version is None or self.version >= version)

    async def _until_readable(self, version: int | None, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not self.readable(version):
                    await self._changed.wait()
        except TimeoutError:
            wanted = "any version" if version is None else f"version {version}"
            newest = "there is none yet" if self.version is None else f"the newest is {self.version}"
            raise DeadlineError(
                f"waited {wait_s:.1f} s for {wanted} of {self._what}; {newest}",
                unit=self._unit,
                version=version,
                newest=self.version,
            ) from None

    def _gone(self, version: int, newest: int) -> VersionGoneError:
        return VersionGoneError(
            f"version {version} of {self._what} has been overwritten by version {newest}",
            unit=self._unit,
            version=version,
            newest=newest,
        )

    def _notify(self) -> None:
        """Wakes those who wait for a change; they look for themselves."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- from version to version ----

    def accept_initial(self, epoch: int, received: IncomingBuffer) -> None:
        """Takes complete initial values, replacing those that were here."""
        assert self.version is None
        if self.home is not None:
            self.home.close()
        self.home = Home(received, self._shared, self._what)
        self.parameters, self.initial_epoch = Parameters(self.home.buffer, version=0), epoch

    def publish(self, epoch: int) -> int:
        """Makes the initial values of an epoch version 0, once; returns the version.

        Raises:
            StepStateError: They are not complete.
        """
        if self.version is not None:
            return self.version
        if self.home is None or self.initial_epoch != epoch:
            raise StepStateError(f"{self._what}: the initial values of epoch {epoch} are not complete here")
        self.version = 0
        self.home.show(self.version)
        self._notify()
        return self.version

    @asynccontextmanager
    async def becoming(self, version: int, in_thread: InThread) -> AsyncIterator[None]:
        """Lets the caller change the values in place; when the block ends they are the next version.

        If the block raises, the values are neither of the two versions, and nobody can read them. The caller repeats
        the same until the block ends well; readers wait meanwhile. If something raises before the block, nothing has
        changed.
        """
        assert self.home is not None
        self._updating = True
        if self._becoming != version:
            try:
                await self._leave_to_readers(in_thread)
            except BaseException:
                self._updating = False
                self._notify()
                raise
            self._becoming = version
            self.home.show(UPDATING)
        yield
        self.version = version
        self.home.show(version)
        self._updating = False
        self._notify()

    async def _leave_to_readers(self, in_thread: InThread) -> None:
        """Has those who read the present version go on in a copy, if there is room for one."""
        assert self.home is not None and self.parameters is not None and self.version is not None
        before, live, copy = self.parameters, self.home.buffer, None
        if before.readers:
            self._superseded.make_room(held_too=False)
            copy = self._memory.try_lend(self.home.size_bytes)
        if copy is not None:
            room = copy
            try:
                await in_thread(lambda: room.copy_(live))
            except BaseException:
                self._memory.take_back(copy)
                raise
        before.newest, self.parameters = False, Parameters(live, self.version + 1)
        if copy is not None:
            before.buffer = copy
            self._superseded.add(before)
        elif before.readers:
            before.revoked = self._gone(self.version, self.version + 1)

    def drop(self, why: NotFoundError) -> None:
        """Forgets everything; those who wait or read are told why."""
        self._failure = why
        self._notify()
        self._superseded.drop(why)
        if self.parameters is not None and self.home is not None:
            self.parameters.revoked, self.parameters.newest = why, False
            self.home.close()
            self.parameters = self.home = None
