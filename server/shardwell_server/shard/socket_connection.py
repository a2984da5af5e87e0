"""One connection of a socket lane, on the event loop: frames, and streams straight from and to memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from shardwell_server.rpc import told
from shardwell_server.shard import streams
from shardwell_wire import frames
from shardwell_wire.codec import Buffer
from shardwell_wire.errors import DeadlineError, ShardwellError, to_status_details
from shardwell_wire.frames import Kind

_SCRATCH_BYTES = 256 << 10

_LINGER_S = 5.0
"""How long what a refused peer still sends is read, so that it sees why and no reset."""

_UNYIELDING_BYTES = 8 << 20
"""Moved without once having to wait: then everything else on the loop gets its turn."""


class Connection:
    """Sends and receives on one connected socket. For one task at a time.

    Every method raises OSError if the peer is gone, and DeadlineError if nothing moves in mid-stream.

    Args:
        peer: The socket.
    """

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._loop = peer, asyncio.get_running_loop()
        self._since_wait_bytes = 0
        self._torn = False
        """Part of a frame was sent: nothing that is sent from now on could be understood."""

    # ---- frames ----

    async def send(self, *buffers: Buffer) -> None:
        """Sends whole frames."""
        left: Sequence[Buffer] = buffers
        self._torn = True
        while left:
            try:
                sent_bytes = self._socket.sendmsg(left)
            except BlockingIOError:
                await self._until(self._loop.add_writer, self._loop.remove_writer, streams.IDLE_LIMIT_S)
                continue
            left = frames.unsent(left, sent_bytes)
            await self._count(sent_bytes)
        self._torn = False

    async def head(self, *expected: Kind) -> tuple[Kind, int]:
        """The head of the next frame, which is part of what has begun.

        Raises:
            InvalidRequestError: It is none of those expected.
        """
        return frames.parse_head(await self.exactly(frames.HEAD_BYTES), *expected)

    async def next_request(self) -> tuple[Kind, int] | None:
        """The head of the next request, however long it takes to come; None if there is none any more.

        Raises:
            InvalidRequestError: Something else came.
        """
        head = bytearray(frames.HEAD_BYTES)
        count = await self._some(memoryview(head), None)
        if count == 0:
            return None
        await self._fill(memoryview(head)[count:])
        return frames.parse_head(head, *frames.REQUESTS)

    async def exactly(self, size_bytes: int) -> bytes:
        """So many bytes."""
        data = bytearray(size_bytes)
        await self._fill(memoryview(data))
        return bytes(data)

    # ---- streams ----

    async def send_stream(self, pieces: Iterable[memoryview]) -> None:
        """Sends DATA frames and END; what ``pieces`` raises ends it between two frames."""
        sender = frames.StreamSender()
        for piece in pieces:
            await self.send(*sender.data([piece]))
        await self.send(sender.end())

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """Receives a stream; see ``IncomingStream``."""
        return await self._receive(targets, sum(len(target) for target in targets), what)

    async def checksum(self, total_bytes: int, what: str) -> int:
        """Receives a stream without keeping it; see ``IncomingStream``."""
        return await self._receive(_scratch(total_bytes), total_bytes, what)

    async def _receive(self, targets: Iterable[memoryview], total_bytes: int, what: str) -> int:
        receiver = frames.StreamReceiver(targets, total_bytes, what)
        while True:
            kind, size_bytes = await self.head(Kind.DATA, Kind.END)
            if kind is Kind.END:
                return receiver.end(await self.exactly(size_bytes))
            receiver.begin(size_bytes)
            while receiver.missing_bytes:
                receiver.took(await self._some_or_end(receiver.place()))

    # ---- the peer's end ----

    @asynccontextmanager
    async def while_silent(self) -> AsyncIterator[None]:
        """Ends what is waited for in the block when the peer closes the connection, or speaks out of turn."""
        task, ended = asyncio.current_task(), False
        assert task is not None

        def end() -> None:
            nonlocal ended
            self._loop.remove_reader(self._socket)
            ended = True
            task.cancel()

        self._loop.add_reader(self._socket, end)
        try:
            yield
        except asyncio.CancelledError:
            if ended and task.uncancel() == 0:
                raise ConnectionResetError("the peer did not wait for the answer") from None
            raise
        finally:
            self._loop.remove_reader(self._socket)

    async def refuse(self, reason: Exception) -> None:
        """Tells the peer why it gets no answer; raises OSError if that is not possible."""
        if isinstance(reason, OSError) and not isinstance(reason, ShardwellError):
            raise reason
        error = told("a request over a socket lane", reason)
        if self._torn:
            raise ConnectionAbortedError(f"ended within a frame: {error}") from error
        await self.send(frames.encode(Kind.ERROR, to_status_details(error)))

    async def linger(self) -> None:
        """Says that nothing more is sent, and reads on for a while: so what was sent last arrives."""
        self._socket.shutdown(socket.SHUT_WR)
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await self._some(scratch, None):
                    pass

    # ---- bytes ----

    async def _fill(self, target: memoryview) -> None:
        while target:
            target = target[await self._some_or_end(target) :]

    async def _some_or_end(self, target: memoryview) -> int:
        if count := await self._some(target, streams.IDLE_LIMIT_S):
            return count
        raise ConnectionResetError("the peer closed the connection in mid-stream")

    async def _some(self, target: memoryview, idle_limit_s: float | None) -> int:
        while True:
            try:
                count = self._socket.recv_into(target)
            except BlockingIOError:
                await self._until(self._loop.add_reader, self._loop.remove_reader, idle_limit_s)
                continue
            await self._count(count)
            return count

    async def _until(
        self, add: Callable[..., None], remove: Callable[[Any], object], idle_limit_s: float | None
    ) -> None:
        ready = self._loop.create_future()
        add(self._socket, _set, ready)
        try:
            async with asyncio.timeout(idle_limit_s):
                await ready
        except TimeoutError:
            raise DeadlineError(f"nothing came or went for {idle_limit_s:g} s in mid-stream") from None
        finally:
            remove(self._socket)
        self._since_wait_bytes = 0

    async def _count(self, size_bytes: int) -> None:
        self._since_wait_bytes += size_bytes
        if self._since_wait_bytes > _UNYIELDING_BYTES:
            self._since_wait_bytes = 0
            await asyncio.sleep(0)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _scratch(total_bytes: int) -> Iterator[memoryview]:
    """Views of ``total_bytes`` together, all of the same memory."""
    scratch = memoryview(bytearray(min(total_bytes, _SCRATCH_BYTES)))
    for start in range(0, total_bytes, _SCRATCH_BYTES):
        yield scratch[: total_bytes - start]
