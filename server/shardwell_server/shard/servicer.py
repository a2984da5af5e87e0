"""The rpcs of ShardService: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shardwell_server.request_log import RequestLog
from shardwell_server.rpc import Call
from shardwell_server.shard import inspection
from shardwell_server.shard.contributions import PushKey
from shardwell_server.shard.store import Run, ShardStore
from shardwell_server.shard.streams import IncomingStream
from shardwell_server.shard.unit_shard import Receiving, UnitShard
from shardwell_wire import codec
from shardwell_wire.errors import InvalidRequestError, StaleEpochError, StepStateError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2


class ShardServicer:
    """Serves ``shardwell.v1.ShardService``.

    Args:
        server_id: Name of this server.
        store: What it holds.
    """

    def __init__(self, server_id: str, store: ShardStore) -> None:
        self._server_id, self._store = server_id, store
        self._requests = RequestLog()
        self._started_s = asyncio.get_running_loop().time()

    # ---- the coordinator's ----

    async def ReserveUnit(self, request: shard_pb2.ReserveUnitRequest, call: Call) -> shard_pb2.ReserveUnitResponse:
        context, layout = request.context, UnitLayout.from_proto(request.unit)
        self._store.check_term(context.epoch)
        self._check_request(call, context, layout.unit)
        if not context.run:
            raise InvalidRequestError("a run needs a name")
        shard = self._store.reserve(
            context.run, layout, request.unit_index, request.start_bytes, request.stop_bytes, request.dp
        )
        return shard_pb2.ReserveUnitResponse(free_bytes=self._store.budget.free_bytes, version=shard.version)

    async def PublishUnit(self, request: shard_pb2.PublishUnitRequest, call: Call) -> shard_pb2.PublishUnitResponse:
        self._store.check_term(request.coordinator_epoch)
        self._check_request(call, request.context, request.unit)
        run = self._store.run(request.context.run)
        shard = run.shard(request.unit)
        if shard.version is None:
            if shard.parameters is None or shard.initial_epoch != request.context.epoch:
                raise StepStateError(
                    f"{shard.what}: the initial values of epoch {request.context.epoch} are not complete here",
                    unit=shard.unit,
                )
            await shard.publish()
        return shard_pb2.PublishUnitResponse(version=shard.version or 0)

    async def Fence(self, request: shard_pb2.FenceRequest, call: Call) -> shard_pb2.FenceResponse:
        run = self._coordinated(request, call)
        async with run.lock:
            self._store.fence(run, request.context.step, request.ranks)
        return shard_pb2.FenceResponse()

    async def PrepareStep(self, request: shard_pb2.PrepareStepRequest, call: Call) -> shard_pb2.PrepareStepResponse:
        run = self._coordinated(request, call)
        async with run.lock:
            return await self._store.prepare(run, request)

    async def Update(self, request: shard_pb2.UpdateRequest, call: Call) -> shard_pb2.UpdateResponse:
        run = self._coordinated(request, call)
        # Once begun an update is finished, also when the coordinator is gone.
        return await asyncio.shield(asyncio.ensure_future(self._update(run, request)))

    async def _update(self, run: Run, request: shard_pb2.UpdateRequest) -> shard_pb2.UpdateResponse:
        async with run.lock:
            return shard_pb2.UpdateResponse(version=await self._store.update(run, request))

    async def DropRun(self, request: shard_pb2.DropRunRequest, call: Call) -> shard_pb2.DropRunResponse:
        self._store.check_term(request.context.epoch)
        self._check_request(call, request.context, "")
        return shard_pb2.DropRunResponse(freed_bytes=await self._store.drop(request.context.run))

    # ---- the trainers' ----

    async def InitializeUnit(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.InitializeUnitResponse:
        incoming = IncomingStream(stream, shard_pb2.InitializeUnitRequest)
        header = await incoming.header()
        assert isinstance(header, shard_pb2.InitializeUnitHeader)
        self._check_request(call, header.context, header.unit)
        shard = self._store.run(header.context.run).shard(header.unit)
        if (header.start_bytes, header.stop_bytes) != (shard.start_bytes, shard.stop_bytes):
            raise InvalidRequestError(
                f"{shard.what}: this server owns [{shard.start_bytes}, {shard.stop_bytes}), "
                f"got [{header.start_bytes}, {header.stop_bytes})"
            )
        if shard.version is not None:
            return shard_pb2.InitializeUnitResponse(version=shard.version)
        if header.context.epoch < shard.initial_epoch:
            raise StaleEpochError(f"{shard.what}: epoch {header.context.epoch} is over")
        buffer = self._store.pool.take(shard.size_bytes)
        try:
            target = codec.memory_at(buffer.data_ptr(), shard.size_bytes)
            await incoming.into([target], f"initial values of {shard.what}")
            if shard.version is None:
                self._store.accept_initial(shard, header.context.epoch, buffer)
        except BaseException:
            self._store.pool.give(buffer)
            raise
        return shard_pb2.InitializeUnitResponse(version=shard.version)

    async def Gather(self, request: shard_pb2.GatherRequest, call: Call) -> AsyncIterator[bytes]:
        shard = self._store.run(request.run).shard(request.unit)
        start, stop = request.start_bytes, request.stop_bytes
        if start == stop == 0:
            start, stop = shard.start_bytes, shard.stop_bytes
        if not shard.start_bytes <= start <= stop <= shard.stop_bytes:
            raise InvalidRequestError(
                f"{shard.what}: [{start}, {stop}) is not in this server's [{shard.start_bytes}, {shard.stop_bytes})"
            )
        if request.chunk_bytes > codec.MAX_CHUNK_BYTES:
            raise InvalidRequestError(f"chunk_bytes is {request.chunk_bytes}: at most {codec.MAX_CHUNK_BYTES}")
        wanted = request.version if request.HasField("version") else None
        version, parameters = await shard.read(wanted, call.remaining_s())
        try:
            whole = codec.memory_at(parameters.buffer.data_ptr(), shard.size_bytes)
            header = shard_pb2.GatherHeader(version=version, start_bytes=start, stop_bytes=stop)
            piece = whole[start - shard.start_bytes : stop - shard.start_bytes]
            for message in codec.encode_stream(
                shard_pb2.GatherResponse(header=header),
                [piece],
                chunk_bytes=request.chunk_bytes or codec.DEFAULT_CHUNK_BYTES,
            ):
                yield message
        finally:
            shard.release(parameters)

    async def ReduceScatter(self, stream: AsyncIterator[bytes], call: Call) -> shard_pb2.ReduceScatterResponse:
        incoming = IncomingStream(stream, shard_pb2.ReduceScatterRequest)
        header = await incoming.header()
        assert isinstance(header, shard_pb2.ReduceScatterHeader)
        context = header.context
        key = PushKey(header.dp_rank, header.attempt, header.part)
        self._requests.check(context.request_id, (call.method, context.run, context.step, header.unit, key))
        run = self._store.run(context.run)
        shard = run.shard(header.unit)
        self._store.check_push(run, shard, header)
        if self._store.begin_push(run, shard, key, context.step):
            checksum = await incoming.checksum()
            here = shard.contributions.by_rank.get(key.dp_rank)
            if here is not None and key.part < here.part_count and here.checksums[key.part] != checksum:
                run.differing_duplicate_count += 1
            return shard_pb2.ReduceScatterResponse(duplicate=True, version=context.step)
        duplicate = await self._receive(run, shard, header, incoming)
        return shard_pb2.ReduceScatterResponse(duplicate=duplicate, version=context.step)

    async def _receive(
        self, run: Run, shard: UnitShard, header: shard_pb2.ReduceScatterHeader, incoming: IncomingStream
    ) -> bool:
        """Receives a push; a newer one of the same rank ends it."""
        what = f"gradient of {shard.what}, rank {header.dp_rank}, part {header.part}"
        if (older := shard.receiving.get(header.dp_rank)) is not None:
            older.cancel()
        buffer = self._store.pool.take(shard.size_bytes)
        packed = shard.layout.packed_segments(header.parameter_indices, shard.start_bytes, shard.stop_bytes)
        memory = codec.memory_at(buffer.data_ptr(), shard.size_bytes)
        targets = [
            memory[segment.start_bytes - shard.start_bytes : segment.stop_bytes - shard.start_bytes]
            for segment in packed
        ]
        task = asyncio.ensure_future(incoming.into(targets, what))
        receiving = shard.receiving[header.dp_rank] = Receiving(task.cancel)
        try:
            checksum = await task
            return self._store.finish_push(run, shard, header, buffer, checksum)
        except asyncio.CancelledError:
            self._store.pool.give(buffer)
            if shard.receiving.get(header.dp_rank) is receiving:
                raise
            raise StaleEpochError(f"{what}: a newer push took its place") from None
        except BaseException:
            self._store.pool.give(buffer)
            raise
        finally:
            task.cancel()
            if shard.receiving.get(header.dp_rank) is receiving:
                del shard.receiving[header.dp_rank]

    # ---- people's ----

    async def DescribeServer(
        self, request: shard_pb2.DescribeServerRequest, call: Call
    ) -> shard_pb2.DescribeServerResponse:
        uptime_s = asyncio.get_running_loop().time() - self._started_s
        return inspection.describe_server(self._store, self._server_id, uptime_s)

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
        return await inspection.peek(self._store, request, call.remaining_s())

    # ---- shared ----

    def _coordinated(
        self, request: shard_pb2.FenceRequest | shard_pb2.PrepareStepRequest | shard_pb2.UpdateRequest, call: Call
    ) -> Run:
        self._store.check_term(request.context.epoch)
        self._check_request(call, request.context, "")
        return self._store.run(request.context.run)

    def _check_request(self, call: Call, context: common_pb2.RequestContext, subject: str) -> None:
        self._requests.check(context.request_id, (call.method, context.run, context.step, subject))
