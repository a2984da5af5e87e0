"""The rpcs of ShardService: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing

from google.protobuf.message import Message

from shardwell_server.rpc import Call
from shardwell_server.shard.concurrency import first_of, uninterrupted
from shardwell_server.shard.requests import (
    initial_values,
    inspection,
    partition_transfers,
    staging_buffer_transfers,
    steps,
    transfers,
)
from shardwell_server.shard.requests.pins import holding
from shardwell_server.shard.requests.standing import StandingStreams
from shardwell_server.shard.requests.streams import IncomingMessages
from shardwell_server.shard.state.coordinator_term import CoordinatorTerm
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.transports.offer import TransportOffer
from shardwell_server.shard.transports.shm_transport import ShmTransports
from shardwell_wire import codec
from shardwell_wire.errors import ConflictError, InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2


class ShardServicer:
    """Serves ``shardwell_wire.v1.ShardService``.

    Args:
        server_id: Name of this server.
        incarnation: Of this process.
        store: What it holds.
        term: Which coordinator it obeys.
        transports: What it offers beside the rpcs.
    """

    def __init__(
        self,
        server_id: str,
        incarnation: str,
        store: ShardStore,
        term: CoordinatorTerm,
        transports: Mapping[int, TransportOffer] | None = None,
    ) -> None:
        self._server_id, self._incarnation, self._store, self._term = server_id, incarnation, store, term
        self._transports = transports or {}
        self._transports_end = asyncio.Event()
        self._standing = StandingStreams()
        self._started_s = asyncio.get_running_loop().time()

    def end_transports(self) -> None:
        """Closes every transport, now and from now on: the server is about to stop."""
        self._transports_end.set()

    # ---- the coordinator's ----

    async def ReserveUnit(self, request: shard_pb2.ReserveUnitRequest, call: Call) -> shard_pb2.ReserveUnitResponse:
        await self._term.check(request.context.epoch)
        layout = UnitLayout.from_proto(request.unit)
        self._note(call, request.context, request)
        shard = self._store.reserve(
            request.context,
            layout,
            request.unit_index,
            request.start_bytes,
            request.stop_bytes,
            request.dp,
            request.placement,
        )
        return shard_pb2.ReserveUnitResponse(free_bytes=self._store.memory.free_bytes, version=shard.version)

    async def ReleaseUnit(self, request: shard_pb2.ReleaseUnitRequest, call: Call) -> shard_pb2.ReleaseUnitResponse:
        await self._term.check(request.context.epoch)
        self._note(call, request.context, request)
        self._store.release(request.context, request.unit, request.placement)
        return shard_pb2.ReleaseUnitResponse(free_bytes=self._store.memory.free_bytes)

    async def PublishUnit(self, request: shard_pb2.PublishUnitRequest, call: Call) -> shard_pb2.PublishUnitResponse:
        await self._term.check(request.coordinator_epoch)
        self._note(call, request.context, request)
        shard = self._store.exact_run(request.context).shard(request.unit)
        return shard_pb2.PublishUnitResponse(version=shard.values.publish(request.context.epoch))

    async def Fence(self, request: shard_pb2.FenceRequest, call: Call) -> shard_pb2.FenceResponse:
        run = await self._coordinated(request, call)

        async def work() -> None:
            steps.fence(run, request)

        await run.alone(work)
        return shard_pb2.FenceResponse()

    async def PrepareStep(self, request: shard_pb2.PrepareStepRequest, call: Call) -> shard_pb2.PrepareStepResponse:
        run = await self._coordinated(request, call)
        return await run.alone(lambda: steps.prepare(run, self._store.in_thread, request))

    async def ConfirmPartitions(
        self, request: shard_pb2.ConfirmPartitionsRequest, call: Call
    ) -> shard_pb2.ConfirmPartitionsResponse:
        run = await self._coordinated(request, call)
        return await run.alone(lambda: partition_transfers.confirm(run, request))

    async def PrepareUpdate(
        self, request: shard_pb2.PrepareUpdateRequest, call: Call
    ) -> shard_pb2.PrepareUpdateResponse:
        run = await self._coordinated(request, call)
        await run.alone(lambda: steps.prepare_update(run, self._store.in_thread, request))
        return shard_pb2.PrepareUpdateResponse()

    async def Update(self, request: shard_pb2.UpdateRequest, call: Call) -> shard_pb2.UpdateResponse:
        run = await self._coordinated(request, call)
        # Once begun an update is finished, also when the coordinator is gone.
        version = await uninterrupted(run.alone(lambda: steps.update(run, self._store.in_thread, request)))
        return shard_pb2.UpdateResponse(version=version)

    async def DropRun(self, request: shard_pb2.DropRunRequest, call: Call) -> shard_pb2.DropRunResponse:
        await self._term.check(request.context.epoch)
        self._note(call, request.context, request)
        if not request.context.run_id:
            raise InvalidRequestError(
                f"run_id is empty: name the id of run {request.context.run!r}, which ListRuns has"
            )
        return shard_pb2.DropRunResponse(freed_bytes=await self._store.drop(request.context.run_id))

    # ---- the trainers' ----

    async def InitializeUnit(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.InitializeUnitResponse:
        incoming = IncomingMessages(stream, shard_pb2.InitializeUnitRequest)
        header = await incoming.header()
        assert isinstance(header, shard_pb2.InitializeUnitHeader)
        self._note(call, header.context, header)
        shard = self._store.exact_run(header.context).shard(header.unit)
        await initial_values.receive(self._store, shard, header, incoming, call.remaining_s())
        return shard_pb2.InitializeUnitResponse(version=shard.version)

    async def Gather(self, request: shard_pb2.GatherRequest, call: Call) -> AsyncIterator[bytes]:
        async with transfers.reading(self._store, request, call.remaining_s()) as reading:
            encoder = codec.StreamEncoder(shard_pb2.GatherResponse(header=reading.header), reading.size_bytes)
            size = request.chunk_bytes or codec.DEFAULT_CHUNK_BYTES
            for start in range(0, max(reading.size_bytes, 1), size):
                async with self._message(call, min(size, reading.size_bytes)):
                    reading.parameters.check()
                    yield encoder.encode([reading.memory()[start : start + size]])

    async def ReduceScatter(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.ReduceScatterResponse:
        incoming = IncomingMessages(stream, shard_pb2.ReduceScatterRequest)
        header = await incoming.header()
        assert isinstance(header, shard_pb2.ReduceScatterHeader)
        return await transfers.push(self._store, header, incoming, call.remaining_s())

    async def ReadPartition(self, request: shard_pb2.ReadPartitionRequest, call: Call) -> AsyncIterator[bytes]:
        messages = partition_transfers.read(self._store, request, call.remaining_s())
        async with aclosing(messages):
            while True:
                async with self._message(call, codec.DEFAULT_CHUNK_BYTES):
                    if (message := await anext(messages, None)) is None:
                        return
                    yield message

    async def StagePartition(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.StagePartitionResponse:
        incoming = IncomingMessages(stream, shard_pb2.StagePartitionRequest)
        header = await incoming.header()
        assert isinstance(header, shard_pb2.StagePartitionHeader)
        self._note(call, header.context, header)
        return await partition_transfers.stage(self._store, header, incoming)

    async def OpenStagingBuffer(
        self, request: shard_pb2.OpenStagingBufferRequest, call: Call
    ) -> shard_pb2.OpenStagingBufferResponse:
        run = self._store.exact_run(request.partition.context)
        transport = self._shm_transports().transport(request.transport_id, run.identity)
        return await staging_buffer_transfers.open_staging_buffer(self._store, run, transport, request.partition)

    async def StageStagingBuffer(
        self, request: shard_pb2.StageStagingBufferRequest, call: Call
    ) -> shard_pb2.StageStagingBufferResponse:
        header = request.header
        self._note(call, header.context, request)
        run = self._store.exact_run(header.context)
        transport = self._shm_transports().transport(request.transport_id, run.identity)
        staging_buffer = transport.opened_staging_buffer(
            request.staging_buffer_id, run.shard(header.unit), header.dp_rank
        )
        await staging_buffer_transfers.stage_staging_buffer(self._store, run, staging_buffer, header)
        return shard_pb2.StageStagingBufferResponse(version=header.context.step)

    async def PinVersion(
        self, request: shard_pb2.PinVersionRequest, call: Call
    ) -> AsyncIterator[shard_pb2.PinVersionResponse]:
        run = self._store.run(request.run, request.run_id)
        with self._standing.one(call.peer):
            async with holding(run, request.version, call.remaining_s(request.wait_s)) as shard_count:
                yield shard_pb2.PinVersionResponse(version=request.version, shard_count=shard_count)
                await first_of(self._transports_end, run.dropped)  # or until the caller is gone

    async def OpenTransport(
        self, request: shard_pb2.OpenTransportRequest, call: Call
    ) -> AsyncIterator[shard_pb2.OpenTransportResponse]:
        run = self._store.exact_run(request)
        offer = self._transports.get(request.kind)
        if offer is None:
            raise ConflictError(f"{self._server_id} offers no transport of kind {request.kind}")
        with self._standing.one(call.peer):
            async with offer.open(run.identity) as answer:
                yield answer
                await first_of(self._transports_end, run.dropped)  # or until the trainer is gone

    async def MeasureTransport(self, request: shard_pb2.MeasureTransportRequest, call: Call) -> AsyncIterator[bytes]:
        encoder = codec.StreamEncoder(shard_pb2.MeasureTransportResponse(), request.size_bytes)
        for piece in transfers.meaningless(request, codec.DEFAULT_CHUNK_BYTES):
            async with self._message(call, len(piece)):
                yield encoder.encode([piece])

    async def LocateShard(self, request: shard_pb2.LocateShardRequest, call: Call) -> shard_pb2.LocateShardResponse:
        run = self._store.exact_run(request)
        self._shm_transports().transport(request.transport_id, run.identity)
        shard = run.shard(request.unit)
        wanted = request.version if request.HasField("version") else None
        version, parameters = await shard.values.read(wanted, call.remaining_s())
        shard.values.release(parameters)
        home = shard.values.home
        assert home is not None
        if home.segment is None:
            raise ConflictError(f"{shard.what} is not in shared memory: {home.why_not_shared}")
        segment = shard_pb2.SharedSegment(path=home.segment.path, size_bytes=shard.size_bytes)
        return shard_pb2.LocateShardResponse(version=version, segment=segment)

    async def OpenGradientBuffer(
        self, request: shard_pb2.OpenGradientBufferRequest, call: Call
    ) -> shard_pb2.OpenGradientBufferResponse:
        run = self._store.exact_run(request)
        transport = self._shm_transports().transport(request.transport_id, run.identity)
        number, gradient_buffer = transport.open_gradient_buffer(run.shard(request.unit))
        return shard_pb2.OpenGradientBufferResponse(gradient_buffer_id=number, path=gradient_buffer.path)

    async def ReduceGradientBuffer(
        self, request: shard_pb2.ReduceGradientBufferRequest, call: Call
    ) -> shard_pb2.ReduceGradientBufferResponse:
        return await transfers.reduce_gradient_buffer(self._store, self._shm_transports(), request)

    # ---- people's ----

    async def DescribeServer(
        self, request: shard_pb2.DescribeServerRequest, call: Call
    ) -> shard_pb2.DescribeServerResponse:
        uptime_s = asyncio.get_running_loop().time() - self._started_s
        return inspection.describe_server(self._store, self._server_id, self._incarnation, uptime_s)

    async def ListShards(self, request: shard_pb2.ListShardsRequest, call: Call) -> shard_pb2.ListShardsResponse:
        shards = self._store.run(request.run).shards.values()
        return shard_pb2.ListShardsResponse(shards=[inspection.summarize(shard) for shard in shards])

    async def DescribeShard(
        self, request: shard_pb2.DescribeShardRequest, call: Call
    ) -> shard_pb2.DescribeShardResponse:
        return inspection.describe_shard(self._store.run(request.run).shard(request.unit))

    async def DescribeStep(self, request: shard_pb2.DescribeStepRequest, call: Call) -> shard_pb2.DescribeStepResponse:
        return inspection.describe_step(self._store.run(request.run))

    async def Peek(self, request: shard_pb2.PeekRequest, call: Call) -> shard_pb2.PeekResponse:
        return await inspection.peek(self._store, request)

    # ---- shared ----

    def _message(self, call: Call, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Room for one message of a stream until the client takes it. Twice: gRPC keeps a copy of its own."""
        return self._store.memory.sending.message(2 * size_bytes, call.peer, call.remaining_s())

    def _shm_transports(self) -> ShmTransports:
        offer = self._transports.get(common_pb2.TRANSPORT_KIND_SHM)
        if not isinstance(offer, ShmTransports):
            raise ConflictError(f"{self._server_id} offers no transport through shared memory")
        return offer

    async def _coordinated(
        self,
        request: shard_pb2.FenceRequest
        | shard_pb2.PrepareStepRequest
        | shard_pb2.ConfirmPartitionsRequest
        | shard_pb2.PrepareUpdateRequest
        | shard_pb2.UpdateRequest,
        call: Call,
    ) -> Run:
        await self._term.check(request.context.epoch)
        self._note(call, request.context, request)
        return self._store.exact_run(request.context)

    def _note(self, call: Call, context: common_pb2.RequestContext, content: Message) -> None:
        """Refuses a request id that was used for other content."""
        self._store.requests.check_content(call.method, context, content)
