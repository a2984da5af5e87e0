"""Trainers of one node that add their gradients before they push them get the same bits and send fewer bytes."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell_wire.errors import UsageError
from tests.support.cluster import events, wait_until
from tests.support.processes import TrainerProcess
from tests.support.rank_runs import STEPS, gradient_bytes, hashes, total, train_ranks
from tests.support.reference import undisturbed_sha256
from tests.support.shared_files import wait_for_no_folder


@pytest.fixture
def cluster(cluster_with_short_leases: shardwell.LocalCluster) -> shardwell.LocalCluster:
    return cluster_with_short_leases


@pytest.fixture(autouse=True)
def _hierarchical(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Without shared memory, a server on this host behaves as a server on another host.
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", "socket,grpc")
    monkeypatch.setenv("SHARDWELL_GRADIENT_REDUCTION", "hierarchical")
    yield
    wait_for_no_folder()


def warnings_of(result: dict[str, Any]) -> list[str]:
    """Returns the log lines of a trainer about its groups."""
    return [line for line in result["stderr"].splitlines() if line.startswith(("node group", "gradient group"))]


def test_a_node_sends_one_gradient_for_all_its_trainers(cluster: shardwell.LocalCluster) -> None:
    results = train_ranks(cluster, 2)
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    assert not any(map(warnings_of, results))
    assert total(results, "hierarchical_pushed_bytes") == STEPS * gradient_bytes(), "one gradient per step"
    assert total(results, "direct_pushed_bytes") == 0
    assert total(results, "node_summed_bytes") == total(results, "pushed_bytes")


def test_each_node_adds_one_reduction_group(cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_REDUCTION_GROUPS", "2,2")
    hosts = [{"SHARDWELL_HOST": "left" if rank < 2 else "right"} for rank in range(4)]
    results = train_ranks(cluster, 4, environments=hosts)
    assert hashes(results) == [undisturbed_sha256(dp=4, steps=STEPS, groups=(2, 2))] * 4
    for node in (results[:2], results[2:]):
        assert total(node, "node_summed_bytes") == total(node, "pushed_bytes") > 0


def test_incomplete_group_pushes_its_own_gradients(cluster: shardwell.LocalCluster) -> None:
    """Without reduction groups, the only group has all ranks, and no node has them."""
    results = train_ranks(cluster, 2, environments=[{"SHARDWELL_HOST": "left"}, {"SHARDWELL_HOST": "right"}])
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    assert total(results, "node_summed_bytes") == 0
    assert not any(map(warnings_of, results))


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_trainer_changes_no_bit(cluster: shardwell.LocalCluster, lost: int) -> None:
    results = train_ranks(cluster, 2, *([("--kill-at-step", 1) if rank == lost else () for rank in range(2)]))
    assert results[lost]["returncode"] == -9, results[lost]
    survivor = results[1 - lost]
    assert hashes([survivor]) == [undisturbed_sha256(dp=2, steps=STEPS)]
    assert survivor["stats"]["node_summed_bytes"] > 0
    assert not warnings_of(survivor), "the relay no longer waits for the lost trainer"


def test_spare_computes_the_work_of_a_lost_trainer(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    """It has no rank of its own, so its gradients go to the servers."""
    run, go_on, options = uuid.uuid4().hex, tmp_path / "go_on", ("--dp", 2, "--steps", STEPS)
    blocked = ("--wait-in-push", 1, "--until", go_on)
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0, *blocked) as first,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1) as second,
    ):
        first.wait_for_step(0)
        with TrainerProcess(cluster.address, run, *options) as spare:
            wait_until(lambda: [at.kind for at in events(cluster.address, run)].count("trainer_joined") == 3, "spare")
            os.kill(second.pid, signal.SIGKILL)
            go_on.touch()
            survivors = [first.finish(), spare.finish()]
    assert hashes(survivors) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    assert survivors[1]["losses"]


def test_trainer_that_joins_again_uses_the_relay_again(cluster: shardwell.LocalCluster) -> None:
    steps, run = 8, uuid.uuid4().hex
    options = ("--dp", 2, "--steps", steps)
    with (
        TrainerProcess(cluster.address, run, *options, "--global-rank", 1, "--stop-at-step", 1) as second,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0, "--stop-at-step", 2) as first,
    ):
        second.wait_stopped()
        first.wait_stopped()  # it has computed step 1 without the other trainer
        second.resume()
        wait_until(lambda: [at.kind for at in events(cluster.address, run)].count("trainer_joined") == 3, "joins again")
        first.resume()
        results = [first.finish(), second.finish()]
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=steps)] * 2
    assert total(results, "node_summed_bytes") >= 5 * gradient_bytes(), "step 0, and the steps after the second join"


def test_several_backwards_are_added_per_rank_first(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = [("--backwards", 2)] * 2
    together = train_ranks(cluster, 2, *twice)
    monkeypatch.setenv("SHARDWELL_GRADIENT_REDUCTION", "direct")
    assert hashes(together) == hashes(train_ranks(cluster, 2, *twice))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_dtype": "bfloat16"}, "gradient_reduction='hierarchical' with push_dtype='bfloat16': the sums of"),
        (
            {"gradient_reduction": "tree"},
            "gradient_reduction='tree': expected one of direct, hierarchical, allreduce",
        ),
        ({"gradient_reduction": "ring"}, "gradient_reduction='ring': a ring adds each part of a gradient in another"),
        ({"gradient_reduction": "allreduce", "push_dtype": "int8"}, "gradient_reduction='allreduce' with push_dtype="),
    ],
)
def test_options_that_change_bits_or_do_not_exist_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shardwell.TransferOptions(**{"gradient_reduction": "hierarchical"} | options)


@pytest.mark.parametrize("axis", ["cp", "tp", "pp"])
def test_grids_are_refused(axis: str) -> None:
    with pytest.raises(UsageError, match=rf"needs a world with cp=1, tp=1 and pp=1, got World\(dp=2, .*{axis}=2"):
        shardwell.join("localhost:1", world=shardwell.World(dp=2, **{axis: 2}))
