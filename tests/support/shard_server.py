"""A shard server in this process, and helpers that drive one unit through its steps."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
import torch

from shardwell.transport.base import into
from shardwell.transport.grpc_transport import GrpcTransport, ShardClient
from shardwell_server.serving.limits import grpc_port
from shardwell_server.serving.rpc import add_service
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.requests.inspection import ServerProcess
from shardwell_server.shard.requests.peers import GrpcPeers
from shardwell_server.shard.servicer import ShardServicer, offered_transports
from shardwell_server.shard.state.runs import CoordinatorTerm
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.transports.shm_transport import ShmTransport
from shardwell_server.shard.transports.socket_transport import SocketTransport
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.connection.channel import SERVER_OPTIONS
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import ShardwellError, from_rpc_error
from shardwell_wire.model.layout import DTYPE_NUMBERS, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.security.tls import Tls, TlsOptions
from shardwell_wire.v1 import common_pb2, shard_pb2

Result = TypeVar("Result")
SERVICE = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
SGD = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": 0.0, "maximize": 0.0}


@cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop for all tests: grpc.aio supports one per process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class ShardServer:
    """A gRPC shard server on an event loop in a thread. ``client`` calls it.

    Args:
        budget_bytes: Memory budget.
        shared: Shared memory for the shm transport. None if the server does not offer it.
    """

    def __init__(
        self, budget_bytes: int = 1 << 30, shared: SharedMemory | None = None, tls: TlsOptions | None = None
    ) -> None:
        self._budget_bytes, self._shared, self._tls = budget_bytes, shared, tls and Tls(tls)
        self._loop = shared_loop()
        self._accepting = AsyncExitStack()
        self.coordinator_term = 1
        """Term that the fake coordinator confirms."""
        self.problems: list[dict[str, Any]] = []
        """Problems that the event loop reported, such as exceptions that were never retrieved."""

    def __enter__(self) -> ShardServer:
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.address = f"127.0.0.1:{port}"
        self.client = ShardClient(self.address, chunk_bytes=64 << 10, credentials=Credentials(tls=self._tls))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.client.close()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._threads.shutdown()
        if kind is None:
            assert not self.problems, self.problems

    async def _start(self) -> int:
        self._loop.set_exception_handler(lambda _, problem: self.problems.append(problem))
        self._threads = ThreadPoolExecutor(2)
        self.store = ShardStore(self._budget_bytes, self._threads, self._shared)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        transports = offered_transports("here", self.store, "127.0.0.1", self._tls)
        self.sockets = transports.find(SocketTransport)
        if self._shared is not None:
            self.shm = transports.find(ShmTransport)
        self._term = CoordinatorTerm(self._confirm_term)
        self.peers = GrpcPeers()
        self.servicer = ShardServicer(ServerProcess("here", "1"), self.store, self._term, transports, self.peers)
        add_service(self._server, SERVICE, self.servicer)
        await self._accepting.enter_async_context(transports.serving())
        if self._tls is None:
            port: int = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", self._tls.server_credentials())
        self._accepting.enter_context(grpc_port(port))
        await self._server.start()
        return port

    async def _confirm_term(self) -> None:
        self._term.learn(self.coordinator_term)

    async def _stop(self) -> None:
        await self._server.stop(0)
        await self.servicer.close()
        await self.peers.close()
        await self._accepting.aclose()

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """Evaluates a function on the server's event loop."""

        async def evaluate() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(evaluate(), self._loop).result(20)

    def evaluate_async(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Awaits a coroutine on the server's event loop."""

        async def evaluate() -> Result:
            return await work()

        return asyncio.run_coroutine_threadsafe(evaluate(), self._loop).result(20)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Polls a condition on the server's event loop until it is true."""
        deadline = time.monotonic() + 20.0
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"timeout while waiting until {what}"
            time.sleep(0.002)

    def taken_bytes(self) -> int:
        return self.evaluate(lambda: self.store.memory.pool.taken_bytes)

    def unreserved_bytes(self) -> int:
        return self.evaluate(lambda: self.store.memory.unreserved.used_bytes)

    def call(self, rpc_name: str, request: Any, *, timeout_s: float = 20.0) -> Any:
        return self.client.call(rpc_name, request, timeout_s=timeout_s)


def layout_of(unit: str = "u", **parameters: tuple[tuple[int, ...], str]) -> UnitLayout:
    """Returns the layout of a unit. Each parameter is ``name=(shape, dtype)``."""
    return UnitLayout.from_proto(
        common_pb2.UnitSpec(
            name=unit,
            parameters=[
                common_pb2.ParameterSpec(name=f"{unit}.{name}", shape=shape, dtype=DTYPE_NUMBERS[dtype])
                for name, (shape, dtype) in parameters.items()
            ],
        )
    )


class HalfStream:
    """A client stream whose messages are sent one by one."""

    def __init__(self, stub: Any, timeout_s: float = 20.0) -> None:
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self.future = stub.future(iter(self._messages.get, None), timeout=timeout_s)

    def send(self, *messages: bytes) -> HalfStream:
        for message in messages:
            self._messages.put(message)
        return self

    def finish(self) -> HalfStream:
        self._messages.put(None)
        return self

    def cancel(self) -> None:
        self.future.cancel()
        self.finish()

    def result(self) -> Any:
        """Returns the response. Raises as ``ServiceClient`` does."""
        try:
            return self.future.result(20)
        except grpc.RpcError as error:
            raise from_rpc_error(error, "server") from error
        finally:
            self.finish()

    def error(self) -> ShardwellError:
        try:
            response = self.result()
        except ShardwellError as error:
            return error
        raise AssertionError(f"no error but {response}")


class OneUnit:
    """One unit of a run on one server. Sends the requests of the coordinator and of trainers."""

    def __init__(
        self,
        server: ShardServer,
        layout: UnitLayout,
        *,
        dp: int = 1,
        index: int = 0,
        run: str = "r",
        run_id: str = "",
        part: tuple[int, int] | None = None,
    ) -> None:
        self.server, self.layout, self.dp, self.index, self.run = server, layout, dp, index, run
        self.identity = RunIdentity(run, run_id or f"id-of-{run}")
        self.start, self.stop = part or (0, layout.size_bytes)
        self.size = self.stop - self.start
        self.segments = layout.segments(self.start, self.stop)

    def context(self, step: int = 0, epoch: int = 1, request_id: str = "") -> common_pb2.RequestContext:
        return common_pb2.RequestContext(
            run=self.run, run_id=self.identity.run_id, epoch=epoch, step=step, request_id=request_id
        )

    @property
    def shard(self) -> UnitShard:
        return self.server.store.runs[self.identity.run_id].shards[self.layout.unit, self.start]

    # ---- requests of the coordinator ----

    def reserve(self, **changes: Any) -> Any:
        fields = {
            "context": self.context(),
            "unit": self.layout.to_proto(),
            "unit_index": self.index,
            "start_bytes": self.start,
            "stop_bytes": self.stop,
            "dp": self.dp,
        }
        return self.server.call("ReserveUnit", shard_pb2.ReserveUnitRequest(**{**fields, **changes}))

    def publish(self, epoch: int = 1, term: int = 1) -> Any:
        request = shard_pb2.PublishUnitRequest(
            context=self.context(epoch=epoch), unit=self.layout.unit, coordinator_epoch=term
        )
        return self.server.call("PublishUnit", request)

    def begin(self, values: Sequence[torch.Tensor] | None = None) -> OneUnit:
        """Reserves, initialises and publishes the unit."""
        self.reserve()
        self.initialize(self.zeros() if values is None else values)
        self.publish()
        return self

    def fence(self, step: int, *ranks: tuple[int, int, int], term: int = 1) -> None:
        fences = [shard_pb2.RankFence(dp_rank=rank, epoch=epoch, attempt=attempt) for rank, epoch, attempt in ranks]
        self.server.call("Fence", shard_pb2.FenceRequest(context=self.context(step, term), ranks=fences))

    def prepare_request(
        self, step: int, *ranks: tuple[int, int, int], dp: int | None = None, term: int = 1, **fields: Any
    ) -> shard_pb2.PrepareStepRequest:
        """Ranks are ``(dp_rank, attempt, part_count)``. By default, every rank pushed one part in attempt 0."""
        manifests = [
            shard_pb2.RankManifest(
                dp_rank=rank,
                attempt=attempt,
                units=[common_pb2.UnitParts(unit_index=self.index, part_count=count)],
            )
            for rank, attempt, count in ranks or [(rank, 0, 1) for rank in range(self.dp)]
        ]
        return shard_pb2.PrepareStepRequest(
            context=self.context(step, term), ranks=manifests, dp=self.dp if dp is None else dp, **fields
        )

    def prepare(self, step: int, *ranks: tuple[int, int, int], **fields: Any) -> Any:
        return self.server.call("PrepareStep", self.prepare_request(step, *ranks, **fields))

    def update_request(
        self, step: int, *, algorithm: str = "sgd", clip: float = 1.0, term: int = 1, **changes: float
    ) -> shard_pb2.UpdateRequest:
        base = {**(SGD if algorithm == "sgd" else ADAM), **changes}
        optimizer = common_pb2.OptimizerStep(
            algorithm=algorithm,
            groups=[common_pb2.ParameterGroup(hyperparameters=base)],
            units=[common_pb2.UnitGroups(unit_index=self.index, group_indices=[0] * len(self.layout.parameters))],
        )
        return shard_pb2.UpdateRequest(context=self.context(step, term), optimizer=optimizer, clip_coefficient=clip)

    def prepare_update(self, step: int, *, ema_decay: float | None = None, **options: Any) -> Any:
        optimizer = self.update_request(step, **options).optimizer
        if ema_decay is not None:
            optimizer.ema_decay = ema_decay
        request = shard_pb2.PrepareUpdateRequest(context=self.context(step), optimizer=optimizer)
        return self.server.call("PrepareUpdate", request)

    def update(self, step: int, **options: Any) -> Any:
        return self.server.call("Update", self.update_request(step, **options))

    def drop(self) -> Any:
        return self.server.call("DropRun", shard_pb2.DropRunRequest(context=self.context()))

    # ---- requests of trainers ----

    def zeros(self) -> list[torch.Tensor]:
        return self.filled(0.0)

    def filled(self, value: float) -> list[torch.Tensor]:
        """Returns one tensor per segment."""
        dtypes = [getattr(torch, self.layout.parameters[s.parameter_index].dtype) for s in self.segments]
        return [
            torch.full((s.stop_element - s.start_element,), value, dtype=dtype)
            for s, dtype in zip(self.segments, dtypes, strict=True)
        ]

    def flat(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the shard's bytes."""
        flat = torch.zeros(self.size, dtype=torch.uint8)
        for segment, value in zip(self.segments, values, strict=True):
            flat[segment.start_bytes - self.start : segment.stop_bytes - self.start] = value.view(torch.uint8)
        return flat

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[s.start_bytes - self.start : s.stop_bytes - self.start].view(
                getattr(torch, self.layout.parameters[s.parameter_index].dtype)
            )
            for s in self.segments
        ]

    def initialize_messages(
        self, values: Sequence[torch.Tensor], *, epoch: int = 1, chunk_bytes: int = 64 << 10, **changes: Any
    ) -> list[bytes]:
        fields = {
            "context": self.context(epoch=epoch),
            "unit": self.layout.unit,
            "start_bytes": self.start,
            "stop_bytes": self.stop,
        }
        header = shard_pb2.InitializeUnitHeader(**{**fields, **changes})
        data = b"".join(value.view(torch.uint8).numpy().tobytes() for value in values)
        first = shard_pb2.InitializeUnitRequest(header=header)
        return list(chunk_streams.encode_stream(first, [data], chunk_bytes=chunk_bytes))

    def initialize(self, values: Sequence[torch.Tensor], **options: Any) -> Any:
        return self.open_initialize().send(*self.initialize_messages(values, **options)).finish().result()

    def open_initialize(self, **options: Any) -> HalfStream:
        return HalfStream(self.server.client.byte_request_stub("InitializeUnit"), **options)

    def push_messages(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        step: int = 0,
        rank: int = 0,
        epoch: int = 1,
        attempt: int = 0,
        part: int = 0,
        request_id: str = "",
        chunk_bytes: int = 64 << 10,
        **changes: Any,
    ) -> list[bytes]:
        """Returns the messages of a push. ``gradients`` has one entry per segment, None if the part has no gradient."""
        chosen = [(s.parameter_index, g) for s, g in zip(self.segments, gradients, strict=True) if g is not None]
        fields = {
            "context": self.context(step, epoch, request_id),
            "unit": self.layout.unit,
            "dp_rank": rank,
            "attempt": attempt,
            "part": part,
            "parameter_indices": [index for index, _ in chosen],
            "start_bytes": self.start,
            "stop_bytes": self.stop,
        }
        first = shard_pb2.ReduceScatterRequest(header=shard_pb2.ReduceScatterHeader(**{**fields, **changes}))
        data = b"".join(gradient.contiguous().view(torch.uint8).numpy().tobytes() for _, gradient in chosen)
        return list(chunk_streams.encode_stream(first, [data], chunk_bytes=chunk_bytes))

    def push(self, gradients: Sequence[torch.Tensor | None], **options: Any) -> Any:
        return self.open_push().send(*self.push_messages(gradients, **options)).finish().result()

    def open_push(self, **options: Any) -> HalfStream:
        return HalfStream(self.server.client.byte_request_stub("ReduceScatter"), **options)

    def gather(self, version: int | None = None, *, timeout_s: float = 20.0) -> tuple[int, list[torch.Tensor]]:
        flat = torch.empty(self.size, dtype=torch.uint8)
        got = GrpcTransport(self.server.client).fetch_stream(
            self.gather_request(version),
            into(chunk_streams.memory_at(flat.data_ptr(), self.size, flat)),
            timeout_s=timeout_s,
        )
        return got, self.split(flat)

    def gather_request(self, version: int | None = None, **fields: Any) -> shard_pb2.GatherRequest:
        return shard_pb2.GatherRequest(
            run=self.run,
            run_id=self.identity.run_id,
            unit=self.layout.unit,
            version=version,
            **({"start_bytes": self.start, "stop_bytes": self.stop} | fields),
        )

    def open_gather(self, version: int | None = None, *, timeout_s: float = 20.0) -> Any:
        """Starts a Gather. Iterate over the result to read its messages."""
        stub = self.server.client.byte_response_stub("Gather")
        return stub(self.gather_request(version, chunk_bytes=1 << 20), timeout=timeout_s)


def error_of(action: Callable[[], object]) -> ShardwellError:
    """Returns the error that an action raises."""
    try:
        action()
    except ShardwellError as error:
        return error
    except grpc.RpcError as error:
        return from_rpc_error(error, "server")
    raise AssertionError("nothing was raised")


def in_background(action: Callable[[], Result]) -> Iterator[Result]:
    """Starts an action in a thread. ``next`` waits for its result or raises its error."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(action)

    def outcome() -> Iterator[Result]:
        try:
            yield future.result(30)
        finally:
            pool.shutdown()

    return outcome()


def train(one: OneUnit, step: int, gradient: float = 1.0, **options: Any) -> None:
    """Runs one step with the same gradient from every rank."""
    for rank in range(one.dp):
        one.push(one.filled(gradient), step=step, rank=rank)
    one.prepare(step)
    one.update(step, **options)


@contextmanager
def pinned(one: OneUnit, version: int) -> Iterator[shard_pb2.PinVersionResponse]:
    """Pins a version of run ``r``, as a reader does."""
    request = shard_pb2.PinVersionRequest(run="r", version=version, wait_s=20.0)
    standing = one.server.client.open("PinVersion", request, timeout_s=20.0)
    yield standing.answer
    standing.end()


def assert_all(values: Sequence[torch.Tensor], expected: float) -> None:
    assert [set(value.tolist()) for value in values] == [{expected}] * len(values)


MIXED = layout_of(
    a=((1031,), "float32"),
    b=((3, 7), "bfloat16"),
    c=((), "float64"),
    d=((0, 4), "float32"),
    e=((997,), "float16"),
)
PLAIN = layout_of(a=((40_000,), "float32"), b=((20_000,), "float32"))
BIG = layout_of(a=((8 << 20,), "float32"))
"""Larger than the connection's buffers, so that a client that does not read blocks the server."""


def unit(server: ShardServer, layout: UnitLayout = PLAIN, **options: Any) -> OneUnit:
    """Returns a published unit on the server, ready for a step."""
    return OneUnit(server, layout, **options).begin()
