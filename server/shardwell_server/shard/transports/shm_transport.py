"""The shm transport: trainers on this host map shards, and share gradient and staging buffers with the server.

Its requests arrive as rpcs. ReduceGradientBuffer may also arrive over a socket.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import ClassVar
from weakref import WeakValueDictionary

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory.budget import BufferQuota, Memory
from shardwell_server.shard.memory.mapped_memory import SharedBuffer, SharedMemory
from shardwell_server.shard.requests import partition_requests
from shardwell_server.shard.requests.pushes import Push, check_leases
from shardwell_server.shard.requests.relay import RelayedSession
from shardwell_server.shard.requests.relayed_shards import RelayedShard
from shardwell_server.shard.state.shard_store import ShardStore, named_identity
from shardwell_server.shard.transports.shm_buffers import DescriptorSocket, SharedGradientBuffer
from shardwell_server.shard.unit.partitions import PartitionState, SharedStagingBuffer, StagedPartition
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import ConflictError, StaleEpochError, StepStateError
from shardwell_wire.host.shared_memory import NONCE_BYTES, PROOF_BYTES, TOKEN_BYTES, session_name
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.topology import state_places
from shardwell_wire.security.tokens import Identity
from shardwell_wire.v1 import common_pb2, shard_pb2

RelayRequest = shard_pb2.RelayUnitRequest | shard_pb2.ReadRelayedRequest | shard_pb2.SkipRelayRequest

PROOF_FILE_BYTES = 1 << 20
"""Size of the proof file. Trainers also measure the bandwidth of shared memory with it."""


class ShmTransport:
    """A ``ServerTransport`` for trainers on this host. Used on the event loop."""

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
    async def open(
        self, run: RunIdentity, caller: Identity | None, relayed: RelayedSession | None = None
    ) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """Opens a session; see ``ServerTransport.open``. ``relayed``: what this server relays for the trainer."""
        transport_id, proof = secrets.token_hex(8), self._proof or self._make_proof()
        name = session_name(transport_id, _start_of(proof))
        token = secrets.token_bytes(TOKEN_BYTES)
        session = ShmSession(run, self._shared, self._memory, relayed)
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
            # The proof takes shared memory, so it exists only while a session is open.
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

    def relay_session(self, request: RelayRequest) -> tuple[ShmSession, RelayedSession]:
        """Returns an open session in which this server relays. Raises ConflictError if there is none."""
        session = self.session(request.transport_id, named_identity(request))
        if session.relayed is None:
            raise ConflictError("the shm session is not one to a relay: open one with OpenTransportRequest.relay")
        return session, session.relayed

    def find_relay_session(self, name: str, run: RunIdentity) -> tuple[ShmSession, RelayedSession] | None:
        """Returns an open session in which this server relays. None: the session is of another kind, or is not open."""
        session = self._open.get(name)
        if session is None or session.relayed is None:
            return None
        session.check_run(run)
        return session, session.relayed

    def session(self, name: str, run: RunIdentity) -> ShmSession:
        """Returns an open session of a run.

        Raises:
            ConflictError: The session is not open: ``data`` has ``session_unknown``. Or it belongs to another run.
        """
        session = self._open.get(name)
        if session is None:
            # The name has the nonce of the file, which a wrong name may contain in part.
            raise ConflictError(
                f"no shm session {name.partition('.')[0]!r} with this nonce is open on this server: open one with "
                "OpenTransport",
                session_unknown=True,
            )
        session.check_run(run)
        return session


def _digest(token: bytes) -> bytes:
    return hashlib.blake2b(token).digest()


def _start_of(file: SharedBuffer) -> memoryview:
    return memory_at(file.tensor.data_ptr(), PROOF_BYTES + NONCE_BYTES, file.tensor)


class ShmSession:
    """The shared gradient buffers and shared staging buffers of one trainer. Used on the event loop.

    Args:
        run: The run that the session belongs to.
        relayed: What this server relays for the trainer. None: the trainer uses the server's own shards.
    """

    def __init__(
        self, run: RunIdentity, shared: SharedMemory, memory: Memory, relayed: RelayedSession | None = None
    ) -> None:
        self._run, self._shared, self._memory, self.relayed = run, shared, memory, relayed
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

    def open_gradient_buffer(
        self, shard: UnitShard | RelayedShard, quota: BufferQuota
    ) -> tuple[int, SharedGradientBuffer]:
        """Makes a gradient buffer for a shard; returns its number and the buffer. ``quota``: what is reserved for it.

        Raises:
            CapacityError: The buffer does not fit the memory budget or the shared memory.
        """
        what = f"a gradient buffer for {shard.what}"
        grant = self._memory.grant(shard.size_bytes, quota, what)
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

        A buffer with staged values must keep them, because the step may be about to commit. This buffer is closed,
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


async def locate_shard(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.LocateShardRequest, wait_s: float
) -> shard_pb2.LocateShardResponse:
    """Returns the file that holds a shard, after waiting for a version.

    Raises:
        ConflictError: The session is not open. Or the shard is not in shared memory: ``data`` has ``not_shared``.
        ShardwellError: As ``Values.read``.
    """
    store.lease.check()
    run = store.exact_run(request)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(request.unit, request.start_bytes if request.HasField("start_bytes") else None)
    wanted = request.version if request.HasField("version") else None
    version, source = await shard.values.read(wanted, wait_s)
    shard.values.release(source)
    live = shard.values.live
    assert live is not None
    if live.file is None:
        reason = f"is not in shared memory ({live.why_not_shared}): use another transport"
        raise ConflictError(f"{shard.what} {reason}", not_shared=True)
    if shard.spec.asynchronous:
        reason = "cannot be mapped: its newest version changes while work items read it. Use another transport"
        raise ConflictError(f"{shard.what} {reason}", not_shared=True)
    segment = shard_pb2.SharedSegment(file=session.offer(live.file.shared), size_bytes=shard.size_bytes)
    return shard_pb2.LocateShardResponse(version=version, segment=segment)


def open_gradient_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.OpenGradientBufferRequest
) -> shard_pb2.OpenGradientBufferResponse:
    """Makes a shared gradient buffer. Raises as ``ShmSession.open_gradient_buffer`` does."""
    if (relayed := shm.find_relay_session(request.transport_id, named_identity(request))) is not None:
        session, at = relayed
        number, gradient_buffer = session.open_gradient_buffer(
            at.run.shard(request.unit, request.start_bytes), BufferQuota(0)
        )
    else:
        store.lease.check()
        run = store.exact_run(request)
        session = shm.session(request.transport_id, run.identity)
        shard = run.primary(request.unit, request.start_bytes if request.HasField("start_bytes") else None)
        number, gradient_buffer = session.open_gradient_buffer(shard, shard.gradient.quota)
    return shard_pb2.OpenGradientBufferResponse(gradient_buffer_id=number, file=session.offer(gradient_buffer.file))


def close_shared_buffers(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.CloseSharedBuffersRequest
) -> shard_pb2.CloseSharedBuffersResponse:
    """Closes buffers of a session. Raises ConflictError if the session is not open."""
    relayed = shm.find_relay_session(request.transport_id, named_identity(request))
    session = relayed[0] if relayed else shm.session(request.transport_id, store.exact_run(request).identity)
    session.close_buffers(request.buffer_ids)
    return shard_pb2.CloseSharedBuffersResponse()


async def reduce_gradient_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.ReduceGradientBufferRequest, wait_s: float
) -> shard_pb2.ReduceGradientBufferResponse:
    """Makes the gradient in a shared gradient buffer one part of a contribution. Raises as ``Push.adopt`` does.

    Raises:
        AccessError: The sender does not prove the lease on the rank.
        DuplicateError: The request id was used for another request.
        NotFoundError: This server does not hold the run or the unit.
        ConflictError: The session is not open, or has no such gradient buffer.
    """
    header = request.header
    check_leases(store, header)
    if (relayed := shm.find_relay_session(request.transport_id, named_identity(header.context))) is not None:
        session, at = relayed
        return await at.push(header, session.gradient_buffer(request.gradient_buffer_id))
    # Checked as ReduceScatter: a push may be repeated over another transport, or from another gradient buffer.
    store.requests.check_content("ReduceScatter", header.context, header)
    store.lease.check()
    run = store.exact_run(header.context)
    gradient_buffer = shm.session(request.transport_id, run.identity).gradient_buffer(request.gradient_buffer_id)
    shard = run.primary(header.unit, header.start_bytes, header.stop_bytes)
    duplicate = await Push(store, run, shard, header).adopt(gradient_buffer, wait_s)
    return shard_pb2.ReduceGradientBufferResponse(
        duplicate=duplicate, version=header.context.step, adopted=gradient_buffer.claimed
    )


def relay_unit(shm: ShmTransport, request: shard_pb2.RelayUnitRequest) -> shard_pb2.RelayUnitResponse:
    """Relays a unit from now on. Raises as ``RelayedRun.name_unit`` does."""
    session, at = shm.relay_session(request)
    segments = [
        shard_pb2.SharedSegment(file=session.offer(cached.file.shared), size_bytes=cached.size_bytes)
        for cached in at.run.name_unit(request)
    ]
    return shard_pb2.RelayUnitResponse(segments=segments)


async def read_relayed(
    shm: ShmTransport, request: shard_pb2.ReadRelayedRequest, wait_s: float
) -> shard_pb2.ReadRelayedResponse:
    """Waits until a cached shard has a version. Raises as ``CachedShard.read`` does."""
    _, at = shm.relay_session(request)
    cached = at.run.cached(request.unit, request.start_bytes)
    return await cached.read(request.version, wait_s, accepts_deltas=request.accepts_deltas)


def skip_relay(shm: ShmTransport, request: shard_pb2.SkipRelayRequest) -> shard_pb2.SkipRelayResponse:
    """Waits for no gradient of the trainer's group in a step."""
    _, at = shm.relay_session(request)
    at.skip(request.step)
    return shard_pb2.SkipRelayResponse()


async def open_staging_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.OpenStagingBufferRequest
) -> shard_pb2.OpenStagingBufferResponse:
    """Copies the gradient of a partition into a staging buffer of the trainer.

    Raises:
        InvalidRequestError: The range is not the partition's.
        StaleEpochError: The lease is over, or a later lease has staged the partition.
        StepStateError: The step is not prepared, or its gradient has been discarded.
        CapacityError: The buffer does not fit the memory budget or the shared memory.
        ConflictError: The optimizer's state is not in shared memory, or the buffer was evicted.
    """
    read = request.partition
    store.lease.check()
    run = store.exact_run(read.context)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(read.unit, read.start_bytes, read.stop_bytes)
    generation = partition_requests.check_lease(run, shard, read)
    if shard.partitions.staged_epoch(read.dp_rank) > read.context.epoch:
        raise StaleEpochError(
            f"partition of {shard.what}, rank {read.dp_rank}: the lease is over, a later lease has staged it"
        )
    state = shard.partitions.states.get(read.dp_rank, PartitionState())
    if state.pooled:
        raise ConflictError(
            f"the optimizer state of {shard.what}, rank {read.dp_rank}, is not in shared memory: stream the partition"
        )
    number, staging_buffer = session.acquire_staging_buffer(shard, read.dp_rank)
    new_state = staging_buffer.allocate_state(state.data.numel()) if state.shared is not None else None
    present = partition_requests.mean_gradients(shard, shard.layout.segments(read.start_bytes, read.stop_bytes))

    def compute_copy() -> None:
        for segment, gradient in present:
            start = segment.start_bytes - read.start_bytes
            staging_buffer.gradients[start : start + segment.size_bytes].view(gradient.dtype).copy_(gradient)

    await store.memory.in_thread(compute_copy)
    # During the copy, the gradient may have been discarded and its memory reused.
    if partition_requests.check_lease(run, shard, read) != generation:
        raise StepStateError(f"the gradient of step {read.context.step} of {shard.what} has been discarded")
    staging_buffer.check_open()
    header = shard_pb2.ReadPartitionHeader(
        version=read.context.step,
        generation=generation,
        gradient_indices=[segment.parameter_index for segment, _ in present],
        state=state.tensors,
    )
    return shard_pb2.OpenStagingBufferResponse(
        header=header,
        staging_buffer_id=number,
        file=session.offer(staging_buffer.file),
        state_file="" if state.shared is None else session.offer(state.shared),
        new_state_file="" if new_state is None else session.offer(new_state),
    )


async def stage_staging_buffer(
    store: ShardStore, shm: ShmTransport, request: shard_pb2.StageStagingBufferRequest
) -> shard_pb2.StageStagingBufferResponse:
    """Stages the values and state in a staging buffer. Raises as ``partitions.stage`` does.

    Raises:
        ConflictError: The buffer is closed, or the state does not fit it.
    """
    header = request.header
    store.lease.check()
    run = store.exact_run(header.context)
    session = shm.session(request.transport_id, run.identity)
    shard = run.primary(header.unit, header.start_bytes, header.stop_bytes)
    staging_buffer = session.staging_buffer(request.staging_buffer_id, shard, header.dp_rank)
    what = f"partition of {shard.what}, rank {header.dp_rank}"
    partition_requests.check_current(run, shard, header, what)
    segments = partition_requests.updated_segments(shard, header, what)
    partition_requests.check_state(shard, header, what)
    values = [
        staging_buffer.values[segment.start_bytes - header.start_bytes : segment.stop_bytes - header.start_bytes]
        for segment in segments
    ]

    async def accept() -> None:
        async with run.exclusively():
            # The lease or the gradient may have changed while the values were checked, so both are checked again.
            partition_requests.check_current(run, shard, header, what)
            staging_buffer.check_open()
            state = _written_state(shard, staging_buffer, header)
            staged = StagedPartition(header.context.epoch, segments, values, state, staging_buffer.release)
            shard.partitions.stage(header.dp_rank, staged)
            staging_buffer.mark_staged()

    await store.memory.in_thread(partial(partition_requests.compute_check_finite, shard, segments, values, what))
    await uninterrupted(accept())
    return shard_pb2.StageStagingBufferResponse(version=header.context.step)


def _written_state(
    shard: UnitShard, staging_buffer: SharedStagingBuffer, header: shard_pb2.StagePartitionHeader
) -> PartitionState:
    before = shard.partitions.states.get(header.dp_rank, PartitionState())
    if list(header.state) != list(before.tensors):
        raise ConflictError(
            f"the optimizer state of {shard.what}, rank {header.dp_rank}, now has other tensors: stream the partition"
        )
    shared = staging_buffer.written_state(state_places(header.state)[1])
    data = PartitionState().data if shared is None else shared.tensor
    return PartitionState(tuple(header.state), data, shared, staging_buffer, header.context.request_id)
