"""Fault tests of replicas: a lost trainer is noticed by its replica, and another replica computes the work item."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import shardwell
from shardwell_wire import fault_points
from shardwell_wire.fault_points import Fault
from tests.support.processes import TrainerProcess

STEPS, AT_STEP, LEASE_S = 5, 2, 1.5
SOON_S = 20.0
"""Far below the trainers' wait limit of 60 s, also on a busy machine."""


class PipelineTrainer(TrainerProcess):
    module = "tests.support.pipeline_trainer"


@pytest.fixture(scope="module")
def cluster() -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, lease_s=LEASE_S) as running:
        yield running


class Grid:
    """Trainers of one run."""

    def __init__(self, cluster: shardwell.LocalCluster, stack: ExitStack, world: tuple[int, int, int]) -> None:
        self._address, self._stack, self._run = cluster.address, stack, uuid.uuid4().hex
        self._options = [value for pair in zip(("--dp", "--tp", "--pp"), world, strict=True) for value in pair]

    def start(self, rank: int, *options: object) -> TrainerProcess:
        trainer = PipelineTrainer(
            self._address, self._run, *self._options, "--steps", STEPS, "--global-rank", rank, *options
        )
        return self._stack.enter_context(trainer)


@pytest.fixture(scope="module")
def undisturbed(cluster: shardwell.LocalCluster) -> dict[tuple[int, int, int], str]:
    hashes = {}
    for world in ((2, 1, 2), (1, 2, 1)):
        with ExitStack() as stack:
            grid = Grid(cluster, stack, world)
            trainers = [grid.start(rank) for rank in range(world[0] * world[1] * world[2])]
            (hashes[world],) = {trainer.finish()["sha256"] for trainer in trainers}
    return hashes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_replica_takes_over_and_the_survivor_ends(
    cluster: shardwell.LocalCluster, undisturbed: dict[tuple[int, int, int], str], number: int
) -> None:
    with ExitStack() as stack:
        grid = Grid(cluster, stack, (2, 1, 2))
        lost = grid.start(1, "--signal", int(number), "--at-step", AT_STEP)
        survivor, *helpers = [grid.start(rank) for rank in (0, 2, 3)]
        if number == signal.SIGSTOP:
            lost.wait_stopped()
        else:
            lost.finish()
        noticed = time.monotonic()
        ended = survivor.finish()
        seconds = time.monotonic() - noticed
        results = [helper.finish() for helper in helpers]
    assert ended["returncode"] == 1 and "ReplicaLostError" in ended["stderr"], ended
    assert seconds < SOON_S
    assert [result.get("sha256") for result in results] == [undisturbed[2, 1, 2]] * 2, results
    assert [len(result["losses"]) for result in results] == [STEPS + STEPS - AT_STEP] * 2, results


def test_survivor_that_waits_for_the_lost_trainer_ends_and_both_go_on_after_a_restart(
    cluster: shardwell.LocalCluster, undisturbed: dict[tuple[int, int, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(point="client.finish_work.before", action="kill", where={"step": AT_STEP})
    with ExitStack() as stack:
        grid = Grid(cluster, stack, (1, 2, 1))
        survivor = grid.start(0)
        with monkeypatch.context() as patched:
            for name, value in fault_points.environment(fault).items():
                patched.setenv(name, value)
            lost = grid.start(1)
        assert lost.finish()["returncode"] == -9
        noticed = time.monotonic()
        ended = survivor.finish()
        assert ended["returncode"] == 1 and "ReplicaLostError" in ended["stderr"], ended
        assert time.monotonic() - noticed < SOON_S
        results = [trainer.finish() for trainer in [grid.start(rank) for rank in (0, 1)]]
    assert [result.get("sha256") for result in results] == [undisturbed[1, 2, 1]] * 2, results
