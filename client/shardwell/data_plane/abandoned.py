"""Gathers of a work item that does not count any more: they deliver the newest version instead of the item's.

The batch is then computed to its end without effect, and no exception reaches the training script.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell_wire.errors import StaleEpochError, VersionGoneError
from shardwell_wire.retry import backoff

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05

Read = Callable[[RemoteShard, int | None], int]
"""Reads one version of a shard, or the newest; returns the version."""


def read_newest(unit: RemoteUnit, read: Read, limit_s: float) -> int:
    """Reads the newest version that all shards of a unit have; returns the version.

    Args:
        unit: The unit.
        read: Reads one shard.
        limit_s: How long to retry while versions are replaced, or shards move, during the read.
    """
    deadline = time.monotonic() + limit_s
    pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            version = None
            for shard in unit.shards:
                version = read(shard, version)
            return version or 0
        except (VersionGoneError, StaleEpochError):
            # StaleEpochError: a shard moved, and this trainer is no member of the run now. Any other version will do.
            if time.monotonic() > deadline:
                raise
            time.sleep(next(pauses))
