"""Trainers that reduce-scatter their gradients over the network, as processes: the bits of a run without faults."""

from __future__ import annotations

import uuid

import pytest

import shardwell
from tests.support.processes import TrainerProcess
from tests.support.rank_runs import STEPS, gradient_bytes, hashes, total, train_ranks
from tests.support.reference import undisturbed_sha256

THREE_HOSTS = [{"SHARDWELL_HOST": f"host-{rank}"} for rank in range(3)]


@pytest.fixture
def cluster(cluster_with_short_leases: shardwell.LocalCluster) -> shardwell.LocalCluster:
    return cluster_with_short_leases


@pytest.fixture(autouse=True)
def _allreduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", "socket,grpc")
    monkeypatch.setenv("SHARDWELL_GRADIENT_REDUCTION", "allreduce")


def test_trainers_of_several_hosts_send_the_servers_one_gradient(cluster: shardwell.LocalCluster) -> None:
    results = train_ranks(cluster, 3, environments=THREE_HOSTS)
    assert hashes(results) == [undisturbed_sha256(dp=3, steps=STEPS)] * 3
    one = STEPS * gradient_bytes()
    assert total(results, "sent_bytes") == one, "a third of what three trainers push directly"
    assert total(results, "allreduce_peer_bytes") + one == 3 * one, "trainers send as many bytes as directly"


def test_sums_go_to_servers_of_this_host_through_shared_memory(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", "shm")
    results = train_ranks(cluster, 2)
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    assert total(results, "allreduce_pushed_bytes") == STEPS * gradient_bytes()


@pytest.mark.parametrize("lost", [0, 2])
def test_killed_trainer_changes_no_bit(cluster: shardwell.LocalCluster, lost: int) -> None:
    killed = [("--kill-at-step", 1) if rank == lost else () for rank in range(3)]
    results = train_ranks(cluster, 3, *killed, environments=THREE_HOSTS)
    assert results[lost]["returncode"] == -9, results[lost]
    survivors = [result for rank, result in enumerate(results) if rank != lost]
    assert hashes(survivors) == [undisturbed_sha256(dp=3, steps=STEPS)] * 2
    for survivor in survivors:
        assert survivor["stats"]["allreduce_count"] > 0
        assert "this trainer pushes its own gradients from now on: member" in survivor["stderr"]


def test_stopped_trainer_is_not_waited_for_without_its_lease(cluster: shardwell.LocalCluster) -> None:
    """The process keeps its connections, so only the coordinator can say that it takes no part any more."""
    options = (cluster.address, uuid.uuid4().hex, "--dp", 2, "--steps", STEPS, "--global-rank")
    with TrainerProcess(*options, 0) as survivor, TrainerProcess(*options, 1, "--stop-at-step", 1) as stopped:
        stopped.wait_stopped()
        result = survivor.finish()
    assert hashes([result]) == [undisturbed_sha256(dp=2, steps=STEPS)]
    assert "of rank 1 has lost its membership" in result["stderr"]
