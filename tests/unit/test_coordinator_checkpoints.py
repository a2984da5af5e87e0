"""Checkpoints on the coordinator, without shard servers that write them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardwell_server.coordinator.checkpoints import saving
from shardwell_server.coordinator.runs.checkpoints import RunCheckpoints
from shardwell_server.coordinator.storage.records import CheckpointRecord
from shardwell_wire.checkpoints import opening
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import config, harness, run_async


def test_times_of_checkpoints_ascend_although_the_clock_is_set_back() -> None:
    checkpoints = RunCheckpoints()
    assert checkpoints.time_of_next(1000.0) == 1000.0
    checkpoints.add_saved(CheckpointRecord("a", 1, "/x", 10, 2000.0, True))
    checkpoints.add_saved(CheckpointRecord("b", 2, "/x", 10, 1500.0, True))
    assert checkpoints.time_of_next(1000.0) > 2000.0
    assert checkpoints.time_of_next(3000.0) == 3000.0


def test_folders_are_opened_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a bucket imports libraries for seconds, in which the event loop must serve leases."""
    threads = []

    class Folder(RunFolder):
        @classmethod
        def of(cls, url: str | Path, run: str) -> Folder:
            threads.append(threading.current_thread())
            return super().of(url, run)

    monkeypatch.setattr(saving, "RunFolder", Folder)

    async def test() -> None:
        async with harness(tmp_path) as running:
            settings = config(World(dp=1))
            settings.MergeFrom(coordinator_pb2.RunConfig(checkpoint_dir=str(tmp_path / "checkpoints")))
            trainer = await running.join("a", config=settings)
            await running.publish_unit([trainer], "u")
            await running.call("SaveCheckpoint", run="r", wait_s=5.0)
            await running.until(lambda: bool(threads), "the folder is opened")

    run_async(test())
    assert threading.main_thread() not in threads


def test_folder_that_cannot_be_written_is_reported_when_the_run_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def test() -> None:
        async with harness(tmp_path) as running:
            settings = config(World(dp=2), min_trainers=1)
            settings.MergeFrom(coordinator_pb2.RunConfig(checkpoint_dir=str(tmp_path / "file" / "checkpoints")))
            for name in ("a", "b"):
                await running.join(name, config=settings)
            await running.until(lambda: "checkpoint_failed" in dict(running.events()), "the event")
            failures = [message for kind, message in running.events() if kind == "checkpoint_failed"]
            assert len(failures) == 1
            assert failures[0].startswith(f"checkpoints cannot be saved: cannot create {tmp_path}/file/checkpoints")

    run_async(test())


def test_url_with_one_slash_is_no_local_folder() -> None:
    for url in ("s3:/bucket/x", "file:/x"):
        with pytest.raises(InvalidRequestError, match=rf"{url}.*two slashes"):
            opening.absolute(url)
    assert opening.absolute("/a:/b") == "/a:/b"
