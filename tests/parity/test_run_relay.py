"""A relay changes no bit, also if it dies at any instant, and is used again after a restart."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.processes.local_cluster import ServerProcess
from shardwell.store import host_relay
from shardwell.transport import shm_transport
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire import fault_points
from shardwell_wire.v1 import coordinator_pb2
from tests.support import transformer
from tests.support.cluster import join_options, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import ADAMW, sha256, train_plain
from tests.support.relay import relay_process

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
REMOTE = "socket,grpc"
"""Without shared memory, a server on this host behaves as a server on another host."""


@pytest.fixture(scope="module")
def plain_hash() -> str:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    train_plain(model, optimizer, transformer.batch, dp=2, steps=STEPS)
    return sha256(model.state_dict())


@pytest.fixture
def relay(cluster: shardwell.LocalCluster, tmp_path: Path) -> Iterator[ServerProcess]:
    with relay_process(cluster, tmp_path) as process:
        yield process


def restart(relay: ServerProcess) -> None:
    relay.restart(time.monotonic() + 60)


def train(session: shardwell.Session, at_step: dict[int, Any]) -> str:
    """Trains the transformer; calls a function in the first forward of some steps; returns the hash."""
    model = transformer.build()
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in session.steps(STEPS):
        for tokens in step.batches(transformer.batch):
            at_step.pop(step.number, lambda: None)()
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sha256(shardwell.full_state_dict(model))


def joined(cluster: shardwell.LocalCluster, **options: Any) -> shardwell.Session:
    world = shardwell.World(dp=2)
    return shardwell.join(
        cluster.address,
        run=uuid.uuid4().hex,
        world=world,
        min_trainers=1,
        **join_options(transports=REMOTE, host_cache_bytes=1 << 30, **options),
    )


def live_servers(cluster: shardwell.LocalCluster) -> dict[str, coordinator_pb2.ServerSummary]:
    with closing(CoordinatorClient(cluster.address)) as client:
        listed = client.call("ListServers", coordinator_pb2.ListServersRequest())
    return {server.server_id: server for server in listed.servers if server.live}


def test_relay_owns_nothing_and_is_preferred(cluster: shardwell.LocalCluster, relay: ServerProcess) -> None:
    with joined(cluster) as session:
        train(session, {})
        assert session.stats()["cache_hit_bytes"] > 0
        at = live_servers(cluster)["relay-0"]
    assert (at.owns_nothing, at.live, at.primary_count, at.backup_count) == (True, True, 0, 0)
    assert at.address == relay.address


def test_servers_relay_after_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """Servers that keep their leases do not register again."""
    with shardwell.LocalCluster(num_shards=1, state_dir=tmp_path) as cluster:
        cluster.coordinator.kill()
        cluster.restart_coordinator()
        options = join_options(transports=REMOTE, host_cache_bytes=1 << 30)
        with shardwell.join(cluster.address, run=uuid.uuid4().hex, **options) as session:
            store = session.store
            wait_until(lambda: store._relay.find() is not None, "the relay")


def test_next_server_removes_what_a_killed_relay_left(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()

    def folders() -> list[Path]:
        return [path for path in memory.iterdir() if path.is_dir()]

    options = ("--shm-dir", str(memory))
    with relay_process(cluster, tmp_path, *options) as relay, joined(cluster) as session:
        train(session, {})
        (left,) = folders()
        size_bytes = sum(path.stat().st_size for path in left.iterdir())
        assert size_bytes > sum(unit.layout.size_bytes for unit in session.units), "the cached weights"
        relay.kill()
        assert left.exists()
        with relay_process(cluster, tmp_path, *options, name="other"):
            wait_until(lambda: left not in folders(), "the removal of the former folder")
            assert len(folders()) == 1
    assert not folders()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_relay_changes_no_bit_and_is_used_again(
    cluster: shardwell.LocalCluster, relay: ServerProcess, dtype: str
) -> None:
    with joined(cluster, gather_dtype=dtype) as session:
        undisturbed = train(session, {})
    with joined(cluster, gather_dtype=dtype) as session:
        store = session.store

        def used_again() -> None:
            restart(relay)
            wait_until(lambda: store._relay.find() is not None, "the relay")
            wait_until(
                lambda: all(shard.cached.is_relayed for unit in store._units.values() for shard in unit.shards),
                "shards at the relay",
            )

        assert train(session, {1: relay.kill, 4: used_again}) == undisturbed
        assert all(shard.cached.is_relayed for unit in store._units.values() for shard in unit.shards)


@contextmanager
def stopped(relay: ServerProcess) -> Iterator[None]:
    """Context in which a relay answers nothing, although it has its lease."""
    os.kill(relay.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(relay.pid, signal.SIGCONT)


def relay_of(session: shardwell.Session) -> str:
    found = session.store._relay.find()
    return "" if found is None else found.server_id


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_trainer_uses_a_shard_server_if_the_preferred_relay_cannot_be_used(
    cluster: shardwell.LocalCluster,
    relay: ServerProcess,
    plain_hash: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_relay, "_OPEN_TIMEOUT_S", 1.0)
    with ExitStack() as stack:
        if how == "stop":
            stack.enter_context(stopped(relay))
        else:
            os.kill(relay.pid, signal.SIGKILL)  # nobody learns of it before the trainer
        session = stack.enter_context(joined(cluster))
        assert train(session, {}) == plain_hash
        assert relay_of(session).startswith("shard-")
        assert session.stats()["cache_hit_bytes"] > 0
    assert "no relay on host" not in caplog.text


def test_trainers_agree_on_a_relay_although_the_preferred_one_does_not_answer(
    cluster: shardwell.LocalCluster, relay: ServerProcess, plain_hash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", REMOTE)
    monkeypatch.setenv("SHARDWELL_GRADIENT_REDUCTION", "hierarchical")
    options, run = ("--dp", 2, "--steps", STEPS), uuid.uuid4().hex
    with (
        stopped(relay),
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as second,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0) as first,
    ):
        results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [plain_hash] * 2, results
    stats = [result["stats"] for result in results]
    assert sum(each["node_summed_bytes"] for each in stats) == sum(each["pushed_bytes"] for each in stats) > 0


def test_trainers_with_different_relays_meet_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a restart, the coordinator does not know which relays are used."""
    monkeypatch.setattr(host_relay, "_OPEN_TIMEOUT_S", 1.0)
    run, world = uuid.uuid4().hex, shardwell.World(dp=2)
    options = join_options(transports=REMOTE, host_cache_bytes=1 << 30, min_trainers=1)
    with shardwell.LocalCluster(1) as cluster, relay_process(cluster, tmp_path) as relay, ExitStack() as stack:

        def join() -> shardwell.Session:
            return stack.enter_context(shardwell.join(cluster.address, run=run, world=world, **options))

        first = join()
        with stopped(relay):
            assert relay_of(first) == "shard-0"
        cluster.restart_coordinator()
        wait_until(lambda: "relay-0" in live_servers(cluster), "the preferred relay")
        second = join()
        assert relay_of(second) == "relay-0"
        assert relay_of(first) == "shard-0"
        left = first.store._relay.find()
        assert left is not None
        left.has_pushed_alone = True  # the gradient of one trainer waited in vain for that of the other
        wait_until(lambda: relay_of(first) == relay_of(second) == "relay-0", "the same relay")
        assert left.is_lost


def test_warning_says_why_there_is_no_relay(
    cluster_of_one: shardwell.LocalCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warning() -> str:
        caplog.clear()
        with joined(cluster_of_one) as session:
            assert relay_of(session) == ""
        (line,) = [line for line in caplog.messages if "no relay on host" in line]
        return line

    start = f"; start one: shardwell-server relay --coordinator {cluster_of_one.address}"

    def refuse(*_: object, **__: object) -> int:
        raise FileNotFoundError("[Errno 2] No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(shm_transport, "receive_descriptor", refuse)  # as from a container with another /dev/shm
        line = warning()
        address = cluster_of_one.shards[0].address
        assert f"'shard-0' at {address} cannot be used: " in line and "offers shared memory at " in line
        assert line.endswith(f"No such file or directory{start}")
    with stopped(cluster_of_one.shards[0]):
        monkeypatch.setattr(host_relay, "_OPEN_TIMEOUT_S", 1.0)
        line = warning()
        assert f"'shard-0' at {address} cannot be used: " in line and line.endswith(start)


@pytest.mark.parametrize("route", ["direct", "hierarchical"])
def test_relay_that_dies_at_any_instant_changes_no_bit(
    cluster: shardwell.LocalCluster,
    relay: ServerProcess,
    plain_hash: str,
    route: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", REMOTE)
    monkeypatch.setenv("SHARDWELL_HOST_CACHE_BYTES", str(1 << 30))
    monkeypatch.setenv("SHARDWELL_GRADIENT_REDUCTION", route)
    over, run = threading.Event(), uuid.uuid4().hex

    def kill_again_and_again() -> None:
        while not over.wait(0.4):
            relay.kill()
            restart(relay)

    killer = threading.Thread(target=kill_again_and_again)
    options = ("--dp", 2, "--steps", STEPS)
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as second,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0) as first,
    ):
        killer.start()
        try:
            results = [first.finish(), second.finish()]
        finally:
            over.set()
            killer.join()
    assert [result.get("sha256") for result in results] == [plain_hash] * 2, results


@pytest.mark.parametrize(
    ("point", "nth"), [("relay.fetch.middle", 11), ("relay.sum.before", 6), ("relay.sum.after", 6)]
)
def test_relay_that_dies_at_a_point_changes_no_bit(
    cluster: shardwell.LocalCluster,
    tmp_path: Path,
    plain_hash: str,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    nth: int,
) -> None:
    """The relay is started again at once. After a sum that nobody has acknowledged, attempts start again."""
    once, run = tmp_path / "happened", uuid.uuid4().hex
    fault = fault_points.Fault(point=point, action="kill", nth=nth, once=str(once))
    with pytest.MonkeyPatch.context() as patched:
        for name, value in fault_points.environment(fault).items():
            patched.setenv(name, value)
        with relay_process(cluster, tmp_path) as relay:
            relay.keep_running(60)
            for name, value in (
                ("TRANSPORTS", REMOTE),
                ("HOST_CACHE_BYTES", 1 << 30),
                ("GRADIENT_REDUCTION", "hierarchical"),
            ):
                monkeypatch.setenv(f"SHARDWELL_{name}", str(value))
            options = ("--dp", 2, "--steps", STEPS)
            with (
                TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as second,
                TrainerProcess(cluster.address, run, *options, "--global-rank", 0) as first,
            ):
                results = [first.finish(), second.finish()]
    assert once.exists()
    assert [result.get("sha256") for result in results] == [plain_hash] * 2, results
    assert sum(result["stats"]["node_summed_bytes"] for result in results) > 0
