"""Fault tests of stragglers: a run goes on without a trainer that hangs in a work item, and keeps its bits."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

import shardwell
from shardwell_server.coordinator.storage.records import KEPT_COMMITS
from tests.support.cluster import events, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256

STEPS, STOP_AT = 12, 4
LEASE_S = 60.0
"""Longer than the test: no lease ends."""


@pytest.mark.parametrize("transports", ["shm,socket,grpc", "socket,grpc"])
@pytest.mark.parametrize(("rank", "spares"), [(0, 1), (1, 0)])
def test_run_goes_on_without_a_trainer_that_hangs(rank: int, spares: int, transports: str) -> None:
    run = uuid.uuid4().hex
    options = ("--dp", 2, "--steps", STEPS, "--transports", transports, "--min-trainers", 2)
    with (
        ExitStack() as stack,
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=LEASE_S) as cluster,
    ):

        def start(*more: object) -> TrainerProcess:
            return stack.enter_context(TrainerProcess(cluster.address, run, *options, *more))

        straggler = start("--global-rank", rank, "--stop-at-step", STOP_AT, "--stop-after-s", 1.0)
        others = [start("--global-rank", 1 - rank)]
        others[0].wait_for_step(1)
        others += [start() for _ in range(spares)]
        straggler.wait_stopped()
        others[0].wait_for_step(STOP_AT + 3)
        straggler.resume()
        results = [trainer.finish() for trainer in (straggler, *others)]
        kinds = [event.kind for event in events(cluster.address, run)]
    expected = undisturbed_sha256(dp=2, steps=STEPS)
    assert [result.get("sha256") for result in results] == [expected] * len(results), results
    assert "work_copied" in kinds
    assert "lease_expired" not in kinds


def test_item_is_late_while_its_gradient_is_pushed(tmp_path: Path) -> None:
    run, proceed = uuid.uuid4().hex, tmp_path / "proceed"
    options = ("--dp", 2, "--steps", STEPS, "--transports", "socket,grpc", "--min-trainers", 2)
    late = ("--global-rank", 1, "--wait-in-push", 30, "--until", proceed)
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=LEASE_S) as cluster,
        TrainerProcess(cluster.address, run, *options, *late) as straggler,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0) as other,
    ):
        wait_until(
            lambda: "work_copied" in [event.kind for event in events(cluster.address, run)], "a copy", timeout_s=60.0
        )
        other.wait_for_step(STOP_AT + 1)
        proceed.touch()
        results = [straggler.finish(), other.finish()]
    expected = undisturbed_sha256(dp=2, steps=STEPS)
    assert [result.get("sha256") for result in results] == [expected] * len(results), results


def test_late_trainer_that_clips_goes_on() -> None:
    """The norms of the steps that the other trainer commits meanwhile are no longer kept."""
    run, steps, late_by = uuid.uuid4().hex, 30, 2 * KEPT_COMMITS
    options = ("--dp", 2, "--steps", steps, "--min-trainers", 2, "--clip", 1e9)
    with (
        shardwell.LocalCluster(num_shards=1, lease_s=LEASE_S) as cluster,
        TrainerProcess(
            cluster.address, run, *options, "--global-rank", 1, "--stop-at-step", STOP_AT, "--stop-after-s", 1.0
        ) as straggler,
        TrainerProcess(cluster.address, run, *options, "--global-rank", 0) as other,
    ):
        straggler.wait_stopped()
        other.wait_for_step(STOP_AT + late_by)
        straggler.resume()
        results = [straggler.finish(), other.finish()]
    expected = undisturbed_sha256(dp=2, steps=steps)
    assert [result.get("sha256") for result in results] == [expected] * len(results), results
