"""The transport through memory that this trainer and a shard server of the same host both map.

Weights are read in place, gradients are written to shared gradient buffers, and optimizer partitions to shared staging
buffers. Messages, which carry no tensor data, go over rpcs or over the transport's control path.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from shardwell.transport.base import (
    GradientPart,
    NearlyDone,
    PreparedPush,
    PushedRange,
    ShardAddress,
    ShardRead,
    SharedTransport,
    ignore,
)
from shardwell.transport.grpc_transport import ShardClient
from shardwell.transport.partition_transfers import (
    PartitionLocation,
    PartitionSegment,
    SharedPartitionSegment,
    StagingBuffer,
    describe_state,
    read_request,
    stage_header,
)
from shardwell.transport.shared_vector import map_shared
from shardwell_wire.encoding.wire_dtypes import AS_STORED
from shardwell_wire.errors import StepStateError, UnavailableError
from shardwell_wire.host.shared_memory import NONCE_BYTES, PROOF_BYTES, opened, receive_descriptor, session_name
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

_MAX_PROOF_FILE_BYTES = 16 << 20


Control = Callable[[shard_pb2.ReduceGradientBufferRequest, float], shard_pb2.ReduceGradientBufferResponse]
"""``(request, timeout_s)``: sends a control message over the fastest stream transport."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientBuffer:
    """A shared gradient buffer: memory laid out like a shard, which its server maps too."""

    buffer_id: int
    """Identifies the buffer to the server."""
    memory: memoryview

    @classmethod
    def map(cls, buffer_id: int, descriptor: int, size_bytes: int) -> GradientBuffer:
        """Maps a buffer that the server created. Raises OSError if it cannot be mapped."""
        return cls(buffer_id, map_shared(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE))


ShardKey = tuple[str, int]
"""A shard of a server: name of the unit, and first byte of the shard in the unit's flat vector."""


class GradientBuffers:
    """The shared gradient buffers of one session: the free ones, and those with gradients of the step. Thread-safe.

    Args:
        create: Opens another buffer for a shard.
    """

    def __init__(self, create: Callable[[ShardKey], GradientBuffer]) -> None:
        self._create = create
        self._free: dict[ShardKey, list[GradientBuffer]] = defaultdict(list)
        self._used: dict[GradientBuffer, tuple[ShardKey, int]] = {}
        """Shard and rank of each buffer in use. After Ctrl-C or a failed push, some buffers are never pushed."""
        self._lock = threading.Lock()

    def acquire_free(self, shard: ShardKey, dp_rank: int) -> GradientBuffer | None:
        """Returns a free buffer for a rank's gradient. None: all are in use."""
        with self._lock:
            free = self._free[shard]
            if not free:
                return None
            buffer = free.pop()
            self._used[buffer] = shard, dp_rank
            return buffer

    def acquire(self, shard: ShardKey, dp_rank: int) -> GradientBuffer:
        """Returns a buffer for a rank's gradient: a free one, or a new one if all are in use."""
        if (buffer := self.acquire_free(shard, dp_rank)) is not None:
            return buffer
        buffer = self._create(shard)  # without the lock: this is an rpc
        with self._lock:
            self._used[buffer] = shard, dp_rank
        return buffer

    def release(self, buffer: GradientBuffer) -> None:
        """Makes one buffer free. Harmless if it is free already."""
        with self._lock:
            self._release(buffer)

    def release_rank(self, dp_rank: int | None = None) -> None:
        """Makes the buffers of one rank free, or of all ranks."""
        with self._lock:
            for buffer, (_, rank) in list(self._used.items()):
                if dp_rank is None or rank == dp_rank:
                    self._release(buffer)

    def take_excess(self, kept: int, of: int) -> list[int]:
        """Forgets some free buffers; returns their ids. Keeps the share ``kept / of`` of each shard's buffers."""
        with self._lock:
            taken = list[GradientBuffer]()
            for buffers in self._free.values():
                count = -(-len(buffers) * kept // of)
                taken += buffers[count:]
                del buffers[count:]
        return [buffer.buffer_id for buffer in taken]

    def close(self) -> None:
        """Forgets all buffers. One that a push still refers to stays mapped until the push ends."""
        with self._lock:
            self._free.clear()
            self._used.clear()

    def _release(self, buffer: GradientBuffer) -> None:
        shard, _ = self._used.pop(buffer, (None, None))
        if shard is not None:
            self._free[shard].append(buffer)


@dataclass(frozen=True, slots=True)
class _BufferedGradients:
    """Gradients in a shared gradient buffer, as the source for another buffer or for a stream. A ``GradientPart``."""

    shard: ShardAddress
    cut: PushedRange
    memory: memoryview
    wire_dtype = AS_STORED

    def write_to(self, memory: memoryview) -> None:
        memory[:] = self.memory

    def stream(self) -> AbstractContextManager[Sequence[memoryview]]:
        first = self.cut.start_bytes
        segments = self.shard.layout.packed_segments(self.cut.indices, first, self.cut.stop_bytes)
        return nullcontext([self.memory[at.start_bytes - first : at.stop_bytes - first] for at in segments])


class _BufferedPush(PreparedPush):
    """A push whose gradients are in a shared gradient buffer. The mapping outlives the session."""

    __slots__ = ("buffer", "transport")

    is_shared = True

    def __init__(self, push: PreparedPush, transport: ShmTransport, buffer: GradientBuffer) -> None:
        self.shard, self.cut, self.header = push.shard, push.cut, push.header
        self.transport, self.buffer = transport, buffer

    @property
    def gradients(self) -> GradientPart:  # type: ignore[override]  # an attribute in the base class: no call
        return _BufferedGradients(self.shard, self.cut, self.buffer.memory)


class ShmTransport(SharedTransport):
    """Moves bytes through shared memory, within a session that ends with its rpc.

    Args:
        client: Calls the server. The caller closes it.
        control: Sends control messages. None: they are rpcs.
        timeout_s: Deadline for opening the session.
        retry_for_s: How long the opening is repeated while the server is unavailable. None: for ``timeout_s``.
        relay: What this trainer tells a relay. None: the session is for the server's own shards.

    Raises:
        UnavailableError: This process cannot see the server's memory.
        ShardwellError: The server does not offer the transport.
    """

    name = "shm"
    kind = common_pb2.TRANSPORT_KIND_SHM

    def __init__(
        self,
        client: ShardClient,
        run: RunIdentity,
        control: Control | None,
        *,
        timeout_s: float,
        retry_for_s: float | None = None,
        relay: shard_pb2.RelaySession | None = None,
    ) -> None:
        self._client, self._run, self._control = client, run, control
        request = shard_pb2.OpenTransportRequest(run=run.name, run_id=run.run_id, kind=self.kind, relay=relay)
        self.session = client.open("OpenTransport", request, timeout_s=timeout_s, retry_for_s=retry_for_s)
        try:
            self._proof = self._verify(self.session.answer.shm)
            self.session_id = session_name(self.session.answer.transport_id, self._proof[: PROOF_BYTES + NONCE_BYTES])
        except BaseException:
            self.session.end()
            raise
        self._sizes: dict[ShardKey, int] = {}
        """Size of the gradient buffers of each shard."""
        self._gradient_buffers = GradientBuffers(self._open_gradient_buffer)
        self._staging_buffers: dict[tuple[str, int, int], StagingBuffer] = {}
        """Keyed by unit, dp rank and first byte."""
        self._ids_to_close: list[int] = []
        """Buffers that this trainer has forgotten and the server may still have."""

    def _verify(self, offer: shard_pb2.SharedMemoryOffer) -> mmap.mmap:
        """Maps the file that the server offers; raises UnavailableError unless the file contains the server's proof.

        The socket may be another server's: on a host of the same name, or in another container.
        """
        self._offer = offer
        try:
            with opened(self._receive(offer.file, max_bytes=_MAX_PROOF_FILE_BYTES)) as descriptor:
                proof = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"{self._client.peer} offers shared memory at {offer.socket}, but {error}"
            ) from error
        if len(offer.proof) != PROOF_BYTES or proof[:PROOF_BYTES] != offer.proof:
            raise UnavailableError(
                f"{self._client.peer} offers shared memory, but {offer.socket} on this host is not its socket"
            )
        return proof

    def open_file(self, name: str, /, *, size_bytes: int) -> int:
        return self._receive(name, size_bytes=size_bytes)

    def _receive(self, name: str, **limits: int) -> int:
        offer = self._offer
        return receive_descriptor(offer.socket, offer.user_id, offer.token, name, **limits)

    # ---- weights ----

    def fetch(self, read: ShardRead, *, wait_s: float, timeout_s: float, nearly_done: NearlyDone = ignore) -> int:
        """See ``Transport``. The shard must be mapped. ``nearly_done`` is not called, because nothing is streamed."""
        found = self.locate(read.shard, read.version, timeout_s=min(wait_s, timeout_s)).version
        return read.shard.copy_to(found, read.target)

    def locate(self, shard: ShardAddress, version: int | None, *, timeout_s: float) -> shard_pb2.LocateShardResponse:
        request = shard_pb2.LocateShardRequest(
            run=self._run.name,
            run_id=self._run.run_id,
            unit=shard.layout.unit,
            version=version,
            transport_id=self.session_id,
            start_bytes=shard.start_bytes,
        )
        answer: shard_pb2.LocateShardResponse = self._client.call("LocateShard", request, timeout_s=timeout_s)
        return answer

    # ---- gradients ----

    def prepare_push(self, push: PreparedPush) -> _BufferedPush:
        """See ``SharedTransport``. Copies the gradients into a shared gradient buffer."""
        cut = push.cut
        self._sizes[cut.shard_key] = cut.stop_bytes - cut.start_bytes
        return self._write(push, self._gradient_buffers.acquire(cut.shard_key, push.header.common.dp_rank))

    def prepare_push_at_once(self, push: PreparedPush) -> _BufferedPush | None:
        buffer = self._gradient_buffers.acquire_free(push.cut.shard_key, push.header.common.dp_rank)
        return None if buffer is None else self._write(push, buffer)

    def _write(self, push: PreparedPush, buffer: GradientBuffer) -> _BufferedPush:
        push.gradients.write_to(buffer.memory)
        return _BufferedPush(push, self, buffer)

    def push(
        self, prepared: PreparedPush, *, timeout_s: float, nearly_done: NearlyDone = ignore
    ) -> shard_pb2.ReduceGradientBufferResponse:
        """See ``Transport``. Returns the server's answer. Copies the gradients if another session prepared the push.

        Also copies them if the buffer still holds a contribution of a work item that this trainer has lost. The server
        drops that contribution when it learns that the item's lease is over, which may be after this trainer has begun
        another item.

        Raises:
            CapacityError: The server has no memory for another gradient buffer.
            ConflictError: The session is closed.
        """
        while True:
            if not isinstance(prepared, _BufferedPush) or prepared.transport is not self:
                prepared = self.prepare_push(prepared)
            answer: shard_pb2.ReduceGradientBufferResponse
            request = shard_pb2.ReduceGradientBufferRequest(
                header=prepared.cut.header(prepared.header),
                transport_id=self.session_id,
                gradient_buffer_id=prepared.buffer.buffer_id,
            )
            try:
                if self._control is None:
                    answer = self._client.call("ReduceGradientBuffer", request, timeout_s=timeout_s)
                else:
                    answer = self._control(request, timeout_s)
                if not answer.adopted:
                    self._gradient_buffers.release(prepared.buffer)
                return answer
            except StepStateError as error:
                if error.data.get("buffer") != "claimed":
                    raise
            prepared = self.prepare_push(prepared)  # the former buffer stays in use, so this takes another one

    def add_to_batch(
        self, prepared: PreparedPush, request: shard_pb2.ReduceBatchRequest
    ) -> shard_pb2.BatchedPart | None:
        if not isinstance(prepared, _BufferedPush) or prepared.transport is not self:
            return None
        request.transport_id = self.session_id
        return request.parts.add(gradient_buffer_id=prepared.buffer.buffer_id)

    def finish_batched(self, prepared: PreparedPush, result: shard_pb2.BatchedPartResult) -> None:
        if isinstance(prepared, _BufferedPush) and not result.status and not result.adopted:
            self._gradient_buffers.release(prepared.buffer)

    def _open_gradient_buffer(self, shard: ShardKey) -> GradientBuffer:
        unit, start_bytes = shard
        request = shard_pb2.OpenGradientBufferRequest(
            run=self._run.name,
            run_id=self._run.run_id,
            unit=unit,
            transport_id=self.session_id,
            start_bytes=start_bytes,
        )
        answer: shard_pb2.OpenGradientBufferResponse = self._client.call("OpenGradientBuffer", request)
        size_bytes = self._sizes[shard]
        with self._mapping(), opened(self.open_file(answer.file, size_bytes=size_bytes)) as descriptor:
            return GradientBuffer.map(answer.gradient_buffer_id, descriptor, size_bytes)

    @contextmanager
    def _mapping(self) -> Iterator[None]:
        """Raises UnavailableError if the server does not send a file that it named, because it or the session ended."""
        try:
            yield
        except (FileNotFoundError, TimeoutError) as error:
            raise UnavailableError(
                f"{self._client.peer} did not send {error.filename}, a file of its shared memory: {error.strerror}"
            ) from error

    def release(self, dp_rank: int | None = None) -> None:
        self._gradient_buffers.release_rank(dp_rank)

    def free_memory(self, kept: int, of: int) -> None:
        staging, self._staging_buffers = self._staging_buffers, {}
        self._ids_to_close += self._gradient_buffers.take_excess(kept, of)
        self._ids_to_close += [each.buffer_id for each in staging.values()]
        if self._ids_to_close:
            request = shard_pb2.CloseSharedBuffersRequest(
                run=self._run.name, run_id=self._run.run_id, transport_id=self.session_id, buffer_ids=self._ids_to_close
            )
            self._client.call("CloseSharedBuffers", request)
            self._ids_to_close.clear()

    # ---- optimizer partitions ----

    def read_partition(
        self, shard: ShardAddress, location: PartitionLocation, context: common_pb2.RequestContext, *, timeout_s: float
    ) -> SharedPartitionSegment:
        request = shard_pb2.OpenStagingBufferRequest(
            partition=read_request(location, context), transport_id=self.session_id
        )
        answer: shard_pb2.OpenStagingBufferResponse = self._client.call(
            "OpenStagingBuffer", request, timeout_s=timeout_s
        )
        window = shard.require_window()
        values = window.bytes[location.start_bytes - shard.start_bytes : location.stop_bytes - shard.start_bytes]
        key = location.layout.unit, location.dp_rank, location.start_bytes
        with self._mapping():
            segment = self._staging_buffers.setdefault(key, StagingBuffer(location, self.open_file)).lay_out(
                answer, values
            )
        window.check(answer.header.version)
        return segment

    def stage_partition(
        self,
        location: PartitionLocation,
        context: common_pb2.RequestContext,
        segment: PartitionSegment,
        *,
        timeout_s: float,
    ) -> bool:
        state = describe_state(location, segment)
        if not isinstance(segment, SharedPartitionSegment) or not segment.write_back(state):
            return False
        request = shard_pb2.StageStagingBufferRequest(
            header=stage_header(location, context, segment, state),
            transport_id=self.session_id,
            staging_buffer_id=segment.staging_buffer_id,
        )
        self._client.call("StageStagingBuffer", request, timeout_s=timeout_s)
        return True

    # ---- session ----

    def measure(self, *, timeout_s: float) -> float:
        """See ``Transport``. Copies some shared memory."""
        target = bytearray(len(self._proof))
        for _ in range(2):  # the first copy also faults the pages in
            started = time.perf_counter()
            target[:] = memoryview(self._proof)
            elapsed_s = time.perf_counter() - started
        return len(target) / elapsed_s

    def close(self) -> None:
        """See ``Transport``. The server releases the buffers, and this process unmaps them."""
        self.session.end()
        self._gradient_buffers.close()
        self._staging_buffers.clear()
