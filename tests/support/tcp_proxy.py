"""A TCP proxy whose connections tests can cut or hold."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import psutil

from shardwell.find_credentials import PublishedCredentials
from shardwell_wire.security.tokens import ClusterKey

_ESTABLISHED = b"HTTP/1.1 200 OK\r\n\r\n"


class TcpProxy:
    """Forwards connections to an address. ``cut`` closes all of them, as proxies and firewalls do.

    ``cut_after`` closes one of them in the middle of its bytes. ``hold`` forwards nothing for a while, as a network
    that drops packets.

    Args:
        target: host:port. Empty: each connection names its own, by an HTTP request CONNECT. gRPC sends one to the proxy
            that ``grpc_proxy`` names, and ``connect_through`` sends one.
        listen: host:port of the proxy. Port 0: a free port.

    Attributes:
        address: host:port of the proxy.
    """

    address: str

    def __init__(self, target: str = "", listen: str = "127.0.0.1:0") -> None:
        self._target, self._listen = _split(target) if target else None, _split(listen)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._holding: tuple[int, ...] = ()
        """Ids of the processes whose connections forward nothing."""
        self._changed = asyncio.Condition()
        self._bytes_to_cut: int | None = None
        """Bytes that are still forwarded before a connection is closed. None: no connection is to be closed."""

    @contextmanager
    def publish(self, key: ClusterKey) -> Iterator[None]:
        """Lets processes of this user find the cluster's key by the proxy's address while the block runs."""
        published = PublishedCredentials(self.address, key)
        try:
            yield
        finally:
            published.withdraw()

    def cut(self) -> None:
        """Closes all connections. New ones are accepted."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(60)

    def cut_after(self, count: int) -> None:
        """Closes one connection, between two of its bytes, when all together have forwarded so many bytes more.

        Returns at once; ``is_cutting`` is false when the connection is closed. The receiver gets the bytes before the
        cut and then the end of the stream; the sender gets a reset.
        """
        self._bytes_to_cut = count

    @property
    def is_cutting(self) -> bool:
        """Whether the connection that ``cut_after`` is to close is still open."""
        return self._bytes_to_cut is not None

    @contextmanager
    def hold(self, *pids: int) -> Iterator[None]:
        """Forwards nothing between these processes and the target while the block runs, on old and new connections.

        Afterwards everything arrives, as packets that are sent again.
        """
        asyncio.run_coroutine_threadsafe(self._hold(pids), self._loop).result(60)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._hold(()), self._loop).result(60)

    async def _hold(self, pids: tuple[int, ...]) -> None:
        async with self._changed:
            self._holding = pids
            self._changed.notify_all()

    def _forwards(self, port: int) -> bool:
        """Whether the connection that a client opened from this port forwards now."""
        return not any(port in _ports_of(pid) for pid in self._holding)

    async def _copy(
        self, port: int, reader: asyncio.StreamReader, source: asyncio.StreamWriter, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                data = await reader.read(1 << 16)
                async with self._changed:
                    await self._changed.wait_for(lambda: self._forwards(port))
                if not data:
                    break
                if (left := self._bytes_to_cut) is not None:
                    self._bytes_to_cut = left - len(data) if left >= len(data) else None
                    if self._bytes_to_cut is None:
                        writer.write(data[:left])
                        source.transport.abort()
                        break
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError, EOFError):
            target = self._target
            if target is None:
                head = await reader.readuntil(b"\r\n\r\n")
                target = _split(head.split()[1].decode())
            target_reader, target_writer = await asyncio.open_connection(*target)
            self._writers.add(target_writer)
            if self._target is None:
                writer.write(_ESTABLISHED)
            port = writer.get_extra_info("peername")[1]
            await asyncio.gather(
                self._copy(port, reader, writer, target_writer), self._copy(port, target_reader, target_writer, writer)
            )
            self._writers.discard(target_writer)
        writer.close()  # also if the target could not be reached
        self._writers.discard(writer)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        start = asyncio.start_server(self._serve, *self._listen)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(60)
        self.address = f"{self._listen[0]}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def connect_through(proxy: str, target: str, timeout_s: float) -> socket.socket:
    """Returns a connection to ``target`` through a ``TcpProxy`` without a target of its own. Both are host:port."""
    connection = socket.create_connection(_split(proxy), timeout_s)
    connection.sendall(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
    answer = b""
    while len(answer) < len(_ESTABLISHED):
        data = connection.recv(len(_ESTABLISHED) - len(answer))
        if not data:
            connection.close()
            raise ConnectionResetError(f"{proxy} cannot reach {target}")
        answer += data
    return connection


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _ports_of(pid: int) -> set[int]:
    """Returns the local ports of a process's TCP connections. Empty if the process has ended."""
    try:
        return {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
    except psutil.Error:
        return set()
