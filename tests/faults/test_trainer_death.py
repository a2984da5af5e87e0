"""Fault tests of trainers: a death at any instant changes the duration only."""

from __future__ import annotations

import uuid
from contextlib import closing

import pytest

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import cluster_fixture
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256

STEPS = 6


cluster = cluster_fixture(num_shards=2, lease_s=1.5)


@pytest.fixture(scope="module")
def undisturbed_hash() -> str:
    return undisturbed_sha256(dp=2, steps=STEPS)


@pytest.mark.parametrize("killed_rank", [0, 1])
def test_sigkill_of_a_trainer_in_backward_keeps_the_result(
    cluster: shardwell.LocalCluster, undisturbed_hash: str, killed_rank: int
) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", killed_rank, "--kill-at-step", 2) as killed,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1 - killed_rank) as survivor,
    ):
        lost, result = killed.finish(), survivor.finish()
    assert lost["returncode"] == -9, lost
    assert result.get("sha256") == undisturbed_hash, result
    assert len(result["losses"]) == STEPS + (STEPS - 2), "the survivor computes the lost work items from step 2 on"


def test_restarted_trainer_gets_its_rank_back(cluster: shardwell.LocalCluster, undisturbed_hash: str) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        TrainerProcess(cluster.address, run, *options, "--trainer", "a", "--global-rank", 0) as first,
        TrainerProcess(cluster.address, run, *options, "--trainer", "b", "--kill-at-step", 1) as killed,
    ):
        assert killed.finish()["returncode"] == -9
        with TrainerProcess(cluster.address, run, *options, "--trainer", "b") as again:
            results = [first.finish(), again.finish()]
    assert [result.get("sha256") for result in results] == [undisturbed_hash] * 2, results


def test_trainer_of_a_deleted_run_cannot_join_its_successor() -> None:
    expected = undisturbed_sha256(dp=1, steps=STEPS)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=60.0) as cluster:
        for transports in ("shm,socket,grpc", "socket", "grpc"):
            run, options = (
                f"run over {transports}",
                ("--dp", 1, "--steps", STEPS, "--trainer", "a", "--transports", transports),
            )
            with TrainerProcess(cluster.address, run, *options, "--stop-at-step", 2) as old:
                old.wait_stopped()
                delete_run(cluster.address, run)
                with TrainerProcess(cluster.address, run, *options, "--stop-at-step", 2) as new:
                    new.wait_stopped()  # the same trainer, rank and step
                    old.resume()
                    lost = old.finish()
                    new.resume()
                    result = new.finish()
            assert lost["returncode"] == 1, lost
            if transports == "grpc":  # the end of a session may be detected before its reason
                assert "RunDeletedError" in lost["stderr"], lost
            assert result.get("sha256") == expected, result


def delete_run(address: str, run: str) -> None:
    with closing(CoordinatorClient(address)) as client:
        client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run=run, force=True), timeout_s=20.0)
