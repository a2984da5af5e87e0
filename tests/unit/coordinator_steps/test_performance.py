"""What trainers report about their last steps, and the history of logged numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardwell_server.coordinator.steps.committed_steps import KEPT_LOGGED, CommittedSteps
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, config

RECORD = CommitRecord(0, 0.0, "a", b"", 1.0, (0,), 1.0, means='{"loss": 0.5}')


def bottleneck(**fields: object) -> coordinator_pb2.StepReport:
    return coordinator_pb2.StepReport(bottlenecks=[coordinator_pb2.StepBottleneck(**fields)])


async def test_rates_of_replicas_are_added_once(cluster: Harness) -> None:
    trainers = [
        await cluster.join(name, config=config(World(dp=2, pp=2), min_trainers=4), global_rank=rank, wait_s=5)
        if rank == 3
        else await cluster.join(name, config=config(World(dp=2, pp=2), min_trainers=4), global_rank=rank)
        for rank, name in enumerate("abcd")
    ]
    for index, trainer in enumerate(trainers[:3]):
        await trainer.heartbeat(report=coordinator_pb2.StepReport(step_s=1.0, tokens_per_s=10.0 + index))
    seen = await cluster.call("DescribePerformance", run="r")
    assert seen.tokens_per_s == 10.0 + 12.0, "ranks 0 and 2 are the first of their replicas"
    assert [(each.trainer, each.report.step_s) for each in seen.trainers] == [("a", 1), ("b", 1), ("c", 1), ("d", 0)]
    await trainers[2].heartbeat()
    assert (await cluster.call("DescribePerformance", run="r")).tokens_per_s == 22.0, "the last report stays"


def measured(part_s: dict[str, float]) -> coordinator_pb2.MeasuredStep:
    return coordinator_pb2.MeasuredStep(step=1, part_s=part_s)


@pytest.mark.parametrize(
    ("report", "error"),
    [
        (coordinator_pb2.StepReport(step_s=math.nan), "negative or not finite"),
        (coordinator_pb2.StepReport(part_s={"push": -1.0}), "negative or not finite"),
        (bottleneck(share=math.inf), "negative or not finite"),
        (
            coordinator_pb2.StepReport(part_s={str(index): 1.0 for index in range(33)}),
            "33 parts, 0 bott",
        ),
        (bottleneck(finding="x" * 1001), "at most 1000 printable characters"),
        (bottleneck(advice="a\x1b[2J"), "at most 1000 printable characters"),
        (
            coordinator_pb2.StepReport(steps=[coordinator_pb2.MeasuredStep()] * 33),
            "0 bottlenecks and 33 steps",
        ),
        (coordinator_pb2.StepReport(steps=[coordinator_pb2.MeasuredStep(committed_s=-1)]), "negative or not finite"),
        (coordinator_pb2.StepReport(steps=[measured({"push": math.nan})]), "negative or not finite"),
        (coordinator_pb2.StepReport(steps=[measured({"a\nb": 1.0})]), "at most 1000 printable characters"),
        (coordinator_pb2.StepReport(part_s={"a\nb": 1.0}), "at most 1000 printable characters"),
    ],
)
async def test_impossible_report_is_refused(cluster: Harness, report: coordinator_pb2.StepReport, error: str) -> None:
    (trainer, _) = await cluster.team_with_unit("a", "b")
    await trainer.heartbeat(report=coordinator_pb2.StepReport(step_s=2.0))
    with pytest.raises(InvalidRequestError, match=error):
        await trainer.heartbeat(report=report)
    seen = await cluster.call("DescribePerformance", run="r")
    assert [each.report.step_s for each in seen.trainers] == [2.0, 0.0]


def test_history_is_bounded_and_follows_a_rollback() -> None:
    commits = CommittedSteps()
    for step in range(KEPT_LOGGED + 20):
        commits.append(replace(RECORD, step=step, means=RECORD.means if step % 2 else ""), None, (), 0.0)
    assert [record.step for record in commits.logged] == list(range(1, KEPT_LOGGED + 20, 2))
    commits.load([replace(RECORD, step=99)], None)
    assert commits.logged[-1].step == 99
    for step in range(100, 100 + 2 * KEPT_LOGGED):
        commits.append(replace(RECORD, step=step), None, (), 0.0)
    assert len(commits.logged) == KEPT_LOGGED
