"""The shm transport: trainers on this host map shards, and share gradient and staging buffers with the server."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar
from weakref import WeakValueDictionary

from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.transports.shm_buffers import SharedGradientBuffer, SharedStagingBuffer
from shardwell_server.shard.transports.shm_descriptors import DescriptorSocket
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import ConflictError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.shared_descriptors import TOKEN_BYTES
from shardwell_wire.shared_proof import NONCE_BYTES, PROOF_BYTES, session_name
from shardwell_wire.tokens import Identity
from shardwell_wire.v1 import common_pb2, shard_pb2

PROOF_FILE_BYTES = 1 << 20
"""Size of the proof file. Trainers also measure the bandwidth of shared memory with it."""


class ShmSession:
    """The shared gradient buffers and shared staging buffers of one trainer. Used on the event loop.

    Args:
        run: The run that the session belongs to.
        shared: Shared memory for buffers.
        memory: The server's memory budget.
    """

    def __init__(self, run: RunIdentity, shared: SharedMemory, memory: Memory) -> None:
        self._run, self._shared, self._memory = run, shared, memory
        self._gradient_buffers: dict[int, SharedGradientBuffer] = {}
        self._staging_buffers: dict[int, tuple[UnitShard, int, SharedStagingBuffer]] = {}
        self._numbers = itertools.count(1)
        self._offered: WeakValueDictionary[str, SharedBuffer] = WeakValueDictionary()

    def offer(self, file: SharedBuffer) -> str:
        """Returns the name by which the trainer can ask for a descriptor of a file from now on."""
        self._offered[file.name] = file
        return file.name

    def open_offered(self, name: str) -> int | None:
        """Returns a new descriptor of a file for the trainer. None: the file was not offered, or has been removed."""
        try:
            return None if (file := self._offered.get(name)) is None else file.open_for_trainer()
        except FileNotFoundError:
            return None

    def check_run(self, run: RunIdentity) -> None:
        """Raises ConflictError unless the session belongs to this run, by name and id."""
        if run != self._run:
            raise ConflictError(
                f"the shm session belongs to run {self._run.name!r} with id {self._run.run_id}, but the request names "
                f"run {run.name!r} with id {run.run_id}: open another session"
            )

    def open_gradient_buffer(self, shard: UnitShard) -> tuple[int, SharedGradientBuffer]:
        """Makes a gradient buffer for a shard; returns its number and the buffer.

        Raises:
            CapacityError: The buffer does not fit the memory budget or the shared memory.
        """
        what = f"a gradient buffer for {shard.what}"
        grant = self._memory.grant(shard.size_bytes, shard.contribution_quota, what)
        try:
            shared = self._shared.create_sealed(shard.size_bytes, what)
        except BaseException:
            grant.release()
            raise
        number = next(self._numbers)
        self._gradient_buffers[number] = SharedGradientBuffer(shard, shared, grant)
        return number, self._gradient_buffers[number]

    def gradient_buffer(self, number: int) -> SharedGradientBuffer:
        """Returns a gradient buffer. Raises ConflictError if the session has no such buffer."""
        if number not in self._gradient_buffers:
            raise ConflictError(f"the shm session has no gradient buffer {number}: open one with OpenGradientBuffer")
        return self._gradient_buffers[number]

    def acquire_staging_buffer(self, shard: UnitShard, dp_rank: int) -> tuple[int, SharedStagingBuffer]:
        """Returns an unused staging buffer for a rank's partition, with its number. Makes one if there is none.

        A buffer with staged values must keep them, because the step may be about to commit. Such a buffer is closed,
        and its memory is freed when the values have been applied or dropped.

        Raises:
            CapacityError: The buffer does not fit the memory budget or the shared memory.
        """
        for number, (owner, rank, staging_buffer) in list(self._staging_buffers.items()):
            if owner is shard and rank == dp_rank and staging_buffer.staged:
                shard.partitions.close_staging_buffer(staging_buffer)
            if staging_buffer.closed:
                del self._staging_buffers[number]
            elif owner is shard and rank == dp_rank:
                return number, staging_buffer
        what = f"a staging buffer for {shard.what}"
        staging_buffer = SharedStagingBuffer(what, shard.partitions.bounds(dp_rank), self._memory, self._shared)
        shard.partitions.add_staging_buffer(staging_buffer)
        number = next(self._numbers)
        self._staging_buffers[number] = shard, dp_rank, staging_buffer
        return number, staging_buffer

    def staging_buffer(self, number: int, shard: UnitShard, dp_rank: int) -> SharedStagingBuffer:
        """Returns a staging buffer. Raises ConflictError if the session has no such buffer for a rank's partition."""
        owner, rank, staging_buffer = self._staging_buffers.get(number, (None, None, None))
        if staging_buffer is None or owner is not shard or rank != dp_rank:
            raise ConflictError(
                f"the shm session has no staging buffer {number} for {shard.what}, rank {dp_rank}: open one with "
                "OpenStagingBuffer"
            )
        return staging_buffer

    def close_buffers(self, numbers: Iterable[int]) -> None:
        """Closes some buffers. Numbers of other buffers are ignored."""
        for number in numbers:
            if (gradient_buffer := self._gradient_buffers.pop(number, None)) is not None:
                gradient_buffer.close()
            elif number in self._staging_buffers:
                shard, _, staging_buffer = self._staging_buffers.pop(number)
                shard.partitions.close_staging_buffer(staging_buffer)

    def close(self) -> None:
        """Closes all buffers."""
        for gradient_buffer in self._gradient_buffers.values():
            gradient_buffer.close()
        self._gradient_buffers.clear()
        for shard, _, staging_buffer in self._staging_buffers.values():
            shard.partitions.close_staging_buffer(staging_buffer)
        self._staging_buffers.clear()


class ShmTransport:
    """A ``ServerTransport`` for trainers on this host. Used on the event loop.

    Args:
        shared: Shared memory for buffers.
        memory: The server's memory budget.
    """

    kind: ClassVar[int] = common_pb2.TRANSPORT_KIND_SHM
    name: ClassVar[str] = "shm"

    def __init__(self, shared: SharedMemory, memory: Memory) -> None:
        self._shared, self._memory = shared, memory
        self._open: dict[str, ShmSession] = {}
        """Open sessions, by ``session_name``."""
        self._by_token: dict[bytes, ShmSession] = {}
        """Open sessions, by the digest of their token: how long a search takes then reveals nothing about a token."""
        self._socket = DescriptorSocket(shared.folder, self._open_offered)
        self._proof: SharedBuffer | None = None

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Sends descriptors while the block runs. Other requests come over rpcs and sockets."""
        return self._socket.serving()

    @asynccontextmanager
    async def open(self, run: RunIdentity, caller: Identity | None) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """Opens a session; see ``ServerTransport.open``."""
        transport_id, proof = secrets.token_hex(8), self._proof or self._make_proof()
        name = session_name(transport_id, _start_of(proof))
        token = secrets.token_bytes(TOKEN_BYTES)
        session = ShmSession(run, self._shared, self._memory)
        self._open[name] = self._by_token[_digest(token)] = session
        try:
            offer = shard_pb2.SharedMemoryOffer(
                proof=bytes(_start_of(proof)[:PROOF_BYTES]),
                socket=self._socket.path,
                user_id=os.geteuid(),
                token=token,
                file=session.offer(proof),
            )
            yield shard_pb2.OpenTransportResponse(transport_id=transport_id, shm=offer)
        finally:
            del self._open[name], self._by_token[_digest(token)]
            session.close()
            if not self._open:
                proof.unlink()
                self._memory.note_shared(-PROOF_FILE_BYTES)
                self._proof = None

    def _make_proof(self) -> SharedBuffer:
        """Makes the file by which trainers check that they share this memory. All open sessions use the same file."""
        self._proof = self._shared.create(PROOF_FILE_BYTES, "an shm session")
        _start_of(self._proof)[:] = secrets.token_bytes(PROOF_BYTES + NONCE_BYTES)
        self._memory.note_shared(PROOF_FILE_BYTES)
        return self._proof

    def _open_offered(self, token: bytes, name: str) -> int | None:
        session = self._by_token.get(_digest(token))
        return None if session is None else session.open_offered(name)

    def session(self, name: str, run: RunIdentity) -> ShmSession:
        """Returns an open session of a run.

        Raises:
            ConflictError: The session is not open, or belongs to another run.
        """
        session = self._open.get(name)
        if session is None:
            # The name has the nonce of the file, which a wrong name may contain in part.
            raise ConflictError(
                f"no shm session {name.partition('.')[0]!r} with this nonce is open on this server: open one with "
                "OpenTransport"
            )
        session.check_run(run)
        return session


def _digest(token: bytes) -> bytes:
    return hashlib.blake2b(token).digest()


def _start_of(file: SharedBuffer) -> memoryview:
    return memory_at(file.tensor.data_ptr(), PROOF_BYTES + NONCE_BYTES)
