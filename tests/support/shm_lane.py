"""Units reached over a shm lane."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any, Literal

import torch

from shardwell.data_plane.lanes import Lane
from shardwell.data_plane.shared_vector import SegmentPlace, SharedVector
from shardwell.data_plane.shm_lane import ShmLane
from shardwell.data_plane.socket_lane import SocketLane
from shardwell_server.shard.lanes.mailboxes import Mailbox
from shardwell_server.shard.lanes.shm_lane import PROOF_FILE_BYTES
from shardwell_wire.codec import memory_at
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import (
    OneUnit,
    ShardServer,
)


def header(
    one: OneUnit, *, step: int = 0, rank: int = 0, epoch: int = 1, **changes: Any
) -> shard_pb2.ReduceScatterHeader:
    fields = {
        "context": one.context(step, epoch),
        "unit": one.layout.unit,
        "dp_rank": rank,
        "parameter_indices": [segment.parameter_index for segment in one.segments],
        "start_bytes": one.start,
        "stop_bytes": one.stop,
    }
    return shard_pb2.ReduceScatterHeader(**{**fields, **changes})


class LanedUnit:
    """One unit of a server, reached over a shm lane.

    Args:
        one: The unit.
        control: How mailboxes are handed over: by rpcs, or over a socket lane.
    """

    def __init__(self, one: OneUnit, control: Literal["grpc", "socket"] = "grpc") -> None:
        self.one, self.server = one, one.server
        self.lane = ShmLane(self.server.client, one.identity, timeout_s=20.0)
        self._ends = ExitStack()
        self._ends.callback(self.lane.close)
        self.control: Lane = self.server.client
        if control == "socket":
            self.control = self._ends.enter_context(closing(SocketLane(self.server.client, one.identity)))

    def __enter__(self) -> LanedUnit:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def locate(self, version: int | None = None, *, timeout_s: float = 20.0) -> shard_pb2.LocateShardResponse:
        return self.lane.locate(self.one.layout.unit, version, timeout_s=timeout_s, retry_for_s=0.0)

    def vector(self) -> SharedVector:
        path = self.locate().segment.path
        return SharedVector(self.one.layout.unit, [SegmentPlace(path, self.one.start, self.one.stop)])

    def header(self, **options: Any) -> shard_pb2.ReduceScatterHeader:
        return header(self.one, **options)

    def push(self, gradients: list[torch.Tensor], **changes: Any) -> None:
        flats = {at.parameter_index: own for at, own in zip(self.one.segments, gradients, strict=True)}

        def write(memory: memoryview) -> None:
            for at in self.one.segments:
                own = flats[at.parameter_index]
                memory[at.start_bytes - self.one.start : at.stop_bytes - self.one.start] = memory_at(
                    own.data_ptr(), own.nbytes
                )

        laid = self.lane.lay(self.header(**changes), write)
        self.lane.hand_over(laid, self._hand_over)

    def _hand_over(self, request: shard_pb2.ReduceMailboxRequest) -> shard_pb2.ReduceMailboxResponse:
        return self.control.reduce_mailbox(request, timeout_s=20.0, retry_for_s=0.0)

    def open_mailbox(self, **changes: Any) -> shard_pb2.OpenMailboxResponse:
        identity = self.one.identity
        fields = {
            "run": identity.name,
            "run_id": identity.run_id,
            "unit": self.one.layout.unit,
            "lane": self.lane._name,
        }
        answer: shard_pb2.OpenMailboxResponse = self.server.call(
            "OpenMailbox", shard_pb2.OpenMailboxRequest(**{**fields, **changes})
        )
        return answer

    def reduce(self, mailbox: int, *, lane: str | None = None, **changes: Any) -> shard_pb2.ReduceMailboxResponse:
        request = shard_pb2.ReduceMailboxRequest(
            header=self.header(**changes), lane=self.lane._name if lane is None else lane, mailbox=mailbox
        )
        return self._hand_over(request)

    def mailboxes(self) -> list[Mailbox]:
        """Those that the server has for the lane."""
        return self.server.look(lambda: list(self.server.shm._open[self.lane._name]._mailboxes.values()))


def shared_bytes(server: ShardServer) -> int:
    """What shards and mailboxes take, without the file that all lanes share."""
    return server.look(lambda: _bytes_of_units(server))


def _bytes_of_units(server: ShardServer) -> int:
    """As ``shared_bytes``, on the server's event loop."""
    return server.store.memory._shared_bytes - bool(server.shm._open) * PROOF_FILE_BYTES


def assert_only_parameters(one: OneUnit) -> None:
    """No mailbox counts against the budget, and nothing is staged."""
    server = one.server
    server.until(lambda: _bytes_of_units(server) == one.size, "mailboxes are given back")
    assert (server.taken_bytes(), server.staged_bytes()) == (0, 0)
    assert server.look(lambda: one.shard.contribution_cover._free_count) == one.dp
