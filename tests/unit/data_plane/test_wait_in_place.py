"""Waits for a version in shared memory go on in the memory of the shards' next servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwell.data_plane.fetch import wait_in_place
from shardwell_wire.errors import DeadlineError, VersionGoneError


class Unit:
    """A unit whose memory shows one version.

    Args:
        shown: The version. None: the unit is not in shared memory of this host.
        moves: Called when a server is asked for the version.
        wait_limit_s: Limit of the wait.
    """

    def __init__(self, shown: int | None, moves: Any = lambda: None, wait_limit_s: float = 0.5) -> None:
        self.vector = None if shown is None else SimpleNamespace(shows=lambda version: version == shown, version=shown)
        owner = SimpleNamespace(policy=SimpleNamespace(settle=lambda: None))
        shard = SimpleNamespace(await_version=lambda version: moves(), owner=owner, wait_limit_s=wait_limit_s)
        self.shards, self.layout = (shard,), SimpleNamespace(unit="buffers:0")


STATS: Any = SimpleNamespace(add_gather_wait=lambda started: None)


@pytest.mark.parametrize("shown", [5, None], ids=["memory of this host", "another host"])
def test_a_unit_that_moves_during_the_wait_is_found_where_it_is_now(shown: int | None) -> None:
    units: list[Any] = []
    units.append(Unit(4, lambda: units.append(Unit(shown))))  # 4 is the last version of a server that is gone
    assert wait_in_place(lambda: units[-1], 5, STATS) is units[1].vector


@pytest.mark.parametrize("shown", [5, None], ids=["memory of this host", "another host"])
def test_a_unit_that_is_found_at_the_end_of_the_limit_is_no_error(shown: int | None) -> None:
    units: list[Any] = []
    units.append(Unit(4, lambda: units.append(Unit(shown, wait_limit_s=0.0)), wait_limit_s=0.0))
    assert wait_in_place(lambda: units[-1], 5, STATS) is units[1].vector


def test_memory_that_never_shows_the_version_is_an_error() -> None:
    unit: Any = Unit(4)
    with pytest.raises(DeadlineError, match="version 5 of unit 'buffers:0' did not appear in shared memory"):
        wait_in_place(lambda: unit, 5, STATS)


def test_version_that_servers_keep_is_gone_from_memory_that_shows_a_newer_one() -> None:
    unit: Any = Unit(6)
    with pytest.raises(VersionGoneError, match="version 5 of unit 'buffers:0' was replaced by version 6"):
        wait_in_place(lambda: unit, 5, STATS)
