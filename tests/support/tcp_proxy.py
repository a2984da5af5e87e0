"""A TCP proxy whose connections tests can cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from shardwell.credentials import PublishedCredentials
from shardwell_wire.credentials import Credentials


class TcpProxy:
    """Forwards connections to an address. ``cut`` closes all of them, as proxies and firewalls do.

    Args:
        target: host:port.

    Attributes:
        address: host:port of the proxy.
    """

    address: str

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()

    @contextmanager
    def publish(self, credentials: Credentials) -> Iterator[None]:
        """Lets processes of this user find the cluster's token by the proxy's address while the block runs."""
        published = PublishedCredentials(self.address, credentials)
        try:
            yield
        finally:
            published.withdraw()

    def cut(self) -> None:
        """Closes all connections. New ones are accepted."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            self._writers.add(target_writer)
            await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))
            self._writers.discard(target_writer)
        self._writers.discard(writer)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
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


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
