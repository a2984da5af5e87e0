"""Reads of the newest version by a trainer whose work does not count any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwell.data_plane.abandoned import read_newest
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell_wire.errors import ShardwellError, StaleEpochError, VersionGoneError


@pytest.mark.parametrize("error", [VersionGoneError("version 7 was replaced"), StaleEpochError("join again")])
def test_all_shards_are_read_again_after_a_commit_or_a_move(error: ShardwellError) -> None:
    """A trainer whose lease has ended still computes its item to the end. A shard that moves must not stop it."""
    reads: list[tuple[Any, int | None]] = []

    def read(shard: RemoteShard, version: int | None) -> int:
        reads.append((shard, version))
        if len(reads) == 2:
            raise error
        return 7 if len(reads) < 2 else 8

    unit = cast(RemoteUnit, SimpleNamespace(shards=["a", "b"]))
    assert read_newest(unit, read, 5.0) == 8
    assert reads == [("a", None), ("b", 7), ("a", None), ("b", 8)]
    with pytest.raises(type(error)):
        reads.clear()
        read_newest(unit, read, -1.0)
