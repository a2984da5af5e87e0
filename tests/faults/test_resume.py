"""Runs that are resumed from checkpoints: the same bits on other servers and trainers, for every optimizer."""

from __future__ import annotations

import uuid
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.checkpoints.folder import Entry, RunFolder
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.v1 import coordinator_pb2
from tests.support.checkpoint_trainer import KINDS
from tests.support.cluster import cluster_fixture, wait_until
from tests.support.processes import TrainerProcess

STEPS = 6
RUN = "run"


class CheckpointTrainer(TrainerProcess):
    module = "tests.support.checkpoint_trainer"


two_servers = cluster_fixture(num_shards=2, lease_s=2.0)


three_servers = cluster_fixture(num_shards=3, lease_s=2.0)


def train(
    cluster: shardwell.LocalCluster, run: str, kind: str, *options: object, trainers: int = 2, steps: int = STEPS
) -> dict[str, Any]:
    """Trains a run to its end; returns the result of one trainer."""
    arguments = ("--kind", kind, "--steps", steps, "--min-trainers", trainers, *options)
    with ExitStack() as stack:
        started = [stack.enter_context(CheckpointTrainer(cluster.address, run, *arguments)) for _ in range(trainers)]
        results = [trainer.finish() for trainer in started]
    assert {result["returncode"] for result in results} == {0}, results
    assert len({result["sha256"] for result in results}) == 1, results
    return results[0]


def save(cluster: shardwell.LocalCluster, run: str) -> str:
    """Saves a checkpoint of a run without trainers; returns its folder.

    It has no residuals. A checkpoint that the trainers have begun, and that has their residuals, is waited for.
    """
    with closing(CoordinatorClient(cluster.address)) as client:

        def is_idle() -> bool:
            described = client.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run), timeout_s=20.0)
            return not described.checkpoints.HasField("in_flight")

        wait_until(is_idle, "the end of the last checkpoint")
        response = client.call(
            "SaveCheckpoint", coordinator_pb2.SaveCheckpointRequest(run=run, wait_s=20), timeout_s=30
        )
    assert response.checkpoint.state == coordinator_pb2.CHECKPOINT_STATE_SAVED, response
    return str(response.checkpoint.url)


def delete_run(cluster: shardwell.LocalCluster, run: str) -> None:
    with closing(CoordinatorClient(cluster.address)) as client:
        client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run=run, force=True), timeout_s=20.0)


def entry(folder: Path, run: str, step: int) -> Entry:
    (found,) = [at for at in RunFolder.of(folder, run).entries() if at.step == step]
    assert not found.problem
    return found


def whole_state(url: str) -> dict[str, Any]:
    """Returns everything in a checkpoint, whatever the cuts between servers were."""
    checkpoint = Checkpoint.open(url)
    state: dict[str, Any] = {"step": checkpoint.manifest.step, "averages": checkpoint.averages_begun}
    for name in checkpoint.parameters:
        state[name] = {(part.algorithm, part.step_count) for part in checkpoint.parts(name)}
        for label in checkpoint.states(name):
            stored = checkpoint.pieces(name, label)
            contents = [bytes(checkpoint.read(each)) for each in stored]
            is_whole = stored[0].piece.kind != "elements"
            assert not is_whole or len(set(contents)) == 1, f"{name} {label} differs between servers"
            state[f"{name}|{label}"] = contents[0] if is_whole else b"".join(contents)
    return state


@pytest.mark.parametrize(
    ("kind", "version", "first_step"),
    [
        *((kind, 3, 3) for kind in KINDS if kind != "gan"),
        ("gan", 2, 1),  # between two steps: gradients of the discriminator are kept
        ("gan", 3, 1),  # in the middle of a step: the committed part is repeated, the generator's optimizer is next
    ],
)
def test_resume_on_other_servers_and_trainers_gives_the_same_bits(
    two_servers: shardwell.LocalCluster,
    three_servers: shardwell.LocalCluster,
    kind: str,
    version: int,
    first_step: int,
    tmp_path: Path,
) -> None:
    run = uuid.uuid4().hex
    options = ("--checkpoint-dir", tmp_path, "--checkpoint-every", version)
    undisturbed = train(two_servers, run, kind, *options)
    final = whole_state(save(two_servers, run))
    middle = entry(tmp_path, run, version).url
    resumed = train(
        three_servers,
        run,
        kind,
        "--resume",
        middle,
        "--checkpoint-dir",
        tmp_path / "resumed",
        "--chunk-bytes",
        65536,
        "--transports",
        "grpc",
        trainers=1,
    )
    first = min(step for step, _ in resumed["losses"])
    # A checkpoint has the end of its last iteration, if that was reported before. Otherwise the iteration is repeated.
    assert first == first_step or (kind != "gan" and first == first_step - 1), "the loop continues at the checkpoint"
    assert resumed["sha256"] == undisturbed["sha256"]
    if kind == "error-feedback":
        residuals = [name for name in whole_state(middle) if "|residual." in name]
        assert {name[-1] for name in residuals} == {"0", "1"}, "one residual per data rank"
    if kind == "gan" and version == 2:
        assert any("kept_gradient" in name for name in whole_state(middle))
    found = whole_state(save(three_servers, run))
    assert found.keys() == final.keys()
    assert [name for name in final if found[name] != final[name]] == []
    delete_run(two_servers, run)
    delete_run(three_servers, run)
