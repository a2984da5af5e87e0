"""Tests of partition updates: the limit of cached bytes, and interrupts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwell.data_plane import partition_updates
from shardwell.data_plane.partition_updates import PartitionUpdates
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.transport.base import ShardAddress
from shardwell.transport.partition_transfers import PartitionSegment
from shardwell.transport.resending import ReachedServer
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2

NUM_SHARDS = 6
LAYOUT = UnitLayout("u", (Parameter("a", (NUM_SHARDS * BLOCK_BYTES // 4,), "float32"),))
PART_BYTES, LONG_S = BLOCK_BYTES, 60.0


class Server(ReachedServer):
    """A connection to a server of another host. Staging returns when ``answers`` is set."""

    def __init__(self, answers: threading.Event) -> None:
        super().__init__("s:1")
        self._answers = answers

    def shares_partitions(self, shard: ShardAddress) -> bool:
        return False

    def read_partition(self, *_: Any, **__: Any) -> PartitionSegment:
        return PartitionSegment(1, {0: torch.zeros(PART_BYTES // 4)})

    def stage_partition(self, *_: Any, **__: Any) -> str:
        self._answers.wait(LONG_S)
        return "request"


@contextmanager
def updates(server_answers: threading.Event) -> Iterator[tuple[PartitionUpdates, RemoteUnit]]:
    """Returns updates of a unit. Staging returns when ``server_answers`` is set."""

    server: Any = Server(server_answers)
    cuts = [(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES) for number in range(NUM_SHARDS)]
    unit = RemoteUnit(
        0, LAYOUT, tuple(RemoteShard(RunIdentity("r", "id-of-r"), LAYOUT, server, *cut, Wire()) for cut in cuts)
    )
    running = PartitionUpdates(1, LONG_S)
    yield running, unit
    server_answers.set()
    running.close()


@pytest.mark.parametrize("room_for", [0, 1, 2, NUM_SHARDS])
def test_segments_being_staged_count_as_cached(room_for: int) -> None:
    server_answers, updated = threading.Event(), []

    def update(unit_index: int, part: PartitionSegment) -> None:
        updated.append(unit_index)
        if len(updated) == partition_updates._BEHIND_COUNT:  # the maximum is being staged
            server_answers.set()

    with updates(server_answers) as (running, unit):
        running.run([unit], 0, common_pb2.RequestContext, update, cache_bytes=room_for * PART_BYTES)
        partitions = running._partitions.values()
    assert sum(each.cached_bytes for each in partitions) == room_for * PART_BYTES and len(partitions) == NUM_SHARDS


def test_interrupt_does_not_wait_for_a_server() -> None:
    server_answers, updated = threading.Event(), []

    def update(unit_index: int, part: PartitionSegment) -> None:
        updated.append(unit_index)
        if len(updated) == 2:
            raise KeyboardInterrupt

    with updates(server_answers) as (running, unit):
        with pytest.raises(KeyboardInterrupt):
            running.run([unit], 0, common_pb2.RequestContext, update, cache_bytes=0)
        assert not server_answers.is_set()
