"""Steps of a simulated team of trainers."""

from __future__ import annotations

from typing import Any

from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer


def proposers(cluster: Harness) -> set[str]:
    """Returns the trainers that have proposed the step in flight."""
    (step,) = cluster.state.runs["r"].work.steps
    return set(step.proposals)


async def take_step(trainers: list[Trainer], step: int, **changes: Any) -> coordinator_pb2.CommitStepResponse:
    for trainer in trainers:
        await trainer.finish(step)
    responses = [await trainer.commit(step, wait_s=5, **changes) for trainer in trainers]
    assert all(response.committed for response in responses)
    return responses[0]
