"""A model of a trainer process: it speaks the protocol as ``shardwell.session`` does, without threads and autograd."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import torch
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from shardwell_wire.connection.channel import backoff, retry_async
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import (
    ConflictError,
    DuplicateError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
    from_rpc_error,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.simulation.environment import running
from tests.simulation.jobs import History, Job
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Channel
from tests.simulation.nodes import COORDINATOR, COORDINATOR_SERVICE, LEASE_S, SHARD_SERVICE, Node

RUN = "r"
_POLL_S, _RPC_S = 10.0, 30.0
_CHUNK_BYTES = (2048, 1 << 20)
_COMPUTE_S = 0.01
"""Mean time to compute one work item."""


class AbandonedItem(Exception):
    """A work item is no longer this trainer's, or has another attempt."""


class Client:
    """Rpcs of one process to one address.

    Args:
        address: host:port.
        service: The service.
    """

    def __init__(self, address: str, service: ServiceDescriptor) -> None:
        self.address, self._service = address, service
        self._channel = Channel(running().network, address)

    async def call(self, rpc_name: str, request: Any, timeout_s: float = _RPC_S) -> Any:
        """Calls a unary rpc once."""
        method = self._service.methods_by_name[rpc_name]
        stub = self._channel.unary_unary(
            self._path(rpc_name),
            type(request).SerializeToString,
            GetMessageClass(method.output_type).FromString,
        )
        return await self._mapped(stub(request, timeout=timeout_s))

    async def send(self, rpc_name: str, messages: list[bytes], timeout_s: float = _RPC_S) -> Any:
        """Calls an rpc that takes a stream."""
        method = self._service.methods_by_name[rpc_name]
        stub = self._channel.stream_unary(
            self._path(rpc_name), response_deserializer=GetMessageClass(method.output_type).FromString
        )
        return await self._mapped(stub(messages, timeout=timeout_s))

    async def receive(self, rpc_name: str, request: Any, timeout_s: float = _RPC_S) -> list[bytes]:
        """Calls an rpc that returns a stream."""
        stub = self._channel.unary_stream(self._path(rpc_name), type(request).SerializeToString)

        async def collect() -> list[bytes]:
            return [message async for message in stub(request, timeout=timeout_s)]

        return await self._mapped(collect())

    def watch(self, rpc_name: str, request: Any) -> Any:
        """Calls an rpc that returns messages until it is cancelled or breaks."""
        method = self._service.methods_by_name[rpc_name]
        stub = self._channel.unary_stream(
            self._path(rpc_name), type(request).SerializeToString, GetMessageClass(method.output_type).FromString
        )
        return stub(request, wait_for_ready=True)

    def _path(self, rpc_name: str) -> str:
        return f"/{self._service.full_name}/{rpc_name}"

    async def _mapped(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error


class TrainerNode(Node):
    """A trainer. Its process joins, trains until the run has enough steps, and ends.

    Args:
        name: Name in the run.
        loop: The event loop.
        job: What to train.
        history: Compares what the trainer reads.
    """

    def __init__(self, name: str, loop: VirtualLoop, job: Job, history: History) -> None:
        super().__init__(name, loop)
        self.job, self.history = job, history
        self.finished = False
        self.options: dict[str, Any] = dict(job.options)
        """More fields of ``RunConfig``."""
        self.membership: Callable[[TrainerNode], Membership] = Membership
        """Makes a membership, see there."""

    async def main(self) -> None:
        while not await self.membership(self).train():
            running().network.trace(f"{self.name}: joins again")
        self.finished = True


class Operator:
    """Somebody who gives commands. A command that the coordinator refuses, or does not receive, has no effect.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._process = Process("operator", loop)

    def drain(self, server_id: str, *, cancel: bool = False) -> None:
        """Begins to move all shards of a server to other servers, or ends that."""
        self._command("DrainServer", coordinator_pb2.DrainServerRequest(server_id=server_id, cancel=cancel))

    def rebalance(self) -> None:
        """Spreads the shards evenly."""
        self._command("RebalanceRun", coordinator_pb2.RebalanceRunRequest(run=RUN))

    def set_backups(self, backups: int) -> None:
        """Changes the number of backups."""
        self._command("SetBackups", coordinator_pb2.SetBackupsRequest(run=RUN, backups=backups))

    def _command(self, rpc_name: str, request: Any) -> None:
        async def call() -> None:
            try:
                await Client(COORDINATOR, COORDINATOR_SERVICE).call(rpc_name, request)
            except ShardwellError as error:
                running().network.trace(f"operator: {rpc_name}: {error}")

        self._process.start(call())


class Membership:
    """One membership of a trainer: from Join to the end of the run, or of the membership.

    Args:
        node: The trainer.
    """

    def __init__(self, node: TrainerNode) -> None:
        self._node, self._job, self._history = node, node.job, node.history
        self._coordinator = Client(COORDINATOR, COORDINATOR_SERVICE)
        self._servers: dict[str, Client] = {}
        self._ended: ShardwellError | None = None
        self._acknowledged: dict[int, int] = {}
        """``History.acknowledged`` when the last request was sent."""
        self._chunk_bytes = running().rng.choice(_CHUNK_BYTES)
        self._shards: dict[int, list[common_pb2.ShardRange]] = {}
        self._items: dict[int, coordinator_pb2.WorkItem] = {}
        self._done: dict[int, coordinator_pb2.FinishedItem] = {}

    async def train(self) -> bool:
        """Trains to the end; returns False if the membership ended before."""
        keeping: list[asyncio.Future[None]] = []
        try:
            await self._join()
            keeping = [asyncio.ensure_future(work) for work in (self._keep_lease(), self._keep_stream())]
            for index, layout in enumerate(self._job.layouts):
                await self._declare(index, layout)
            await self._do_steps()
            await self._leave()
            return True
        except StaleEpochError as error:
            self._trace(f"membership ended: {error}")
            return False
        finally:
            for work in keeping:
                work.cancel()

    # ---- the coordinator ----

    async def _join(self) -> None:
        world = World(dp=self._job.dp)
        request = coordinator_pb2.JoinRequest(
            run=RUN,
            config=coordinator_pb2.RunConfig(
                world=world.to_proto(),
                min_trainers=self._job.dp,
                **self._node.options,
            ),
            trainer=self._node.name,
            host="h",
            incarnation=uuid.uuid4().hex,
            process=self._node.identity,
        )
        while True:
            try:
                joined = await self._poll("Join", request, lambda answer: answer.started)
                break
            except DuplicateError:
                # The former process of this name is alive for all that the coordinator knows.
                await asyncio.sleep(LEASE_S / 4)
        self._run_id, self._epoch, self._lease_s = joined.run_id, joined.epoch, joined.lease_s
        self._step = joined.work.step
        self._rollbacks = joined.rollback_count
        self._history.check_joined(self._node.name, self._rollbacks, joined.committed_step, self._acknowledged)
        self._history.note_acknowledged(self._rollbacks, joined.committed_step)
        self._position = joined.work.position
        self._set_items(joined.work.items)
        self._trace(f"joined with epoch {self._epoch} at step {self._step}, ranks {sorted(self._items)}")

    async def _declare(self, index: int, layout: UnitLayout) -> None:
        pauses = backoff(0.02, 0.2)
        failed: ShardwellError | None = None
        former: tuple[list[common_pb2.ShardRange], int] | None = None
        while True:
            request = coordinator_pb2.DeclareUnitRequest(
                context=self._context(0), trainer=self._node.name, unit=layout.to_proto()
            )
            declared = await self._retried("DeclareUnit", request)
            self._shards[index] = list(declared.shards)
            placed = self._shards[index], declared.epoch
            if failed is not None and placed == former and not isinstance(failed, UnavailableError):
                raise failed
            failed = None
            if declared.HasField("version"):
                return
            if declared.initialize:
                try:
                    await self._initialize(index, layout, declared.epoch)
                    continue  # the unit may have been placed again meanwhile
                except ShardwellError as error:
                    self._trace(f"initial values of {layout.unit!r}: {error}")
                    failed, former = error, placed
            await asyncio.sleep(next(pauses))

    async def _initialize(self, index: int, layout: UnitLayout, epoch: int) -> None:
        values = self._job.initial(index)
        for shard in self._shards[index]:
            header = shard_pb2.InitializeUnitHeader(
                context=self._context(0, epoch=epoch),
                unit=layout.unit,
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
            )
            first = shard_pb2.InitializeUnitRequest(header=header)
            await self._server(shard).send("InitializeUnit", _encode(layout, shard, first, values, self._chunk_bytes))
        request = coordinator_pb2.PublishInitialUnitRequest(
            context=self._context(0, epoch=epoch), trainer=self._node.name, unit=layout.unit
        )
        await self._retried("PublishInitialUnit", request)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._heartbeat(self._lease_s / 3)
            except StaleEpochError as error:
                self._ended = error
                return
            except ShardwellError:
                continue

    async def _keep_stream(self) -> None:
        """Keeps the membership stream open, as ``shardwell.membership.heartbeats`` does."""
        request = coordinator_pb2.KeepMembershipRequest(
            run=RUN, run_id=self._run_id, trainer=self._node.name, epoch=self._epoch
        )
        pauses = backoff(0.01, 1.0)
        while True:
            try:
                async for _ in self._coordinator.watch("KeepMembership", request):
                    pauses = backoff(0.01, 1.0)
            except grpc.RpcError as error:
                mapped = from_rpc_error(error, COORDINATOR)
                if isinstance(mapped, StaleEpochError):
                    self._ended = mapped
                    return
            await asyncio.sleep(next(pauses))

    async def _heartbeat(self, timeout_s: float) -> None:
        request = coordinator_pb2.HeartbeatRequest(
            run=RUN, run_id=self._run_id, trainer=self._node.name, epoch=self._epoch
        )
        await self._coordinator.call("Heartbeat", request, timeout_s)

    async def _leave(self) -> None:
        request = coordinator_pb2.LeaveRequest(run=RUN, run_id=self._run_id, trainer=self._node.name, epoch=self._epoch)
        try:
            await self._coordinator.call("Leave", request, 2.0)
        except ShardwellError as error:
            self._trace(f"Leave: {error}")

    async def _poll(self, rpc_name: str, request: Any, done: Callable[[Any], bool]) -> Any:
        """Repeats an rpc until its answer is final, as ``shardwell.membership.membership`` does."""
        while True:
            request.wait_s = _POLL_S
            answer = await self._retried(rpc_name, request)
            if done(answer):
                return answer

    async def _retried(self, rpc_name: str, request: Any) -> Any:
        async def attempt() -> Any:
            if self._ended is not None:
                raise self._ended
            self._acknowledged = dict(self._history.acknowledged)
            return await self._coordinator.call(rpc_name, request, _POLL_S + _RPC_S)

        return await retry_async(attempt, limit_s=600.0)

    def _context(self, step: int, epoch: int | None = None) -> common_pb2.RequestContext:
        return common_pb2.RequestContext(
            run=RUN,
            run_id=self._run_id,
            epoch=self._epoch if epoch is None else epoch,
            step=step,
            request_id=uuid.uuid4().hex,
        )

    # ---- a step ----

    def _set_items(self, items: Any) -> None:
        self._items, self._done = {item.global_rank: item for item in items}, {}

    async def _do_steps(self) -> None:
        while self._step < self._job.steps:
            await self._do_step()

    async def _do_step(self) -> None:
        step = self._step
        while True:
            await self._finish_work()
            if self._step != step:
                return
            request = coordinator_pb2.CommitStepRequest(
                context=self._context(step),
                trainer=self._node.name,
                optimizer=self._job.optimizer(),
                clip_coefficient=1.0,
                unit_order=range(len(self._job.layouts)),
                state=coordinator_pb2.RunState(step=step),
            )
            try:
                answer = await self._poll("CommitStep", request, lambda answer: answer.committed)
            except StepStateError as error:
                self._trace(f"CommitStep of step {step}: {error}")
                continue
            self._trace(f"step {step} is committed, next {answer.next_work.step}")
            self._history.note_acknowledged(self._rollbacks, answer.next_work.step)
            self._step = answer.next_work.step
            self._set_items(answer.next_work.items)
            return

    async def _finish_work(self) -> None:
        """Computes items until all items of the step are finished."""
        while True:
            for rank, item in sorted(self._items.items()):
                if rank in self._done and self._done[rank].attempt == item.attempt:
                    continue
                try:
                    await self._compute(item)
                except AbandonedItem as error:
                    self._trace(f"item {rank} of step {self._step} is abandoned: {error}")
                    self._done.pop(rank, None)
            request = coordinator_pb2.FinishWorkRequest(
                context=self._context(self._step),
                trainer=self._node.name,
                items=list(self._done.values()),
                accept_work=True,
            )
            answer = await self._poll(
                "FinishWork", request, lambda answer: answer.all_finished or answer.HasField("work")
            )
            if answer.all_finished:
                return
            self._trace(f"work of step {self._step}: {[(at.global_rank, at.attempt) for at in answer.work.items]}")
            self._items.update({item.global_rank: item for item in answer.work.items})
            for item in answer.work.items:
                done = self._done.get(item.global_rank)
                if done is not None and (done.attempt, done.epoch) != (item.attempt, item.epoch):
                    del self._done[item.global_rank]

    async def _compute(self, item: coordinator_pb2.WorkItem) -> None:
        parts = []
        for index, layout in enumerate(self._job.layouts):
            flat = await self._gather(index, layout)
            await asyncio.sleep(running().rng.expovariate(1 / _COMPUTE_S))
            values = [
                flat[start : start + size * 4].view(torch.float32)
                for start, size in zip(layout.starts, (p.numel for p in layout.parameters), strict=True)
            ]
            gradients = self._job.gradient(index, values, item.number, item.dp_rank)
            starts = range(len(self._shards[index]))
            await asyncio.gather(*(self._push(item, index, number, gradients) for number in starts))
            parts.append(common_pb2.UnitParts(unit_index=index, part_count=1))
        self._done[item.global_rank] = coordinator_pb2.FinishedItem(
            global_rank=item.global_rank, epoch=item.epoch, attempt=item.attempt, units=parts, number=item.number
        )

    async def _gather(self, index: int, layout: UnitLayout) -> torch.Tensor:
        """Reads a unit at the step's version. [size_bytes]"""
        flat = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        await asyncio.gather(*(self._read(index, number, flat) for number in range(len(self._shards[index]))))
        if not self._job.consistency.asynchronous:
            self._history.note_read(self._node.name, self._step, layout.unit, flat.numpy().tobytes())
        return flat

    async def _read(self, index: int, number: int, flat: torch.Tensor) -> None:
        async def read(shard: common_pb2.ShardRange) -> None:
            request = shard_pb2.GatherRequest(
                run=RUN,
                run_id=self._run_id,
                unit=self._job.layouts[index].unit,
                version=self._step,
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
                chunk_bytes=self._chunk_bytes,
            )
            receiver = chunk_streams.StreamReceiver(
                [memoryview(flat.numpy())[shard.start_bytes : shard.stop_bytes]], "Gather"
            )
            for data in await self._server(shard).receive("Gather", request):
                message, chunk = chunk_streams.decode_message(data, shard_pb2.GatherResponse)
                # A read of an abandoned item may end when this trainer is at the next step already.
                if message.HasField("header") and message.header.version != request.version:
                    self._history.problems.append(f"Gather of version {request.version} got {message.header.version}")
                receiver.feed(chunk)
            receiver.require_complete()

        await self._on_owner(index, number, read)

    async def _push(
        self, item: coordinator_pb2.WorkItem, index: int, number: int, gradients: list[torch.Tensor]
    ) -> None:
        # A push of an abandoned item may be repeated when this trainer is at the next step already.
        layout, step = self._job.layouts[index], self._step

        async def push(shard: common_pb2.ShardRange) -> None:
            header = shard_pb2.ReduceScatterHeader(
                context=self._context(step, epoch=item.epoch),
                unit=layout.unit,
                dp_rank=item.dp_rank,
                attempt=item.attempt,
                part=0,
                parameter_indices=range(len(layout.parameters)),
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
            )
            first = shard_pb2.ReduceScatterRequest(header=header)
            await self._server(shard).send("ReduceScatter", _encode(layout, shard, first, gradients, self._chunk_bytes))

        await self._on_owner(index, number, push)

    async def _on_owner(
        self, index: int, number: int, action: Callable[[common_pb2.ShardRange], Awaitable[None]]
    ) -> None:
        """Repeats an operation on a shard while its server is unavailable, and on its next owner if it moves."""
        pauses = backoff()
        while True:
            if self._ended is not None:
                raise self._ended
            shard = self._shards[index][number]
            try:
                await action(shard)
                return
            except UnavailableError as error:
                self._trace(f"{self._job.layouts[index].unit!r} on {shard.server_id}: {error}")
                await self._ask()
                await self._relocate()
            except (StaleEpochError, VersionGoneError, StepStateError, NotFoundError, ConflictError) as error:
                await self._ask()
                await self._relocate()
                owner = self._shards[index][number]
                if (owner.server_id, owner.incarnation) == (shard.server_id, shard.incarnation):
                    raise AbandonedItem(f"{type(error).__name__}: {error}") from error
                continue
            await asyncio.sleep(next(pauses))

    async def _relocate(self) -> None:
        """Learns the owners of all shards."""
        try:
            units = await self._coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=RUN), 5.0)
        except ShardwellError as error:
            self._trace(f"ListUnits: {error}")
            return
        for unit in units.units:
            ranges = [(shard.start_bytes, shard.stop_bytes) for shard in unit.shards]
            if ranges == [(shard.start_bytes, shard.stop_bytes) for shard in self._shards[unit.unit_index]]:
                self._shards[unit.unit_index] = list(unit.shards)

    async def _ask(self) -> None:
        """Sends a heartbeat, to learn whether the membership is still valid."""
        try:
            await self._heartbeat(5.0)
        except StaleEpochError:
            raise
        except ShardwellError as error:
            self._trace(f"heartbeat: {error}")

    def _server(self, shard: common_pb2.ShardRange) -> Client:
        if shard.address not in self._servers:
            self._servers[shard.address] = Client(shard.address, SHARD_SERVICE)
        return self._servers[shard.address]

    def _trace(self, line: str) -> None:
        running().network.trace(f"{self._node.name}: {line}")


def _encode(layout: UnitLayout, shard: Any, first: Any, tensors: list[torch.Tensor], chunk_bytes: int) -> list[bytes]:
    """Returns the messages of a stream with a shard's part of whole tensors, by parameter index."""
    pieces = [
        tensors[segment.parameter_index][segment.start_element : segment.stop_element].numpy().tobytes()
        for segment in layout.segments(shard.start_bytes, shard.stop_bytes)
    ]
    return list(chunk_streams.encode_stream(first, pieces, chunk_bytes=chunk_bytes))
