"""Trainers of one node that share their gathers get the same bits and fetch each byte once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import shardwell
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import align
from tests.support import transformer
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256
from tests.support.shared_files import wait_for_no_folder

STEPS = 4


@pytest.fixture
def cluster(cluster_with_short_leases: shardwell.LocalCluster) -> shardwell.LocalCluster:
    return cluster_with_short_leases


@pytest.fixture(autouse=True)
def _sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Without shared memory, a server on this host behaves as a server on another host.
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", "socket,grpc")
    monkeypatch.setenv("SHARDWELL_NODE_GROUP", "gloo")
    yield
    wait_for_no_folder()


def train_ranks(cluster: shardwell.LocalCluster, dp: int, *options: tuple[object, ...]) -> list[dict[str, Any]]:
    """Runs one trainer per rank, each with its own options, and returns their results in rank order."""
    run, steps = uuid.uuid4().hex, ("--dp", dp, "--steps", STEPS)
    own = list(options) or [()] * dp
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(TrainerProcess(cluster.address, run, *steps, "--global-rank", rank, *own[rank]))
            for rank in range(dp)
        ]
        return [trainer.finish() for trainer in trainers]


def group_warnings(result: dict[str, Any]) -> list[str]:
    """Returns the log lines of a trainer about the node group."""
    return [line for line in result["stderr"].splitlines() if line.startswith("node group")]


def hashes(results: list[dict[str, Any]]) -> list[str]:
    return [result.get("sha256", str(result)) for result in results]


@pytest.mark.parametrize(("dp", "transport"), [(2, "socket"), (3, "grpc")])
def test_each_byte_is_fetched_once_per_node(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch, dp: int, transport: str
) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", transport)
    results = train_ranks(cluster, dp)
    assert hashes(results) == [undisturbed_sha256(dp=dp, steps=STEPS)] * dp
    moved = [result["stats"] for result in results]
    (needed,) = {stats["gathered_bytes"] for stats in moved}
    *blocks, rest = unit_sizes()
    shared = STEPS * (2 * sum(blocks) + rest)  # forward and backward; the root is gathered once
    alone = needed - shared  # for the trainer's state dict
    assert sum(stats["received_bytes"] for stats in moved) == shared + dp * alone
    for stats in moved:
        assert stats["received_bytes"] + stats["node_shared_bytes"] == needed
        assert stats["received_bytes"] - alone == pytest.approx(shared / dp, rel=0.02)
    assert not any(map(group_warnings, results))


def unit_sizes() -> list[int]:
    """Returns the sizes of the flat vectors of the trainer's units; the root is the last."""
    model = transformer.build()
    units = [set(block.parameters()) for block in model.blocks]
    units.append(set(model.parameters()).difference(*units))
    return [sum(align(parameter.nbytes) for parameter in unit) for unit in units]


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_trainer_changes_no_bit(cluster: shardwell.LocalCluster, lost: int) -> None:
    results = train_ranks(cluster, 2, *([("--kill-at-step", 1) if rank == lost else () for rank in range(2)]))
    assert results[lost]["returncode"] == -9, results[lost]
    survivor = results[1 - lost]
    assert hashes([survivor]) == [undisturbed_sha256(dp=2, steps=STEPS)]
    assert survivor["stats"]["node_shared_bytes"] > 0
    (line,) = group_warnings(survivor)
    assert "this trainer fetches whole units from now on" in line


@pytest.mark.long
def test_trainers_with_different_gather_orders_train_without_the_group(cluster: shardwell.LocalCluster) -> None:
    """One trainer keeps its weights from forward to backward and gathers fewer units.

    Only the other one is sure to notice: in its backward it asks for units that no other trainer asks for. The one
    that keeps its weights never waits for a unit, and meets the end of the group only if it trains long enough.
    """
    run = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as keeping:
        keeping.setenv("SHARDWELL_KEEP_BYTES", str(1 << 30))
        first = TrainerProcess(cluster.address, run, "--dp", 2, "--steps", STEPS)
    with first, TrainerProcess(cluster.address, run, "--dp", 2, "--steps", STEPS) as second:
        results = [first.finish(), second.finish()]
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    assert group_warnings(results[1])


def test_trainers_on_different_hosts_form_no_group(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    monkeypatch.setenv("SHARDWELL_HOST", "left")
    left = TrainerProcess(cluster.address, run, *steps)
    monkeypatch.setenv("SHARDWELL_HOST", "right")
    with left, TrainerProcess(cluster.address, run, *steps) as right:
        results = [left.finish(), right.finish()]
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    for result in results:
        assert result["stats"]["node_shared_bytes"] == 0
        assert not group_warnings(result)


def test_weights_in_shared_memory_are_read_in_place(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWELL_TRANSPORTS", "shm,socket,grpc")
    results = train_ranks(cluster, 2)
    assert hashes(results) == [undisturbed_sha256(dp=2, steps=STEPS)] * 2
    assert [result["stats"]["node_shared_bytes"] for result in results] == [0, 0]
    assert [result["stats"]["received_bytes"] for result in results] == [0, 0]


def test_unknown_backend_is_rejected() -> None:
    with pytest.raises(UsageError, match="node_group='mpi': expected one of none, gloo, nccl"):
        shardwell.join("localhost:1", transfers=shardwell.TransferOptions(node_group="mpi"))
