"""What a trainer does while it waits for a version of a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwell.data_plane import shard as remote_shard
from shardwell.data_plane.shard import RemoteShard, ShardOwner, Wire
from shardwell_wire.errors import DeadlineError, StaleEpochError
from shardwell_wire.model.names import RunIdentity
from tests.support.shard_server import PLAIN


class ServerWithoutTheVersion:
    """Answers after each wait that the version does not exist."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def await_version(self, shard: object, version: int, *, wait_s: float, wait_limit_s: float) -> int:
        self.waits.append(wait_s)
        raise DeadlineError(f"waited {wait_s:.1f} s for version {version}")

    def fetch(self, shard: object, version: int, target: object, *, wait_s: float, **_: object) -> int:
        return self.await_version(shard, version, wait_s=wait_s, wait_limit_s=0.0)


class Moves:
    """The trainer is a member of the run for some checks."""

    def __init__(self, checks: float) -> None:
        self._checks = checks

    def settle(self) -> None:
        """No shard moves."""

    def require_valid(self) -> None:
        self._checks -= 1
        if self._checks < 0:
            raise StaleEpochError("the run was rolled back")


def shard(server: Any, moves: Moves, *, wait_limit_s: float) -> RemoteShard:
    owner = ShardOwner(server, moves)
    return RemoteShard(RunIdentity("r", "1"), PLAIN, owner, 0, PLAIN.size_bytes, Wire(wait_limit_s=wait_limit_s))


def await_version(shard: RemoteShard) -> int:
    return shard.await_version(3)


def fetch(shard: RemoteShard) -> int:
    return shard.fetch(3, memoryview(bytearray(PLAIN.size_bytes)))


@pytest.mark.parametrize("wait", [await_version, fetch])
def test_wait_for_a_version_ends_when_the_run_was_rolled_back(wait: Callable[[RemoteShard], int]) -> None:
    server = ServerWithoutTheVersion()
    with pytest.raises(StaleEpochError, match="rolled back"):
        wait(shard(server, Moves(2), wait_limit_s=600.0))
    assert server.waits == [remote_shard._ASK_S] * 3


@pytest.mark.parametrize("wait", [await_version, fetch])
def test_wait_for_a_version_ends_at_the_limit(wait: Callable[[RemoteShard], int]) -> None:
    server = ServerWithoutTheVersion()
    with pytest.raises(DeadlineError, match="version 3"):
        wait(shard(server, Moves(10), wait_limit_s=0.5))
    assert len(server.waits) == 1 and server.waits[0] <= 0.5
