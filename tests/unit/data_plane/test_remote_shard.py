"""What a trainer does while it waits for a version of a shard."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardwell.data_plane.host_copy import HostCopies, HostCopy
from shardwell.data_plane.shard import RemoteShard, Wire
from shardwell.store.run_servers import ShardRelocations
from shardwell.transport.resending import ASK_S, ReachedServer, ResendPolicy
from shardwell_wire.errors import DeadlineError, StaleEpochError, UnavailableError
from shardwell_wire.model.names import RunIdentity
from tests.support.shard_server import PLAIN


class ServerWithoutTheVersion(ReachedServer):
    """Answers after each wait that the version does not exist."""

    def __init__(self, policy: Moves) -> None:
        super().__init__("s:1", policy)
        self.waits: list[float] = []

    def await_version(self, shard: object, version: int, *, wait_s: float) -> int:
        self.waits.append(wait_s)
        raise DeadlineError(f"waited {wait_s:.1f} s for version {version}")

    def fetch(self, read: Any, *, wait_s: float, **_: object) -> int:
        return self.await_version(read.shard, read.version, wait_s=wait_s)


class Moves(ResendPolicy):
    """The trainer is a member of the run for some checks."""

    def __init__(self, checks: float) -> None:
        super().__init__()
        self._checks = checks

    def settle(self, *, mapped: bool = True) -> None:
        """No shard moves."""

    def require_valid(self) -> None:
        self._checks -= 1
        if self._checks < 0:
            raise StaleEpochError("the run was rolled back")


def shard(server: Any, *, wait_limit_s: float) -> RemoteShard:
    return RemoteShard(RunIdentity("r", "1"), PLAIN, server, 0, PLAIN.size_bytes, Wire(wait_limit_s=wait_limit_s))


def await_version(shard: RemoteShard) -> int:
    return shard.await_version(3)


def fetch(shard: RemoteShard) -> int:
    return shard.fetch(3, memoryview(bytearray(PLAIN.size_bytes)))


@pytest.mark.parametrize("wait", [await_version, fetch])
def test_wait_for_a_version_ends_when_the_run_was_rolled_back(wait: Callable[[RemoteShard], int]) -> None:
    server = ServerWithoutTheVersion(Moves(2))
    with pytest.raises(StaleEpochError, match="rolled back"):
        wait(shard(server, wait_limit_s=600.0))
    assert server.waits == [ASK_S] * 3


@pytest.mark.parametrize("wait", [await_version, fetch])
def test_wait_for_a_version_ends_at_the_limit(wait: Callable[[RemoteShard], int]) -> None:
    server = ServerWithoutTheVersion(Moves(10))
    with pytest.raises(DeadlineError, match="version 3"):
        wait(shard(server, wait_limit_s=0.5))
    assert len(server.waits) == 1 and server.waits[0] <= 0.5


class Server(ReachedServer):
    """Fills the shard with a byte."""

    def __init__(self, policy: ResendPolicy, byte: bytes) -> None:
        super().__init__("s:1", policy)
        self._byte = byte

    def fetch(self, read: Any, **_: object) -> int:
        read.target.memory[:] = self._byte * len(read.target.memory)
        return int(read.version)


class LostServer(ReachedServer):
    """A server that is gone. A fetch fails, and the shard has another server from then on."""

    def __init__(self, policy: ResendPolicy, move: Callable[[], None]) -> None:
        super().__init__("s:0", policy)
        self._move = move
        self.closed.set()

    def fetch(self, read: Any, **_: object) -> int:
        self._move()
        raise UnavailableError("the server is gone")


def test_fetch_to_a_copy_goes_on_while_the_shard_is_mapped_again() -> None:
    """The thread that moves shards waits for the copy, and the fetch that fills it waits for another server."""
    membership: Any = SimpleNamespace(run="r", joined=SimpleNamespace(placement=0), placement=0)
    membership.list_units = lambda: SimpleNamespace(placement=membership.placement)
    membership.check = membership.require_valid = lambda: None
    moves, mapped = ShardRelocations(membership, 20.0), list[bool]()

    def move() -> None:
        membership.placement = 1
        moves.wake()

    remote = shard(LostServer(moves, move), wait_limit_s=20.0)
    copy = HostCopy(remote.address, HostCopies())

    def map_again(_: bool) -> None:
        with copy.unchanged():
            mapped.append(copy.shows(3))

    present: Any = Server(moves, b"x")
    moves.attach(lambda units, anew: remote.move(present), map_again)
    remote.fetch_copy(copy, 3)
    moves.settle()
    moves.close()
    assert mapped == [True]
