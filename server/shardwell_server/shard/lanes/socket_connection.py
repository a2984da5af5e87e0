"""One connection of a socket lane, on the event loop: frames, and streams straight from and to memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

from shardwell_server.rpc import told
from shardwell_server.shard.requests import streams
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
        # By number: asyncio would describe the socket object, in words, each time it begins to watch it.
        self._socket, self._number, self._loop = peer, peer.fileno(), asyncio.get_running_loop()
        self._since_wait_bytes = 0
        self._torn = False
        """Part of a frame was sent: nothing that is sent from now on could be understood."""

    # ---- frames ----

    async def send(self, *buffers: Buffer) -> None:
        """Sends whole frames."""
        left: Sequence[Buffer] = buffers

        def advance() -> bool:
            nonlocal left
            sent_bytes = self._socket.sendmsg(left)
            self._since_wait_bytes += sent_bytes
            left = frames.unsent(left, sent_bytes)
            return not left

        self._torn = True
        await self._drive(advance, self._loop.add_writer, self._loop.remove_writer, streams.IDLE_LIMIT_S)
        self._torn = False

    async def next_request(self) -> tuple[Kind, int] | None:
        """The head of the next request, however long it takes to come; None if there is none any more.

        Raises:
            InvalidRequestError: Something else came.
        """
        head = bytearray(frames.HEAD_BYTES)
        count = await self._read([memoryview(head)], None, enough=1)
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
        head = memoryview(bytearray(frames.HEAD_BYTES))
        await self._fill(head)
        while True:
            kind, size_bytes = frames.parse_head(head, Kind.DATA, Kind.END)
            if kind is Kind.END:
                return receiver.end(await self.exactly(size_bytes))
            receiver.begin(size_bytes)
            while receiver.missing_bytes:
                place = receiver.place()
                # Another frame follows the last byte of this one.
                await self._fill(place, *([head] if len(place) == receiver.missing_bytes else []))
                receiver.took(len(place))

    # ---- the peer's end ----

    @asynccontextmanager
    async def while_silent(self) -> AsyncIterator[None]:
        """Ends what is waited for in the block when the peer closes the connection, or speaks out of turn."""
        task, ended = asyncio.current_task(), False
        assert task is not None

        def end() -> None:
            nonlocal ended
            self._loop.remove_reader(self._number)
            ended = True
            task.cancel()

        self._loop.add_reader(self._number, end)
        try:
            yield
        except asyncio.CancelledError:
            if ended and task.uncancel() == 0:
                raise ConnectionResetError("the peer did not wait for the answer") from None
            raise
        finally:
            self._loop.remove_reader(self._number)

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
                while await self._read([scratch], None, enough=1):
                    pass

    # ---- bytes ----

    async def _fill(self, *targets: memoryview) -> None:
        size_bytes = sum(map(len, targets))
        if size_bytes and await self._read(targets, streams.IDLE_LIMIT_S, enough=size_bytes) < size_bytes:
            raise ConnectionResetError("the peer closed the connection in mid-stream")

    async def _read(self, targets: Sequence[memoryview], idle_limit_s: float | None, *, enough: int) -> int:
        """Receives into consecutive views until there is enough, or the peer has ended; returns how much came."""
        left: Sequence[Buffer] = targets
        count = 0

        def advance() -> bool:
            nonlocal left, count
            came, *_ = self._socket.recvmsg_into(left)
            count += came
            self._since_wait_bytes += came
            left = frames.unsent(left, came)
            return not came or count >= enough

        await self._drive(advance, self._loop.add_reader, self._loop.remove_reader, idle_limit_s)
        return count

    async def _drive(
        self,
        advance: Callable[[], bool],
        add: Callable[..., None],
        remove: Callable[[int], object],
        idle_limit_s: float | None,
    ) -> None:
        """Moves bytes until ``advance`` says that it is done: now, and whenever the socket is ready for more.

        A link brings a frame in many small parts; the task that waits for it is woken once.
        """
        if await self._advance_now(advance):
            return
        done, moved_at, failure = self._loop.create_future(), self._loop.time(), None

        def advance_more() -> None:
            nonlocal moved_at, failure
            if done.done():
                return
            try:
                if advance():
                    done.set_result(None)
                moved_at = self._loop.time()
            except BlockingIOError:
                pass
            except OSError as error:
                failure = error
                done.set_result(None)

        add(self._number, advance_more)
        try:
            while not await _within(done, None if idle_limit_s is None else moved_at + idle_limit_s):
                if idle_limit_s is not None and self._loop.time() >= moved_at + idle_limit_s:
                    raise DeadlineError(f"nothing came or went for {idle_limit_s:g} s in mid-stream")
        finally:
            remove(self._number)
        if failure is not None:
            raise failure

    async def _advance_now(self, advance: Callable[[], bool]) -> bool:
        """Moves what can be moved without waiting for the peer; returns whether that was all."""
        try:
            while not advance():
                if self._since_wait_bytes > _UNYIELDING_BYTES:
                    self._since_wait_bytes = 0
                    await asyncio.sleep(0)
        except BlockingIOError:
            self._since_wait_bytes = 0
            return False
        return True


async def _within(done: asyncio.Future[None], until_s: float | None) -> bool:
    """Waits for a future, but not beyond a time of the loop; returns whether it is done."""
    if until_s is None:
        await done
        return True
    await asyncio.wait((done,), timeout=max(0.0, until_s - done.get_loop().time()))
    return done.done()


def _scratch(total_bytes: int) -> Iterator[memoryview]:
    """Views of ``total_bytes`` together, all of the same memory."""
    scratch = memoryview(bytearray(min(total_bytes, _SCRATCH_BYTES)))
    for start in range(0, total_bytes, _SCRATCH_BYTES):
        yield scratch[: total_bytes - start]
