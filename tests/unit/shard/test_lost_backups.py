"""Servers of backups that end: their primary gives them up soon, however many backups they have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from google.protobuf.message import Message

from shardwell_server.shard.requests import steps
from shardwell_server.shard.requests.replication import Replicator
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_server.shard.unit.unit_shard import Backup
from shardwell_wire.errors import UnavailableError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.simulation.loop import VirtualLoop

RUN = RunIdentity("run", "0123456789abcdef")
UNITS = 24
"""Several times as many as are sent to one server at the same time."""
CALL_S = 0.001


class Peer:
    """The server of all backups.

    Args:
        lost: Number of calls that fail, because the connection was cut. None: all, because the server has ended.
    """

    def __init__(self, lost: int | None) -> None:
        self._lost = lost

    async def call(self, address: str, rpc_name: str, request: Message, *, timeout_s: float) -> Any:
        assert rpc_name == "ConfirmBackups"
        await self._connect()
        return shard_pb2.ConfirmBackupsResponse()

    async def stream(self, address: str, rpc_name: str, messages: Iterator[bytes], *, timeout_s: float) -> Any:
        assert rpc_name == "ReplicateStep"
        await self._connect()
        return shard_pb2.ReplicateStepResponse()

    async def _connect(self) -> None:
        await asyncio.sleep(CALL_S)
        if self._lost is None:
            raise UnavailableError("connection refused")
        if self._lost:
            self._lost -= 1
            raise UnavailableError("connection reset")


async def add_unit(store: ShardStore, index: int) -> None:
    """Adds a unit with values and the gradient of step 0, whose primary has a backup."""
    layout = UnitLayout(f"unit{index}", (Parameter("p", (8,), "float32"),))
    spec = ShardSpec(run=RUN, layout=layout, index=index, start_bytes=0, stop_bytes=layout.size_bytes, dp=1)
    shard = store.reserve(spec)
    room = store.memory.incoming(shard.size_bytes, shard.initial_quota, wait_s=1.0, what=shard.what)
    with await room as received:
        shard.values.accept_initial(0, received)
    store.runs[RUN.run_id].publish(layout.unit, 0)
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    shard.gradient.contributions.add(0, Contribution(0, 0, buffer, shard.views(buffer), lambda: None, {0}, [None]))
    shard.backups.add(Backup("backup", "backup:1", 1))


async def prepare(peer: Peer, threads: ThreadPoolExecutor) -> shard_pb2.PrepareStepResponse:
    store = ShardStore(64 << 20, threads)
    for index in range(UNITS):
        await add_unit(store, index)
    run: HostedRun = store.runs[RUN.run_id]
    units = [common_pb2.UnitParts(unit_index=index, part_count=1) for index in range(UNITS)]
    request = shard_pb2.PrepareStepRequest(dp=1, ranks=[shard_pb2.RankManifest(units=units)])
    return await steps.prepare(run, request, Replicator(store, peer))


def prepared(peer: Peer) -> tuple[shard_pb2.PrepareStepResponse, float]:
    """Prepares a step. Returns the answer, and the virtual time that it took."""
    loop = VirtualLoop(random.Random(0))
    with ThreadPoolExecutor(1) as threads:
        task = loop.create_task(prepare(peer, threads))
        assert loop.run(task.done, lambda: 60.0)
        loop.close()
    assert not loop.problems
    return task.result(), loop.time()


def test_a_step_waits_shortly_for_a_server_that_has_ended() -> None:
    answer, took_s = prepared(Peer(lost=None))
    assert len(answer.failed_backups) == UNITS and not answer.confirmed_backups
    assert took_s < 0.3


def test_backups_stay_in_sync_if_a_connection_is_cut() -> None:
    answer, _ = prepared(Peer(lost=4))
    assert len(answer.confirmed_backups) == UNITS and not answer.failed_backups
