"""One connection of a socket transport, on the event loop: frames, and streams straight from and to memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

from shardwell_server.rpc import told
from shardwell_server.shard.requests import streams
from shardwell_server.shard.transports.socket_transfers import Arriving, ArrivingStream, Leaving, PeerEnded, Transfer
from shardwell_wire import frames
from shardwell_wire.codec import Buffer
from shardwell_wire.errors import DeadlineError, ShardwellError, to_status_details
from shardwell_wire.frames import Kind
from shardwell_wire.low_water_mark import LowWaterMark

_SCRATCH_BYTES = 256 << 10

_LINGER_S = 5.0
"""How long what a refused peer still sends is read, so that it sees why and no reset."""

_UNYIELDING_BYTES = 8 << 20
"""Moved without once having to wait: then everything else on the loop gets its turn."""

_CALL_BYTES = 64 << 10
"""What could be moved in the time that a system call takes, however little it moves: it counts as so many more."""


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
        self._mark = LowWaterMark(peer)
        self._peer = _name_of(peer)
        """For the log."""
        self._since_wait_bytes = 0
        self._torn = False
        """Part of a frame was sent: nothing that is sent from now on could be understood."""

    # ---- frames ----

    async def send(self, *buffers: Buffer) -> None:
        """Sends whole frames."""
        self._torn = True
        await self._drive(Leaving(self._socket, buffers), streams.IDLE_LIMIT_S)
        self._torn = False

    async def next_request(self) -> tuple[Kind, int] | None:
        """The head of the next request, however long it takes to come; None if there is none any more.

        Raises:
            InvalidRequestError: Something else came.
        """
        head = bytearray(frames.HEAD_BYTES)
        count = await self._some(memoryview(head))
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

    async def send_stream(self, pieces: Iterable[memoryview], before: bytes = b"") -> None:
        """Sends DATA frames and END; what ``pieces`` raises ends it between two frames.

        Args:
            pieces: Of the stream.
            before: Frames that go first.
        """
        sender = frames.StreamSender()
        for piece in pieces:
            await self.send(before, *sender.data([piece]))
            before = b""
        await self.send(before, sender.end())

    async def into(self, targets: Sequence[memoryview], what: str) -> int:
        """Receives a stream; see ``IncomingStream``."""
        return await self._receive(targets, sum(len(target) for target in targets), what)

    async def checksum(self, total_bytes: int, what: str) -> int:
        """Receives a stream without keeping it; see ``IncomingStream``."""
        return await self._receive(_scratch(total_bytes), total_bytes, what)

    async def _receive(self, targets: Iterable[memoryview], total_bytes: int, what: str) -> int:
        receiver = frames.StreamReceiver(targets, total_bytes, what)
        await self._drive(ArrivingStream(self._socket, receiver), streams.IDLE_LIMIT_S)
        assert receiver.checksum is not None
        return receiver.checksum

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

        self._mark.want(1)
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
        error = told("a request over a socket transport", reason, self._peer)
        if self._torn:
            raise ConnectionAbortedError(f"ended within a frame: {error}") from error
        await self.send(frames.encode(Kind.ERROR, to_status_details(error)))

    async def linger(self) -> None:
        """Says that nothing more is sent, and reads on for a while: so what was sent last arrives."""
        self._socket.shutdown(socket.SHUT_WR)
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await self._some(scratch):
                    pass

    # ---- bytes ----

    async def _fill(self, target: memoryview) -> None:
        if target:
            await self._drive(Arriving(self._socket, target, len(target)), streams.IDLE_LIMIT_S)

    async def _some(self, target: memoryview) -> int:
        """Receives at least a byte, however long it takes to come; returns how many, 0 if the peer has ended."""
        arriving = Arriving(self._socket, target, 1)
        with suppress(PeerEnded):
            await self._drive(arriving, None)
        return arriving.count

    async def _drive(self, transfer: Transfer, idle_limit_s: float | None) -> None:
        """Moves bytes until nothing is missing: now, and whenever the socket is ready for more.

        A link brings a stream in many parts; the task that waits for it is woken once.
        """
        if await self._moved_now(transfer):
            return
        done: asyncio.Future[None] = self._loop.create_future()
        moved_at, timer = self._loop.time(), None

        def move() -> None:
            nonlocal moved_at
            if done.done():
                return
            try:
                transfer.move()
                moved_at = self._loop.time()
                if transfer.missing_bytes:
                    self._await_more(transfer)
                else:
                    done.set_result(None)
            except BlockingIOError:
                pass
            except Exception as error:
                done.set_exception(error)

        def give_up(limit_s: float) -> None:
            nonlocal timer
            move()  # over a slow link less may have come than the mark, which wakes nobody
            if done.done():
                return
            if self._loop.time() < moved_at + limit_s:
                timer = self._loop.call_at(moved_at + limit_s, give_up, limit_s)
            else:
                done.set_exception(DeadlineError(f"nothing came or went for {limit_s:g} s in mid-stream"))

        watch, forget = (
            (self._loop.add_reader, self._loop.remove_reader)
            if transfer.arrives
            else (self._loop.add_writer, self._loop.remove_writer)
        )
        self._await_more(transfer)
        if idle_limit_s is not None:
            timer = self._loop.call_at(moved_at + idle_limit_s, give_up, idle_limit_s)
        watch(self._number, move)
        try:
            await done
        finally:
            forget(self._number)
            if timer is not None:
                timer.cancel()

    def _await_more(self, transfer: Transfer) -> None:
        if transfer.arrives:
            self._mark.want(transfer.missing_bytes)

    async def _moved_now(self, transfer: Transfer) -> bool:
        """Moves what can be moved without waiting for the peer; returns whether that was all."""
        try:
            while transfer.missing_bytes:
                self._since_wait_bytes += transfer.move() + _CALL_BYTES
                if self._since_wait_bytes > _UNYIELDING_BYTES:
                    self._since_wait_bytes = 0
                    await asyncio.sleep(0)
        except BlockingIOError:
            self._since_wait_bytes = 0
            return False
        return True


def _scratch(total_bytes: int) -> Iterator[memoryview]:
    """Views of ``total_bytes`` together, all of the same memory."""
    scratch = memoryview(bytearray(min(total_bytes, _SCRATCH_BYTES)))
    for start in range(0, total_bytes, _SCRATCH_BYTES):
        yield scratch[: total_bytes - start]


def _name_of(peer: socket.socket) -> str:
    try:
        return ":".join(map(str, peer.getpeername()[:2]))
    except OSError:
        return "a peer that is gone"
