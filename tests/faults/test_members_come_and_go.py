"""Fault tests of trainers and servers that come and go while a run trains: no step is lost, and bits are the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import shardwell
from shardwell.command.cli import main
from tests.support.cluster import events, wait_until
from tests.support.long_run import LongRun, terminate
from tests.support.server_processes import added_server


@pytest.mark.long
def test_one_four_two_and_three_trainers_get_the_bits_of_four(tmp_path: Path) -> None:
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=60.0) as cluster,
        LongRun(cluster, tmp_path / "changing", name="changing", dp=4, min_trainers=1) as changing,
        LongRun(cluster, tmp_path / "four", name="four", dp=4, batch_s=0.0) as four,
    ):
        changing.start("a")
        changing.wait_commits(3)
        changing.start("b", "c", "d")
        changing.wait_players("abcd")
        changing.wait_commits(3)
        assert changing.end("a", signal.SIGTERM)["returncode"] == 128 + signal.SIGTERM
        assert changing.end("c", signal.SIGKILL)["returncode"] == -signal.SIGKILL
        changing.wait_players("bd")
        changing.wait_commits(3)
        changing.start("e")
        changing.wait_players("bde")
        changing.wait_commits(3)
        steps = changing.finish()
        four.start(*"abcd")
        wait_until(lambda: four.committed + 8 >= steps, "as many steps", timeout_s=60.0)
        four.finish()


def test_run_keeps_its_bits_on_one_then_three_then_two_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shardwell.LocalCluster(num_shards=1, min_shard_bytes=4096) as cluster, LongRun(cluster, tmp_path) as run:

        def command(*words: str) -> str:
            assert main([*words, "--address", cluster.address, "--wait"]) == 0
            return capsys.readouterr().out

        run.start("a", "b")
        run.wait_commits(3)
        with added_server(cluster, "shard-1"), added_server(cluster, "shard-2"):
            command("rebalance", run.name)
            assert run.owners() == {"shard-0", "shard-1", "shard-2"}
            run.wait_commits(3)
            assert "no shards left" in command("drain", "shard-0")
            assert run.owners() == {"shard-1", "shard-2"}
            cluster.shards[0].stop(20.0)
            run.wait_commits(3)
            steps = run.finish()
            happened = events(cluster.address, run.name)
        kinds = [event.kind for event in happened]
        assert not {"step_failed", "work_leased", "work_reset", "shards_promoted", "lease_expired"} & set(kinds), kinds
        for reported in run.reports().values():
            assert reported == list(range(1, steps + 1))


@pytest.mark.timeout(120)
def test_rolling_restart_of_every_process_loses_no_step(tmp_path: Path) -> None:
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, state_dir=tmp_path / "state") as cluster,
        LongRun(cluster, tmp_path, backups=1) as run,
    ):
        run.start("a", "b")
        run.wait_commits(3)
        for server in cluster.shards:
            run.wait_in_sync()
            terminate(server)
            run.wait_commits(3)
        run.wait_in_sync()
        cluster.coordinator.stop(20.0)
        cluster.restart_coordinator()
        run.wait_commits(3)
        for name in ("a", "b"):
            assert run.end(name, signal.SIGTERM)["returncode"] == 128 + signal.SIGTERM
            run.start(name)
            run.wait_players("ab")
            run.wait_commits(3)
        run.finish()
        assert "run_loading" not in [event.kind for event in events(cluster.address, run.name)]
