"""All shard servers are stopped, by an operator, a new version or a reboot, and started again: no run is lost."""

from __future__ import annotations

import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardwell_server.cli import main
from tests.support.cluster import descendants, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256
from tests.support.separate_servers import SeparateServers

STEPS = 8


@pytest.fixture(scope="module")
def undisturbed_hash() -> str:
    return undisturbed_sha256(dp=2, steps=STEPS)


def train(
    servers: SeparateServers, interrupt: Callable[[], object] | None = None, *options: object, run: str = ""
) -> str:
    """Trains both ranks, and may interrupt the servers after some steps; returns the hash of the weights."""
    run = run or uuid.uuid4().hex
    with TrainerProcess(servers.address, run, "--dp", 2, "--min-trainers", 1, "--steps", STEPS, *options) as trainer:
        if interrupt is not None:
            trainer.wait_for_step(3)
            interrupt()
        result = trainer.finish()
    assert "sha256" in result, result
    return str(result["sha256"])


def restart(servers: SeparateServers, *signals: int) -> Callable[[], None]:
    """Returns a function that stops all servers and starts them again."""

    def stop_and_start() -> None:
        servers.stop(*signals)
        assert servers.folders(), "the shards stay in shared memory"
        servers.start()

    return stop_and_start


@pytest.mark.parametrize(
    ("names", "signals", "options"),
    [
        (("a",), (signal.SIGTERM,), ()),
        (("a",), (signal.SIGINT,), ()),
        (("a", "b"), (signal.SIGTERM, signal.SIGTERM), ()),
        (("a", "b"), (signal.SIGTERM,), ("--backups", 1)),
    ],
)
def test_run_goes_on_after_all_servers_were_stopped(
    names: tuple[str, ...], signals: tuple[int, ...], options: tuple[object, ...], undisturbed_hash: str, tmp_path: Path
) -> None:
    with SeparateServers(tmp_path, *names) as servers:
        assert train(servers, restart(servers, *signals), *options) == undisturbed_hash
        for name in names:
            assert "the next process of" in servers.log_path(name).read_text()


def test_server_that_does_not_drain_keeps_its_shards(undisturbed_hash: str, tmp_path: Path) -> None:
    with SeparateServers(tmp_path, "a", "b", options=["--drain-s", "0"]) as servers:
        assert train(servers, restart(servers)) == undisturbed_hash


def test_run_that_has_ended_stays(undisturbed_hash: str, tmp_path: Path) -> None:
    with SeparateServers(tmp_path, "a") as servers:
        run = uuid.uuid4().hex
        assert train(servers, run=run) == undisturbed_hash
        restart(servers)()
        assert train(servers, run=run) == undisturbed_hash


def test_saved_shards_are_taken_up_when_shared_memory_is_gone(undisturbed_hash: str, tmp_path: Path) -> None:
    with SeparateServers(tmp_path, "a", "b", saves=True) as servers:

        def reboot() -> None:
            servers.stop()
            assert len(servers.saved()) == 2
            for folder in servers.folders():
                shutil.rmtree(folder)
            servers.start()
            assert not servers.saved(), "files that are taken up are obsolete"

        assert train(servers, reboot) == undisturbed_hash
        log = servers.log_path("a").read_text()
        assert "saving" in log and "bytes of shards in" in log and "bytes of saved shards from" in log


def test_shared_memory_is_preferred_to_saved_files(undisturbed_hash: str, tmp_path: Path) -> None:
    with SeparateServers(tmp_path, "a", saves=True) as servers:
        assert train(servers, restart(servers)) == undisturbed_hash
        assert not servers.saved() and "bytes of saved shards from" not in servers.log_path("a").read_text()


def test_a_directory_that_cannot_be_written_is_reported_and_shared_memory_is_kept(
    undisturbed_hash: str, tmp_path: Path
) -> None:
    with SeparateServers(tmp_path, "a", saves=True) as servers:

        def stop_and_start() -> None:
            servers.state_dir.rmdir()
            servers.state_dir.touch()
            servers.stop()
            servers.state_dir.unlink()
            servers.start()

        assert train(servers, stop_and_start) == undisturbed_hash
        assert "are not saved in" in servers.log_path("a").read_text()


@pytest.mark.parametrize("stop_all", [False, True])
def test_group_of_processes_goes_on(stop_all: bool, undisturbed_hash: str, tmp_path: Path) -> None:
    with SeparateServers(tmp_path, "host", options=["--processes", "2"]) as servers:

        def kill_one() -> None:
            children = descendants(servers.shards["host"].pid)
            (victim,) = [child for child in children if "--id=host-1" in child.cmdline()]
            victim.kill()
            wait_until(lambda: len(descendants(servers.shards["host"].pid)) == 2, "another process", timeout_s=30.0)

        interrupt = restart_group(servers) if stop_all else kill_one
        assert train(servers, interrupt) == undisturbed_hash


def restart_group(servers: SeparateServers) -> Callable[[], None]:
    def stop_and_start() -> None:
        servers.stop()
        servers.start()

    return stop_and_start


def test_server_without_a_name_says_what_ends_with_it(tmp_path: Path) -> None:
    with SeparateServers(tmp_path, "") as servers:
        train(servers)
        pid = servers.shards[""].pid
        servers.stop()
        assert not psutil.pid_exists(pid)
        assert "shards end with this process" in servers.log_path("").read_text()
        assert "a server without --id cannot be taken up" in servers.log_path("").read_text()


def test_shards_of_a_stopped_server_are_discarded_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SeparateServers(tmp_path, "a", saves=True) as servers:
        train(servers)
        options = ["--coordinator", servers.address, "--state-dir", str(servers.state_dir)]
        assert main(["discard", *options, "--id", "a"]) == 1
        assert "server 'a' runs on this host: stop it first" in capsys.readouterr().err
        servers.stop()
        assert main(["discard", *options, "--id", "b"]) == 1
        assert "left nothing in" in capsys.readouterr().err
        left = [*servers.folders(), *servers.saved()]
        assert len(left) == 2
        assert main(["discard", *options, "--id", "a"]) == 0
        assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [str(path) for path in left]
        assert not servers.folders() and not servers.saved()
