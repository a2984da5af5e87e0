"""``shardwell upgrade`` restarts every server with the next version during a run, which keeps its bits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main
from shardwell.command.upgrade_command import new_problems
from shardwell.processes import local_cluster
from shardwell.processes.local_cluster import ServerProcess
from shardwell_wire.errors import UnavailableError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2
from tests.support import next_version
from tests.support.background_training import BackgroundTraining, FirstStates
from tests.support.cluster import events, wait_in_sync, wait_until
from tests.support.forked_servers import ForkedProcess
from tests.support.long_run import LongRun

KEPT = 64
"""Number of versions that the run keeps. A reader that follows does not fall this far behind."""


def start_next_version(server: ServerProcess) -> ForkedProcess:
    module = "tests.support.next_version"
    return ForkedProcess(module, server._arguments, local_cluster._server_environment(), server.log_path)


@pytest.mark.parametrize("number", ["INT", "TERM"])
def test_a_run_goes_on_while_all_servers_are_replaced_by_the_next_version(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster,
        LongRun(cluster, tmp_path, backups=1) as run,
    ):
        run.start("a", "b")
        run.wait_commits(2)
        run.wait_in_sync()
        servers = (cluster.coordinator, *cluster.shards)
        for server in servers:
            (tmp_path / f"{server.name}.pid").write_text(str(server.pid))
        cluster.coordinator.keep_running(60.0)
        monkeypatch.setattr(ServerProcess, "_start", start_next_version)
        command = f"kill -{number} $(cat {tmp_path}/{{server}}.pid)"
        options = ["--restart-command", command, "--coordinator-command", command, "--address", cluster.address]
        assert main(["upgrade", *options, "--timeout", "90"]) == 0
        printed = capsys.readouterr().out
        own, new = installed_version("shardwell"), next_version.VERSION
        assert f"shard-0: version {own} -> {new}, in sync after" in printed
        assert f"coordinator: version {own} -> {new}, term 2" in printed
        assert [server.ends for server in servers] == [[0], [0], [0]]
        run.wait_commits(3)
        run.finish()


def test_servers_that_one_command_restarts_together_are_restarted_once(capsys: pytest.CaptureFixture[str]) -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        pids = " ".join(str(server.pid) for server in cluster.shards)
        asked = ["upgrade", "--restart-command", f"kill -INT {pids}", "--address", cluster.address, "--timeout", "60"]
        assert main(asked) == 0
        printed = capsys.readouterr().out
        assert [server.ends for server in cluster.shards] == [[0], [0]]
    assert "shard-0: restarting" in printed and "shard-1: has been restarted with another server" in printed
    assert "coordinator: not restarted" in printed


def test_upgrade_stops_at_the_first_failure_and_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        address = ["--address", cluster.address]
        assert main(["upgrade", "--restart-command", "exit 7 # {server} {host}", *address]) == 1
        error = capsys.readouterr().err
        assert "the command for shard-0 ended with exit code 7: exit 7 # shard-0 127.0.0.1" in error
        assert "continue with `shardwell upgrade shard-0 shard-1`" in error
        assert main(["upgrade", "shard-1", "--restart-command", "true", "--timeout", "0.1", *address]) == 4
        error = capsys.readouterr().err
        assert "after 0.1 s: no new process of server 'shard-1' has registered" in error
        assert main(["upgrade", "shard-x", "--restart-command", "true", *address]) == 1
        assert "there is no server 'shard-x', only 'shard-0', 'shard-1'" in capsys.readouterr().err
        cluster.shards[1].kill()
        wait_until(lambda: main(["status", *address]) == 3, "the coordinator notices the end of shard-1")
        capsys.readouterr()
        assert main(["upgrade", "--restart-command", "true", *address]) == 1
        assert "the cluster is degraded: server 'shard-1'" in capsys.readouterr().err


def test_a_problem_that_takes_the_place_of_another_one_is_new() -> None:
    def cluster(*problems: str, of_run: str = "", backups: int = 0) -> coordinator_pb2.DescribeClusterResponse:
        summary = coordinator_pb2.RunSummary(run_id="id", missing_backup_count=backups)
        lines = [f"{backups} backup{'s are' if backups > 1 else ' is'} missing"] if backups else []
        run = coordinator_pb2.RunHealth(summary=summary, problems=[*lines, *([of_run] if of_run else [])])
        return coordinator_pb2.DescribeClusterResponse(problems=problems, runs=[run])

    before = cluster("server 'shard-1' has ended", of_run="no progress in step 7", backups=2)
    assert new_problems(before, before) == []
    assert new_problems(cluster(of_run="no progress in step 12", backups=1), before) == []
    assert new_problems(cluster("server 'shard-2' has ended"), before) == ["server 'shard-2' has ended"]
    assert new_problems(cluster(backups=3), before) == ["3 backups are missing"]
    silent = [cluster(f"server 'shard-1' has sent no heartbeat for {silent_s} s") for silent_s in (1.5, 20)]
    assert new_problems(silent[1], silent[0]) == []


class FollowedModel(nn.Module):
    """A model with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.norm = nn.Linear(120, 120), nn.Linear(120, 120), nn.BatchNorm1d(120)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)))


class FollowedTraining(BackgroundTraining):
    """A run of a model with statistics, whose states are recorded when a step begins for the first time."""

    model, units, width = FollowedModel, {nn.BatchNorm1d}, 120

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.states = FirstStates()


class Follower:
    """A thread that reads the newest, a published and an older version in turn, and patches tensors between them.

    Args:
        address: Address of the coordinator.
        run: Name of the run.
    """

    def __init__(self, address: str, run: str) -> None:
        self._reader, self._stop = shardwell.attach(address, run, timeout_s=90.0), threading.Event()
        self.read: list[tuple[int, str]] = []
        """Versions and their digests."""
        self.patched: list[tuple[int, str]] = []
        """In the same way, of tensors that were brought to a version by its changes."""
        self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(self._follow)

    def _follow(self) -> None:
        tensors: dict[str, torch.Tensor] = {}
        known = -1
        while not self._stop.is_set():
            version, state = self._reader.read("eval")  # must never fail: it is promised
            self.read.append((version, shardwell.weights_digest(state)))
            newest, state = self._reader.read()
            self.read.append((newest, shardwell.weights_digest(state)))
            with suppress(VersionGoneError, UnavailableError), self._reader.pin() as pinned:
                if known >= 0:
                    pinned.patch(tensors, since=known)
                    self.patched.append((pinned.version, shardwell.weights_digest(tensors)))
                else:
                    tensors = dict(pinned.values())
                known = pinned.version
                continue
            tensors, known = state, newest

    def finish(self) -> None:
        """Ends the thread; raises what it has raised."""
        self._stop.set()
        with self._reader, self._thread:
            self._running.result(120.0)


@pytest.mark.parametrize(
    "number, backups",
    [
        ("INT", 0),
        pytest.param("INT", 1, marks=pytest.mark.long),
        pytest.param("TERM", 0, marks=pytest.mark.long),
        pytest.param("TERM", 1, marks=pytest.mark.long),
    ],
)
def test_published_and_kept_versions_are_read_while_all_servers_are_replaced(
    number: str, backups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        address = ["--address", cluster.address]
        training = FollowedTraining(cluster.address, keep_versions=KEPT, backups=backups)
        with training.in_background(), ExitStack() as stack:
            if backups:
                wait_in_sync(cluster.address, training.run)
            training.wait_for(training.step + KEPT)
            published = training.pause()
            assert main(["publish", training.run, "eval", *address]) == 0
            training.resume()
            follower = Follower(cluster.address, training.run)
            stack.callback(follower.finish)
            wait_until(lambda: len(follower.read) > 1, "the first reads", timeout_s=60.0)
            for server in (cluster.coordinator, *cluster.shards):
                (tmp_path / f"{server.name}.pid").write_text(str(server.pid))
            cluster.coordinator.keep_running(60.0)
            monkeypatch.setattr(ServerProcess, "_start", start_next_version)
            command = f"kill -{number} $(cat {tmp_path}/{{server}}.pid)"
            options = ["--restart-command", command, "--coordinator-command", command, "--timeout", "120"]
            before = len(follower.read)
            assert main(["upgrade", *options, *address]) == 0
            during = follower.read[before:]
            newest = training.step
            training.wait_for(newest + KEPT + 1)
            wait_until(lambda: bool(follower.patched), "a patch between two versions", timeout_s=60.0)
            paused = training.pause()
            count = len(follower.read)
            wait_until(lambda: len(follower.read) > count + 4, "reads after the upgrade", timeout_s=60.0)
            with shardwell.attach(cluster.address, training.run) as late:
                for version in (published, paused - KEPT + 1, paused - 1, paused):
                    assert late.digest(version) == shardwell.weights_digest(training.states[version]), version
                assert late.digest("eval") == shardwell.weights_digest(training.states[published])
            stack.close()
            training.resume()
        assert not [event for event in events(cluster.address, training.run) if event.kind == "versions_lost"]
    assert during, "readers went on during the upgrade"
    for version, digest in follower.read + follower.patched:
        assert digest == shardwell.weights_digest(training.states[version]), version
