"""Stored state: round trip, full disks and failed commits."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.command import until_lost
from shardwell_server.coordinator.storage.database import FILE_NAME, Database
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_server.coordinator.storage.records import SCHEMA_VERSION, RunRecord
from shardwell_wire.errors import ConflictError, UnavailableError
from shardwell_wire.model.topology import World
from tests.support.coordinator import Harness, Trainer, config, optimizer


def test_second_coordinator_on_the_same_state_is_rejected(tmp_path: Path) -> None:
    store = Database(tmp_path)
    with pytest.raises(ConflictError, match="is in use by another coordinator"):
        Database(tmp_path)
    store.close()
    Database(tmp_path).close()


def test_state_of_another_schema_version_is_rejected(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConflictError, match=f"has schema version 99, expected {SCHEMA_VERSION}"):
        Database(tmp_path)


ADDED = {18: ("created_by", "created_on", "ended_step"), 19: ("published",)}
"""Columns of runs that a schema version does not have, and the next one does."""


@pytest.mark.parametrize("former", sorted(ADDED))
def test_state_of_a_previous_schema_version_is_upgraded(tmp_path: Path, former: int) -> None:
    async def write() -> None:
        await storage.save_run(
            RunRecord("r", "id", b"config", 1.5, True, 7, created_by="a", created_on="h", ended_step=3, published="{}")
        )

    storage = Storage(Database(tmp_path))
    asyncio.run(write())
    storage.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        lacking = [column for version, columns in ADDED.items() if version >= former for column in columns]
        for column in lacking:
            database.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        if former == 18:
            database.execute("DROP TABLE events")
        database.execute(f"PRAGMA user_version = {former}")
    database.close()
    for _ in range(2):  # the upgraded file is opened again
        storage = Storage(Database(tmp_path))
        (run,) = asyncio.run(storage.load()).runs
        storage.close()
        kept = {"created_by": "a", "created_on": "h", "ended_step": 3}
        left = {name: value for name, value in kept.items() if name not in lacking}
        assert run.record == RunRecord("r", "id", b"config", 1.5, True, 7, **left)


def test_row_of_an_older_schema_gets_the_defaults_of_the_columns_that_it_lacks() -> None:
    record = RunRecord("r", "id", b"config", 1.5, True, 7, ended_step=3, published='{"a": 1}')
    assert RunRecord.from_row(record.to_row()[:-1]) == RunRecord("r", "id", b"config", 1.5, True, 7, ended_step=3)
    with pytest.raises(ValueError, match="longer"):
        RunRecord.from_row((*record.to_row(), "more"))


def test_file_that_is_not_a_database_is_rejected(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 1000)
    with pytest.raises(UnavailableError, match="file is not a database"):
        Database(tmp_path)
    with pytest.raises(UnavailableError, match="cannot open"):
        Database(tmp_path / FILE_NAME)


def fill_disk(storage: Storage) -> None:
    connection = storage._store._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")


def repair_disk(storage: Storage) -> None:
    storage._store._connection.execute("PRAGMA max_page_count = 1000000")


async def test_commit_on_a_full_disk_changes_nothing_and_can_be_retried(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    fill_disk(cluster.state.storage)
    large = {f"beta{index}": 0.5 for index in range(1, 3)}
    assert large
    state = {"tracked_json": {"counter": "x" * 100_000}}
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"cannot write its state to .*: database or disk is full"):
            await a.commit(0, wait_s=5, state=state)
    await cluster.settle()
    assert all(not shard.calls["Update"] for shard in cluster.shards.values())
    assert cluster.events()[-1][0] == "step_failed"
    assert (await a.heartbeat()).committed_step == 0
    repair_disk(cluster.state.storage)
    assert (await a.commit(0, wait_s=5, state=state)).committed
    assert (await b.commit(0, wait_s=5)).committed


class FailingCommit:
    """A connection whose next COMMIT fails as if the log could not be synced.

    Args:
        connection: The real connection.
        logged: True if the log contains the whole transaction, as SQLite leaves it when only the sync failed.
    """

    def __init__(self, connection: sqlite3.Connection, *, logged: bool) -> None:
        self._connection, self._logged = connection, logged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *arguments: Any) -> Any:
        if statement != "COMMIT":
            return self._connection.execute(statement, *arguments)
        self._connection.execute("COMMIT" if self._logged else "ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")


async def ready_to_commit(cluster: Harness) -> tuple[Trainer, Trainer]:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    return a, b


async def test_record_in_the_log_is_committed_although_its_sync_failed(cluster: Harness) -> None:
    a, b = await ready_to_commit(cluster)
    database = cluster.state.storage._store
    database._connection = FailingCommit(database._connection, logged=True)
    assert (await a.commit(0, wait_s=5, optimizer=optimizer(lr=0.5))).committed
    await cluster.restart()
    assert (await b.commit(0, wait_s=5, optimizer=optimizer(lr=0.5))).committed
    assert cluster.state.runs["r"].committed_step == 1


async def test_record_reported_as_failed_is_absent_after_a_restart(cluster: Harness) -> None:
    a, b = await ready_to_commit(cluster)
    database = cluster.state.storage._store
    database._connection = FailingCommit(database._connection, logged=False)
    with pytest.raises(UnavailableError, match="disk I/O error: this request changed nothing"):
        await a.commit(0, wait_s=5, optimizer=optimizer(lr=0.5))
    await cluster.restart()
    assert cluster.state.runs["r"].committed_step == 0
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    assert (await a.commit(0, wait_s=5, optimizer=optimizer(lr=0.25))).committed
    assert (await b.commit(0, wait_s=5, optimizer=optimizer(lr=0.25))).committed


@pytest.mark.parametrize("logged", [True, False])
async def test_coordinator_stops_when_the_outcome_of_a_commit_is_unknown(cluster: Harness, logged: bool) -> None:
    a, b = await ready_to_commit(cluster)
    storage = cluster.state.storage
    storage._store._connection = FailingCommit(storage._store._connection, logged=logged)
    storage._store._open = unreadable
    ending = asyncio.create_task(until_lost(storage))
    for ask in (lambda: a.commit(0, wait_s=5), lambda: b.commit(0, wait_s=5), lambda: b.reset(0, 1)):
        with pytest.raises(UnavailableError, match=r"outcome cannot be determined.* this coordinator stops"):
            await ask()
    with pytest.raises(UnavailableError, match="this coordinator stops; fix the disk and start the coordinator again"):
        await asyncio.wait_for(ending, 5)
    assert all(not shard.calls["Update"] for shard in cluster.shards.values())
    await cluster.restart()
    assert cluster.state.runs["r"].committed_step == int(logged)
    await asyncio.gather(a.finish(0), b.finish(0, wait_s=1))
    assert (await a.commit(0, wait_s=5)).committed
    assert (await b.commit(0, wait_s=5)).committed


def unreadable() -> sqlite3.Connection:
    raise UnavailableError("the disk is gone")


async def test_join_writes_only_changed_rows(cluster: Harness) -> None:
    settings = config(World(dp=1000), min_trainers=1)
    first = await cluster.join("first", config=settings)
    connection, run = cluster.state.storage._store._connection, cluster.state.runs["r"]
    for number in range(3):
        changes, rank_assignments = connection.total_changes, dict(run.owners.by_rank)
        await cluster.join(f"later-{number}", config=settings)
        moved = sum(owner != run.owners.by_rank[rank] for rank, owner in rank_assignments.items())
        assert 0 < connection.total_changes - changes - moved <= 5, "rows of the run, a member and the write counter"
    changes = connection.total_changes
    await first.rpcs.call("ExchangeAddress", context=first.context(0), trainer="first", name="n", address="h:1")
    assert connection.total_changes - changes == 3, "rows of the run, the address and the write counter"
    await cluster.restart()
    assert run.owners.by_rank == cluster.state.runs["r"].owners.by_rank
    assert len(cluster.state.runs["r"].owners.by_rank) == 1000
    assert len(cluster.state.runs["r"].members.live) == 4


async def test_join_is_not_acknowledged_before_it_is_stored(cluster: Harness) -> None:
    fill_disk(cluster.state.storage)
    name = "a" * 200
    for index in range(40):
        try:
            await cluster.try_join(f"{name[:-2]}{index:02}", run=f"{name[:-2]}{index:02}", incarnation=name)
        except UnavailableError:
            break
    else:
        pytest.fail("the disk never became full")
    repair_disk(cluster.state.storage)
    again = await cluster.try_join(f"{name[:-2]}{index:02}", run=f"{name[:-2]}{index:02}", incarnation=name)
    assert again.epoch == 1
    await cluster.restart()
    assert len(cluster.state.runs) == index + 1


async def test_optimizer_is_stored_unchanged(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await asyncio.gather(a.finish(0), b.finish(0))
    await a.commit(0, wait_s=5, optimizer=optimizer(lr=0.1 + 0.2))
    await cluster.restart()
    described = await cluster.call("DescribeRun", run="r")
    assert described.optimizer == optimizer(lr=0.1 + 0.2)
