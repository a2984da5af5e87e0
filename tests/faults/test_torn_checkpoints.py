"""Fault tests of checkpoints whose writing is interrupted: torn ones are never offered, and the next one is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwell
import shardwell.testing
from shardwell.command.cli import main
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.folder import RunFolder
from tests.support.cluster import events, small_run, wait_until
from tests.support.long_run import LongRun

EVERY = 4
TORN = {8: "middle", 16: "between_shards", 24: "before_header"}
"""Fault point by step of the checkpoint at which it is reached."""


def test_server_killed_while_it_writes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    faults = [
        fault_points.Fault(
            point=f"server.checkpoint.{point}",
            action="kill",
            nth=2 if point != "before_header" else 1,
            where={"server": f"shard-{step // EVERY % 4 // 2}", "step": step},
            once=str(tmp_path / f"torn-{step}"),
        )
        for step, point in TORN.items()
    ]
    for name, value in fault_points.environment(*faults).items():
        monkeypatch.setenv(name, value)

    def intact() -> dict[int, str]:
        return {entry.step: entry.url for entry in RunFolder.of(folder, run.name).entries() if entry.is_valid}

    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster,
        LongRun(cluster, tmp_path / "run", checkpoint_dir=str(folder), checkpoint_every=EVERY) as run,
    ):
        run.start("a", "b")
        for step in TORN:
            wait_until((tmp_path / f"torn-{step}").exists, f"a server is killed in the checkpoint of step {step}")
            found = intact()
            assert step not in found and step - EVERY in found
            assert main(["verify", found[step - EVERY]]) == 0
            wait_until(lambda following=step + EVERY: following in intact(), "the next checkpoint", timeout_s=60.0)
        run.finish()
        kinds = [event.kind for event in events(cluster.address, run.name)]
        assert kinds.count("checkpoint_failed") == len(TORN)
        assert "run_loading" not in kinds
        assert not intact().keys() & TORN.keys()
        assert main(["verify", *[intact()[max(intact())]]]) == 0


def test_checkpoint_after_a_failed_one_waits_until_the_servers_have_stopped(tmp_path: Path) -> None:
    """A server writes one checkpoint of a run at a time."""
    with (
        shardwell.testing.in_process_cluster() as address,
        small_run(address, "gpt", checkpoint_dir=str(tmp_path)) as session,
        fault_points.armed("server.checkpoint.middle", "delay", delay_s=0.5),
    ):
        with (
            fault_points.armed("coordinator.checkpoint.begun", "raise"),
            pytest.raises(shardwell.UnavailableError, match="was not written"),
        ):
            session.save_checkpoint(wait=True)
        assert session.save_checkpoint(wait=True)
