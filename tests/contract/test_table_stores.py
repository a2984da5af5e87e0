"""The contract of a store of the coordinator's state: every store keeps the same rows, all of a write or nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardwell_server.coordinator.storage.database import Database
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_server.coordinator.storage.etcd_store import EtcdClient, EtcdStore, try_to_lead
from shardwell_server.coordinator.storage.records import (
    KEPT_COMMITS,
    KEYS,
    AddressRecord,
    BackupRecord,
    BackupState,
    Change,
    CheckpointRecord,
    CommitRecord,
    Delete,
    InitializerRecord,
    MemberRecord,
    Put,
    RankRecord,
    RunRecord,
    ServerRecord,
    ShardRecord,
    StoredState,
    TableStore,
    UnitRecord,
)
from tests.support.etcd import etcd_cluster

Open = Callable[[], TableStore]
"""Opens the same store once more, as the next process does."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the address of a real etcd."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as (member,):
        yield member.address


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "sqlite":
        return lambda: Database(tmp_path)
    address, prefix = request.getfixturevalue("etcd"), f"/{uuid.uuid4().hex}"
    return partial(lead, address, prefix)


def lead(address: str, prefix: str) -> EtcdStore:
    store = try_to_lead(EtcdClient([address]), prefix, "host:1", lease_s=5)
    assert store is not None, "another coordinator leads"
    return store


RUN = RunRecord(
    run="r",
    run_id="id",
    config=b"config\x00\xff",
    created=12.5,
    started=True,
    last_epoch=9,
    members=(
        MemberRecord("a", "h", "i", 1, None, "live", None),
        MemberRecord("b", "h", "j", 2, 0, "expired", True, "p", behind=True),
    ),
    ranks=(RankRecord(0, "a", "a", 3, 7, 2), RankRecord(1, "b", "a", 5, 7, 0)),
    addresses=(AddressRecord("name/with %", "h:1"),),
    initializers=(InitializerRecord(0, "a", 4), InitializerRecord(3, "b", 5)),
)
UNIT = UnitRecord(
    0,
    b"spec",
    True,
    shards=(ShardRecord(0, 4096, "s9", "i"), ShardRecord(4096, 8192, "s1", "j")),
    backups=(BackupRecord(0, 4096, "s1", "j", BackupState.IN_SYNC, 3),),
)
SERVER = ServerRecord("s", "h:1", "i", 3, 1 << 60)
CHECKPOINT = CheckpointRecord("c1", 4, "s3://b/c1", 0, 1.25, False)


def commit_record(step: int) -> CommitRecord:
    return CommitRecord(
        step,
        0.1 + 0.2,
        "rank 0",
        b"optimizer",
        0.25,
        (1, 0),
        float("inf"),
        ((3.0, 0.5, 2.5),),
        skipped=step % 2 == 1,
        means='{"loss": 0.1}',
    )


def load(open_store: Open) -> StoredState:
    """Returns what the next coordinator loads."""
    with closing(Storage(open_store())) as storage:
        return asyncio.run(storage.load())


def test_stored_state_is_loaded_unchanged(open_store: Open) -> None:
    async def write(storage: Storage) -> None:
        await storage.save_server(replace(SERVER, epoch=1))
        await storage.save_server(SERVER)
        await storage.save_server(replace(SERVER, server_id="gone"))
        await storage.delete_server("gone", 21)
        await storage.save_run(replace(RUN, members=(*RUN.members, MemberRecord("c", "", "", 1, None, "live", None))))
        await storage.save_run(RUN)
        await storage.save_units("r", [replace(UNIT, published=False), replace(UNIT, unit_index=1), UNIT])
        await storage.save_units("r", [replace(UNIT, shards=(ShardRecord(0, 8192, "s3", "k"),), backups=())])
        await storage.save_units("r", [UNIT])
        await storage.save_commit("r", commit_record(0), b"state")
        await storage.save_commit("r", commit_record(1), None)
        await storage.save_checkpoint("r", CHECKPOINT)
        await storage.save_checkpoint("r", replace(CHECKPOINT, checkpoint_id="c2"))
        await storage.delete_checkpoints("r", ["c2"])
        await storage.save_run(replace(RUN, run="gone"))
        await storage.save_run(replace(RUN, run="r2"))
        await storage.save_units("gone", [UNIT])
        await storage.delete_run("gone", "1d", 17)
        await storage.delete_run("r2", "2d", 5)

    with closing(Storage(open_store())) as storage:
        term = storage.term
        asyncio.run(write(storage))
    with closing(Storage(open_store())) as storage:
        assert (storage.term, storage.server_epoch) == (term + 1, 21)
        stored = asyncio.run(storage.load())
    (run,) = stored.runs
    assert stored.servers == (SERVER,)
    assert (stored.deleted_last_epoch, stored.deleted_run_ids) == (17, {"1d", "2d"})
    assert run.record == RUN
    assert run.units == (UNIT, replace(UNIT, unit_index=1))
    assert run.commits == (commit_record(0), commit_record(1))
    assert run.state == b"state"
    assert run.checkpoints == (CHECKPOINT,)


def test_old_commits_are_deleted(open_store: Open) -> None:
    async def write(storage: Storage) -> None:
        await storage.save_run(RUN)
        for step in range(2 * KEPT_COMMITS):
            await storage.save_commit("r", commit_record(step), None)

    with closing(Storage(open_store())) as storage:
        asyncio.run(write(storage))
    (run,) = load(open_store).runs
    assert [record.step for record in run.commits] == list(range(KEPT_COMMITS, 2 * KEPT_COMMITS))


def test_loaded_run_replaces_all_that_was_stored(open_store: Open) -> None:
    """Also a run with more rows and bytes than one request of etcd may have."""
    units = [replace(UNIT, unit_index=index, spec=b"s" * 10_000) for index in range(300)]
    ranks = tuple(RankRecord(rank, "a", "a", 3, 7, 2) for rank in range(1500))
    large = replace(RUN, ranks=ranks)

    async def write(storage: Storage) -> None:
        await storage.save_run(RUN)
        await storage.save_units("r", [replace(UNIT, unit_index=1000)])
        await storage.save_commit("r", commit_record(3), b"old" * 1_000_000)
        await storage.save_loaded_run(large, units, [commit_record(0)], b"state" * 500_000)
        await storage.save_commit("r", commit_record(1), b"state" * 300_000)

    with closing(Storage(open_store())) as storage:
        asyncio.run(write(storage))
    (run,) = load(open_store).runs
    assert run.record == large
    assert run.units == tuple(units)
    assert run.commits == (commit_record(0), commit_record(1))
    assert run.state == b"state" * 300_000


def test_changes_are_made_in_order(open_store: Open) -> None:
    def fact(name: str, value: int) -> Change:
        return Put("facts", [(name, value)])

    with closing(open_store()) as store:
        store.write([fact("a", 1), Delete("facts", [("a",)]), fact("b", 1), fact("b", 2)])
        store.write([Delete("facts", [("b",)]), fact("b", 3), fact("c", 4), Delete("facts", [("c",)]), Put("runs", [])])
        assert store.rows("facts", "b") == [("b", 3)]
        assert [name for name, _ in store.rows("facts")] == ["b", "term"]


def test_rows_are_in_the_order_of_their_keys(open_store: Open) -> None:
    rows = [("r", unit, start, 2 * start, "s", "i") for unit in (2, 10) for start in (0, 5, 40, 300)]
    other = ("r/2", 3, 0, 1, "s", "i")
    with closing(open_store()) as store:
        store.write([Put("shards", [other, *reversed(rows)])])
        assert store.rows("shards", "r") == rows
        assert store.rows("shards", "r", 2) == rows[:4]
        assert store.rows("shards") == [*rows, other]
        store.write([Delete("shards", [("r", 2), ("r", 1)])])
        assert store.rows("shards") == [*rows[4:], other]


def test_every_table_has_its_keys_first(open_store: Open) -> None:
    with closing(open_store()) as store:
        assert all(store.rows(table, *columns) == [] for table, columns in KEYS.items())
