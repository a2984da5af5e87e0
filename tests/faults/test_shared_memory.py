"""Fault tests of processes that share memory: no bit changes, and no files stay behind."""

from __future__ import annotations

import os
import signal
import uuid

import grpc
import pytest

import shardwell
from shardwell.transport.shm_transport import ShmTransport
from tests.support.cluster import cluster_fixture, small_run, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256
from tests.support.shared_files import SHARED_MEMORY, files_of, folder_of

STEPS = 8
UNITS = 4
"""Number of units of the transformer. Each has a shard on every server."""


cluster = cluster_fixture(num_shards=2, lease_s=1.5)


@pytest.fixture(scope="module")
def undisturbed_hash() -> str:
    return undisturbed_sha256(dp=2, steps=STEPS)


class FileCount:
    """Counts the files that a cluster's servers add to shared memory."""

    def __init__(self, cluster: shardwell.LocalCluster) -> None:
        self._cluster, self._before = cluster, self._now(cluster)

    def __call__(self) -> int:
        return self._now(self._cluster) - self._before

    @staticmethod
    def _now(cluster: shardwell.LocalCluster) -> int:
        return sum(len(files_of(shard.pid)) for shard in cluster.shards)


def test_sigkill_of_a_trainer_in_backward_removes_its_gradient_buffers(
    cluster: shardwell.LocalCluster, undisturbed_hash: str
) -> None:
    files = FileCount(cluster)
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS, "--transports", "shm")
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0, "--kill-at-step", 2) as killed,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as survivor,
    ):
        assert killed.finish()["returncode"] == -signal.SIGKILL
        result = survivor.finish()
    assert result.get("sha256") == undisturbed_hash, result
    wait_until(lambda: files() == UNITS * len(cluster.shards), "only the shards' files are left")


def test_trainer_stopped_beyond_its_lease_changes_nothing(
    cluster: shardwell.LocalCluster, undisturbed_hash: str
) -> None:
    files = FileCount(cluster)
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS, "--transports", "shm")
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0, "--stop-at-step", 2) as stopped,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as survivor,
    ):
        survivor.wait_for_step(3)  # the other trainer computed the stopped trainer's work item of step 2
        os.kill(stopped.process.pid, signal.SIGCONT)
        late, result = stopped.finish(), survivor.finish()
    assert result.get("sha256") == undisturbed_hash, result
    assert late["returncode"] == 0, late["stderr"]
    assert late.get("sha256") == undisturbed_hash, late  # it joined again, or went on with its next item
    wait_until(lambda: files() == UNITS * len(cluster.shards), "only the shards' files are left")


def test_files_of_a_killed_server_are_removed_with_its_cluster() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        with small_run(cluster.address, "small", steps=1):
            left = folder_of(cluster.shards[0].pid)
            assert len(list(left.iterdir())) > 2
            cluster.shards[0].kill()
        with shardwell.LocalCluster(num_shards=1):
            assert left.exists(), "a new process of the killed server may need the files"
    assert not left.exists()


def test_stopped_servers_leave_no_files_in_shared_memory() -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        with small_run(cluster.address, "small", steps=1):
            folders = [folder_of(shard.pid) for shard in cluster.shards]
            assert all(folder.parent == SHARED_MEMORY and any(folder.iterdir()) for folder in folders)
        assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)
    assert [shard.exit_code for shard in cluster.shards] == [0, 0]


def test_stopping_server_ends_its_transport_sessions_first() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster, small_run(cluster.address, "small", steps=1) as session:
        (server,) = session.store.servers._connections.values()
        cluster.shards[0].stop(20.0)
        assert cluster.shards[0].exit_code == 0
        # Otherwise the rpc lasts for the server's grace period and is then cancelled.
        shared = server.transport
        assert isinstance(shared, ShmTransport)
        assert shared.session.status is grpc.StatusCode.OK
