"""Buffers in shared memory between one trainer and the server: for gradients, and for updates by trainers.

Sends descriptors of shared files to trainers; see Note: [Descriptors, not paths] in ``shared_descriptors.py``.
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
from shardwell_server.shard.memory.budget import BufferQuota, Grant, Memory
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.optimizer.partitions import StagingBuffer
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import ConflictError, InvalidRequestError, StepStateError
from shardwell_wire.host.shared_memory import ANSWER, MAX_REQUEST_BYTES, SOCKET_NAME, TOKEN_BYTES, open_folder, opened
from shardwell_wire.model.topology import values_offset

# Note: [Buffers belong to one trainer]
# A shared gradient buffer or shared staging buffer belongs to one trainer until it is closed, by a request of the
# trainer or with its shm session. The server never reuses the buffer for another trainer. A trainer whose lease has
# ended may still run, and can then write into its own buffers only; its requests about them are rejected.


class SharedGradientBuffer:
    """Shared memory in which a trainer leaves a gradient, laid out like a shard. The gradient becomes a contribution
    without a copy.

    Used on the event loop. See Note: [Buffers belong to one trainer].

    Args:
        shard: Shard that the gradients belong to.
        shared: The file.
        grant: The memory's grant in the server's budget.
    """

    def __init__(self, shard: UnitShard, shared: SharedBuffer, grant: Grant) -> None:
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

    def check_adoptable(self, shard: UnitShard) -> None:
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


class SharedStagingBuffer:
    """Shared memory in which a trainer updates one optimizer partition: gradients, new values and new state.

    Used on the event loop. What the trainer writes takes effect only after it is staged. See
    Note: [Buffers belong to one trainer].

    Args:
        what: Names the buffer in errors.
        bounds: Half-open range of the partition within the shard.
        memory: The server's memory budget.
        shared: Shared memory for the buffer.

    Raises:
        CapacityError: The buffer does not fit the memory budget or the shared memory.
    """

    def __init__(self, what: str, bounds: tuple[int, int], memory: Memory, shared: SharedMemory) -> None:
        self._what, self._memory, self._shared = what, memory, shared
        self._size_bytes, self._values_offset = bounds[1] - bounds[0], values_offset(*bounds)
        self._file, self._grant = self._allocate(self._values_offset + self._size_bytes)
        self._state: SharedBuffer | None = None
        self._state_grant: Grant | None = None
        self._staged = self._closed = False

    @property
    def file(self) -> SharedBuffer:
        """The gradients, and from ``values_offset`` the values."""
        return self._file

    @property
    def staged(self) -> bool:
        """True while the values in the buffer are staged."""
        return self._staged

    @property
    def closed(self) -> bool:
        """True once the trainer or the end of the session has closed the buffer, or the buffer was evicted."""
        return self._closed

    @property
    def gradients(self) -> torch.Tensor:
        """Laid out like the partition. uint8. [size_bytes]"""
        return self._file.tensor[: self._size_bytes]

    @property
    def values(self) -> torch.Tensor:
        """Laid out like the partition. uint8. [size_bytes]"""
        return self._file.tensor[self._values_offset :]

    def allocate_state(self, size_bytes: int) -> SharedBuffer:
        """Returns memory for the new state.

        Raises:
            CapacityError: The state does not fit the memory budget or the shared memory.
            ConflictError: Allocating the state has evicted this buffer.
        """
        if self._state is None or self._state.tensor.numel() != size_bytes:
            self._free_state()
            self._state, self._state_grant = self._allocate(size_bytes)
            # The allocation may have evicted this buffer, which closes it.
            if self._closed:
                self._free_state()
            self.check_open()
        return self._state

    def written_state(self, size_bytes: int) -> SharedBuffer | None:
        """Returns the new state that the trainer wrote. None if the state is empty.

        Raises:
            ConflictError: ``allocate_state`` has not allocated this size.
        """
        if not size_bytes:
            return None
        if self._state is None or self._state.tensor.numel() != size_bytes:
            raise ConflictError(
                f"{self._what} has no memory for a state of {size_bytes} bytes: stream the partition instead"
            )
        return self._state

    def check_open(self) -> None:
        """Raises ConflictError if the buffer is closed."""
        if self._closed:
            raise ConflictError(f"{self._what} is closed: stream the partition, or open another buffer")

    def mark_staged(self) -> None:
        """Marks the values in the buffer as staged, until ``release``."""
        self._staged = True

    def release(self) -> None:
        """Called when the staged values are applied or dropped. The trainer may write again."""
        self._staged = False
        if self._closed:
            self._free()

    def swap_state(self, former: SharedBuffer | None, writer: StagingBuffer | None) -> bool:
        """Passes the new state to the shard and takes the former state's memory for the next one.

        The memory is not taken if another trainer wrote the former state, because that trainer may still write there.
        See ``StagingBuffer.swap_state``.
        """
        written, self._state = self._state, None
        if former is None or writer not in (None, self) or self._closed or written is None:
            self._free_state()
            return False
        self._state = former
        return True

    def close(self) -> None:
        """Closes the buffer. Its memory is freed when nothing staged needs it."""
        if not self._closed:
            self._closed = True
            self._file.unlink()
            if not self._staged:
                self._free()

    def _free(self) -> None:
        self._free_state()
        self._memory.note_shared(-self._file.tensor.numel())
        self._grant.release()

    def _free_state(self) -> None:
        if self._state is not None:
            self._state.unlink()
        if self._state_grant is not None:
            self._memory.note_shared(-self._state_grant.size_bytes)
            self._state_grant.release()
        self._state = self._state_grant = None

    def _allocate(self, size_bytes: int) -> tuple[SharedBuffer, Grant]:
        grant = self._memory.grant(size_bytes, BufferQuota(0), self._what)
        try:
            made = self._shared.create_sealed(size_bytes, self._what)
        except BaseException:
            grant.release()
            raise
        self._memory.note_shared(size_bytes)
        return made, grant


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
