"""Gathers of a work item that does not count any more: they deliver the newest version instead of the item's.

The batch is then computed to its end without effect, and no exception reaches the training script.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell_wire.errors import DeadlineError, NotFoundError, StaleEpochError, UnavailableError, VersionGoneError
from shardwell_wire.retry import backoff

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05

_PASSING = (VersionGoneError, StaleEpochError, NotFoundError, DeadlineError, UnavailableError)
"""Errors of a read while steps are committed, shards move, or the run is loaded from a checkpoint. Then a shard has no
version yet, or its server has another range of the unit. Any other version, from any other server, will do."""

Read = Callable[[RemoteShard, int | None], int]
"""Reads one version of a shard, or the newest; returns the version."""


def read_newest(find: Callable[[], RemoteUnit], read: Read, check: Callable[[], None], limit_s: float) -> int:
    """Reads the newest version that all shards of a unit have; returns the version.

    Args:
        find: Returns the unit as it is cut now.
        read: Reads one shard.
        check: Raises if this trainer cannot continue. Called before a read is repeated.
        limit_s: How long to retry while versions are replaced, shards move, or the run is loaded.
    """
    deadline = time.monotonic() + limit_s
    pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            version = None
            for shard in find().shards:
                version = read(shard, version)
            return version or 0
        except _PASSING:
            check()
            if time.monotonic() > deadline:
                raise
            time.sleep(next(pauses))
