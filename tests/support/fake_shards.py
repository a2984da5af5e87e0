"""Fake shard servers without tensors, for tests of the coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from shardwell_server.coordinator.servers.cluster import Server
from shardwell_server.coordinator.servers.shard_client import REFUSED
from shardwell_server.rpc import Call, add_service
from shardwell_wire.channel import SERVER_OPTIONS
from shardwell_wire.errors import (
    CapacityError,
    IncompleteStepError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import shard_pb2

COST = 3
"""Reserved bytes per byte of parameters, which includes optimizer state and contributions."""


@dataclass
class FakeUnit:
    start_bytes: int
    stop_bytes: int
    placement: int
    version: int | None = None


@dataclass
class FakeRun:
    name: str
    units: dict[int, FakeUnit] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    prepared: shard_pb2.PrepareStepRequest | None = None
    updates: list[shard_pb2.UpdateRequest] = field(default_factory=list)
    """Applied updates, without repetitions."""


class FakeShard:
    """A fake shard server with one method per rpc.

    Attributes:
        fail: Called with each rpc's name and request. Raises to fail the rpc.
        calls: Number of calls of each rpc.
        square_partials: Partial squared norm of every unit.
        manifests: All PrepareStep requests.
        available: While False every rpc is UNAVAILABLE.
        incarnation: Incarnation of the process. None if the process has ended.
    """

    def __init__(self, budget_bytes: int = 1 << 30) -> None:
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.runs_by_id: dict[str, FakeRun] = {}
        self.term = 0
        self.calls: Counter[str] = Counter()
        self.fail: Callable[[str, Any], None] = lambda rpc_name, request: None
        self.available = True
        self.refuses = False
        """True: its host refuses connections."""
        self.incarnation: str | None = "1"
        self.square_partials = [4.0]
        self.manifests: list[shard_pb2.PrepareStepRequest] = []
        self._updated = threading.Condition()
        self.changed_buffers: dict[int, list[int]] = {}
        """Indices of changed buffers, by unit index."""
        self.missing: set[int] = set()
        """dp ranks whose contributions were lost."""

    @property
    def runs(self) -> dict[str, FakeRun]:
        """Runs by name. If several runs have one name, only the newest."""
        return {run.name: run for run in self.runs_by_id.values()}

    def restart(self, incarnation: str) -> None:
        """Replaces the process by one without state."""
        self.incarnation = incarnation
        self.runs_by_id.clear()
        self.reserved_bytes = 0

    def handle(self, rpc_name: str, request: Any) -> Any:
        self.calls[rpc_name] += 1
        if not self.available or self.incarnation is None:
            raise UnavailableError("fake: not available")
        if rpc_name == "DescribeServer":
            return shard_pb2.DescribeServerResponse(incarnation=self.incarnation)
        term = request.coordinator_epoch if rpc_name == "PublishUnit" else request.context.epoch
        if term < self.term:
            raise StaleEpochError(f"term {term} is stale: the current term is {self.term}")
        self.term = term
        self.fail(rpc_name, request)
        return getattr(self, rpc_name)(request)

    def ReserveUnit(self, request: shard_pb2.ReserveUnitRequest) -> shard_pb2.ReserveUnitResponse:
        self.runs_by_id.setdefault(request.context.run_id, FakeRun(request.context.run))
        run = self._run(request)
        size = COST * (request.stop_bytes - request.start_bytes)
        if request.placement <= run.released.get(request.unit.name, 0):
            raise StaleEpochError(f"placement {request.placement} was released")
        former = run.units.get(request.unit_index)
        if former is not None and former.placement < request.placement and not former.version:
            self._release(run, request.unit_index)
        if request.unit_index not in run.units:
            if self.reserved_bytes + size > self.budget_bytes:
                raise CapacityError(f"{size} bytes do not fit")
            self.reserved_bytes += size
            run.units[request.unit_index] = FakeUnit(request.start_bytes, request.stop_bytes, request.placement)
            run.names[request.unit.name] = request.unit_index
        unit = run.units[request.unit_index]
        assert (unit.start_bytes, unit.stop_bytes) == (request.start_bytes, request.stop_bytes)
        return shard_pb2.ReserveUnitResponse(free_bytes=self.budget_bytes - self.reserved_bytes, version=unit.version)

    def ReleaseUnit(self, request: shard_pb2.ReleaseUnitRequest) -> shard_pb2.ReleaseUnitResponse:
        run = self.runs_by_id.get(request.context.run_id, FakeRun(request.context.run))
        run.released[request.unit] = max(request.placement, run.released.get(request.unit, 0))
        index = run.names.get(request.unit)
        if index is not None and index in run.units and run.units[index].placement <= request.placement:
            self._release(run, index)
        return shard_pb2.ReleaseUnitResponse(free_bytes=self.budget_bytes - self.reserved_bytes)

    def _release(self, run: FakeRun, index: int) -> None:
        unit = run.units.pop(index)
        self.reserved_bytes -= COST * (unit.stop_bytes - unit.start_bytes)

    def PublishUnit(self, request: shard_pb2.PublishUnitRequest) -> shard_pb2.PublishUnitResponse:
        run = self._run(request)
        unit = run.units[run.names[request.unit]]
        unit.version = unit.version or 0
        return shard_pb2.PublishUnitResponse(version=unit.version)

    def Fence(self, request: shard_pb2.FenceRequest) -> shard_pb2.FenceResponse:
        run = self._run(request)
        for rank in request.ranks:
            run.epochs[rank.dp_rank] = max(run.epochs.get(rank.dp_rank, 0), rank.epoch)
            if rank.attempt > run.attempts.get(rank.dp_rank, 0):
                run.attempts[rank.dp_rank], run.prepared = rank.attempt, None
        return shard_pb2.FenceResponse()

    def PrepareStep(self, request: shard_pb2.PrepareStepRequest) -> shard_pb2.PrepareStepResponse:
        run, step = self._run(request), request.context.step
        self.manifests.append(request)
        if any(unit.version != step for unit in run.units.values()):
            raise StepStateError(f"step {step} is not the next: {run.units}")
        if lost := sorted(self.missing & {rank.dp_rank for rank in request.ranks}):
            raise IncompleteStepError(f"unit 'u': rank {lost} missing", step=step)
        run.prepared = request
        norms = [
            shard_pb2.UnitNorm(unit_index=index, square_partials=self.square_partials, max_abs=2.0)
            for index in run.units
        ]
        changed = [
            shard_pb2.ChangedBuffers(unit_index=index, buffer_indices=found)
            for index, found in self.changed_buffers.items()
        ]
        return shard_pb2.PrepareStepResponse(
            units=norms, version=step, update_ready=request.HasField("optimizer"), buffers=changed
        )

    def ConfirmPartitions(self, request: shard_pb2.ConfirmPartitionsRequest) -> shard_pb2.ConfirmPartitionsResponse:
        run = self._run(request)
        if run.prepared is None or run.prepared.context.step != request.context.step:
            raise StepStateError(f"step {request.context.step} is not prepared")
        return shard_pb2.ConfirmPartitionsResponse()

    def PrepareUpdate(self, request: shard_pb2.PrepareUpdateRequest) -> shard_pb2.PrepareUpdateResponse:
        run = self._run(request)
        if run.prepared is None or run.prepared.context.step != request.context.step:
            raise StepStateError(f"step {request.context.step} is not prepared")
        return shard_pb2.PrepareUpdateResponse()

    def Update(self, request: shard_pb2.UpdateRequest) -> shard_pb2.UpdateResponse:
        run, step = self._run(request), request.context.step
        if all(unit.version == step + 1 for unit in run.units.values()):
            return shard_pb2.UpdateResponse(version=step + 1)
        if run.prepared is None or run.prepared.context.step != step:
            raise StepStateError(f"step {step} is not prepared")
        for unit in run.units.values():
            unit.version = step + 1
        run.prepared, run.attempts = None, {}
        with self._updated:
            run.updates.append(request)
            self._updated.notify_all()
        return shard_pb2.UpdateResponse(version=step + 1)

    def DropRun(self, request: shard_pb2.DropRunRequest) -> shard_pb2.DropRunResponse:
        run = self.runs_by_id.pop(request.context.run_id, None)
        freed = COST * sum(unit.stop_bytes - unit.start_bytes for unit in run.units.values()) if run else 0
        self.reserved_bytes -= freed
        return shard_pb2.DropRunResponse(freed_bytes=freed)

    def steps_updated(self, run: str, count: int) -> list[int]:
        """Waits until ``count`` steps were applied; returns them in order. Not for the server's own thread."""
        updates = self.runs[run].updates
        with self._updated:
            self._updated.wait_for(lambda: len(updates) >= count, 20.0)
            return [update.context.step for update in updates]

    def _run(self, request: Any) -> FakeRun:
        run = self.runs_by_id.get(request.context.run_id)
        if run is None or run.name != request.context.run:
            raise NotFoundError(f"the server has no run {request.context.run!r}")
        return run


class DirectCalls:
    """``ShardCalls`` to fake servers, without sockets."""

    def __init__(self, shards: dict[str, FakeShard]) -> None:
        self.shards = shards

    async def call(self, address: str, rpc_name: str, request: Any, *, retry_for_s: float) -> Any:
        give_up = asyncio.get_running_loop().time() + retry_for_s
        while True:
            await asyncio.sleep(0)
            try:
                return self.shards[address].handle(rpc_name, request)
            except UnavailableError:
                if asyncio.get_running_loop().time() > give_up:
                    raise
            await asyncio.sleep(0.005)

    async def is_running(self, server: Server) -> bool:
        await asyncio.sleep(0)
        shard = self.shards[server.address]
        if shard.refuses:
            raise UnavailableError(f"the coordinator cannot reach {server.address}: refused", connection=REFUSED)
        if not shard.available:
            raise UnavailableError(f"the coordinator cannot reach {server.address}: fake")
        return shard.incarnation == server.incarnation


class _Servicer:
    """Serves a fake server over gRPC. Streams are not supported."""

    def __init__(self, shard: FakeShard) -> None:
        self._shard = shard

    def __getattr__(self, rpc_name: str) -> Callable[[Any, Call], Any]:
        async def handle(request: Any, call: Call) -> Any:
            return self._shard.handle(rpc_name, request)

        return handle


@contextmanager
def serve_fakes(shards: list[FakeShard]) -> Iterator[list[str]]:
    """Serves fake shard servers over gRPC on loopback; yields their addresses."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    addresses: list[str] = []

    async def main() -> None:
        servers = []
        for shard in shards:
            server = grpc.aio.server(options=SERVER_OPTIONS)
            add_service(server, shard_pb2.DESCRIPTOR.services_by_name["ShardService"], _Servicer(shard))
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            servers.append(server)
        ready.set()
        await stop.wait()
        await asyncio.gather(*(server.stop(0) for server in servers))

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait(10)
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def fail_times(rpc: str, times: int, error: ShardwellError) -> Callable[[str, Any], None]:
    """Returns a ``FakeShard.fail`` that fails the first calls of one rpc."""
    left = times

    def fail(rpc_name: str, request: Any) -> None:
        nonlocal left
        if rpc_name == rpc and left > 0:
            left -= 1
            raise error

    return fail
