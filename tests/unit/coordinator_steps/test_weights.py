"""Description of one version of a run's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shardwell_wire.errors import DeadlineError, NotFoundError, StepStateError, VersionGoneError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.topology import World
from tests.support.coordinator import harness, unit


async def test_weights_are_described_at_one_version(tmp_path: Path) -> None:
    async with harness(tmp_path) as running:
        (trainer,) = await running.team("a")
        with pytest.raises(StepStateError, match="has no units yet"):
            await running.call("DescribeWeights", run="r")
        await trainer.declare(unit("u", (64, 64)))
        with pytest.raises(StepStateError, match="initial values of unit 'u' are not complete"):
            await running.call("DescribeWeights", run="r")
        await running.publish_unit([trainer], "u")
        first = await running.call("DescribeWeights", run="r")
        assert (first.version, World.from_proto(first.world)) == (0, World())
        (described,) = first.units
        assert UnitLayout.from_proto(described.spec).parameters[0].shape == (64, 64)
        assert [shard.server_id for shard in described.shards] == ["s0", "s1"]
        assert described.shards[-1].stop_bytes == 64 * 64 * 4

        coming = asyncio.create_task(running.call("DescribeWeights", run="r", version=1, wait_s=5.0))
        await asyncio.sleep(0)
        for step in range(2):
            await trainer.finish(step, parts={0: 1})
            await trainer.commit(step, wait_s=5.0)
            await running.settle()
        answer = await coming
        assert answer.version == 1
        with pytest.raises(
            VersionGoneError, match="'r' is at version 2 and keeps no older ones: version 1 is no longer available"
        ) as error:
            await running.call("DescribeWeights", run="r", version=1)
        assert error.value.data["newest"] == "2"
        with pytest.raises(DeadlineError, match=r"waited 0.0 s for version 3 of run 'r'; the newest is 2"):
            await running.call("DescribeWeights", run="r", version=3)
        with pytest.raises(NotFoundError, match="run 'x' does not exist"):
            await running.call("DescribeWeights", run="x")


async def test_waiting_describe_weights_fails_when_the_run_is_deleted(tmp_path: Path) -> None:
    async with harness(tmp_path) as running:
        (trainer,) = await running.team("a")
        await running.publish_unit([trainer], "u")
        waiting = asyncio.create_task(running.call("DescribeWeights", run="r", version=1, wait_s=5.0))
        await asyncio.sleep(0)
        await running.call("DeleteRun", run="r", force=True)
        with pytest.raises(NotFoundError, match="run 'r' was deleted"):
            await waiting


async def test_weights_without_units(tmp_path: Path) -> None:
    async with harness(tmp_path) as running:
        (trainer,) = await running.team("a")
        with pytest.raises(StepStateError, match="has no units yet"):
            await running.call("DescribeWeights", run="r", without_units=True)
        await running.publish_unit([trainer], "u")
        whole = await running.call("DescribeWeights", run="r")
        brief = await running.call("DescribeWeights", run="r", without_units=True)
        assert whole.units and not brief.units
        del whole.units[:]
        assert whole == brief
