"""Stores of torchrun's agents: one per rendezvous, bounded, without a run, and only for clusters with a token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.rendezvous import TORCHRUN, Stores
from shardwell_server.coordinator.rpcs.servicer import CoordinatorServicer
from shardwell_wire.errors import CapacityError, ConflictError, InvalidRequestError
from shardwell_wire.security.credentials import new_key
from tests.support.coordinator import Clock, Harness, harness


def test_stores_are_separate_and_end_when_nobody_uses_them() -> None:
    clock = Clock()
    stores = Stores(TORCHRUN, clock)
    stores.open("a").set("key", b"1")
    assert stores.open("b").get(["key"]) is None
    clock.now += TORCHRUN.idle_s - 1
    assert stores.open("a").get(["key"]) == [b"1"]
    clock.now += 2
    stores.open("a")
    assert len(stores) == 1, "b has ended"
    clock.now += TORCHRUN.idle_s + 1
    assert stores.open("a").get(["key"]) is None


async def test_stores_are_bounded(tmp_path: Path) -> None:
    stores = Stores(replace(TORCHRUN, max_stores=2), Clock())
    stores.open("a"), stores.open("b")
    with pytest.raises(CapacityError, match="has 2 stores of torchrun already"):
        stores.open("c")
    with pytest.raises(CapacityError, match=f"{TORCHRUN.max_bytes} bytes"):
        stores.open("a").set("key", bytes(TORCHRUN.max_bytes))
    async with harness(tmp_path) as cluster:
        cluster.servicer = CoordinatorServicer(cluster.coordinator, new_key())
        for name in ("", "x" * 300, "a\nb"):
            with pytest.raises(InvalidRequestError):
                await cluster.call("StoreCheck", rendezvous=name)


async def test_cluster_without_a_token_has_no_stores(cluster: Harness) -> None:
    with pytest.raises(ConflictError, match="start the coordinator and the shard servers with --token-file"):
        await cluster.call("StoreCheck", rendezvous="a")


async def test_agents_use_the_store_without_a_run(cluster: Harness) -> None:
    cluster.servicer = CoordinatorServicer(cluster.coordinator, new_key())

    async def call(rpc_name: str, request_id: str = "", **fields: Any) -> Any:
        context = {"request_id": request_id}
        return await cluster.call(f"Store{rpc_name}", rendezvous="job", context=context, **fields)

    waiting = asyncio.create_task(call("Get", keys=["x", "y"], wait_s=5))
    assert (await call("Set", key="x", value=b"1", expected=b"")).value == b"1"
    assert (await call("Set", key="x", value=b"2", expected=b"")).value == b"1"
    assert (await call("Add", "first", key="y", amount=2)).value == 2
    assert (await call("Add", "first", key="y", amount=2)).value == 2, "a repeated request adds nothing"
    assert list((await waiting).values) == [b"1", b"2"]
    assert list((await call("Get", keys=["x", "z"])).missing) == ["z"]
    assert (await call("Delete", key="x")).deleted
    checked = await call("Check", keys=["x", "y"])
    assert (list(checked.missing), checked.key_count) == (["x"], 1)
    with pytest.raises(InvalidRequestError, match="request_id has 129 characters, expected at most 128"):
        await call("Set", "i" * 129, key="x", value=b"1")
