"""Fault tests of trainers that are stopped: each goes on by itself, whether its item was copied or it was fenced."""

from __future__ import annotations

import uuid

import pytest

import shardwell
from tests.support.cluster import cluster_fixture
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256

STEPS = 8


cluster = cluster_fixture(num_shards=2, lease_s=1.0)


@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("transports", ["shm,socket,grpc", "socket", "grpc"])
def test_stopped_trainer_joins_again(cluster: shardwell.LocalCluster, transports: str, clip: float | None) -> None:
    run, options = uuid.uuid4().hex, ["--dp", 2, "--steps", STEPS, "--transports", transports]
    options += [] if clip is None else ["--clip", clip]
    with (
        TrainerProcess(cluster.address, run, *options, "--trainer", "a", "--stop-at-step", 2) as stopped,
        TrainerProcess(cluster.address, run, *options, "--trainer", "b") as other,
    ):
        stopped.wait_stopped()
        other.wait_for_step(4)  # it has computed the work of both
        stopped.resume()
        results = [stopped.finish(), other.finish()]
    expected = undisturbed_sha256(dp=2, steps=STEPS)
    assert [result.get("sha256") for result in results] == [expected] * 2, results
    assert len(results[1]["losses"]) > STEPS, "the other trainer has computed work of the stopped one"
