"""Work items of simulated trainers in a run that commits them one by one."""

from __future__ import annotations

from contextlib import suppress

from shardwell_wire.errors import StepRestartedError
from shardwell_wire.model.topology import ASYNCHRONOUS, Consistency
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer


async def take_item(trainer: Trainer) -> coordinator_pb2.CommitStepResponse:
    """Finishes and commits the item that a trainer has."""
    version = trainer.version
    finished = await trainer.finish(version, wait_s=5)
    assert finished.all_finished
    response = await trainer.commit(version, wait_s=5)
    assert response.committed
    trainer.version = response.next_work.step
    return response


async def take_restarted_item(trainer: Trainer) -> coordinator_pb2.CommitStepResponse:
    """Finishes and commits an item, and computes it again as often as it is restarted."""
    while True:
        answer = await trainer.finish(trainer.version, wait_s=5)
        if answer.HasField("work"):
            trainer.version = answer.work.step
        elif answer.all_finished:
            with suppress(StepRestartedError):
                response = await trainer.commit(trainer.version, wait_s=5)
                trainer.version = response.next_work.step
                return response


async def team(cluster: Harness, *names: str, consistency: Consistency = ASYNCHRONOUS) -> list[Trainer]:
    """Returns the trainers of a new run with one unit."""
    return await cluster.team_with_unit(*names, consistency=consistency)


def commits(cluster: Harness) -> list[tuple[int, int, int, int]]:
    """Returns (step, dp rank, item, version read) of every commit record that is kept."""
    records = cluster.state.runs["r"].commits.records
    return [(record.step, record.dp_rank, record.item, record.base_version) for record in records]
