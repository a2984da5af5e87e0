"""Updates of several small shards at once: their bits, their failures, and shards that must not be joined."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest
import torch

from shardwell_server.shard.memory.mapped_memory import SharedBuffer
from shardwell_server.shard.restart.undo import ChangedRange, CopyPlan, UndoLog
from shardwell_server.shard.state.runs import HostedRun, JointUpdates
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.unit_shard import StepUpdate
from shardwell_wire import fault_points
from shardwell_wire.errors import UnavailableError
from tests.support.restarted_shard import ADAMW, STEPS, Program, optimizer_step
from tests.unit.shard_arithmetic.test_optimizers import SETTINGS

CASES = {
    "sgd": ("sgd", SETTINGS["sgd"]),
    "sgd with momentum": ("sgd", SETTINGS["sgd"] | {"momentum": 0.9}),
    "adam": ("adam", SETTINGS["adam"]),
    "adamw": ("adamw", ADAMW),
    "adamw with amsgrad": ("adamw", ADAMW | {"amsgrad": 1.0}),
    "lion": ("lion", SETTINGS["lion"]),
}


class Counted(Program):
    """A process whose joint updates are counted, and can fail.

    Args:
        folder: Directory for shared memory.
        case: Key of ``CASES``.
        fault: Occurrence of the fault point at which a joint update fails. 0: none does.
    """

    def __init__(self, folder: Path, case: str, fault: int = 0) -> None:
        folder.mkdir()
        super().__init__(folder, optimizer_step(*CASES[case]), "float32", 2)
        self.fault, self.failed, self.joined = fault, 0, 0

    async def update(self, run: HostedRun, store: ShardStore, step: int) -> None:
        with fault_points.armed("server.update.joint", "raise", nth=self.fault or 1000) as point:
            try:
                await super().update(run, store, step)
            except UnavailableError:
                assert all(shard.values.updating for shard in run.published if shard.version == step)
                self.failed += 1
        await super().update(run, store, step)
        self.joined += point.count > 0

    def play(self) -> object:
        return asyncio.run(self.run())["hash"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes every shard be updated by itself, until undone."""
    monkeypatch.setattr(JointUpdates, "update", lambda *_: [])
    return monkeypatch


@pytest.mark.parametrize("case", CASES)
def test_joint_updates_have_the_bits_of_updates_of_each_shard(
    case: str, tmp_path: Path, alone: pytest.MonkeyPatch
) -> None:
    expected = Counted(tmp_path / "alone", case).play()
    alone.undo()
    together = Counted(tmp_path / "together", case)
    assert together.play() == expected
    # In the first two steps, state is created. Lion has no kernel that takes lists.
    assert together.joined == (0 if case == "lion" else STEPS - 2)


@pytest.mark.parametrize("fault", [1, 2])
def test_failed_joint_update_changes_nothing_and_can_be_repeated(
    fault: int, tmp_path: Path, alone: pytest.MonkeyPatch
) -> None:
    expected = Counted(tmp_path / "alone", "adamw").play()
    alone.undo()
    failing = Counted(tmp_path / "failing", "adamw", fault)
    assert (failing.play(), failing.failed) == (expected, STEPS - 2)


class Refused(Counted):
    """A process that tries, before the last update, to join shards that must not change."""

    async def update(self, run: HostedRun, store: ShardStore, step: int) -> None:
        if step == STEPS - 1:
            await self.try_to_join(run, step)
        await super().update(run, store, step)

    async def try_to_join(self, run: HostedRun, step: int) -> None:
        first, second = run.published[:2]
        asked = StepUpdate.of(step, self.optimizer, 0.5)

        def joined(may_change: bool = True) -> int:
            return len(run.joint_updates.update(deque([first, second]), asked, lambda _: may_change))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.joint_updates, "_run", lambda *_: None)
            assert joined() == 2
            assert joined(may_change=False) == 0
            _, source = await first.values.read(None, 0.0)
            assert joined() == 0
            first.values.release(source)
            async with second.unchanging:
                assert joined() == 0
            assert joined() == 2


def test_shards_that_are_read_or_locked_or_captured_are_not_joined(tmp_path: Path) -> None:
    refused = Refused(tmp_path / "refused", "adamw")
    refused.play()
    assert refused.joined == STEPS - 2


class Frozen(Counted):
    """A process whose parameters have no optimizer, so that only the averages of their values begin."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "adamw")
        self.optimizer.ClearField("units")

    async def update(self, run: HostedRun, store: ShardStore, step: int) -> None:
        await super().update(run, store, step)
        for shard in run.published:
            if not shard.layout.holds_buffers:
                shard.check_averaged()


def test_averages_of_parameters_without_an_optimizer_begin_with_the_first_averaged_step(tmp_path: Path) -> None:
    frozen = Frozen(tmp_path / "frozen")
    frozen.play()
    assert frozen.joined == STEPS - 1


def test_copies_are_merged_and_restored() -> None:
    memory = torch.arange(256, dtype=torch.uint8)
    file = SharedBuffer("/none/file", memory)
    start = memory.data_ptr()
    near = [ChangedRange(start + at, 16, file.name, at) for at in (100, 0, 40)]
    plan = CopyPlan.merged([*near, ChangedRange(start + 240, 8, "another", 0)])
    assert [(each.offset_bytes, each.size_bytes) for each in plan.ranges] == [(0, 116), (0, 8)]
    undo = UndoLog()
    assert undo.reserve(plan.size_bytes)
    undo.begin(plan)
    memory.fill_(7)
    undo.restore()
    expected = torch.arange(256, dtype=torch.uint8)
    expected[116:240] = expected[248:] = 7
    assert torch.equal(memory, expected)
