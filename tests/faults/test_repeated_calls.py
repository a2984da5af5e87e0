"""Call connections that break when an rpc was executed and not answered: its repetition over gRPC does no harm.

``EXECUTED_TWICE`` names the test of every unary rpc that the coordinator and the shard servers take. Its first request
on a call connection is executed twice, and so is that of all other rpcs of the test. The results are those of a run
whose connections do not break.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.grid.replica_store import ReplicaStore
from shardwell.transport.service_client import CallConnections, CoordinatorClient
from shardwell_server import in_process
from shardwell_server.coordinator import command, coordinator
from shardwell_server.coordinator.servers.shard_client import CallLine, ShardCalls
from shardwell_server.serving.call_server import CallServer
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_wire import fault_points
from shardwell_wire.connection.call_frames import CallConnectionError
from shardwell_wire.errors import CapacityError, ShardwellError
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.cluster import join_options, wait_in_sync, wait_until
from tests.support.reference import sha256

STEPS, DP = 6, 2

EXECUTED_TWICE: Mapping[str, set[str]] = {
    "train": {
        # of trainers
        "Heartbeat",
        "Join",
        "Leave",
        "DeclareUnit",
        "PublishInitialUnit",
        "ResetWork",
        "FinishWork",
        "PrepareGradients",
        "CommitStep",
        "SaveCheckpoint",
        "AddResiduals",
        "ListUnits",
        "DescribeRun",
        "ExplainStall",
        # of the coordinator
        "ReserveUnit",
        "PublishUnit",
        "Fence",
        "PrepareStep",
        "PrepareUpdate",
        "Update",
        "CopyShard",
        "BeginCheckpoint",
        "DescribeCheckpoint",
    },
    "optimizer_on_the_trainer": {"ConfirmPartitions"},
    "administer": {
        "PublishVersion",
        "SetBackups",
        "DrainServer",
        "RebalanceRun",
        "VerifyRun",
        "DeleteRun",
        "ListRuns",
        "ListServers",
        "DescribeWeights",
        "PromoteShards",
        "ReleaseShards",
        "HashShards",
        "DropRun",
        "DescribeServer",
    },
    "load_a_checkpoint": {"BeginRestore", "LoadShards", "AbortCheckpoint"},
    "declare_a_unit_that_is_refused": {"ReleaseUnit"},
    "replica": {
        "DescribeWorld",
        "DeclareParallelPlan",
        "ExchangeAddress",
        "FindRelay",
        "StoreSet",
        "StoreGet",
        "StoreAdd",
        "StoreCheck",
        "StoreDelete",
    },
}

OVER_GRPC_ONLY = {
    # Commands of operators use gRPC only. A repeated ForgetServer would not find the server, which is forgotten.
    "ForgetServer",
    "DescribeCluster",
    "DescribePerformance",
    "ListReaders",
    # A shard server calls the coordinator over gRPC only.
    "RegisterServer",
    "HeartbeatServer",
    "DeregisterServer",
    # Trainers, readers and other shard servers call a shard server over gRPC only.
    "LocateShard",
    "RelayUnit",
    "ReadRelayed",
    "SkipRelay",
    "OpenGradientBuffer",
    "CloseSharedBuffers",
    "ReduceGradientBuffer",
    "ReduceBatch",
    "OpenStagingBuffer",
    "StageStagingBuffer",
    "ConfirmBackups",
    "ListShards",
    "DescribeShard",
    "DescribeStep",
    "Peek",
}
"""Rpcs that no process of Shardwell sends on a call connection."""

SERVICES = (
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    shard_pb2.DESCRIPTOR.services_by_name["ShardService"],
)
UNARY = {
    method.name
    for service in SERVICES
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
}


def test_every_rpc_has_a_test() -> None:
    """For a new rpc, make sure that a repetition does no harm, and send it in one of the tests of this module."""
    tested = Counter(name for names in EXECUTED_TWICE.values() for name in names)
    assert set(tested) | OVER_GRPC_ONLY == UNARY
    assert set(tested) & OVER_GRPC_ONLY == set()
    assert set(tested.values()) == {1}


class Cluster:
    """A cluster in this process. Its call connections break after the first request of each rpc, if ``breaks``."""

    def __init__(self, address: str, servers: list[CallServer], coordinators: list[coordinator.Coordinator]) -> None:
        self.address, self._servers, self._coordinators = address, servers, coordinators
        self.broken: set[str] = set()
        """Rpcs that were executed, and whose connection broke then."""

    def break_connection(self, executed: Mapping[str, Any]) -> None:
        """Called when an rpc was executed."""
        self.broken.add(executed["rpc"])
        executed["connection"].close()

    def wait_for_connections(self) -> None:
        """Waits until trainers and coordinator use call connections."""
        wait_until(lambda: all(server._connections for server in self._servers), "call connections")

    def join(self, run: str, **options: Any) -> shardwell.Session:
        """Joins a run; returns when all rpcs go over call connections."""
        session = shardwell.join(self.address, run=run, **join_options(**options))
        wait_until(lambda: session._membership._coordinator._calls.idle is not None, "a call connection")
        self.wait_for_connections()
        return session

    def on_loop(self, work: Any) -> Any:
        """Runs a coroutine on the event loop of the servers; returns its result."""
        return asyncio.run_coroutine_threadsafe(work, in_process._shared_loop()).result(30.0)

    def restart_items(self) -> None:
        """Fences the work items of all runs, and starts new attempts."""

        async def restart() -> None:
            (of,) = self._coordinators
            for run in of.state.runs.values():
                run.work.restart()
                await of.state.save(run)
                of.trainers.items.start_fencing(run)

        self.on_loop(restart())

    def probe(self, server_id: str) -> bool:
        """Lets the coordinator probe a server, as if its heartbeats were late."""
        (of,) = self._coordinators
        running: bool = self.on_loop(of.server_leases._calls.is_running(of.state.cluster.servers[server_id]))
        return running

    @contextmanager
    def operator(self) -> Iterator[Callable[[str, Any], Any]]:
        """Yields a function that calls the coordinator over a call connection."""
        with closing(CoordinatorClient(self.address)) as client:
            port = int(self.address.rpartition(":")[2])
            offers = [each.offer() for each in self._servers]
            (offer,) = (each for each in offers if each is not None and each.grpc_port == port)
            client.use_calls(offer)
            yield partial(client.call, timeout_s=30.0, retry_for_s=30.0)


@contextmanager
def running(patched: pytest.MonkeyPatch, *, breaks: bool) -> Iterator[Cluster]:
    """Runs a cluster of three servers. Broken call connections are replaced at once."""
    servers, start, coordinators = list[CallServer](), CallServer.start, list[coordinator.Coordinator]()
    use_calls, call_line, offers = ShardCalls.use_calls, ShardCalls._call_line, dict[str, Any]()

    async def observed_start(self: CallServer, *arguments: Any, **options: Any) -> None:
        servers.append(self)
        await start(self, *arguments, **options)

    class ObservedCoordinator(coordinator.Coordinator):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            coordinators.append(self)

    async def observed_use(self: ShardCalls, address: str, calls: common_pb2.CallPort) -> None:
        offers[address] = calls
        await use_calls(self, address, calls)

    async def replaced_line(self: ShardCalls, line: CallLine, rpc_name: str, request: Any) -> Any:
        try:
            return await call_line(self, line, rpc_name, request)
        except CallConnectionError:
            for address, known in list(self._lines.items()):
                if known is line:
                    await use_calls(self, address, offers[address])
            raise

    patched.setattr(CallServer, "start", observed_start)
    patched.setattr(command, "Coordinator", ObservedCoordinator)
    patched.setattr(ShardCalls, "use_calls", observed_use)
    patched.setattr(ShardCalls, "_call_line", replaced_line)
    patched.setattr(CallConnections, "start", CallConnections.connect)
    with shardwell.testing.in_process_cluster(3, dp=DP) as address:
        cluster = Cluster(address, servers, coordinators)
        with ExitStack() as stack:
            for rpc in UNARY if breaks else ():
                stack.enter_context(fault_points.armed("server.call.executed", cluster.break_connection, rpc=rpc))
            yield cluster


Scenario = Callable[[Cluster, Path], object]
"""Uses a cluster; returns what must not depend on broken connections. The folder is empty."""


class Net(nn.Module):
    """Two units with parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(17, 300), nn.Linear(300, 8)
        self.register_buffer("mean", torch.zeros(17))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(batch.mean(0), 0.25)
        return self.last(torch.tanh(self.first(batch)))


def sharded(session: shardwell.Session) -> Net:
    """Returns the sharded model."""
    model = Net()
    shardwell.fully_shard(model.first, session, name="first")
    shardwell.fully_shard(model, session, name="rest")
    return model


def loss(model: nn.Module, number: int) -> torch.Tensor:
    """Returns the loss of a step's batch."""
    return model(torch.randn(4, 17, generator=torch.Generator().manual_seed(number))).square().mean()


def take_step(
    session: shardwell.Session, model: nn.Module, optimizer: Any, at: shardwell.Step, *, withdraws: bool = False
) -> None:
    """Computes and commits a step, with its gradients or without them."""
    for _ in at.batches(lambda *_: 0):
        loss(model, at.number).backward()
    if withdraws:
        optimizer.zero_grad()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def has_ended(thread: threading.Thread | None) -> bool:
    """Returns whether a thread has started and ended."""
    return thread is not None and not thread.is_alive()


def train(cluster: Cluster, folder: Path) -> object:
    options = {"checkpoint_dir": str(folder), "push_dtype": "int8", "push_error_feedback": True, "backups": 1}
    with cluster.join("gpt", **options) as session:
        membership, model = session._membership, sharded(session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
        for step in session.steps(STEPS):
            membership.ask()
            match step.number:
                case 2:
                    cluster.restart_items()
                case 3:
                    membership.give_up("a test")
                case 4:
                    membership.call("SaveCheckpoint", coordinator_pb2.SaveCheckpointRequest(run="gpt"))
                    # No rpc of this thread meanwhile: those of two threads do not share a call connection.
                    wait_until(lambda: has_ended(session.store.residuals._thread), "residuals in the checkpoint")
            take_step(session, model, optimizer, step, withdraws=step.number == 1)
        membership.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run="gpt"))
        membership.list_units()
        session.explain_stall()
        session.save_checkpoint(wait=True)
        return sha256({**shardwell.full_state_dict(model), **dict(model.named_buffers())})


def optimizer_on_the_trainer(cluster: Cluster, folder: Path) -> object:
    with cluster.join("gpt") as session:
        model = sharded(session)
        optimizer = shardwell.ClientSide(model.parameters(), torch.optim.AdamW, lr=1e-2)
        for step in session.steps(STEPS):
            take_step(session, model, optimizer, step)
        return sha256(shardwell.full_state_dict(model))


def administer(cluster: Cluster, folder: Path) -> object:
    with cluster.operator() as call:
        with cluster.join("gpt", keep_versions=1) as session:
            model = sharded(session)
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
            drain = coordinator_pb2.DrainServerRequest(server_id="shard-2")
            for step in session.steps(10_000):  # shards move with a commit
                if step.number == 2:
                    call("SetBackups", coordinator_pb2.SetBackupsRequest(run="gpt", backups=1))
                    wait_in_sync(cluster.address, "gpt")
                if step.number == STEPS:
                    weights = sha256(shardwell.full_state_dict(model))
                if step.number >= 2 and not call("DrainServer", drain).shard_count and step.number > STEPS:
                    break
                take_step(session, model, optimizer, step)
        call("ListServers", coordinator_pb2.ListServersRequest())
        assert cluster.probe("shard-0")
        call("RebalanceRun", coordinator_pb2.RebalanceRunRequest(run="gpt"))
        call("ListRuns", coordinator_pb2.ListRunsRequest())
        call("PublishVersion", coordinator_pb2.PublishVersionRequest(run="gpt", name="eval"))
        assert dict(call("DescribeWeights", coordinator_pb2.DescribeWeightsRequest(run="gpt")).published) == {
            "eval": step.number
        }
        verified = call("VerifyRun", coordinator_pb2.VerifyRunRequest(run="gpt"))
        assert not verified.differences
        call("DeleteRun", coordinator_pb2.DeleteRunRequest(run="gpt", force=True, request_id="1"))
        return weights


def refuse_the_last_of_three(patched: pytest.MonkeyPatch) -> None:
    """Lets two servers reserve a unit, and the third refuse it."""
    reserve = ShardStore.reserve

    def refuse(self: ShardStore, *arguments: Any) -> Any:
        if self not in asked:
            asked.append(self)
        if asked.index(self) == 2:
            raise CapacityError("refused by a test")
        return reserve(self, *arguments)

    asked: list[ShardStore] = []
    patched.setattr(ShardStore, "reserve", refuse)


def load_a_checkpoint(cluster: Cluster, folder: Path) -> object:
    options = {"checkpoint_dir": str(folder)}
    with cluster.join("gpt", **options) as session:
        model = sharded(session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
        for step in session.steps(2):
            take_step(session, model, optimizer, step)
        with fault_points.armed("coordinator.checkpoint.begun", "raise"), pytest.raises(ShardwellError):
            session.save_checkpoint(wait=True)
        session.save_checkpoint(wait=True)
    with cluster.operator() as call:
        call("DeleteRun", coordinator_pb2.DeleteRunRequest(run="gpt", force=True, request_id="1"))
    with cluster.join("gpt", resume="latest", **options) as session:
        model = sharded(session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
        for step in session.steps(STEPS):
            take_step(session, model, optimizer, step)
        return sha256(shardwell.full_state_dict(model))


def declare_a_unit_that_is_refused(cluster: Cluster, folder: Path) -> object:
    with pytest.MonkeyPatch.context() as patched, cluster.join("gpt") as session:
        refuse_the_last_of_three(patched)
        with pytest.raises(CapacityError, match="refused by a test"):
            shardwell.fully_shard(nn.Linear(256, 256), session, name="refused")
        patched.undo()
        model = sharded(session)
        return sha256(shardwell.full_state_dict(model))


def replica(cluster: Cluster, folder: Path) -> object:
    """Two trainers form a replica. Their stores are used by the first of them."""
    run, world = "gpt", shardwell.World(dp=1, tp=1, pp=2)
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        joining = [threads.submit(cluster.join, run, world=world, min_trainers=2, trainer=name) for name in "ab"]
        sessions = [stack.enter_context(each.result(30.0)) for each in joining]
        membership = sessions[0]._membership
        world_of = membership.call("DescribeWorld", coordinator_pb2.DescribeWorldRequest(run=run))
        (of,) = (each for each in world_of.replicas if membership.trainer in each.trainers)
        store, found = ReplicaStore(membership, of.replica_epoch), list[object]()
        store.set("key", "value")
        found += [store.compare_set("key", "value", "other"), store.compare_set("key", "value", "third")]
        found += [store.get("key"), store.add("sum", 2), store.add("sum", 3), store.check(["key", "none"])]
        found += [store.delete_key("key"), store.delete_key("key"), store.num_keys()]
        found += [sessions[0].exchange_address("a", "host:1"), sessions[1].exchange_address("a")]
        finding = coordinator_pb2.FindRelayRequest(context=membership.context(0), trainer=membership.trainer)
        found.append(membership.call("FindRelay", finding).server_id)
        plan = coordinator_pb2.ParallelPlan()
        context = membership.context(0)
        request = coordinator_pb2.DeclareParallelPlanRequest(context=context, trainer=membership.trainer, plan=plan)
        membership.call("DeclareParallelPlan", request)
        return found


SCENARIOS: Mapping[str, Scenario] = {
    each.__name__: each
    for each in (
        train,
        optimizer_on_the_trainer,
        administer,
        load_a_checkpoint,
        declare_a_unit_that_is_refused,
        replica,
    )
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_rpcs_that_are_executed_twice_do_no_harm(name: str, tmp_path: Path) -> None:
    results = []
    for breaks in (False, True):
        (folder := tmp_path / str(breaks)).mkdir()
        with pytest.MonkeyPatch.context() as patched, running(patched, breaks=breaks) as cluster:
            results.append(SCENARIOS[name](cluster, folder))
    assert results[0] == results[1]
    assert cluster.broken >= EXECUTED_TWICE[name], sorted(EXECUTED_TWICE[name] - cluster.broken)
    assert not cluster.broken & OVER_GRPC_ONLY
