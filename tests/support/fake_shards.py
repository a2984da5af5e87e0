"""Fake shard servers without tensors, for tests of the coordinator."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from shardwell_server.coordinator.servers.cluster import Server
from shardwell_server.coordinator.servers.shard_client import REFUSED
from shardwell_server.serving.rpc import Call, add_service
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.connection.channel import SERVER_OPTIONS
from shardwell_wire.errors import (
    CapacityError,
    IncompleteStepError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
)
from shardwell_wire.v1 import common_pb2, shard_pb2

COST = 3
"""Reserved bytes per byte of parameters, which includes optimizer state and contributions."""


@dataclass
class FakeUnit:
    """A shard of a unit."""

    start_bytes: int
    stop_bytes: int
    placement: int
    version: int | None = None
    index: int = 0
    backup: bool = False
    in_sync: bool = False
    """True if a backup receives every prepared step."""
    prepared_step: int | None = None
    replicas: dict[str, FakeShard] = field(default_factory=dict)
    """Backups of a primary, by server id."""
    history: list[int] = field(default_factory=list)
    """Steps whose updates the values contain."""

    @property
    def size_bytes(self) -> int:
        return COST * (self.stop_bytes - self.start_bytes)

    def update(self, step: int) -> None:
        self.version, self.prepared_step = step + 1, None
        self.history.append(step)


@dataclass
class FakeRun:
    name: str
    shards: dict[tuple[int, int], FakeUnit] = field(default_factory=dict)
    """By unit index and first byte."""
    names: dict[str, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    placement: int = 0
    """Of the last PromoteShards."""
    prepared: shard_pb2.PrepareStepRequest | None = None
    updates: list[shard_pb2.UpdateRequest] = field(default_factory=list)
    """Applied updates, without repetitions."""

    @property
    def units(self) -> dict[int, FakeUnit]:
        """Shards by unit index. If the server has several shards of a unit, only the last."""
        return {index: shard for (index, _), shard in self.shards.items()}

    @property
    def primaries(self) -> list[FakeUnit]:
        return [shard for shard in self.shards.values() if not shard.backup]

    def named(self, reference: shard_pb2.ShardReference) -> FakeUnit | None:
        """The shard of a reference."""
        return self.shards.get((self.names.get(reference.unit, -1), reference.start_bytes))


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
        self.checkpoint_url = ""
        """Folder of the last checkpoint that began."""
        self._updated = threading.Condition()
        self.changed_buffers: dict[int, list[int]] = {}
        """Indices of changed buffers, by unit index."""
        self.missing: set[int] = set()
        """dp ranks whose contributions were lost."""
        self.peers: dict[str, FakeShard] = {}
        """All fake servers, by address."""

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
        if rpc_name == "ListShards":
            return self.ListShards(request)
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
        backup, key = request.role == shard_pb2.SHARD_ROLE_BACKUP, (request.unit_index, request.start_bytes)
        for index, start in list(run.shards):
            former = run.shards[index, start]
            replaced = former.start_bytes == request.start_bytes if backup else not former.version
            older = index == request.unit_index and former.placement < request.placement
            if older and replaced and former.backup == backup:
                self._release(run, (index, start))
        if key not in run.shards:
            if self.reserved_bytes + size > self.budget_bytes:
                raise CapacityError(f"{size} bytes do not fit")
            self.reserved_bytes += size
            run.shards[key] = FakeUnit(
                request.start_bytes, request.stop_bytes, request.placement, index=request.unit_index, backup=backup
            )
            run.names[request.unit.name] = request.unit_index
        unit = run.shards[key]
        assert unit.backup == backup
        assert (unit.start_bytes, unit.stop_bytes) == (request.start_bytes, request.stop_bytes)
        return shard_pb2.ReserveUnitResponse(free_bytes=self.budget_bytes - self.reserved_bytes, version=unit.version)

    def ReleaseUnit(self, request: shard_pb2.ReleaseUnitRequest) -> shard_pb2.ReleaseUnitResponse:
        run = self.runs_by_id.get(request.context.run_id, FakeRun(request.context.run))
        run.released[request.unit] = max(request.placement, run.released.get(request.unit, 0))
        for index, start in list(run.shards):
            named = run.names.get(request.unit) == index
            if named and run.shards[index, start].placement <= request.placement:
                self._release(run, (index, start))
        return shard_pb2.ReleaseUnitResponse(free_bytes=self.budget_bytes - self.reserved_bytes)

    def _release(self, run: FakeRun, key: tuple[int, int]) -> None:
        self.reserved_bytes -= run.shards.pop(key).size_bytes

    def PublishUnit(self, request: shard_pb2.PublishUnitRequest) -> shard_pb2.PublishUnitResponse:
        run = self._run(request)
        units = [unit for unit in run.primaries if unit.index == run.names[request.unit]]
        for unit in units:
            unit.version = unit.version or 0
        return shard_pb2.PublishUnitResponse(version=unit.version)

    def BeginRestore(self, request: shard_pb2.BeginRestoreRequest) -> shard_pb2.BeginRestoreResponse:
        run = self.runs_by_id.setdefault(request.context.run_id, FakeRun(request.context.run))
        for key in list(run.shards):
            self._release(run, key)
        return shard_pb2.BeginRestoreResponse(free_bytes=self.budget_bytes - self.reserved_bytes)

    def LoadShards(self, request: shard_pb2.LoadShardsRequest) -> shard_pb2.LoadShardsResponse:
        run = self._run(request)
        for unit in run.primaries:
            if not request.unit or unit.index == run.names[request.unit]:
                unit.version, unit.history = request.context.step, list(range(request.context.step))
        return shard_pb2.LoadShardsResponse(loaded=True)

    def BeginCheckpoint(self, request: shard_pb2.BeginCheckpointRequest) -> shard_pb2.BeginCheckpointResponse:
        self.checkpoint_url = request.url
        return shard_pb2.BeginCheckpointResponse()

    def DescribeCheckpoint(self, request: shard_pb2.DescribeCheckpointRequest) -> shard_pb2.DescribeCheckpointResponse:
        """Writes a file without tensors."""
        plan = FilePlan([], [], run_id=request.context.run_id, step=request.context.step)
        writer = CheckpointFileWriter(open_storage(self.checkpoint_url), uuid.uuid4().hex, plan)
        return shard_pb2.DescribeCheckpointResponse(file_json=json.dumps(writer.finish().to_dict()))

    def AbortCheckpoint(self, request: shard_pb2.AbortCheckpointRequest) -> shard_pb2.AbortCheckpointResponse:
        return shard_pb2.AbortCheckpointResponse()

    def Fence(self, request: shard_pb2.FenceRequest) -> shard_pb2.FenceResponse:
        run = self._run(request)
        self._raise_fences(run, request.ranks)
        return shard_pb2.FenceResponse()

    def _raise_fences(self, run: FakeRun, ranks: Iterable[shard_pb2.RankFence]) -> None:
        for rank in ranks:
            run.epochs[rank.dp_rank] = max(run.epochs.get(rank.dp_rank, 0), rank.epoch)
            if rank.attempt > run.attempts.get(rank.dp_rank, 0):
                run.attempts[rank.dp_rank], run.prepared = rank.attempt, None

    def PrepareStep(self, request: shard_pb2.PrepareStepRequest) -> shard_pb2.PrepareStepResponse:
        run, step = self._run(request), request.context.step
        self.manifests.append(request)
        if any(unit.version != step for unit in run.primaries):
            raise StepStateError(f"step {step} is not the next: {run.shards}")
        if lost := sorted(self.missing & {rank.dp_rank for rank in request.ranks}):
            raise IncompleteStepError(f"unit 'u': rank {lost} missing", step=step)
        run.prepared = request
        norms = [
            shard_pb2.UnitNorm(
                unit_index=index, square_partials=self.square_partials, max_abs=min(2.0, request.norm_bound or 2.0)
            )
            for index in sorted({unit.index for unit in run.primaries})
        ]
        changed = [
            shard_pb2.ChangedBuffers(unit_index=index, buffer_indices=found)
            for index, found in self.changed_buffers.items()
        ]
        failed = [status for unit in run.primaries for status in self._replicate(run, unit, step)]
        return shard_pb2.PrepareStepResponse(
            units=norms,
            version=step,
            update_ready=request.HasField("optimizer"),
            buffers=changed,
            failed_backups=failed,
        )

    def _replicate(self, run: FakeRun, unit: FakeUnit, step: int) -> list[shard_pb2.BackupStatus]:
        """Gives the prepared step to the backups of a primary. Returns those that failed."""
        unit.prepared_step, failed = step, []
        for server_id, target in list(unit.replicas.items()):
            copy = target.find(run, unit)
            if copy is None or not copy.in_sync or copy.version != step or not target.available:
                del unit.replicas[server_id]
                failed.append(
                    shard_pb2.BackupStatus(
                        unit_index=unit.index,
                        start_bytes=unit.start_bytes,
                        stop_bytes=unit.stop_bytes,
                        server_id=server_id,
                        error="fake: no answer",
                    )
                )
            else:
                copy.prepared_step = step
        return failed

    def find(self, run: FakeRun, unit: FakeUnit) -> FakeUnit | None:
        """Returns this server's copy of another server's shard."""
        own = next((each for each in self.runs_by_id.values() if each.name == run.name), None)
        if own is None or self.incarnation is None:
            return None
        return own.shards.get((unit.index, unit.start_bytes))

    def CopyShard(self, request: shard_pb2.CopyShardRequest) -> shard_pb2.CopyShardResponse:
        run, target = self._run(request), self.peers[request.target_address]
        unit = run.named(request.shard)
        if unit is None or unit.backup or unit.version is None:
            raise NotFoundError(f"this server is not the primary of {request.shard}")
        copy = target.find(run, unit)
        if copy is None or not target.available or copy.placement != request.placement:
            raise UnavailableError(f"{request.target_server_id} has no reservation {request.placement}")
        copy.version, copy.prepared_step, copy.in_sync = unit.version, unit.prepared_step, True
        copy.history = list(unit.history)
        unit.replicas[request.target_server_id] = target
        return shard_pb2.CopyShardResponse(version=unit.version, copied_bytes=unit.size_bytes)

    def PromoteShards(self, request: shard_pb2.PromoteShardsRequest) -> shard_pb2.PromoteShardsResponse:
        run, step = self._run(request), request.context.step
        names = {index: name for name, index in run.names.items()}
        units = [run.named(reference) for reference in request.shards]
        for unit in units:
            can_update = unit is not None and (unit.version, unit.prepared_step) == (step - 1, step - 1)
            if unit is None or (unit.version != step and not can_update):
                raise StepStateError(f"cannot be promoted at step {step}: {unit}")
        for unit in units:
            assert unit is not None
            if unit.version == step:
                unit.prepared_step = None
            if unit.backup or request.placement > run.placement:
                unit.replicas = {
                    entry.server_id: self.peers[entry.address]
                    for entry in request.backups
                    if (entry.shard.unit, entry.shard.start_bytes) == (names[unit.index], unit.start_bytes)
                }
            unit.backup = unit.in_sync = False
        self._raise_fences(run, request.fences)
        run.placement = max(run.placement, request.placement)
        return shard_pb2.PromoteShardsResponse()

    def ReleaseShards(self, request: shard_pb2.ReleaseShardsRequest) -> shard_pb2.ReleaseShardsResponse:
        run = self.runs_by_id.get(request.context.run_id)
        for reference in request.shards if run is not None else ():
            assert run is not None
            unit = run.named(reference)
            if unit is not None and unit.placement <= request.placement:
                self._release(run, (unit.index, unit.start_bytes))
        return shard_pb2.ReleaseShardsResponse(free_bytes=self.budget_bytes - self.reserved_bytes)

    def ListShards(self, request: shard_pb2.ListShardsRequest) -> shard_pb2.ListShardsResponse:
        run = self.runs.get(request.run)
        if run is None:
            raise NotFoundError(f"this server has no run {request.run!r}")
        names = {index: name for name, index in run.names.items()}
        shards = [
            shard_pb2.ShardSummary(
                unit=names[index], start_bytes=at.start_bytes, stop_bytes=at.stop_bytes, version=at.version
            )
            for (index, _), at in run.shards.items()
        ]
        return shard_pb2.ListShardsResponse(shards=shards)

    def HashShards(self, request: shard_pb2.HashShardsRequest) -> shard_pb2.HashShardsResponse:
        run = self._run(request)
        names = {index: name for name, index in run.names.items()}
        return shard_pb2.HashShardsResponse(
            shards=[
                shard_pb2.ShardHash(
                    unit=names[unit.index],
                    start_bytes=unit.start_bytes,
                    stop_bytes=unit.stop_bytes,
                    role=shard_pb2.SHARD_ROLE_BACKUP if unit.backup else shard_pb2.SHARD_ROLE_PRIMARY,
                    version=unit.version or 0,
                    tensors=[shard_pb2.TensorHash(parameter="p", name="values", xxh3=sum(unit.history))],
                )
                for unit in run.shards.values()
                if unit.version is not None
            ]
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
        pending = [unit for unit in run.primaries if unit.version != step + 1]
        if any(unit.prepared_step != step for unit in pending):
            raise StepStateError(f"step {step} is not prepared")
        for unit in pending:
            unit.update(step)
        stale = []
        for unit in run.shards.values():
            if unit.backup and unit.in_sync and unit.version != step + 1:
                if (unit.version, unit.prepared_step) == (step, step):
                    unit.update(step)
                else:
                    unit.in_sync = False
                    stale.append(shard_pb2.BackupStatus(unit_index=unit.index, start_bytes=unit.start_bytes))
        run.prepared, run.attempts = None, {}
        if pending:
            with self._updated:
                run.updates.append(request)
                self._updated.notify_all()
        return shard_pb2.UpdateResponse(version=step + 1, stale_backups=stale)

    def DropRun(self, request: shard_pb2.DropRunRequest) -> shard_pb2.DropRunResponse:
        run = self.runs_by_id.pop(request.context.run_id, None)
        freed = sum(unit.size_bytes for unit in run.shards.values()) if run else 0
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
        for shard in shards.values():
            shard.peers = shards

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

    async def use_calls(self, address: str, calls: common_pb2.CallPort) -> None:
        raise AssertionError("fake servers offer no call connections")

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
    assert ready.wait(60)
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
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
