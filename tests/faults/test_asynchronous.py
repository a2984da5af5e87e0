"""Fault tests of asynchronous runs: the weights are those of the commits, one after another, on one machine.

Each test compares the weights with a replay of the run's commits in plain PyTorch, in which each item reads the version
that its commit record names. Equal bits show that every commit was applied once and whole, and that each item read one
version.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import events, wait_in_sync, wait_until
from tests.support.commit_log import ItemCommit, read_commits, replay, stored_commits
from tests.support.processes import TrainerProcess

ITEMS, DP = 6, 2
LEASE_S = 1.5
LONG_LEASE_S = 60.0
"""Longer than a test: no lease ends."""


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def cluster(log_dir: Path, state_dir: Path, request: pytest.FixtureRequest) -> Iterator[shardwell.LocalCluster]:
    lease_s = getattr(request, "param", LEASE_S)
    with shardwell.LocalCluster(
        num_shards=2, min_shard_bytes=4096, lease_s=lease_s, log_dir=log_dir, state_dir=state_dir
    ) as running:
        yield running


def trainer(cluster: shardwell.LocalCluster, run: str, rank: int, *options: object, mode: str) -> TrainerProcess:
    shape = ("--dp", DP, "--steps", ITEMS, "--consistency", mode)
    return TrainerProcess(cluster.address, run, "--trainer", f"t{rank}", "--global-rank", rank, *shape, *options)


def explain(cluster: shardwell.LocalCluster, run: str) -> str:
    with closing(CoordinatorClient(cluster.address)) as client:
        return "\n".join(client.call("ExplainStall", coordinator_pb2.ExplainStallRequest(run=run)).waiting_for)


def assert_each_once(commits: list[ItemCommit]) -> None:
    assert sorted((commit.dp_rank, commit.item) for commit in commits) == list(product(range(DP), range(ITEMS)))


@pytest.mark.parametrize("transports", ["shm,socket,grpc", "socket,grpc"])
@pytest.mark.parametrize("cluster", [LONG_LEASE_S], indirect=True)
def test_a_stopped_trainer_is_at_most_s_items_behind(
    cluster: shardwell.LocalCluster, log_dir: Path, run: str, transports: str
) -> None:
    stop_at, limit, mode = 1, 1, "BOUNDED_STALENESS(1)"
    options = ("--transports", transports)
    with (
        trainer(cluster, run, 1, *options, "--stop-at-step", stop_at, mode=mode) as stopped,
        trainer(cluster, run, 0, *options, mode=mode) as other,
    ):
        stopped.wait_stopped()
        at_most = f"waits until it is at most {limit} items ahead of the slowest rank: rank 1 is at item {stop_at}"
        wait_until(lambda: at_most in explain(cluster, run), "rank 0 waits for rank 1", timeout_s=60.0)
        before = read_commits(log_dir, run)
        assert sorted((commit.dp_rank, commit.item) for commit in before) == [(0, 0), (0, 1), (0, 2), (1, 0)]
        stopped.resume()
        results = [stopped.finish(), other.finish()]
    commits = read_commits(log_dir, run)
    assert_each_once(commits)
    late = next(commit for commit in commits if (commit.dp_rank, commit.item) == (1, stop_at))
    assert late.step == len(before), "the first commit after the stop"
    assert late.step - late.base_version >= limit
    assert [len(result["losses"]) for result in results] == [ITEMS, ITEMS], "each item is computed once"
    assert replay(commits) in [result.get("sha256") for result in results], results


def test_others_go_on_when_the_lease_of_a_stopped_trainer_ends(
    cluster: shardwell.LocalCluster, log_dir: Path, run: str
) -> None:
    mode = "BOUNDED_STALENESS(0)"
    with (
        trainer(cluster, run, 1, "--stop-at-step", 1, mode=mode) as stopped,
        trainer(cluster, run, 0, mode=mode) as other,
    ):
        stopped.wait_stopped()
        result = other.finish()
        kinds = [event.kind for event in events(cluster.address, run)]
        commits = read_commits(log_dir, run)
        stopped.resume()
        late = stopped.finish()
    assert_each_once(commits)
    assert len(result["losses"]) == ITEMS + ITEMS - 1, "item 0 of rank 1 is the only one that it does not compute"
    assert replay(commits) == result.get("sha256"), result
    assert "lease_expired" in kinds
    assert late.get("sha256") == result["sha256"], "the stopped trainer finds its rank's items committed"


@pytest.mark.parametrize("killed_rank", [0, 1])
def test_sigkill_of_a_trainer(cluster: shardwell.LocalCluster, log_dir: Path, run: str, killed_rank: int) -> None:
    mode = "ASYNCHRONOUS"
    with (
        trainer(cluster, run, killed_rank, "--kill-at-step", 2, mode=mode) as killed,
        trainer(cluster, run, 1 - killed_rank, mode=mode) as survivor,
    ):
        assert killed.finish()["returncode"] == -9
        with trainer(cluster, run, killed_rank, mode=mode) as again:
            results = [survivor.finish(), again.finish()]
    commits = read_commits(log_dir, run)
    assert_each_once(commits)
    assert replay(commits) in [result.get("sha256") for result in results], results


@pytest.mark.parametrize("cluster", [LONG_LEASE_S], indirect=True)
def test_sigkill_of_the_coordinator(cluster: shardwell.LocalCluster, log_dir: Path, state_dir: Path, run: str) -> None:
    mode = "BOUNDED_STALENESS(2)"
    with (
        trainer(cluster, run, 1, "--stop-at-step", 0, mode=mode) as stopped,
        trainer(cluster, run, 0, mode=mode) as other,
    ):
        stopped.wait_stopped()
        other.wait_for_step(1)
        cluster.restart_coordinator()
        wait_until(
            lambda: "item 3 waits until it is at most 2 items ahead" in explain(cluster, run),
            "rank 0 waits",
            timeout_s=60.0,
        )
        stored = stored_commits(state_dir, run)
        cluster.restart_coordinator()
        stopped.resume()
        results = [stopped.finish(), other.finish()]
    commits = read_commits(log_dir, run, stored)
    assert_each_once(commits)
    first = next(commit for commit in commits if commit.dp_rank == 1)
    assert (first.step, first.base_version) == (3, 0), "the version that it reads is kept over both restarts"
    assert replay(commits) in [result.get("sha256") for result in results], results


def lose(cluster: shardwell.LocalCluster, number: int) -> None:
    """Kills a shard server and starts it again without its memory, as if its host had restarted."""
    server = cluster.shards[number]
    server.kill()
    for folder in DEFAULT_DIRECTORY.glob(f"{FolderOwner(server_id=server.name, coordinator=cluster.address).prefix}*"):
        shutil.rmtree(folder)
    server.restart(time.monotonic() + 60)


@pytest.mark.parametrize("cluster", [LONG_LEASE_S], indirect=True)
def test_loss_of_a_shard_server_rolls_the_run_back(
    cluster: shardwell.LocalCluster, log_dir: Path, tmp_path: Path, run: str
) -> None:
    """The checkpoint is that of version 4. Each rank computes an item that has read an earlier or a later version."""
    mode, folder = "BOUNDED_STALENESS(3)", tmp_path / "checkpoints"
    options = ("--checkpoint-dir", folder, "--checkpoint-every", 4)
    with (
        trainer(cluster, run, 1, *options, "--stop-at-step", 1, mode=mode) as stopped,
        trainer(cluster, run, 0, *options, mode=mode) as other,
    ):
        stopped.wait_stopped()
        wait_until(
            lambda: [at.step for at in RunFolder.of(folder, run).entries() if at.is_valid] == [4], "saved", timeout_s=60
        )
        wait_until(lambda: len(read_commits(log_dir, run)) == 6, "rank 0 waits for rank 1", timeout_s=60)
        lose(cluster, 1)
        stopped.resume()
        results = [stopped.finish(), other.finish()]
    commits = read_commits(log_dir, run)
    assert_each_once(commits)
    bases = [commit.base_version for commit in commits[4:]]
    assert min(bases) == bases[0] == 4, "no item that is computed again has read an earlier version"
    assert replay(commits) in [result.get("sha256") for result in results], results
    assert "rolled_back" in [event.kind for event in events(cluster.address, run)]


@pytest.mark.parametrize("cluster", [LONG_LEASE_S], indirect=True)
def test_backups_replace_a_lost_shard_server(cluster: shardwell.LocalCluster, log_dir: Path, run: str) -> None:
    """One rank computes an item that has read version 0, which no backup has. The other rank waits for it."""
    mode, options = "BOUNDED_STALENESS(3)", ("--backups", 1)
    with (
        trainer(cluster, run, 1, *options, "--stop-at-step", 0, mode=mode) as stopped,
        trainer(cluster, run, 0, *options, mode=mode) as other,
    ):
        stopped.wait_stopped()
        wait_until(lambda: len(read_commits(log_dir, run)) == 4, "rank 0 waits for rank 1", timeout_s=60)
        wait_in_sync(cluster.address, run)
        os.kill(cluster.shards[1].pid, signal.SIGKILL)  # the cluster starts it again
        wait_until(lambda: "shards_promoted" in [event.kind for event in events(cluster.address, run)], "promotion")
        stopped.resume()
        results = [stopped.finish(), other.finish()]
        wait_in_sync(cluster.address, run)
        with closing(CoordinatorClient(cluster.address)) as client:
            report = client.call("VerifyRun", coordinator_pb2.VerifyRunRequest(run=run), timeout_s=30)
    commits = read_commits(log_dir, run)
    assert_each_once(commits)
    first = next(commit for commit in commits if commit.dp_rank == 1)
    assert (first.step, first.base_version) == (4, 4), "the item is computed again from the newest version"
    assert replay(commits) in [result.get("sha256") for result in results], results
    assert (report.version, list(report.differences)) == (2 * ITEMS, [])


@pytest.mark.parametrize("cluster", [LONG_LEASE_S], indirect=True)
def test_restarted_shard_server_takes_up_its_shards(cluster: shardwell.LocalCluster, log_dir: Path, run: str) -> None:
    """The version that rank 1 reads is lost with the former process, so its item starts again from the newest one."""
    mode = "BOUNDED_STALENESS(1)"
    with (
        trainer(cluster, run, 1, "--stop-at-step", 1, mode=mode) as stopped,
        trainer(cluster, run, 0, mode=mode) as other,
    ):
        stopped.wait_stopped()
        wait_until(lambda: len(read_commits(log_dir, run)) == 4, "rank 0 waits for rank 1", timeout_s=60)
        os.kill(cluster.shards[1].pid, signal.SIGKILL)  # the cluster starts it again
        wait_until(lambda: "shards_adopted" in [event.kind for event in events(cluster.address, run)], "taken up")
        stopped.resume()
        results = [stopped.finish(), other.finish()]
    commits = read_commits(log_dir, run)
    assert_each_once(commits)
    late = next(commit for commit in commits if (commit.dp_rank, commit.item) == (1, 1))
    assert (late.step, late.base_version) == (4, 4)
    assert replay(commits) in [result.get("sha256") for result in results], results


def test_loss_of_a_shard_server_without_a_checkpoint_is_reported(cluster: shardwell.LocalCluster, run: str) -> None:
    with trainer(cluster, run, 1, "--stop-at-step", 1, mode="ASYNCHRONOUS") as stopped:
        with trainer(cluster, run, 0, mode="ASYNCHRONOUS") as other:
            stopped.wait_stopped()
            lose(cluster, 1)
            assert "lost its shards of units" in explain(cluster, run)
            result = other.finish()
        assert result["returncode"] == 1
        assert "ConflictError: server 'shard-1' was restarted and has lost its shards" in result["stderr"], result
