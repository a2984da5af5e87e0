"""Buffers in the coordinator: their versions, and the check that all ranks start a step with the same values."""

from __future__ import annotations

import asyncio

import pytest

from shardwell_wire.errors import ConflictError, InvalidRequestError, StepStateError, UnitMismatchError
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import Harness, Trainer, buffers, finished_item, optimizer


async def team_with_buffers(cluster: Harness) -> list[Trainer]:
    """Starts two trainers that declare unit 0 of parameters and unit 1 of the buffers ``mean`` and ``count``."""
    trainers = await cluster.team_with_unit("a", "b")
    for trainer in trainers:
        declared = await trainer.declare(buffers("buffers:0", "mean", "count"))
        if declared.initialize:
            await trainer.publish("buffers:0", declared.epoch)
    return trainers


def written(trainer: Trainer, checksum: int, index: int = 0) -> list[coordinator_pb2.FinishedItem]:
    buffer = coordinator_pb2.WrittenBuffer(unit_index=1, buffer_index=index, checksum=checksum)
    items = [finished_item(item) for item in trainer.items.values()]
    for item in items:
        item.written_buffers.append(buffer)
    return items


async def test_buffer_versions_rise_with_new_values_and_survive_a_restart(cluster: Harness) -> None:
    a, b = trainers = await team_with_buffers(cluster)
    shard = cluster.shards["s0"]
    for step, changed in enumerate([[0, 1], [], [1]]):
        shard.changed_buffers = {1: changed} if changed else {}
        await asyncio.gather(*(trainer.finish(step) for trainer in trainers))
        source = a.items[0]
        await b.commit(step)
        answer = await a.commit(step, wait_s=5)
        assert answer.committed
        await b.commit(step)
    (unit,) = answer.state.buffer_versions
    assert (unit.unit_index, list(unit.versions)) == (1, [1, 3])
    assert (answer.state.step, answer.state.buffer_source) == (2, source)
    joined = await cluster.join("c")
    assert joined.joined.state == answer.state
    await cluster.restart()
    assert (await cluster.try_join("d")).state == answer.state


@pytest.mark.harness(lease_s=10.0)
async def test_another_trainer_can_propose_after_rank_0_finished_and_died(cluster: Harness) -> None:
    a, b = trainers = await team_with_buffers(cluster)
    for shard in cluster.shards.values():
        shard.changed_buffers = {1: [0]}
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await cluster.pass_time(11.0, b)
    answer = await b.commit(0, wait_s=5)
    assert answer.committed
    assert [list(unit.versions) for unit in answer.state.buffer_versions] == [[1, 0]]
    assert answer.state.buffer_source.epoch > a.items[0].epoch, "a trainer with the former lease must read the values"


async def test_different_buffers_at_the_start_of_a_step_are_rejected(cluster: Harness) -> None:
    a, b = await team_with_buffers(cluster)
    await a.finish(0, items=written(a, 7))
    with pytest.raises(ConflictError, match=r"buffer 'mean' had different values when rank 1 and rank 0 started"):
        await b.finish(0, items=written(b, 8))
    with pytest.raises(ConflictError, match=r"in the process of rank 0\. Write"):
        await b.finish(0)
    assert not (await a.finish(0, items=written(a, 7))).all_finished
    assert (await b.finish(0, items=written(b, 7), wait_s=5)).all_finished


async def test_report_of_an_unknown_buffer_is_rejected(cluster: Harness) -> None:
    a, _ = await team_with_buffers(cluster)
    with pytest.raises(InvalidRequestError, match="rank 0 reports buffer 2 of unit 1"):
        await a.finish(0, items=written(a, 7, index=2))
    item = finished_item(a.items[0])
    item.written_buffers.add(unit_index=0, buffer_index=0, checksum=1)
    with pytest.raises(InvalidRequestError, match="rank 0 reports buffer 0 of unit 0"):
        await a.finish(0, items=[item])


async def test_buffers_with_another_kind_shape_or_count_are_rejected(cluster: Harness) -> None:
    a, b = trainers = await team_with_buffers(cluster)
    other = buffers("buffers:0", "mean", "count")
    other.parameters[0].shape[:] = [2]
    with pytest.raises(UnitMismatchError, match=r"buffer 'mean' was declared with shape \(1,\), now with \(2,\)"):
        await b.declare(other)
    with pytest.raises(UnitMismatchError, match="with 2 buffers, now with 1: only one declaration contains 'count'"):
        await b.declare(buffers("buffers:0", "mean"))
    same = buffers("buffers:0", "mean", "count")
    same.kind = common_pb2.UNIT_KIND_UNSPECIFIED
    for parameter in same.parameters:
        parameter.dtype = common_pb2.DTYPE_FLOAT32
    with pytest.raises(UnitMismatchError, match="was declared with buffers, now with parameters"):
        await b.declare(same)
    with pytest.raises(ConflictError, match="buffer 'mean' of unit 'more' already belongs to unit 'buffers:0'"):
        await b.declare(buffers("more", "mean"))
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await asyncio.gather(*(trainer.commit(0, wait_s=5) for trainer in trainers))
    with pytest.raises(StepStateError, match="buffer 'late' is new, but run 'r' has committed 1 steps"):
        await a.declare(buffers("buffers:1", "late"))


async def test_optimizer_of_buffers_is_rejected(cluster: Harness) -> None:
    a, _ = trainers = await team_with_buffers(cluster)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    wrong = optimizer()
    wrong.units.add(unit_index=1, group_indices=[0, 0])
    with pytest.raises(InvalidRequestError, match="names unit 'buffers:0', which contains buffers"):
        await a.commit(0, optimizer=wrong)
    description = await cluster.call("DescribeRun", run="r")
    assert description.summary.parameter_bytes == 64 * 64 * 4, "buffers do not count as parameters"
