"""Runs with backups on simulated shard servers: trainers, losses of servers, and what the servers have."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from shardwell_server.coordinator.checkpoints import restoring
from shardwell_server.coordinator.checkpoints.manifests import manifest_of
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_server.coordinator.storage.records import BackupState, CheckpointRecord
from shardwell_wire.errors import StepRestartedError
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency, World
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.support.coordinator import Harness, Trainer, config


async def started(
    cluster: Harness, *names: str, backups: int = 1, units: int = 2, consistency: Consistency = SYNCHRONOUS
) -> list[Trainer]:
    """Trainers of a run whose units are published, with all backups in sync."""
    names = names or ("a", "b")
    settings = config(World(dp=len(names)), min_trainers=len(names), consistency=consistency)
    settings.backups = backups
    trainers = await asyncio.gather(*(cluster.join(name, wait_s=5, config=settings) for name in names))
    for index in range(units):
        await cluster.publish_unit(trainers, f"u{index}", (64, 64))
    await in_sync(cluster, backups)
    return list(trainers)


async def trained(cluster: Harness, **options: Any) -> list[Trainer]:
    """As ``started``, after the first step."""
    trainers = await started(cluster, **options)
    await take_step(trainers, 0)
    await cluster.settle()
    return trainers


def with_checkpoint(cluster: Harness, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Gives the run a checkpoint of step 0, which the servers can load. Returns the run."""
    run = run_of(cluster)
    manifest = manifest_of(run, "c0", 0.0, run.commits.records)
    monkeypatch.setattr(restoring, "open_manifest", lambda url: manifest)
    run.checkpoints.saved.append(CheckpointRecord("c0", 0, "somewhere", 1, 0.0, True))
    return run


def run_of(cluster: Harness) -> Run:
    """Returns the only run."""
    return cluster.state.runs["r"]


async def in_sync(cluster: Harness, backups: int) -> None:
    """Waits until every shard has so many backups in sync and no other copies."""

    def reached() -> bool:
        return all(
            [each.state for each in unit.backups_of(shard)] == [BackupState.IN_SYNC] * backups
            for unit in run_of(cluster).units
            for shard in unit.shards
        )

    await cluster.until(reached, f"{backups} backups in sync")


def kill(cluster: Harness, name: str) -> None:
    """Ends a shard server's process, and lets the coordinator notice."""
    cluster.shards[name].incarnation = None
    cluster.state.cluster.servers[name].state = ServerState.ENDED
    cluster.state.cluster.changed.notify()


async def take_step(trainers: list[Trainer], step: int) -> None:
    """Completes a step, and computes restarted items again."""

    async def work(trainer: Trainer) -> None:
        while True:
            answer = await trainer.finish(step, wait_s=5)
            trainer.items |= {item.global_rank: item for item in answer.work.items}
            if answer.all_finished:
                with suppress(StepRestartedError):
                    if (await trainer.commit(step, wait_s=5)).committed:
                        return

    async with asyncio.timeout(20):
        await asyncio.gather(*map(work, trainers))


def owners(cluster: Harness) -> set[str]:
    """Returns the servers that have primaries."""
    return {shard.server_id for unit in run_of(cluster).units for shard in unit.shards}


def confirmed(cluster: Harness) -> bool:
    """True if all servers know the placement."""
    return not run_of(cluster).relocations.unconfirmed


def histories(cluster: Harness) -> list[list[int]]:
    """The updates of every primary's values."""
    return [
        cluster.shards[shard.server_id].runs["r"].shards[unit.index, shard.start_bytes].history
        for unit in run_of(cluster).units
        for shard in unit.shards
    ]


def kinds(cluster: Harness) -> list[str]:
    """Returns the kinds of all events."""
    return [kind for kind, _ in cluster.events()]


def held(cluster: Harness, name: str, *, version: int, can_update: bool = False) -> list[coordinator_pb2.HeldShard]:
    """What a restarted process reports to have taken up."""
    run = cluster.shards[name].runs_by_id[run_of(cluster).identity.run_id]
    names = {index: unit for unit, index in run.names.items()}
    return [
        coordinator_pb2.HeldShard(
            run="r",
            run_id=run_of(cluster).identity.run_id,
            unit=names[shard.index],
            unit_index=shard.index,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
            version=version,
            can_update=can_update,
            role=shard_pb2.SHARD_ROLE_BACKUP if shard.backup else shard_pb2.SHARD_ROLE_PRIMARY,
        )
        for shard in run.shards.values()
    ]


async def register(cluster: Harness, name: str, incarnation: str, **fields: Any) -> Any:
    """Registers a new process of a server, which may have taken up shards."""
    cluster.shards[name].incarnation = incarnation
    return await cluster.call(
        "RegisterServer",
        server_id=name,
        address=cluster.addresses[name],
        budget_bytes=1 << 30,
        incarnation=incarnation,
        restartable=True,
        **fields,
    )


async def register_all(cluster: Harness) -> None:
    """Registers all servers as restartable."""
    for name in cluster.shards:
        await register(cluster, name, "1")
