"""Sends descriptors of shared files to trainers; see Note: [Descriptors, not paths] in ``shared_descriptors.py``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from shardwell_server.limits import Rate
from shardwell_wire.shared_descriptors import ANSWER, MAX_REQUEST_BYTES, SOCKET_NAME, TOKEN_BYTES
from shardwell_wire.shared_files import open_folder, opened

logger = logging.getLogger(__name__)

REQUEST_LIMIT_S = 5.0
"""A connection that has sent no request within this time is closed."""

MAX_WAITING = 128
"""Maximum number of connections that have sent no request. One more closes the oldest of them."""

ACCEPTED_PER_S, ACCEPT_BURST = 1000.0, 10_000
"""Connections that are accepted per second, and at once after a pause. Every user of the host can connect."""

_ACCEPT_PAUSE_S = 0.5


class DescriptorSocket:
    """The socket in a server's folder. Used on the event loop.

    Args:
        folder: The server's folder.
        find: Returns a new descriptor of the file with a name, for the transport with a token. None: there is none.
    """

    def __init__(self, folder: Path, find: Callable[[bytes, str], int | None]) -> None:
        self._folder, self._find = folder, find
        self.path = str(folder / SOCKET_NAME)
        self._waiting: dict[asyncio.Task[None], None] = {}
        """Oldest first."""
        self._accepted = Rate(ACCEPTED_PER_S, ACCEPT_BURST)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answers requests while the block runs. Trainers use the network if the socket cannot be made."""
        try:
            made = _listen(self._folder)
        except OSError as error:
            logger.warning("trainers on this host use the network: cannot make a socket in %s: %s", self._folder, error)
            yield
            return
        with made as listener:
            accepting = asyncio.ensure_future(self._accept(listener))
            try:
                yield
            finally:
                tasks = [accepting, *self._waiting]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("cannot accept a connection at %s: %s", self.path, error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._waiting) >= MAX_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                oldest.cancel()
            task = asyncio.ensure_future(self._answer(peer))
            self._waiting[task] = None
            task.add_done_callback(lambda task: self._waiting.pop(task, None))
            await asyncio.sleep(self._accepted.count(""))

    async def _answer(self, peer: socket.socket) -> None:
        with peer:
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    packet = await asyncio.get_running_loop().sock_recv(peer, MAX_REQUEST_BYTES)
                descriptor = self._find(packet[:TOKEN_BYTES], packet[TOKEN_BYTES:].decode())
                if descriptor is not None:
                    with opened(descriptor):
                        socket.send_fds(peer, [ANSWER], [descriptor])
            except (OSError, UnicodeDecodeError) as error:  # also TimeoutError
                logger.debug("a request for a shared file failed: %s", error)


def _listen(folder: Path) -> socket.socket:
    """Makes the socket, in the place of a former process's. Trainers of all users may connect."""
    (folder / SOCKET_NAME).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with opened(open_folder(folder)) as descriptor:
            path = f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"  # paths of sockets must be short
            listener.bind(path)
            os.chmod(path, 0o666)
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
