"""Checkpoints of runs on a cluster: when they are saved, what happens when this fails, and how runs are resumed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.folder import Entry, RunFolder
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    NotFoundError,
    RunMismatchError,
    ShardwellError,
    StepStateError,
    UnitMismatchError,
)
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import cluster_fixture, wait_until

cluster = cluster_fixture(num_shards=2)


@pytest.fixture
def run_name() -> str:
    return uuid.uuid4().hex


class Training:
    """A run with one trainer in this process."""

    def __init__(self, address: str, run: str, *, model_width: int = 64, **options: object) -> None:
        self.address, self.run, self.width = address, run, model_width
        self.options = {"trainer": "tester", "waits": shardwell.WaitOptions(wait_limit_s=30), **options}

    def __call__(self, steps: int, after_step: Callable[[int], None] = lambda _: None) -> dict[str, torch.Tensor]:
        """Trains until a step; returns the final values. ``steps_seen`` are the steps of this call."""
        self.steps_seen: list[int] = []
        with shardwell.join(self.address, run=self.run, **self.options) as session:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(17, self.width), nn.Tanh(), nn.Linear(self.width, 1))
            shardwell.fully_shard(model[0], session, name="first")
            shardwell.fully_shard(model, session, name="rest")
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
            for step in session.steps(steps):
                self.steps_seen.append(step.number)
                for x in step.batches(lambda number, rank: torch.full((3, 17), float(number + rank))):
                    model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                after_step(step.number)
            state: dict[str, torch.Tensor] = shardwell.full_state_dict(model)
        return state


def call(address: str, rpc_name: str, request: object) -> object:
    with closing(CoordinatorClient(address)) as client:
        return client.call(rpc_name, request, timeout_s=40.0)


def checkpoints_of(address: str, run: str) -> coordinator_pb2.CheckpointSummary:
    response: coordinator_pb2.DescribeRunResponse = call(
        address, "DescribeRun", coordinator_pb2.DescribeRunRequest(run=run)
    )
    return response.checkpoints


def save(address: str, run: str, wait_s: float = 20.0) -> coordinator_pb2.CheckpointProgress:
    response: coordinator_pb2.SaveCheckpointResponse = call(
        address, "SaveCheckpoint", coordinator_pb2.SaveCheckpointRequest(run=run, wait_s=wait_s)
    )
    return response.checkpoint


def events_of(address: str, run: str) -> dict[str, list[str]]:
    """Returns the messages of the run's events, by kind."""
    found: dict[str, list[str]] = {}
    with closing(CoordinatorClient(address)) as client:
        request = coordinator_pb2.WatchEventsRequest(run=run, duration_s=0.1)
        for event in client.stream("WatchEvents", request, timeout_s=60.0):
            found.setdefault(event.kind, []).append(event.message)
    return found


def wait_saved(address: str, run: str, step: int) -> Callable[[int], None]:
    """Returns a function that waits, after one step, until the checkpoint of a version is complete."""

    def wait(number: int) -> None:
        if number + 1 == step:
            wait_until(
                lambda: checkpoints_of(address, run).last_saved.step == step, f"the checkpoint of step {step} is saved"
            )

    return wait


def entries(folder: Path, run: str) -> list[Entry]:
    return RunFolder.of(folder, run).entries()


def steps_in(folder: Path, run: str) -> list[int]:
    return [entry.step for entry in entries(folder, run) if entry.is_valid]


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpoints_are_saved_every_few_commits_and_old_ones_are_deleted(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    training = Training(cluster.address, run_name, checkpoint_dir=str(tmp_path), checkpoint_every=2, keep=2)

    def wait_for_each(number: int) -> None:
        if number % 2:
            wait_saved(cluster.address, run_name, number + 1)(number)

    training(9, wait_for_each)
    wait_until(lambda: steps_in(tmp_path, run_name) == [8, 6], "older checkpoints are deleted")
    assert not [entry for entry in entries(tmp_path, run_name) if entry.is_incomplete]
    summary = checkpoints_of(cluster.address, run_name)
    assert (summary.checkpoint_every, summary.checkpoint_keep) == (2, 2)
    assert not summary.HasField("in_flight") and not summary.HasField("last_failed")
    events = events_of(cluster.address, run_name)
    assert len(events["checkpoint_started"]) == len(events["checkpoint_saved"]) == 4


def test_save_checkpoint_of_an_idle_run(cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path) -> None:
    Training(cluster.address, run_name, checkpoint_dir=str(tmp_path))(3)
    progress = save(cluster.address, run_name)
    assert progress.state == coordinator_pb2.CHECKPOINT_STATE_SAVED
    assert progress.step == 3
    assert progress.written_bytes == progress.total_bytes > 0
    again = save(cluster.address, run_name)
    assert again.checkpoint_id != progress.checkpoint_id
    assert steps_in(tmp_path, run_name) == [3, 3]
    with pytest.raises(NotFoundError, match="no checkpoint 'abc'"):
        call(
            cluster.address,
            "SaveCheckpoint",
            coordinator_pb2.SaveCheckpointRequest(run=run_name, checkpoint_id="abc"),
        )


def test_a_run_without_a_folder_saves_nothing(cluster: shardwell.LocalCluster, run_name: str) -> None:
    Training(cluster.address, run_name)(1)
    with pytest.raises(StepStateError, match="checkpoint_dir"):
        save(cluster.address, run_name)


def test_a_folder_that_cannot_be_written_is_an_event_and_training_goes_on(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    blocked = tmp_path / "folder"

    def block(_: int) -> None:
        if blocked.is_dir():
            shutil.rmtree(blocked)
            blocked.write_text("not a folder")

    state = Training(cluster.address, run_name, checkpoint_dir=str(blocked / "below"), checkpoint_every=2)(6, block)
    assert equal(state, Training(cluster.address, f"{run_name}-2")(6))
    wait_until(lambda: checkpoints_of(cluster.address, run_name).HasField("last_failed"), "the failure is reported")
    assert str(blocked) in checkpoints_of(cluster.address, run_name).last_failed.error
    assert "Training goes on" in events_of(cluster.address, run_name)["checkpoint_failed"][0]


def test_resume_latest(cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 3, "resume": "latest"}
    training = Training(cluster.address, run_name, **options)
    expected = training(8, wait_saved(cluster.address, run_name, 6))
    assert training.steps_seen[0] == 0, "there was no checkpoint"
    assert training(8) and training.steps_seen == [], "the run is live: its trainer joins it"
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as other:
        resumed = Training(other.address, run_name, **options)
        assert equal(resumed(8), expected)
        assert resumed.steps_seen == [6, 7]
        assert "continues at step 6" in events_of(other.address, run_name)["run_resumed"][0]
        with pytest.raises(RunMismatchError, match="seed"):
            Training(other.address, f"{run_name}-x", seed=5, resume=entries(tmp_path, run_name)[0].url)(1)
        with pytest.raises(ShardwellError, match="was declared with shape"):
            Training(other.address, f"{run_name}-y", model_width=65, resume=entries(tmp_path, run_name)[0].url)(9)


def test_a_model_that_lacks_units_of_the_checkpoint_is_refused(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    Training(cluster.address, run_name, checkpoint_dir=str(tmp_path))(2)
    url = save(cluster.address, run_name).url
    with shardwell.join(cluster.address, run=f"{run_name}-part", resume=url) as session:
        layer = shardwell.fully_shard(nn.Linear(17, 64), session, name="first")
        optimizer = shardwell.optim.AdamW(layer.parameters(), lr=0.01)
        layer(torch.ones(3, 17)).sum().backward()
        with pytest.raises(UnitMismatchError, match="1 units that this trainer's model lacks, such as 'rest'"):
            optimizer.step()
        assert session.step == 2, "nothing was committed"


@pytest.mark.parametrize("damage", ["manifest", "header", "tensor", "missing"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    cluster: shardwell.LocalCluster,
    run_name: str,
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    training = Training(cluster.address, run_name, **options)

    def wait_for_each(number: int) -> None:
        if number in (1, 3):
            wait_saved(cluster.address, run_name, number + 1)(number)

    expected = training(5, wait_for_each)
    newest = Path(next(entry.url for entry in entries(tmp_path, run_name) if entry.step == 4))
    name, position = {
        "manifest": ("manifest.json", 30),
        "header": ("shards-shard-1.safetensors", 30),
        "tensor": ("shards-shard-1.safetensors", -5),
        "missing": ("shards-shard-1.safetensors", 0),
    }[damage]
    path = newest / name
    data = bytearray(path.read_bytes())
    data[position] ^= 255
    path.unlink() if damage == "missing" else path.write_bytes(data)
    with shardwell.LocalCluster(num_shards=1, min_shard_bytes=4096) as other:
        with pytest.raises((CorruptDataError, ConflictError), match=name):
            Training(other.address, f"{run_name}-x", resume=str(newest), **options)(5)
        resumed = Training(other.address, run_name, resume="latest", **options)
        assert equal(resumed(5), expected)
        assert resumed.steps_seen == [2, 3, 4]
        assert name in events_of(other.address, run_name)["checkpoint_damaged"][0]
        used = next(entry.url for entry in entries(tmp_path, run_name) if entry.step == 2)
        (warning,) = [at.getMessage() for at in caplog.records if "because newer ones are damaged" in at.getMessage()]
        assert f"continues from the checkpoint of step 2, {used}" in warning
        assert str(newest) in warning


def test_the_newest_is_kept_after_the_clock_was_set_back(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 1}
    Training(cluster.address, run_name, **options)(1, wait_saved(cluster.address, run_name, 1))
    path = Path(entries(tmp_path, run_name)[0].url) / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    path.write_bytes(replace(manifest, created=manifest.created + 3600).to_bytes())
    with shardwell.LocalCluster(num_shards=1, min_shard_bytes=4096) as other:
        resumed = Training(other.address, run_name, resume="latest", keep=1, **options)
        resumed(2, wait_saved(other.address, run_name, 2))
        wait_until(lambda: steps_in(tmp_path, run_name) == [2], "only the checkpoint of step 2 is kept")


POINTS = ("before_begin", "begun", "before_manifest", "after_manifest")


@pytest.mark.parametrize("point", POINTS)
def test_a_coordinator_killed_while_a_checkpoint_is_written(
    run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    folder = tmp_path / "checkpoints"
    fault = fault_points.Fault(
        point=f"coordinator.checkpoint.{point}", action="kill", nth=2, once=str(tmp_path / "happened")
    )
    for name, value in fault_points.environment(fault).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        training = Training(cluster.address, run_name, checkpoint_dir=str(folder), checkpoint_every=2)

        def restart(number: int) -> None:
            if number == 1:
                wait_saved(cluster.address, run_name, 2)(number)
            if number == 3:
                wait_until((tmp_path / "happened").exists, "the coordinator is killed")
                if point in ("before_manifest", "after_manifest", "begun"):
                    # Whatever is in the folder now: the torn checkpoint is not offered, the one before is intact.
                    assert steps_in(folder, run_name)[-1] == 2
                    assert (4 in steps_in(folder, run_name)) == (point == "after_manifest")
                cluster.restart_coordinator()

        state = training(9, restart)
        wait_until(lambda: checkpoints_of(cluster.address, run_name).last_saved.step >= 6, "checkpoints go on")
        wait_until(lambda: not any(entry.is_incomplete for entry in entries(folder, run_name)), "the torn one is gone")
        assert (4 in steps_in(folder, run_name)) == (point == "after_manifest")
        monkeypatch.undo()
        assert equal(state, Training(cluster.address, f"{run_name}-2")(9))


def test_two_trainers_may_change_the_options_later(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    Training(cluster.address, run_name, checkpoint_dir=str(tmp_path / "a"), checkpoint_every=100)(2)
    Training(cluster.address, run_name)(3)
    assert checkpoints_of(cluster.address, run_name).checkpoint_dir == str(tmp_path / "a"), (
        "unset options change nothing"
    )
    Training(cluster.address, run_name, checkpoint_dir=str(tmp_path / "b"), checkpoint_every=1)(4)
    wait_until(lambda: steps_in(tmp_path / "b", run_name) == [4], "the new folder is used")
    assert not os.listdir(tmp_path / "a")
