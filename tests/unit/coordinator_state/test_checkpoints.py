"""Checkpoints on the coordinator, without shard servers that write them."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.checkpoints import restoring
from shardwell_server.coordinator.checkpoints.manifests import CheckpointFiles
from shardwell_server.coordinator.leases import trainer_leases
from shardwell_server.coordinator.run_checkpoints import RunCheckpoints
from shardwell_server.coordinator.storage.records import CheckpointRecord
from shardwell_wire.checkpoints import storage
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan, Piece
from shardwell_wire.checkpoints.manifest import RESIDUAL_RANKS
from shardwell_wire.checkpoints.reading import read_manifest
from shardwell_wire.checkpoints.storage import CheckpointRoots, Storage
from shardwell_wire.errors import InvalidRequestError, StaleEpochError, StepStateError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer, config, harness, run_async, take_step


def test_times_of_checkpoints_ascend_although_the_clock_is_set_back() -> None:
    checkpoints = RunCheckpoints()
    assert checkpoints.time_of_next(1000.0) == 1000.0
    checkpoints.saved.append(CheckpointRecord("a", 1, "/x", 10, 2000.0, True))
    checkpoints.saved.append(CheckpointRecord("b", 2, "/x", 10, 1500.0, True))
    assert checkpoints.time_of_next(1000.0) > 2000.0
    assert checkpoints.time_of_next(3000.0) == 3000.0


def test_folders_are_opened_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a bucket imports libraries for seconds, in which the event loop must serve leases."""
    threads, opened = [], CheckpointRoots.open

    def open_root(roots: CheckpointRoots, url: str) -> Storage:
        threads.append(threading.current_thread())
        return opened(roots, url)

    monkeypatch.setattr(CheckpointRoots, "open", open_root)

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


async def test_folder_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step could be committed while a folder is opened. The checkpoint would then have its version."""
    opened, open_run = [], CheckpointFiles.open_run

    def open_and_note(files: CheckpointFiles, url: str, run: str) -> RunFolder:
        opened.append(url)
        return open_run(files, url, run)

    monkeypatch.setattr(CheckpointFiles, "open_run", open_and_note)

    async with run_with_checkpoints(tmp_path) as (running, a, b):
        checkpoints = running.state.runs["r"].checkpoints
        checkpoints.set_options(replace(checkpoints.options, every_commits=1))
        await take_step([a, b], 1)
        await running.until(lambda: checkpoints.saved_at(2) is not None, "the checkpoint")
        await take_step([a, b], 2)
        await running.until(lambda: checkpoints.saved_at(3) is not None, "the next checkpoint")
        assert opened == [checkpoints.options.directory]
        checkpoints.set_options(replace(checkpoints.options, directory=str(tmp_path / "other")))
        await take_step([a, b], 3)
        await running.until(lambda: checkpoints.saved_at(4) is not None, "the checkpoint in the other folder")
        assert len(opened) == 2


async def test_folder_is_opened_before_a_checkpoint_is_due(tmp_path: Path) -> None:
    """At the first join, and after a restart of the coordinator."""

    def is_open() -> bool:
        return running.state.runs["r"].checkpoints.folder is not None

    async with harness(tmp_path) as running:
        settings = config(World(dp=1))
        settings.checkpoint_dir = str(tmp_path / "checkpoints")
        await running.join("a", config=settings)
        await running.until(is_open, "the folder is opened")
        await running.restart()
        await running.until(is_open, "the folder is opened again")


async def test_a_folder_that_cannot_be_written_is_refused_at_join_and_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async with harness(tmp_path) as running:
        settings = config(World(dp=2), min_trainers=1)
        settings.checkpoint_dir = str(tmp_path / "file" / "checkpoints")
        refusal = f"checkpoints of run 'r' cannot be saved: cannot create {tmp_path}/file/checkpoints"
        with pytest.raises(InvalidRequestError, match=refusal):
            await running.join("a", config=settings)
        assert not running.state.runs
        settings.checkpoint_dir = str(tmp_path / "checkpoints")
        await running.join("a", config=settings)
        assert not [kind for kind, _ in running.events() if kind == "checkpoint_failed"]


async def test_a_trainer_that_joins_again_is_not_refused_for_a_folder_that_was_lost(tmp_path: Path) -> None:
    async with harness(tmp_path) as running:
        settings = config(World(dp=1))
        settings.checkpoint_dir = str(tmp_path / "checkpoints")
        trainer = await running.join("a", config=settings)
        await running.settle()
        await running.call("Leave", **membership(trainer))
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").write_text("")
        running.state.runs["r"].checkpoints.checked_directory = ""  # as after a restart of the coordinator
        again = await running.join("a", config=settings)
        await running.until(lambda: "checkpoint_failed" in dict(running.events()), "the event")
        news = await anext(aiter(running.stream("KeepMembership", **membership(again))))
        (notice,) = news.notices
        assert notice.message.startswith("checkpoints cannot be saved: cannot create")
        stall = await running.call("ExplainStall", run="r")
        assert any(line.startswith("no checkpoint is saved") for line in stall.waiting_for)


def test_url_with_one_slash_is_no_local_folder() -> None:
    for url in ("s3:/bucket/x", "file:/x"):
        with pytest.raises(InvalidRequestError, match=rf"{url}.*two slashes"):
            storage.absolute(url)
    assert storage.absolute("/a:/b") == "/a:/b"


@asynccontextmanager
async def run_with_checkpoints(tmp_path: Path) -> AsyncIterator[tuple[Harness, Trainer, Trainer]]:
    """Yields a coordinator with a run of two trainers that has committed a step."""
    async with harness(tmp_path, num_shards=1) as running:
        a, b = await running.team("a", "b")
        await running.publish_unit([a, b])
        await take_step([a, b], 0)
        settings = config(World(dp=2), min_trainers=2)
        settings.checkpoint_dir = str(tmp_path / "checkpoints")
        running.state.runs["r"].checkpoints.set_options(
            running.state.runs["r"].checkpoints.options.changed_by(settings)
        )
        await running.settle()
        yield running, a, b


def membership(trainer: Trainer) -> dict[str, Any]:
    return {"run": "r", "run_id": trainer.run_id, "trainer": trainer.name, "epoch": trainer.epoch}


async def keep_with_residuals(running: Harness, trainer: Trainer) -> asyncio.Queue[coordinator_pb2.WantedResiduals]:
    """Keeps a trainer's membership stream open. Returns the queue of checkpoints that want its residuals."""
    wanted, opened = asyncio.Queue[coordinator_pb2.WantedResiduals](), asyncio.Event()

    async def receive() -> None:
        async for news in running.stream("KeepMembership", has_residuals=True, **membership(trainer)):
            opened.set()
            if news.residuals.checkpoint_id:
                wanted.put_nowait(news.residuals)

    running.state.tasks.start(_until_left(receive))
    await opened.wait()
    return wanted


async def _until_left(receive: Any) -> None:
    with suppress(StaleEpochError):
        await receive()


def write_residual(url: str, trainer: Trainer, state: str) -> str:
    """Writes a trainer's file. Returns its entry in the manifest."""
    piece = Piece("u.0", state, 0, 4096, "float32", (4096,))
    plan = FilePlan([piece], [], run_id=trainer.run_id, step=1)
    name = f"residuals-{trainer.epoch}.safetensors"
    writer = CheckpointFileWriter(storage.open_storage(url), "trainer", plan, name=name)
    writer.write(piece, bytes(piece.size_bytes))
    return json.dumps(writer.finish().to_dict())


async def add_residuals(
    running: Harness, trainer: Trainer, wanted: coordinator_pb2.WantedResiduals, **fields: Any
) -> None:
    await running.call(
        "AddResiduals",
        context=trainer.context(wanted.step, request_id=uuid.uuid4().hex),
        trainer=trainer.name,
        checkpoint_id=wanted.checkpoint_id,
        **fields,
    )


async def test_checkpoint_waits_for_the_residuals_of_live_trainers(tmp_path: Path) -> None:
    async with run_with_checkpoints(tmp_path) as (running, a, b):
        wanted = [await keep_with_residuals(running, trainer) for trainer in (a, b)]
        progress = (await running.call("SaveCheckpoint", run="r")).checkpoint
        first, second = [await queue.get() for queue in wanted]
        assert first == second
        assert (first.step, first.checkpoint_id) == (1, progress.checkpoint_id)
        assert (await a.heartbeat()).residuals == first
        await add_residuals(running, a, first, dp_ranks=[0], file_json=write_residual(first.url, a, "residual.0"))
        assert not (await a.heartbeat()).HasField("residuals"), "it has done its part"
        assert running.state.runs["r"].checkpoints.in_flight is not None, "the checkpoint waits for b"
        await b.leave()
        saved = await running.call("SaveCheckpoint", run="r", checkpoint_id=first.checkpoint_id, wait_s=5.0)
        assert saved.checkpoint.state == coordinator_pb2.CHECKPOINT_STATE_SAVED
        manifest = read_manifest(storage.open_storage(first.url))
        assert [file.name for file in manifest.files if file.server_id == "trainer"] == [
            f"residuals-{a.epoch}.safetensors"
        ]
        assert manifest.extra[RESIDUAL_RANKS] == [0]
        assert "lacks the residuals of error feedback of data ranks [1]" in dict(running.events())["residuals_missing"]
        with pytest.raises(StepStateError, match="is not being written"):
            await add_residuals(running, a, first, dp_ranks=[0])
        assert (await running.try_join("c", config=config(World(dp=2), min_trainers=2))).checkpoint_url == first.url


async def test_residuals_are_wanted_for_the_next_checkpoint_while_the_last_one_is_written(tmp_path: Path) -> None:
    """A trainer that leaves after the last step waits for the checkpoint of that step."""

    async with run_with_checkpoints(tmp_path) as (running, a, b):
        checkpoints = running.state.runs["r"].checkpoints
        checkpoints.set_options(replace(checkpoints.options, every_commits=1))
        wanted = [await keep_with_residuals(running, trainer) for trainer in (a, b)]
        await running.call("SaveCheckpoint", run="r")
        first = await wanted[0].get()
        await add_residuals(running, a, first, dp_ranks=[0])
        assert not (await a.heartbeat()).HasField("residuals")
        await take_step([a, b], 1)
        news = (await a.heartbeat()).residuals
        assert (news.step, news.checkpoint_id) == (2, ""), "its checkpoint has not begun"
        assert (await b.heartbeat()).residuals == first, "the first checkpoint waits for b"
        await add_residuals(running, b, first, dp_ranks=[1])
        second = await wanted[0].get()
        assert (second.step, second.checkpoint_id == first.checkpoint_id) == (2, False)


async def test_residuals_are_wanted_when_the_folder_of_the_checkpoint_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, goes_on, begin = threading.Event(), threading.Event(), RunFolder.begin

    def begin_late(folder: RunFolder, step: int, checkpoint_id: str) -> str:
        begins.set()
        assert goes_on.wait(10.0)
        return begin(folder, step, checkpoint_id)

    monkeypatch.setattr(RunFolder, "begin", begin_late)

    async with run_with_checkpoints(tmp_path) as (running, a, _):
        queue = await keep_with_residuals(running, a)
        await running.call("SaveCheckpoint", run="r")
        try:
            assert await asyncio.to_thread(begins.wait, 10.0)
            wanted = (await a.heartbeat()).residuals
            assert (wanted.step, wanted.checkpoint_id) == (1, "")
        finally:
            goes_on.set()
        wanted = await queue.get()
        await add_residuals(running, a, wanted, dp_ranks=[0, 1])
        saved = await running.call("SaveCheckpoint", run="r", checkpoint_id=wanted.checkpoint_id, wait_s=5.0)
        assert saved.checkpoint.state == coordinator_pb2.CHECKPOINT_STATE_SAVED


async def test_file_with_other_tensors_than_residuals_is_left_out(tmp_path: Path) -> None:
    async with run_with_checkpoints(tmp_path) as (running, a, _):
        queue = await keep_with_residuals(running, a)
        await running.call("SaveCheckpoint", run="r")
        wanted = await queue.get()
        with pytest.raises(InvalidRequestError, match="expected ranks below 2"):
            await add_residuals(running, a, wanted, dp_ranks=[2])
        with pytest.raises(InvalidRequestError, match="is not the entry of a file"):
            await add_residuals(running, a, wanted, dp_ranks=[0], file_json="{}")
        await add_residuals(running, a, wanted, dp_ranks=[0, 1], file_json=write_residual(wanted.url, a, "values"))
        await running.call("SaveCheckpoint", run="r", checkpoint_id=wanted.checkpoint_id, wait_s=5.0)
        assert len(read_manifest(storage.open_storage(wanted.url)).files) == 1
        message = dict(running.events())["residuals_missing"]
        assert "data ranks [0, 1] (trainer 'a': its file has other tensors than the residuals" in message


async def test_checkpoint_of_steps_that_were_rolled_back_is_removed(tmp_path: Path) -> None:
    async with run_with_checkpoints(tmp_path) as (running, a, b):
        checkpoints = running.state.runs["r"].checkpoints
        await running.call("SaveCheckpoint", run="r", wait_s=5.0)
        (before,) = checkpoints.saved
        await take_step([a, b], 1)
        await running.settle()
        queue = await keep_with_residuals(running, a)
        await running.call("SaveCheckpoint", run="r")
        wanted = await queue.get()  # the file of the server is complete, and that of the trainer is not
        assert await running.coordinator.restorer.roll_back(running.state.runs["r"], "a test")
        await running.until(lambda: checkpoints.in_flight is None, "the end of the checkpoint")
        assert checkpoints.saved == [before]
        failed = checkpoints.failed[wanted.checkpoint_id]
        assert failed.error == "the run was rolled back while step 2 was being saved"
        await running.until(lambda: not Path(wanted.url).exists(), "the folder is removed")


async def roll_back(running: Harness, a: Trainer, b: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves a checkpoint, commits a step, and rolls the run back."""
    # The fake servers write no tensors.
    monkeypatch.setattr(restoring, "open_manifest", read_manifest)
    run = running.state.runs["r"]
    await running.call("SaveCheckpoint", run="r", wait_s=5.0)
    await take_step([a, b], 1)
    await running.settle()
    assert await running.coordinator.restorer.roll_back(run, "a test")
    await running.until(lambda: run.checkpoints.restore is None, "the end of the rollback")


async def test_a_rolled_back_run_continues_when_its_trainers_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_with_checkpoints(tmp_path) as (running, *former):
        await roll_back(running, *former, monkeypatch)
        settings = config(World(dp=2), min_trainers=2)
        early = await running.try_join("a", incarnation="a2", config=settings)
        assert not early.started
        assert "trainer 'b': has not joined again since the rollback" in early.waiting_for
        b = await running.join("b", config=settings, wait_s=5.0)
        a = await running.join("a", incarnation="a2", config=settings, wait_s=5.0)
        assert a.joined.started and b.joined.started
        assert [item.dp_rank for item in a.joined.work.items] == [0]
        assert [item.dp_rank for item in b.joined.work.items] == [1]
        assert not (await a.finish(1)).work.items, "the item of the other trainer is not taken over"


@pytest.mark.parametrize("ended", [False, True])
async def test_a_rolled_back_run_does_not_wait_for_a_lost_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    async with run_with_checkpoints(tmp_path) as (running, *former):
        await roll_back(running, *former, monkeypatch)
        if ended:
            monkeypatch.setattr(trainer_leases, "has_ended", lambda process: process == former[1].name)
            running.state.runs["r"].members.by_name["b"].process = former[1].name
        settings = config(World(dp=2), min_trainers=2)
        early = await running.join("a", incarnation="a2", config=settings)
        assert not early.joined.started
        if not ended:
            await running.pass_time(running.settings.lease_s, early)
        a = await running.join("a", incarnation="a2", config=settings, wait_s=5.0)
        assert a.joined.started
        await running.settle()
        assert [item.dp_rank for item in (await a.finish(1)).work.items] == [1]
