"""Reads of the newest version by a trainer whose work does not count any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwell.data_plane.fetch import read_newest
from shardwell.data_plane.shard import RemoteShard, RemoteUnit
from shardwell_wire.errors import (
    DeadlineError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    VersionGoneError,
)


@pytest.mark.parametrize(
    "error",
    [
        VersionGoneError("version 7 was replaced"),
        StaleEpochError("join again"),
        NotFoundError("no shard on this server contains the range"),
        DeadlineError("waited 1.0 s for any version: none exists yet"),
        UnavailableError("this server has a backup only"),
    ],
)
def test_all_shards_are_read_again_after_a_commit_or_a_move(error: ShardwellError) -> None:
    """A trainer whose lease has ended still computes its item to the end. A shard that moves must not stop it."""
    reads: list[tuple[Any, int | None]] = []

    def read(shard: RemoteShard, version: int | None) -> int:
        reads.append((shard, version))
        if len(reads) == 2:
            raise error
        return 7 if len(reads) < 2 else 8

    cuts = iter([["a", "b"], ["c", "d", "e"], ["c", "d", "e"]])  # a rollback cuts the unit anew

    def find() -> RemoteUnit:
        return cast(RemoteUnit, SimpleNamespace(shards=next(cuts)))

    checks: list[None] = []
    assert read_newest(find, read, lambda: checks.append(None), 5.0) == 8
    assert reads == [("a", None), ("b", 7), ("c", None), ("d", 8), ("e", 8)]
    assert len(checks) == 1
    with pytest.raises(type(error)):
        reads.clear()
        read_newest(find, read, lambda: None, -1.0)


def test_reads_end_with_the_membership() -> None:
    deleted = RunDeletedError("run 'r' was deleted")

    def read(shard: RemoteShard, version: int | None) -> int:
        raise NotFoundError("no run 'r' on this server")

    def check() -> None:
        raise deleted

    with pytest.raises(RunDeletedError) as caught:
        read_newest(lambda: cast(RemoteUnit, SimpleNamespace(shards=["a"])), read, check, 5.0)
    assert caught.value is deleted
