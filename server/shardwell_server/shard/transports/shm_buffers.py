"""Shared gradient buffers, and the socket that sends descriptors of shared files to trainers.

See Note: [Descriptors, not paths] in ``shardwell_wire/host/shared_memory.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from shardwell_server.serving.limits import Rate
from shardwell_server.shard.memory.budget import Grant
from shardwell_server.shard.memory.mapped_memory import SharedBuffer
from shardwell_server.shard.requests.relayed_shards import RelayedShard
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.errors import ConflictError, InvalidRequestError, StepStateError
from shardwell_wire.host.shared_memory import ANSWER, MAX_REQUEST_BYTES, SOCKET_NAME, TOKEN_BYTES, open_folder, opened

# Note: [Buffers belong to one trainer]
# A shared gradient buffer or shared staging buffer belongs to one trainer until it is closed, by a request of the
# trainer or with its shm session. The server never reuses the buffer for another trainer. A trainer whose lease has
# ended may still run, and can then write into its own buffers only; its requests about them are rejected.


class SharedGradientBuffer:
    """Shared memory in which a trainer leaves a gradient, laid out like a shard. The gradient becomes a contribution
    without a copy.

    Used on the event loop. See Note: [Buffers belong to one trainer].

    Args:
        shared: The file.
        grant: The memory's grant in the server's budget.
    """

    def __init__(self, shard: UnitShard | RelayedShard, shared: SharedBuffer, grant: Grant) -> None:
        self._shard, self._shared, self._grant = shard, shared, grant
        self.views = shard.views(shared.tensor)
        """Segments of ``buffer``, by segment number. Each [numel]"""
        self._claimed = self._closed = False
        grant.memory.note_shared(grant.size_bytes)

    @property
    def file(self) -> SharedBuffer:
        return self._shared

    @property
    def buffer(self) -> torch.Tensor:
        """uint8. [stop_bytes - start_bytes]"""
        return self._shared.tensor

    @property
    def claimed(self) -> bool:
        """True while the buffer is a contribution."""
        return self._claimed

    def check_adoptable(self, shard: UnitShard | RelayedShard) -> None:
        """Raises unless the buffer can become a contribution to the shard now."""
        if self._closed:
            raise ConflictError(
                f"the gradient buffer for {self._shard.what} is closed, by its trainer or with its shm session: use "
                "another one"
            )
        if shard is not self._shard:
            raise InvalidRequestError(f"the gradient buffer belongs to {self._shard.what}, not to {shard.what}")
        if self._claimed:
            raise StepStateError(
                f"the gradient buffer for {self._shard.what} already holds a contribution: use another one",
                buffer="claimed",
            )

    def claim(self) -> torch.Tensor:
        """Makes the buffer a contribution, until ``release``."""
        self._claimed = True
        self._grant.settle()
        return self.buffer

    def release(self) -> None:
        """Ends the contribution: the trainer may write again. Frees the memory if the buffer is closed."""
        self._claimed = False
        if self._closed:
            self._free()

    def close(self) -> None:
        """Removes the file's name. Frees the memory when no contribution needs it."""
        self._shared.unlink()
        self._closed = True
        if not self._claimed:
            self._free()

    def _free(self) -> None:
        self._grant.memory.note_shared(-self._grant.size_bytes)
        self._grant.release()


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
