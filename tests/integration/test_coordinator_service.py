"""The coordinator process over gRPC with fake shard servers, also killed in every phase."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from shardwell.processes.local_cluster import ServerProcess
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import (
    DuplicateError,
    InvalidRequestError,
    NotFoundError,
    StaleEpochError,
    StepRestartedError,
    StepStateError,
    UnavailableError,
    WorldError,
)
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.cluster import wait_until
from tests.support.coordinator import config, finished_item, optimizer, unit
from tests.support.fake_shards import FakeShard, serve_fakes
from tests.support.server_processes import server_process

LEASE_S = 1.0
POLLS = 10
"""Polls of 5 s each before a trainer gives up."""


class Cluster:
    """A coordinator process and two fake shard servers. A thread sends their heartbeats."""

    def __init__(self, state_dir: Path, *options: str) -> None:
        self.shards = [FakeShard(), FakeShard()]
        arguments = ["--listen", "127.0.0.1:0", "--state-dir", str(state_dir / "state"), "--lease-s", str(LEASE_S)]
        self._process = ServerProcess(
            "coordinator", ["coordinator", "--exit-with-parent", *arguments, *options], state_dir / "log"
        )
        self._process.wait_ready(time.monotonic() + 30)
        self.client = CoordinatorClient(self._process.address)
        self._stop = threading.Event()
        self.trainers: list[Trainer] = []

    @contextmanager
    def running(self) -> Iterator[Cluster]:
        with ExitStack() as stack:
            stack.callback(self._process.stop, 5.0)
            stack.callback(self.client.close)
            addresses = stack.enter_context(serve_fakes(self.shards))
            epochs = [
                self.call(
                    "RegisterServer", server_id=f"s{index}", address=address, budget_bytes=1 << 30, incarnation="1"
                ).epoch
                for index, address in enumerate(addresses)
            ]
            heartbeats = threading.Thread(target=self._heartbeat, args=(epochs,))
            heartbeats.start()
            stack.callback(heartbeats.join)
            stack.callback(self._stop.set)
            stack.callback(lambda: [trainer.stop() for trainer in self.trainers])
            yield self

    def _heartbeat(self, epochs: list[int]) -> None:
        while not self._stop.wait(LEASE_S / 4):
            for index, epoch in enumerate(epochs):
                try:
                    self.call("HeartbeatServer", retry_for_s=0.0, server_id=f"s{index}", epoch=epoch)
                except UnavailableError:
                    continue

    def call(self, rpc_name: str, *, retry_for_s: float = 20.0, **fields: Any) -> Any:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        request = getattr(coordinator_pb2, service.methods_by_name[rpc_name].input_type.name)(**fields)
        return self.client.call(rpc_name, request, timeout_s=20.0, retry_for_s=retry_for_s)

    def kill(self) -> None:
        self._process.kill()

    def restart(self) -> None:
        self._process.restart(time.monotonic() + 30)

    def kill_at(self, rpc_name: str) -> None:
        """Kills the coordinator while it calls an rpc of a shard server, and starts it again."""
        killed = threading.Event()

        def fail(called: str, request: Any) -> None:
            if called == rpc_name and not killed.is_set():
                killed.set()
                self.kill()
                # The restart must not block the server's event loop, which runs this function.
                threading.Thread(target=self.restart).start()
                raise UnavailableError("fake: the coordinator was killed")

        for shard in self.shards:
            shard.fail = fail


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--min-shard-bytes", "4096").running() as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("shared"), "--min-shard-bytes", "4096").running() as running:
        yield running


class Trainer:
    """A trainer whose calls wait and retry like the SDK's calls. A thread sends its heartbeats."""

    def __init__(self, cluster: Cluster, run: str, name: str, world: World, **fields: Any) -> None:
        self.cluster, self.run, self.name = cluster, run, name
        request = {"run": run, "trainer": name, "config": config(world), "incarnation": uuid.uuid4().hex, "wait_s": 5.0}
        while not (joined := cluster.call("Join", **(request | fields))).started:
            pass
        self.joined, self.epoch, self.run_id = joined, joined.epoch, joined.run_id
        self.items = {item.global_rank: item for item in joined.work.items}
        self.silent = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_lease)
        self._heartbeat.start()
        cluster.trainers.append(self)

    def stop(self) -> None:
        self.silent.set()
        self._heartbeat.join()

    def _keep_lease(self) -> None:
        while not self.silent.wait(LEASE_S / 4):
            try:
                self.cluster.call(
                    "Heartbeat",
                    retry_for_s=0.0,
                    run=self.run,
                    run_id=self.run_id,
                    trainer=self.name,
                    epoch=self.epoch,
                )
            except (UnavailableError, StaleEpochError, NotFoundError):
                continue

    def context(self, step: int, epoch: int | None = None) -> common_pb2.RequestContext:
        return common_pb2.RequestContext(
            run=self.run,
            run_id=self.run_id,
            epoch=self.epoch if epoch is None else epoch,
            step=step,
            request_id=uuid.uuid4().hex,
        )

    def declare(self, spec: common_pb2.UnitSpec) -> coordinator_pb2.DeclareUnitResponse:
        request = {"context": self.context(0), "trainer": self.name, "unit": spec}
        deadline = time.monotonic() + 20
        while not (declared := self.cluster.call("DeclareUnit", **request)).HasField("version"):
            assert time.monotonic() < deadline
            if declared.initialize:
                context = self.context(0, declared.epoch)
                # The unit may have been placed again meanwhile, which expects its values under another epoch.
                with suppress(StaleEpochError):
                    self.cluster.call("PublishInitialUnit", context=context, trainer=self.name, unit=spec.name)
        return declared

    def finish(self, step: int) -> None:
        """Finishes its items and all items leased to it later. Waits until all items of the step are finished."""
        for _ in range(POLLS):
            request = {
                "context": self.context(step),
                "trainer": self.name,
                "items": [finished_item(item) for item in self.items.values()],
            }
            finished = self.cluster.call("FinishWork", accept_work=True, wait_s=5.0, **request)
            if finished.all_finished:
                return
            self.items.update({item.global_rank: item for item in finished.work.items})
        raise AssertionError(f"step {step} is not finished: {finished.waiting_for}")

    def take_step(self, step: int) -> None:
        """Finishes and commits a step."""
        self.finish(step)
        request = {"context": self.context(step), "trainer": self.name}
        for _ in range(POLLS):
            try:
                committed = self.cluster.call(
                    "CommitStep", **request, optimizer=optimizer(), clip_coefficient=1.0, wait_s=5.0
                )
            except StepRestartedError:
                self.finish(step)  # the coordinator has restarted since
                continue
            if committed.committed:
                self.items = {item.global_rank: item for item in committed.next_work.items}
                return
        raise AssertionError(f"step {step} is not committed: {committed.waiting_for}")

    def train(self, steps: int) -> None:
        self.declare(unit("u", (64, 64)))
        for step in range(steps):
            self.take_step(step)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(60) for future in [threads.submit(call) for call in calls]]


def team(cluster: Cluster, *names: str, dp: int | None = None) -> list[Trainer]:
    run, world = uuid.uuid4().hex, World(dp=dp or len(names))
    settings = {"config": config(world, min_trainers=len(names))}
    return together(*(lambda name=name: Trainer(cluster, run, name, world, **settings) for name in names))


def assert_updated_once(cluster: Cluster, run: str, steps: int) -> None:
    assert [shard.steps_updated(run, steps) for shard in cluster.shards] == [list(range(steps))] * 2


def test_three_trainers_commit_every_step(shared: Cluster) -> None:
    trainers = team(shared, "a", "b", "c")
    together(*(lambda trainer=trainer: trainer.train(5) for trainer in trainers))
    assert_updated_once(shared, trainers[0].run, 5)


@pytest.mark.parametrize("rpc_name", ["ReserveUnit", "PublishUnit", "PrepareStep", "Update"])
def test_run_continues_after_a_kill_during_a_server_call(cluster: Cluster, rpc_name: str) -> None:
    trainers = team(cluster, "a", "b")
    cluster.kill_at(rpc_name)
    together(*(lambda trainer=trainer: trainer.train(4) for trainer in trainers))
    assert_updated_once(cluster, trainers[0].run, 4)
    assert cluster.shards[0].term == 2


def test_run_continues_after_a_kill_during_fencing(cluster: Cluster) -> None:
    a, b = team(cluster, "a", "b")
    together(lambda: a.train(1), lambda: b.train(1))
    cluster.kill_at("Fence")
    b.silent.set()
    a.take_step(1)
    assert_updated_once(cluster, a.run, 2)
    assert cluster.shards[0].term == 2
    assert cluster.shards[0].runs[a.run].epochs[1] > b.items[1].epoch
    with pytest.raises(StaleEpochError, match="trainer 'b'"):
        b.take_step(1)


def test_run_continues_after_a_kill_while_trainers_wait(cluster: Cluster) -> None:
    a, b = team(cluster, "a", "b")
    together(lambda: a.train(1), lambda: b.train(1))

    def kill_and_finish() -> None:
        wait_until(lambda: finished_ranks(cluster, a.run) == [0], "trainer a waits for rank 1")
        cluster.kill()
        cluster.restart()
        b.take_step(1)

    together(lambda: a.take_step(1), kill_and_finish)

    def kill_and_commit() -> None:
        a.finish(2)
        cluster.kill()
        cluster.restart()
        a.take_step(2)

    together(lambda: b.take_step(2), kill_and_commit)
    assert_updated_once(cluster, a.run, 3)


def finished_ranks(cluster: Cluster, run: str) -> list[int]:
    work = cluster.call("DescribeRun", run=run).work
    return [each.item.global_rank for each in work if each.state == coordinator_pb2.WORK_STATE_FINISHED]


def test_temporarily_unavailable_server_gets_its_update(shared: Cluster) -> None:
    trainers = team(shared, "a", "b")
    away = threading.Event()

    def fail(rpc_name: str, request: Any) -> None:
        if rpc_name == "Update" and not away.is_set():
            raise UnavailableError("fake: away")

    shared.shards[1].fail = fail
    try:
        # The commit does not wait for the update.
        together(*(lambda trainer=trainer: trainer.train(1) for trainer in trainers))
        assert not shared.shards[1].runs[trainers[0].run].updates
        away.set()
        together(*(lambda trainer=trainer: trainer.take_step(1) for trainer in trainers))
    finally:
        shared.shards[1].fail = lambda rpc_name, request: None
    assert_updated_once(shared, trainers[0].run, 2)


def test_work_of_a_silent_trainer_is_reassigned_when_its_lease_expires(shared: Cluster) -> None:
    a, b = team(shared, "a", "b")
    together(lambda: a.train(1), lambda: b.train(1))
    b.silent.set()
    a.take_step(1)
    expired, leased, committed = list(watch(shared, a.run))[-3:]
    assert [event.kind for event in (expired, leased, committed)] == ["lease_expired", "work_leased", "step_committed"]
    (silent_s,) = re.findall(r"trainer 'b'.* sent no request for ([\d.]+) s", expired.message)
    assert LEASE_S <= float(silent_s) < LEASE_S * 2.5


def watch(cluster: Cluster, run: str) -> list[coordinator_pb2.WatchEventsResponse]:
    request = coordinator_pb2.WatchEventsRequest(run=run, duration_s=0.05)
    return [event for event in cluster.client.stream("WatchEvents", request, timeout_s=60) if event.run == run]


def test_killed_trainer_that_restarts_at_once_gets_its_rank_back(shared: Cluster) -> None:
    a, b = team(shared, "a", "b")
    together(lambda: a.train(1), lambda: b.train(1))
    b.silent.set()
    settings = {"config": config(World(dp=2), min_trainers=2)}
    again = Trainer(shared, a.run, "b", World(dp=2), **settings)
    assert [rank_assignment.coordinates.global_rank for rank_assignment in again.joined.rank_assignments] == [1]
    with pytest.raises(DuplicateError, match="has a live trainer 'b'"):
        Trainer(shared, a.run, "b", World(dp=2), **settings)
    together(lambda: a.take_step(1), lambda: again.take_step(1))


def test_errors_keep_their_type_and_data(shared: Cluster) -> None:
    (a,) = team(shared, "a")
    with pytest.raises(StaleEpochError, match="join again") as stale:
        shared.call("Heartbeat", run=a.run, run_id=a.run_id, trainer="a", epoch=0)
    assert stale.value.data == {"run": a.run, "trainer": "a", "epoch": str(a.epoch)}
    with pytest.raises(WorldError, match=r"World\(dp=0\)"):
        shared.call("DescribeWorld", world=common_pb2.World())
    with pytest.raises(StepStateError, match=r"step 3 of run .* has not started"):
        shared.call("FinishWork", context=a.context(3), trainer="a")
    with pytest.raises(NotFoundError, match="run 'nobody' does not exist"):
        shared.call("ListUnits", run="nobody")


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x08" + b"\xff" * 11])
def test_malformed_bytes_are_rejected(shared: Cluster, data: bytes) -> None:
    with grpc.insecure_channel(shared.client.address) as channel:
        for method in coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods:
            if method.input_type.fields and not method.server_streaming:
                stub = channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}")
                with pytest.raises(grpc.RpcError) as refused:
                    stub(data, timeout=60)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, method.name
    shared.call("ListRuns")


def test_empty_requests_are_rejected_by_field_name(shared: Cluster) -> None:
    lists = {"ListRuns", "ListServers", "DescribeCluster", "WatchEvents"}
    for method in coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods:
        if method.name not in lists:
            with pytest.raises((InvalidRequestError, NotFoundError, StaleEpochError)) as refused:
                if method.server_streaming:
                    list(shared.client.stream(method.name, GetMessageClass(method.input_type)(), timeout_s=60.0))
                shared.call(method.name)
            assert str(refused.value)


def test_long_poll_ends_before_its_deadline(shared: Cluster) -> None:
    a, _ = team(shared, "a", "b")
    request = coordinator_pb2.FinishWorkRequest(context=a.context(0), trainer="a", wait_s=30.0)
    response = shared.client.call("FinishWork", request, timeout_s=0.5)  # raises after the deadline
    assert list(response.waiting_for) == [
        f"rank {rank}: trainer {name!r} is computing it" for rank, name in enumerate("ab")
    ]


def test_oversized_request_is_rejected(shared: Cluster) -> None:
    (a,) = team(shared, "a")
    spec = unit("huge", *[(1,)] * 65_537)
    with pytest.raises(InvalidRequestError, match="has 65537 parameters, more than"):
        shared.call("DeclareUnit", context=a.context(0), trainer="a", unit=spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lease-s", "0"], "lease_s=0.0: expected 0.1 to 3600 seconds"),
        (["--min-servers", "0"], "min_servers=0: expected at least 1"),
        (["--min-shard-bytes", "lots"], "'lots' is not a size"),
        (["--listen", "nowhere"], "expected HOST:PORT to listen on, got 'nowhere'"),
        (["--state-dir", "/dev/null"], "cannot open /dev/null/coordinator.sqlite"),
        (["--log-level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], message: str) -> None:
    with server_process("coordinator", "--listen", "127.0.0.1:0", *options) as server:
        output, errors = server.communicate(timeout=30)
    assert server.returncode not in (0, None) and output == ""
    assert message in errors
    assert "Traceback" not in errors
