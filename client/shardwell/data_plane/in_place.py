"""Waits for versions of units that are read in place, in the calling thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.data_plane.traffic_stats import TrafficStats
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.errors import DeadlineError
from shardwell_wire.retry import backoff

_POLL_LIMIT_S = 0.1
"""How long to poll shared memory for a version before asking the servers, which may report it gone."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001
_FIRST_NEWEST_PAUSE_S, _LONGEST_NEWEST_PAUSE_S = 0.0005, 0.05


def wait_in_place(unit: RemoteUnit, version: int, stats: TrafficStats) -> int:
    """Waits until the memory of a unit shows a version; returns the version.

    Args:
        unit: A unit with a vector.
        version: The version to wait for.
        stats: Counts the waiting time.

    Raises:
        VersionGoneError: A later version has replaced it.
        DeadlineError: The servers have the version, but the memory does not show it.
    """
    with stats.waiting_for_gather():
        return _poll(unit, version)


def _poll(unit: RemoteUnit, version: int) -> int:
    vector, shards = unit.vector, unit.shards
    assert vector is not None
    # An update takes milliseconds. An rpc that waits for it would cost almost as much processor time.
    started = time.perf_counter()
    deadline, pause_s = started + _POLL_LIMIT_S, _FIRST_PAUSE_S
    while not vector.shows(version):
        if time.perf_counter() > deadline:
            # A segment of a server that is gone shows its last version for ever, until the shard's move is known.
            for shard in shards:
                shard.await_version(version)
                shard.owner.settle()
            if time.perf_counter() - started > shards[0].wait_limit_s:
                raise DeadlineError(
                    f"version {version} of unit {unit.layout.unit!r} did not appear in shared memory, although its "
                    "servers have it",
                    unit=unit.layout.unit,
                )
            deadline, pause_s = time.perf_counter() + _POLL_LIMIT_S, _FIRST_PAUSE_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return version


def wait_for_any(vector: SharedVector, check: Callable[[], None], limit_s: float) -> int:
    """Waits until all segments of a unit show the same version; returns it. For a work item that does not count.

    Args:
        vector: The memory.
        check: Raises if this trainer cannot continue.
        limit_s: How long to wait.

    Raises:
        DeadlineError: No version was complete in time.
    """
    deadline = time.monotonic() + limit_s
    pauses = backoff(_FIRST_NEWEST_PAUSE_S, _LONGEST_NEWEST_PAUSE_S)
    while (version := vector.version) is None:
        check()
        if time.monotonic() > deadline:
            raise DeadlineError(f"no version of the unit was complete in shared memory for {limit_s:.0f} s")
        time.sleep(next(pauses))
    return version
