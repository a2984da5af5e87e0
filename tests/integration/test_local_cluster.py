"""``LocalCluster``: real processes that start together, can be killed, and end with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import shardwell
from shardwell.processes import local_cluster
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import small_run, wait_gone, wait_until
from tests.support.forked_servers import started_servers

OWNER = """
import contextlib, shardwell, sys
from tests.support.cluster import small_run
with contextlib.ExitStack() as stack:
    cluster = stack.enter_context(shardwell.LocalCluster(num_shards=2, min_shard_bytes=1))
    if "with_run" in sys.argv:
        stack.enter_context(small_run(cluster.address, "kept"))
    print(cluster.coordinator.pid, *(shard.pid for shard in cluster.shards), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[shardwell.LocalCluster]:
    """Its servers are new interpreters, as in production. Those of the other clusters of this process are forked."""
    running = shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096)
    with started_servers():
        running.start()
    try:
        yield running
    finally:
        running.stop()


def listed_servers(address: str) -> coordinator_pb2.ListServersResponse:
    client = CoordinatorClient(address)
    try:
        response = client.call("ListServers", coordinator_pb2.ListServersRequest(), retry_for_s=10)
    finally:
        client.close()
    assert isinstance(response, coordinator_pb2.ListServersResponse)
    return response


def live_servers(address: str) -> list[str]:
    return sorted(server.server_id for server in listed_servers(address).servers if server.live)


def test_all_servers_are_registered_after_start(cluster: shardwell.LocalCluster) -> None:
    assert live_servers(cluster.address) == ["shard-0", "shard-1"]
    pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
    assert all("shardwell_server" in psutil.Process(pid).cmdline() for pid in pids)
    assert len({cluster.address, *(shard.address for shard in cluster.shards)}) == 3


def test_servers_do_not_receive_signals_of_the_terminal(cluster: shardwell.LocalCluster) -> None:
    own = os.getsid(0)
    assert all(os.getsid(process.pid) != own for process in (cluster.coordinator, *cluster.shards))


def test_stop_ends_all_processes_and_removes_temporary_files() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        servers = (cluster.coordinator, *cluster.shards)
        processes = [psutil.Process(server.pid) for server in servers]
        directory = cluster.coordinator.log_path.parents[1]
        assert directory.is_dir()
    wait_gone(processes, timeout_s=0)
    assert [server.exit_code for server in servers] == [0, 0]
    assert not directory.exists()
    cluster.stop()


def test_logs_and_state_stay_in_the_given_folders(tmp_path: Path) -> None:
    with shardwell.LocalCluster(num_shards=1, log_dir=tmp_path / "logs", state_dir=tmp_path / "state"):
        pass
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["coordinator.log", "shard-0.log"]
    assert any((tmp_path / "state").iterdir())


def test_restarted_coordinator_keeps_its_address_and_state() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster, small_run(cluster.address, "kept") as session:
        address, pid = cluster.address, cluster.coordinator.pid
        cluster.restart_coordinator()
        assert (cluster.address, cluster.coordinator.pid != pid) == (address, True)
        client = CoordinatorClient(address)
        response = client.call("ListRuns", coordinator_pb2.ListRunsRequest(), retry_for_s=10)
        client.close()
        assert [(run.run, run.committed_step) for run in response.runs] == [("kept", session.step)]


def test_shard_server_can_be_killed() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        process = psutil.Process(cluster.shards[0].pid)
        cluster.shards[0].kill()
        assert cluster.shards[0].exit_code == -signal.SIGKILL
        wait_gone([process], timeout_s=0)


@pytest.mark.parametrize("ready_s", [0.0, 3600.0])
def test_server_that_is_killed_often_is_started_again_unless_it_was_ready_too_shortly(
    ready_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_MAX_QUICK_ENDS", 2)
    monkeypatch.setattr(local_cluster, "_QUICK_END_S", ready_s)
    with shardwell.LocalCluster(num_shards=1) as cluster:
        (shard,) = cluster.shards
        for kills in range(1, 4):
            os.kill(pid := shard.pid, signal.SIGKILL)
            if kills == 2 and ready_s > 0:
                wait_until(lambda: shard.is_over, "the cluster to give up")
                break
            wait_until(lambda pid=pid: shard.pid != pid and shard.is_ready, "the server to start again")  # type: ignore[misc]
        assert shard.ends == [-signal.SIGKILL] * (1 if ready_s > 0 else 3)


def test_server_that_fails_to_start_is_explained() -> None:
    with pytest.raises(shardwell.UnavailableError, match=r"(?s)coordinator ended with exit code.*lease_s=-1"):
        shardwell.LocalCluster(num_shards=1, lease_s=-1.0).start()


def test_server_that_starts_too_slowly_is_explained() -> None:
    with pytest.raises(shardwell.UnavailableError, match="coordinator was not ready in time"):
        shardwell.LocalCluster(num_shards=1, start_limit_s=0.0).start()


def test_cluster_without_shards_is_rejected() -> None:
    with pytest.raises(shardwell.UsageError, match="num_shards=0"):
        shardwell.LocalCluster(num_shards=0)


def test_servers_of_a_cluster_share_the_memory_of_the_machine(cluster: shardwell.LocalCluster) -> None:
    budgets = [server.budget_bytes for server in listed_servers(cluster.address).servers]
    assert len(budgets) == 2
    assert sum(budgets) <= 0.8 * psutil.virtual_memory().total


def shm_folder_of(server: psutil.Process) -> Path:
    """Returns the folder of the files that trainers map. The shard server holds the folder's lock."""
    descriptors = (os.readlink(path) for path in Path(f"/proc/{server.pid}/fd").iterdir() if path.is_symlink())
    (lock,) = [Path(target) for target in descriptors if target.startswith("/dev/shm/") and target.endswith("/lock")]
    return lock.parent


def start_owner(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """Returns a process that runs ``OWNER``, and its coordinator and shard servers."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER, *arguments]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    servers = [psutil.Process(int(word)) for word in owner.stdout.readline().split()]
    assert len(servers) == 3
    return owner, servers


def wait_all_gone(tmp_path: Path) -> None:
    """Waits for the end of all processes of ``start_owner``, and of the servers that the owner started again."""

    def has_ended(process: psutil.Process) -> bool:
        with suppress(psutil.Error):  # a zombie has no environment
            return process.environ().get("TMPDIR") != str(tmp_path)
        return True

    wait_until(lambda: all(has_ended(process) for process in psutil.process_iter()), "the end of the cluster")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_and_no_file_remains_when_owner_and_server_are_killed(
    tmp_path: Path, number: signal.Signals
) -> None:
    owner, servers = start_owner(tmp_path)
    folders = [shm_folder_of(server) for server in servers[1:]]
    assert len(set(folders)) == 2
    assert os.listdir(tmp_path)
    servers[1].kill()
    owner.send_signal(number)
    owner.communicate()
    wait_all_gone(tmp_path)
    assert not any(folder.exists() for folder in folders)
    assert os.listdir(tmp_path) == []


def test_server_that_was_starting_again_removes_its_folder_when_all_others_are_killed(tmp_path: Path) -> None:
    owner, servers = start_owner(tmp_path, "with_run")
    folder = shm_folder_of(servers[1])
    assert list(folder.glob("*.shard"))
    servers[1].kill()
    children = psutil.Process(owner.pid).children
    wait_until(
        lambda: len({child.pid for child in children()} - {server.pid for server in servers}) == 1, "a new process"
    )
    for process in (owner, servers[0], servers[2]):
        process.kill()
    owner.communicate()
    wait_all_gone(tmp_path)
    assert not folder.exists()
