"""A push of one shard's part of a gradient, after the gradient was read and before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwell.data_plane.shard_owner import ShardOwner
from shardwell.transport.base import NearlyDone, PreparedPush
from shardwell.transport.server_connection import ServerConnection
from shardwell_wire import fault_points


class ShardPush:
    """Pushes one part of a contribution when it is called. May be called again: the server drops duplicates.

    Args:
        owner: The server that owns the shard.
        server: The server that the push was prepared for, which may have lost the shard meanwhile.
        prepared: The part.
        stream_bytes: Size of the part in a stream. 0: the part is in memory of the server.
        wait_limit_s: Deadline of the push.
    """

    __slots__ = ("_owner", "prepared", "server", "stream_bytes", "wait_limit_s")

    def __init__(
        self,
        owner: ShardOwner,
        server: ServerConnection,
        prepared: PreparedPush,
        *,
        stream_bytes: int,
        wait_limit_s: float,
    ) -> None:
        self.server, self.prepared, self.stream_bytes, self.wait_limit_s = server, prepared, stream_bytes, wait_limit_s
        self._owner = owner

    def __call__(self, nearly_done: NearlyDone) -> None:
        """Pushes the part by itself, to the present owner of the shard."""
        self.reach_before()
        self._owner.run(
            lambda server: server.push(self.prepared, wait_limit_s=self.wait_limit_s, nearly_done=nearly_done)
        )
        self.reach_after()

    def reach_before(self) -> None:
        """Marks the fault point before the push."""
        if fault_points.are_armed():
            fault_points.reach("client.push.before", **self._fields())

    def reach_after(self) -> None:
        """Marks the fault point after the push."""
        if fault_points.are_armed():
            fault_points.reach("client.push.after", **self._fields())

    def _fields(self) -> dict[str, Any]:
        push = self.prepared
        return {"unit": push.cut.unit, "dp_rank": push.header.common.dp_rank, "part": push.header.part}


def push_together(pushes: Sequence[ShardPush]) -> list[bool]:
    """Sends pushes to one server in one message, once; returns for each whether the server has accepted it."""
    if fault_points.are_armed():
        for push in pushes:
            push.reach_before()
    first = pushes[0]
    accepted = first.server.push_batch([push.prepared for push in pushes], wait_limit_s=first.wait_limit_s)
    if fault_points.are_armed():
        for push, is_accepted in zip(pushes, accepted, strict=True):
            if is_accepted:
                push.reach_after()
    return accepted
