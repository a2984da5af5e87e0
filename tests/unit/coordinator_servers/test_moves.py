"""Shards of drained servers and of rebalanced runs move with a commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.placed_units import Promotion, Relocations
from shardwell_server.coordinator.relocation.keeper import BackupKeeper
from shardwell_server.coordinator.run import Run
from tests.support.coordinator import Harness, Trainer, harness
from tests.support.relocation import (
    confirmed,
    histories,
    in_sync,
    kinds,
    owners,
    run_of,
    started,
    take_step,
)

pytestmark = pytest.mark.usefixtures("without_pauses")


async def drained(cluster: Harness, trainers: list[Trainer], name: str, step: int) -> int:
    """Trains until a server has no shards. Returns the next step."""
    await cluster.call("DrainServer", server_id=name)
    for number in range(step, step + 40):
        await take_step(trainers, number)
        await cluster.settle()
        held = await cluster.call("DrainServer", server_id=name)
        if not held.shard_count:
            return number + 1
    raise AssertionError(f"{name} still has shards: {held}")


@pytest.mark.parametrize("backups", [0, 1])
async def test_shards_of_runs_without_copies_are_not_looked_at(
    backups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Run] = []
    shards = BackupKeeper._shards

    def note(self: BackupKeeper, run: Run) -> Iterator[Any]:
        looked_at.append(run)
        return shards(self, run)

    async with harness(tmp_path, num_shards=2) as cluster:
        trainers = await started(cluster, backups=backups)
        monkeypatch.setattr(BackupKeeper, "_shards", note)
        for step in range(3):
            await take_step(trainers, step)
            await cluster.settle()
        assert bool(looked_at) == bool(backups)


@pytest.mark.parametrize("backups", [0, 1])
@pytest.mark.harness(num_shards=3)
async def test_drained_server_hands_over_its_shards_without_a_repeated_step(cluster: Harness, backups: int) -> None:
    trainers = await started(cluster, backups=backups)
    step = await drained(cluster, trainers, "s0", 0)
    assert "s0" not in owners(cluster)
    await in_sync(cluster, backups)
    assert not cluster.shards["s0"].runs["r"].shards
    assert not cluster.shards["s0"].reserved_bytes
    await take_step(trainers, step)
    await cluster.settle()
    assert histories(cluster) == [list(range(step + 1))] * len(histories(cluster))
    assert {item.attempt for trainer in trainers for item in trainer.items.values()} == {0}
    await cluster.until(lambda: "server_drained" in kinds(cluster), "the event")
    assert "server_drained" in kinds(cluster)


@pytest.mark.harness(num_shards=1)
async def test_server_without_successor_cannot_be_drained(cluster: Harness) -> None:
    trainers = await started(cluster, backups=0)
    answer = await cluster.call("DrainServer", server_id="s0")
    await take_step(trainers, 0)
    assert (answer.shard_count, list(answer.waiting_for)) == (
        2,
        ["no other live server can take the shards of run 'r': start more servers"],
    )
    await cluster.call("DrainServer", server_id="s0", cancel=True)
    assert not cluster.state.cluster.servers["s0"].draining


async def test_idle_run_is_moved_without_a_commit(cluster: Harness) -> None:
    trainers = await started(cluster, backups=0)
    await take_step(trainers, 0)
    for trainer in trainers:
        await trainer.leave()
    await cluster.call("DrainServer", server_id="s0")
    await cluster.until(lambda: owners(cluster) == {"s1"} and confirmed(cluster), "the move")
    assert histories(cluster) == [[0]] * 4


@pytest.mark.harness(num_shards=3)
async def test_rebalanced_run_uses_new_servers(cluster: Harness) -> None:
    for name in ("s1", "s2"):
        await cluster.call("DrainServer", server_id=name)
    trainers = await started(cluster, backups=0, units=6)
    assert owners(cluster) == {"s0"}
    for name in ("s1", "s2"):
        await cluster.call("DrainServer", server_id=name, cancel=True)
    await cluster.call("RebalanceRun", run="r")
    step = 0
    while (await cluster.call("RebalanceRun", run="r", report_only=True)).rebalancing:
        await take_step(trainers, step)
        step += 1
        assert step < 40
    counts = sorted(
        sum(shard.server_id == name for unit in run_of(cluster).units for shard in unit.shards)
        for name in cluster.shards
    )
    assert counts == [2, 2, 2]
    await take_step(trainers, step)
    await cluster.settle()
    assert histories(cluster) == [list(range(step + 1))] * 6


@pytest.mark.parametrize("how", ["drain", "rebalance"])
async def test_planned_move_takes_no_backup_away(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promote, moved = Relocations.promote, []

    def checked(self: Relocations, promotions: Iterable[Promotion]) -> None:
        promotions = list(promotions)
        promote(self, promotions)
        for promotion in promotions:
            unit, start_bytes = promotion.unit, promotion.backup.start_bytes
            copies = unit.backups_of(unit.shard_at(start_bytes))
            moved.append([copy.server_id for copy in copies if copy.in_sync])

    async with harness(tmp_path, num_shards=3) as cluster:
        if how == "rebalance":
            await cluster.call("DrainServer", server_id="s2")
        trainers = await started(cluster, backups=1, units=6)
        monkeypatch.setattr(Relocations, "promote", checked)
        if how == "drain":
            await drained(cluster, trainers, "s0", 0)
        else:
            await cluster.call("DrainServer", server_id="s2", cancel=True)
            await cluster.call("RebalanceRun", run="r")
            step = 0
            while (await cluster.call("RebalanceRun", run="r", report_only=True)).rebalancing:
                await take_step(trainers, step)
                step += 1
                assert step < 40
        await in_sync(cluster, 1)
        assert moved and all(moved), "each shard has a backup in sync when it moves"
        assert "backups_lost" not in kinds(cluster)
