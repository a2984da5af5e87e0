"""Runs that lose shards without a backup go back to their last checkpoint by themselves, and end with the same bits."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.errors import ConflictError
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner
from shardwell_wire.v1 import coordinator_pb2
from tests.support import checkpoint_trainer
from tests.support.cluster import events, join_options, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import one_thread, sha256

STEPS, PAUSE = 8, 5
EVERY = 3
"""Commits between two checkpoints: the newest one before the pause is of step 3."""


class CheckpointTrainer(TrainerProcess):
    module = "tests.support.checkpoint_trainer"


def run_once(
    cluster: shardwell.LocalCluster, folder: Path, kind: str, at_pause: Callable[[], None]
) -> tuple[str, list[dict[str, Any]]]:
    """Trains with two trainers. ``at_pause`` runs while both compute step ``PAUSE``. Returns run and results."""
    run, proceed = uuid.uuid4().hex, folder / "proceed"
    proceed.unlink(missing_ok=True)
    arguments: tuple[object, ...] = ("--kind", kind, "--steps", STEPS, "--checkpoint-dir", folder)
    arguments += ("--checkpoint-every", EVERY, "--pause-at-step", PAUSE, "--pause-until", proceed)
    with ExitStack() as stack:
        trainers = [stack.enter_context(CheckpointTrainer(cluster.address, run, *arguments)) for _ in range(2)]
        for trainer in trainers:
            trainer.wait_for_step(PAUSE)
        wait_until(lambda: [at.step for at in RunFolder.of(folder, run).entries() if at.is_valid][:1] == [3], "saved")
        at_pause()
        proceed.touch()
        results = [trainer.finish() for trainer in trainers]
    assert {result["returncode"] for result in results} == {0}, results
    return run, results


@cache
@one_thread()
def undisturbed(kind: str) -> str:
    """Returns the hash of the weights of a run that loses nothing. One trainer plays both ranks, without deltas."""
    with (
        shardwell.testing.in_process_cluster(num_shards=2, dp=2),
        shardwell.join(
            run=uuid.uuid4().hex, **join_options(**checkpoint_trainer.transfers(kind) | {"delta_cache_bytes": 0})
        ) as session,
    ):
        state = checkpoint_trainer.train(session, kind, STEPS, checkpoint_trainer.Pause(None, ""))
    return sha256(state)


def describe(cluster: shardwell.LocalCluster, run: str) -> coordinator_pb2.CheckpointSummary:
    with closing(CoordinatorClient(cluster.address)) as client:
        response = client.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run), timeout_s=20)
    return response.checkpoints


def lose(cluster: shardwell.LocalCluster, number: int) -> None:
    """Kills a shard server and removes its shared memory, as if its host had restarted. Starts it again, empty."""
    server = cluster.shards[number]
    server.kill()
    for folder in DEFAULT_DIRECTORY.glob(f"{FolderOwner(server_id=server.name, coordinator=cluster.address).prefix}*"):
        shutil.rmtree(folder)
    server.restart(time.monotonic() + 60)


def computed(results: list[dict[str, Any]], step: int) -> int:
    """Returns how many work items of a step were computed."""
    return sum(number == step for result in results for number, _ in result["losses"])


@pytest.mark.parametrize("kind", ["adamw", "sgd", "client-side", "error-feedback", "deltas"])
def test_loss_of_a_shard_server_rolls_the_run_back(tmp_path: Path, kind: str) -> None:
    expected = undisturbed(kind)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=2.0) as cluster:
        run, results = run_once(cluster, tmp_path, kind, lambda: lose(cluster, 1))
        assert {result["sha256"] for result in results} == {expected}
        assert computed(results, 3) == 4, "steps 3 and 4 were repeated"
        # Step 2 runs again without effect if the checkpoint was saved before its end; see docs/loop.md.
        assert computed(results, 2) in (2, 4) and computed(results, 1) == 2
        assert describe(cluster, run).rollback_count == 1
        assert not describe(cluster, run).loading


@pytest.mark.parametrize("point", ["restore.begun", "restore.before_record", "restore.after_record"])
def test_a_coordinator_killed_during_the_rollback_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    expected, happened = undisturbed("adamw"), tmp_path / "happened"
    fault = fault_points.Fault(point=f"coordinator.{point}", action="kill", once=str(happened))
    for name, value in fault_points.environment(fault).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=2.0) as cluster:

        def lose_and_restart() -> None:
            with ThreadPoolExecutor(1) as thread:
                losing = thread.submit(lose, cluster, 0)  # the server is ready when the coordinator is there again
                wait_until(happened.exists, "the coordinator is killed")
                cluster.restart_coordinator()
                losing.result()

        run, results = run_once(cluster, tmp_path, "adamw", lose_and_restart)
        assert {result["sha256"] for result in results} == {expected}
        assert describe(cluster, run).rollback_count == 1


def test_a_model_that_follows_the_run_gets_the_values_of_the_repeated_steps(tmp_path: Path) -> None:
    """A reader loads version 2. The run goes back to version 1, and commits version 2 again, with other values."""
    run, losses = uuid.uuid4().hex, [1.0]
    values: list[torch.Tensor] = []
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=64, lease_s=2.0) as cluster,
        shardwell.join(cluster.address, run=run, checkpoint_dir=str(tmp_path)) as session,
        ExitStack() as stack,
    ):
        trained, followed = nn.Linear(300, 7), nn.Linear(300, 7)
        shardwell.auto_wrap(trained, session)
        optimizer = shardwell.optim.SGD(trained.parameters(), lr=0.1)
        reader: shardwell.Reader | None = None
        for step in session.steps(3):
            for x in step.batches(lambda number, rank: torch.randn(4, 300)):
                (losses[-1] * trained(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.number == 0:
                session.save_checkpoint(wait=True)
            if session.step != step.number + 1:
                continue  # the run went back meanwhile, so this iteration had no effect
            reader = reader or stack.enter_context(shardwell.attach(cluster.address, run=run))
            fresh = nn.Linear(300, 7)
            assert reader.follow(followed) == reader.follow(fresh) == step.number + 1
            assert torch.equal(followed.weight, fresh.weight), f"version {step.number + 1}, losses {losses}"
            if step.number == 1:
                values.append(fresh.weight.detach())
                if losses == [1.0]:
                    losses.append(2.0)
                    lose(cluster, 1)
    assert len(values) == 2 and not torch.equal(*values)


def test_a_trainer_ends_with_an_error_if_all_checkpoints_have_vanished(tmp_path: Path) -> None:
    run = uuid.uuid4().hex
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=64, lease_s=2.0) as cluster,
        shardwell.join(cluster.address, run=run, checkpoint_dir=str(tmp_path)) as session,
    ):
        model = nn.Linear(300, 7)
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConflictError, match=r"cannot be loaded: .* contains no complete checkpoint"):
            for step in session.steps(3):
                for x in step.batches(lambda number, rank: torch.ones(4, 300)):
                    model(x).square().mean().backward()
                optimizer.step()
                if step.number == 1:
                    shutil.rmtree(session.save_checkpoint(wait=True))
                    lose(cluster, 1)
        assert [event.kind for event in events(cluster.address, run)].count("checkpoint_damaged") == 1


def test_a_checkpoint_in_a_former_folder_is_used_if_the_newest_is_damaged(tmp_path: Path) -> None:
    run, paths = uuid.uuid4().hex, list[Path]()
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=64, lease_s=2.0) as cluster:
        for number in (1, 2):
            with shardwell.join(cluster.address, run=run, checkpoint_dir=str(tmp_path / str(number))) as session:
                model = nn.Linear(300, 7)
                shardwell.auto_wrap(model, session)
                optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
                for step in session.steps(number):
                    for x in step.batches(lambda number, rank: torch.ones(4, 300)):
                        model(x).square().mean().backward()
                    optimizer.step()
                paths.append(Path(session.save_checkpoint(wait=True)))
        next(paths[1].glob("*.safetensors")).unlink()
        lose(cluster, 1)
        wait_until(lambda: describe(cluster, run).rollback_count == 1, "rolled back", timeout_s=60)
        with shardwell.attach(cluster.address, run=run) as reader:
            assert reader.version == 1
