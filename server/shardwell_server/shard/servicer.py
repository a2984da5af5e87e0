"""The rpcs of ShardService: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from google.protobuf.message import Message

from shardwell_server.serving.call_server import listen
from shardwell_server.serving.rpc import Call
from shardwell_server.shard.concurrency import first_of, uninterrupted
from shardwell_server.shard.requests import (
    backups,
    client_streams,
    inspection,
    partition_requests,
    pushes,
    steps,
    weight_reads,
)
from shardwell_server.shard.requests.checkpoints import CheckpointRequests
from shardwell_server.shard.requests.client_streams import IncomingMessages, StandingStreams
from shardwell_server.shard.requests.inspection import ServerProcess
from shardwell_server.shard.requests.peers import GrpcPeers
from shardwell_server.shard.requests.relay import Relay
from shardwell_server.shard.requests.replication import Replicator
from shardwell_server.shard.shard_spec import Role, ShardSpec
from shardwell_server.shard.state.runs import CoordinatorTerm, HostedRun
from shardwell_server.shard.state.shard_store import ShardStore, named_identity
from shardwell_server.shard.transports import batch_requests, shm_transport
from shardwell_server.shard.transports.server_transport import ServerTransports, measurement_chunks
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_server.shard.transports.socket_transport import SocketTransport
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.storage import CheckpointRoots
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import ConflictError, InvalidRequestError, NotFoundError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.topology import checked_groups
from shardwell_wire.security.tls import Tls
from shardwell_wire.security.tokens import INITIALIZER
from shardwell_wire.v1 import common_pb2, shard_pb2

_ABORT_WAIT_S = 5.0
"""Longest time in which storage may answer when a checkpoint is aborted, in seconds."""


class ShardServicer:
    """Serves ``shardwell_wire.v1.ShardService``. Used on the event loop.

    Args:
        process: This process of the server.
        term: The term of the server's coordinator.
        transports: The transports that the server offers besides gRPC.
        checkpoint_roots: The folders in which checkpoints may be opened. None: any.
        relay: Relays for the trainers of this host. None: this server offers no shared memory.
    """

    def __init__(
        self,
        process: ServerProcess,
        store: ShardStore,
        term: CoordinatorTerm,
        transports: ServerTransports,
        peers: GrpcPeers,
        checkpoint_roots: CheckpointRoots | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._relay = relay
        self._process, self._store, self._term, self._transports = process, store, term, transports
        self._checkpoints = CheckpointRequests(process.server_id, store, checkpoint_roots or CheckpointRoots())
        self._replicator = Replicator(store, peers)
        self._stopping = asyncio.Event()
        self._standing = StandingStreams()
        self._started_s = asyncio.get_running_loop().time()

    def run_id_of(self, name: str) -> str:
        """Returns the id of the run that has a name now. Empty: this server holds nothing of such a run."""
        return next((run.identity.run_id for run in reversed(self._store.runs.values()) if run.name == name), "")

    def end_standing_streams(self) -> None:
        """Ends all transport sessions and pins, now and in future, because the server is about to stop."""
        self._stopping.set()

    async def close(self) -> None:
        """Ends transfers to other servers."""
        await self._replicator.close()

    # ---- rpcs of the coordinator ----

    async def ReserveUnit(self, request: shard_pb2.ReserveUnitRequest, call: Call) -> shard_pb2.ReserveUnitResponse:
        await self._admit(request, call)
        spec = ShardSpec(
            run=named_identity(request.context),
            layout=UnitLayout.from_proto(request.unit),
            index=request.unit_index,
            start_bytes=request.start_bytes,
            stop_bytes=request.stop_bytes,
            dp=request.dp,
            placement=request.placement,
            reduction_groups=checked_groups(request.dp, request.reduction_groups),
            asynchronous=request.asynchronous,
            keep_versions=request.keep_versions,
        )
        role = Role.BACKUP if request.role == shard_pb2.SHARD_ROLE_BACKUP else Role.PRIMARY
        await self._checkpoints.stop_loading(request.context.run_id, spec.unit)
        shard = self._store.reserve(spec, role)
        return shard_pb2.ReserveUnitResponse(free_bytes=self._store.memory.free_bytes, version=shard.version)

    async def ReleaseUnit(self, request: shard_pb2.ReleaseUnitRequest, call: Call) -> shard_pb2.ReleaseUnitResponse:
        await self._admit(request, call)
        await self._checkpoints.stop_loading(request.context.run_id, request.unit)
        self._store.release(request.context, request.unit, request.placement)
        return shard_pb2.ReleaseUnitResponse(free_bytes=self._store.memory.free_bytes)

    async def PublishUnit(self, request: shard_pb2.PublishUnitRequest, call: Call) -> shard_pb2.PublishUnitResponse:
        await self._term.check(request.coordinator_epoch)
        self._check_request_id(call, request.context, request)
        run = self._store.exact_run(request.context)
        return shard_pb2.PublishUnitResponse(version=run.publish(request.unit, request.context.epoch))

    async def Fence(self, request: shard_pb2.FenceRequest, call: Call) -> shard_pb2.FenceResponse:
        run = await self._coordinated(request, call)
        async with run.exclusively():
            steps.fence(run, request)
        return shard_pb2.FenceResponse()

    async def PrepareStep(self, request: shard_pb2.PrepareStepRequest, call: Call) -> shard_pb2.PrepareStepResponse:
        run = await self._coordinated(request, call)
        async with run.exclusively():
            return await steps.prepare(run, request, self._replicator)

    async def ConfirmPartitions(
        self, request: shard_pb2.ConfirmPartitionsRequest, call: Call
    ) -> shard_pb2.ConfirmPartitionsResponse:
        run = await self._coordinated(request, call)
        async with run.exclusively():
            return await partition_requests.confirm(run, request, self._replicator)

    async def PrepareUpdate(
        self, request: shard_pb2.PrepareUpdateRequest, call: Call
    ) -> shard_pb2.PrepareUpdateResponse:
        run = await self._coordinated(request, call)
        async with run.exclusively():
            return await steps.prepare_update(run, request, self._replicator)

    async def Update(self, request: shard_pb2.UpdateRequest, call: Call) -> shard_pb2.UpdateResponse:
        run = await self._coordinated(request, call)

        async def update() -> shard_pb2.UpdateResponse:
            async with run.exclusively():
                return await steps.update(run, request)

        response = await uninterrupted(update())  # a started update is finished even if the rpc is cancelled
        for backup in response.stale_backups:
            backup.server_id = self._process.server_id
        return response

    async def CopyShard(self, request: shard_pb2.CopyShardRequest, call: Call) -> shard_pb2.CopyShardResponse:
        run = await self._coordinated(request, call)
        version, copied_bytes = await self._replicator.copy(run, request, call.remaining_s())
        return shard_pb2.CopyShardResponse(version=version, copied_bytes=copied_bytes)

    async def PromoteShards(
        self, request: shard_pb2.PromoteShardsRequest, call: Call
    ) -> shard_pb2.PromoteShardsResponse:
        run = await self._coordinated(request, call)
        async with run.exclusively():
            await backups.promote(run, request)
        return shard_pb2.PromoteShardsResponse()

    async def ReleaseShards(
        self, request: shard_pb2.ReleaseShardsRequest, call: Call
    ) -> shard_pb2.ReleaseShardsResponse:
        try:
            run = await self._coordinated(request, call)
        except NotFoundError:  # nothing of the run is here
            return shard_pb2.ReleaseShardsResponse(free_bytes=self._store.memory.free_bytes)
        async with run.exclusively():
            backups.release(self._store, run, request)
        return shard_pb2.ReleaseShardsResponse(free_bytes=self._store.memory.free_bytes)

    async def HashShards(self, request: shard_pb2.HashShardsRequest, call: Call) -> shard_pb2.HashShardsResponse:
        run = await self._coordinated(request, call)
        async with run.exclusively():
            return await backups.hash_shards(run, request)

    async def DropRun(self, request: shard_pb2.DropRunRequest, call: Call) -> shard_pb2.DropRunResponse:
        await self._admit(request, call)
        if not request.context.run_id:
            raise InvalidRequestError(
                f"run_id is empty: set the id of run {request.context.run!r}, which ListRuns returns"
            )
        self._checkpoints.forget(request.context.run_id)
        return shard_pb2.DropRunResponse(freed_bytes=await self._store.drop(request.context.run_id))

    async def BeginCheckpoint(
        self, request: shard_pb2.BeginCheckpointRequest, call: Call
    ) -> shard_pb2.BeginCheckpointResponse:
        run = await self._coordinated(request, call)
        await self._checkpoints.begin(run, request)
        return shard_pb2.BeginCheckpointResponse()

    async def DescribeCheckpoint(
        self, request: shard_pb2.DescribeCheckpointRequest, call: Call
    ) -> shard_pb2.DescribeCheckpointResponse:
        await self._coordinated(request, call)
        return await self._checkpoints.describe(request, call.remaining_s(request.wait_s))

    async def AbortCheckpoint(
        self, request: shard_pb2.AbortCheckpointRequest, call: Call
    ) -> shard_pb2.AbortCheckpointResponse:
        await self._admit(request, call)
        await self._checkpoints.abort(request, call.remaining_s(_ABORT_WAIT_S))
        return shard_pb2.AbortCheckpointResponse()

    async def BeginRestore(self, request: shard_pb2.BeginRestoreRequest, call: Call) -> shard_pb2.BeginRestoreResponse:
        await self._admit(request, call)
        await self._checkpoints.begin_restore(request)
        return shard_pb2.BeginRestoreResponse(free_bytes=self._store.memory.free_bytes)

    async def LoadShards(self, request: shard_pb2.LoadShardsRequest, call: Call) -> shard_pb2.LoadShardsResponse:
        run = await self._coordinated(request, call)
        return await self._checkpoints.load(run, request, call.remaining_s(request.wait_s))

    # ---- rpcs of other shard servers ----

    async def ReceiveShardState(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.ReceiveShardStateResponse:
        incoming = IncomingMessages(stream, shard_pb2.ReceiveShardStateRequest)
        header = await incoming.header(shard_pb2.ReceiveShardStateHeader, call.check)
        return await backups.receive_state(self._store, header, incoming)

    async def ReplicateStep(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.ReplicateStepResponse:
        incoming = IncomingMessages(stream, shard_pb2.ReplicateStepRequest)
        header = await incoming.header(shard_pb2.ReplicateStepHeader, call.check)
        return await backups.receive_step(self._store, header, incoming, call.remaining_s())

    async def ConfirmBackups(
        self, request: shard_pb2.ConfirmBackupsRequest, call: Call
    ) -> shard_pb2.ConfirmBackupsResponse:
        return await backups.confirm(self._store, request)

    # ---- rpcs of trainers ----

    async def InitializeUnit(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.InitializeUnitResponse:
        incoming = IncomingMessages(stream, shard_pb2.InitializeUnitRequest)
        header = await incoming.header(shard_pb2.InitializeUnitHeader, call.check)
        self._store.check_lease(header.context, INITIALIZER)
        self._check_request_id(call, header.context, header)
        self._store.lease.check()
        shard = self._store.exact_run(header.context).primary(header.unit, header.start_bytes, header.stop_bytes)
        await client_streams.receive(self._store, shard, header, incoming, call.remaining_s())
        return shard_pb2.InitializeUnitResponse(version=shard.version)

    async def Gather(self, request: shard_pb2.GatherRequest, call: Call) -> AsyncIterator[bytes]:
        run, shard = weight_reads.requested_shard(self._store, request)
        async with weight_reads.reading(self._store, run, shard, request, call.remaining_s()) as found:
            encoder = chunk_streams.StreamEncoder(shard_pb2.GatherResponse(header=found.header), found.size_bytes)
            size = max(request.chunk_bytes or chunk_streams.DEFAULT_CHUNK_BYTES, chunk_streams.MIN_CHUNK_BYTES)
            for start in range(0, max(found.size_bytes, 1), size):
                async with self._message(call, min(size, found.size_bytes)):
                    found.source.check()
                    yield encoder.encode([found.memory()[start : start + size]])
                    fault_points.reach("server.gather.middle")
            self._store.traffic.gathered_bytes += found.size_bytes

    async def ReduceScatter(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.ReduceScatterResponse:
        incoming = IncomingMessages(stream, shard_pb2.ReduceScatterRequest)
        header = await incoming.header(shard_pb2.ReduceScatterHeader, call.check)
        return await pushes.push(self._store, header, incoming, call.remaining_s())

    async def ReadPartition(self, request: shard_pb2.ReadPartitionRequest, call: Call) -> AsyncIterator[bytes]:
        self._store.check_lease(request.context, request.dp_rank)
        messages = partition_requests.read(self._store, request, call.remaining_s())
        async with aclosing(messages):
            while True:
                async with self._message(call, chunk_streams.DEFAULT_CHUNK_BYTES):
                    if (message := await anext(messages, None)) is None:
                        return
                    yield message

    async def StagePartition(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.StagePartitionResponse:
        incoming = IncomingMessages(stream, shard_pb2.StagePartitionRequest)
        header = await incoming.header(shard_pb2.StagePartitionHeader, call.check)
        self._store.check_lease(header.context, header.dp_rank)
        self._check_request_id(call, header.context, header)
        return await partition_requests.stage(self._store, header, incoming)

    async def OpenStagingBuffer(
        self, request: shard_pb2.OpenStagingBufferRequest, call: Call
    ) -> shard_pb2.OpenStagingBufferResponse:
        self._store.check_lease(request.partition.context, request.partition.dp_rank)
        return await shm_transport.open_staging_buffer(self._store, self._transports.find(ShmTransport), request)

    async def StageStagingBuffer(
        self, request: shard_pb2.StageStagingBufferRequest, call: Call
    ) -> shard_pb2.StageStagingBufferResponse:
        self._store.check_lease(request.header.context, request.header.dp_rank)
        self._check_request_id(call, request.header.context, request)
        return await shm_transport.stage_staging_buffer(self._store, self._transports.find(ShmTransport), request)

    async def PinVersion(
        self, request: shard_pb2.PinVersionRequest, call: Call
    ) -> AsyncIterator[shard_pb2.PinVersionResponse]:
        run = self._store.run(request.run, request.run_id)
        with self._standing.count(call.peer):
            async with weight_reads.pinning(run, request.version, call.remaining_s(request.wait_s)) as response:
                yield response
                await first_of(self._stopping, run.dropped)  # gRPC cancels this task when the client disconnects

    async def OpenTransport(
        self, request: shard_pb2.OpenTransportRequest, call: Call
    ) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        if request.HasField("relay"):
            async with self._relaying(request, call) as answer:
                yield answer
                await self._stopping.wait()
            return
        run = self._store.exact_run(request)
        session = self._transports.open(request.kind, run.identity, call.caller)
        with self._standing.count(call.peer):
            async with session as answer:
                yield answer
                await first_of(self._stopping, run.dropped)  # gRPC cancels this task when the trainer disconnects

    @asynccontextmanager
    async def _relaying(
        self, request: shard_pb2.OpenTransportRequest, call: Call
    ) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        """Relays for a trainer of this host while the block runs."""
        identity, shm = named_identity(request), self._transports.find(ShmTransport)
        if self._relay is None or request.kind != ShmTransport.kind:
            raise ConflictError(f"server {self._process.server_id!r} relays over the transport shm only")
        async with self._relay.joined(identity, request.relay) as relayed:
            with self._standing.count(call.peer):
                async with shm.open(identity, call.caller, relayed) as answer:
                    yield answer

    async def RelayUnit(self, request: shard_pb2.RelayUnitRequest, call: Call) -> shard_pb2.RelayUnitResponse:
        return shm_transport.relay_unit(self._transports.find(ShmTransport), request)

    async def ReadRelayed(self, request: shard_pb2.ReadRelayedRequest, call: Call) -> shard_pb2.ReadRelayedResponse:
        wait_s = call.remaining_s(request.wait_s)
        return await shm_transport.read_relayed(self._transports.find(ShmTransport), request, wait_s)

    async def SkipRelay(self, request: shard_pb2.SkipRelayRequest, call: Call) -> shard_pb2.SkipRelayResponse:
        return shm_transport.skip_relay(self._transports.find(ShmTransport), request)

    async def GatherBatch(self, request: shard_pb2.GatherBatchRequest, call: Call) -> AsyncIterator[bytes]:
        groups = batch_requests.groups(self._store, request, call.remaining_s(), call.peer)
        async with aclosing(groups):
            async for group in groups:
                async with self._message(call, group.response.ByteSize() + group.size_bytes):
                    yield chunk_streams.StreamEncoder(group.response, group.size_bytes).encode(group.memory())
                    fault_points.reach("server.gather.middle", response=group.response.DESCRIPTOR.name)

    async def MeasureTransport(self, request: shard_pb2.MeasureTransportRequest, call: Call) -> AsyncIterator[bytes]:
        encoder = chunk_streams.StreamEncoder(shard_pb2.MeasureTransportResponse(), request.size_bytes)
        for piece in measurement_chunks(request, chunk_streams.DEFAULT_CHUNK_BYTES):
            async with self._message(call, len(piece)):
                yield encoder.encode([piece])

    async def LocateShard(self, request: shard_pb2.LocateShardRequest, call: Call) -> shard_pb2.LocateShardResponse:
        shm = self._transports.find(ShmTransport)
        return await shm_transport.locate_shard(self._store, shm, request, call.remaining_s())

    async def OpenGradientBuffer(
        self, request: shard_pb2.OpenGradientBufferRequest, call: Call
    ) -> shard_pb2.OpenGradientBufferResponse:
        return shm_transport.open_gradient_buffer(self._store, self._transports.find(ShmTransport), request)

    async def CloseSharedBuffers(
        self, request: shard_pb2.CloseSharedBuffersRequest, call: Call
    ) -> shard_pb2.CloseSharedBuffersResponse:
        return shm_transport.close_shared_buffers(self._store, self._transports.find(ShmTransport), request)

    async def ReduceGradientBuffer(
        self, request: shard_pb2.ReduceGradientBufferRequest, call: Call
    ) -> shard_pb2.ReduceGradientBufferResponse:
        shm = self._transports.find(ShmTransport)
        return await shm_transport.reduce_gradient_buffer(self._store, shm, request, call.remaining_s())

    async def ReduceBatch(self, request: shard_pb2.ReduceBatchRequest, call: Call) -> shard_pb2.ReduceBatchResponse:
        wait_s = call.remaining_s()
        return await batch_requests.reduce_batch(self._store, self._transports, request, wait_s, call.peer)

    # ---- rpcs for inspection ----

    async def DescribeServer(
        self, request: shard_pb2.DescribeServerRequest, call: Call
    ) -> shard_pb2.DescribeServerResponse:
        uptime_s = asyncio.get_running_loop().time() - self._started_s
        response = inspection.describe_server(self._store, self._process, uptime_s)
        response.replicated_bytes = self._store.replicated_bytes
        visible = [run for run in response.runs if call.sees(RunIdentity(run.run, run.run_id))]
        del response.runs[:]
        response.runs.extend(visible)
        return response

    async def ListShards(self, request: shard_pb2.ListShardsRequest, call: Call) -> shard_pb2.ListShardsResponse:
        shards = self._store.run(request.run).shards.values()
        in_order = sorted(shards, key=lambda shard: (shard.index, shard.start_bytes))
        return shard_pb2.ListShardsResponse(shards=[inspection.summarize(shard) for shard in in_order])

    async def DescribeShard(
        self, request: shard_pb2.DescribeShardRequest, call: Call
    ) -> shard_pb2.DescribeShardResponse:
        start = request.start_bytes if request.HasField("start_bytes") else None
        return inspection.describe_shard(self._store.run(request.run).shard(request.unit, start))

    async def DescribeStep(self, request: shard_pb2.DescribeStepRequest, call: Call) -> shard_pb2.DescribeStepResponse:
        return inspection.describe_step(self._store.run(request.run))

    async def Peek(self, request: shard_pb2.PeekRequest, call: Call) -> shard_pb2.PeekResponse:
        return await inspection.peek(self._store, request)

    def _message(self, call: Call, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Counts one message of a stream until the client takes it. Counted twice, because gRPC makes a copy."""
        return self._store.memory.sending.message(2 * size_bytes, call.peer, call.remaining_s())

    async def _coordinated(self, request: Message, call: Call) -> HostedRun:
        """Returns the run of a request that ``_admit`` admits. Raises as that and ``ShardStore.exact_run``."""
        return self._store.exact_run(await self._admit(request, call))

    async def _admit(self, request: Message, call: Call) -> common_pb2.RequestContext:
        """Checks a request that only the current coordinator may send; returns its context.

        Raises:
            ShardwellError: As ``CoordinatorTerm.check``.
            DuplicateError: The request id was used for another request.
        """
        context: common_pb2.RequestContext = request.context  # type: ignore[attr-defined]
        await self._term.check(context.epoch)
        self._check_request_id(call, context, request)
        return context

    def _check_request_id(self, call: Call, context: common_pb2.RequestContext, content: Message) -> None:
        """Raises DuplicateError if the request id was used for another request."""
        self._store.requests.check_content(call.method, context, content)


def offered_transports(server_id: str, store: ShardStore, host: str, tls: Tls | None = None) -> ServerTransports:
    """Builds every transport that a server can offer besides gRPC, which is always available.

    Args:
        host: Host to listen on, without a port.
        tls: Encrypts the connections of the socket transport. None: they are not encrypted.
    """
    offered = ServerTransports(server_id)
    if store.memory.shared is not None:
        offered.add(ShmTransport(store.memory.shared, store.memory))
    offered.add(SocketTransport(store, listen(host), offered, tls))
    return offered
