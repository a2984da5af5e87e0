"""Gathers of a work item that does not count any more: they deliver the newest version instead of the item's.

The batch is then computed to its end without effect, and no exception reaches the training script.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.traffic import RemoteUnit, TimedFuture, TrafficStats
from shardwell.transport.shared_vector import SharedVector
from shardwell_wire.errors import DeadlineError, ShardwellError, StaleEpochError, VersionGoneError
from shardwell_wire.retry import backoff

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05

Read = Callable[[RemoteShard, int | None], int]
"""Reads one version of a shard, or the newest; returns the version."""


class AbandonableGather(TimedFuture):
    """A gather that is repeated with the newest version if its work item does not count any more.

    Args:
        gather: The gather.
        is_abandoned: Returns whether the work item does not count any more. Called once, if ``gather`` has failed.
        newest: Starts to gather the newest version.
        stats: Counts the waiting time.
    """

    def __init__(
        self,
        gather: Future[int],
        is_abandoned: Callable[[], bool],
        newest: Callable[[], Future[int]],
        stats: TrafficStats,
    ) -> None:
        super().__init__(stats)
        self._is_abandoned, self._newest = is_abandoned, newest
        gather.add_done_callback(self._gathered)

    def _gathered(self, gather: Future[int]) -> None:
        error = gather.exception()
        try:
            if isinstance(error, VersionGoneError | StaleEpochError) and self._is_abandoned():
                self._newest().add_done_callback(self._finish)
                return
        except ShardwellError as final:
            self.set_exception(final)
            return
        self._finish(gather)

    def _finish(self, gather: Future[int]) -> None:
        if (error := gather.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(Future.result(gather))


def read_newest(unit: RemoteUnit, read: Read, limit_s: float) -> int:
    """Reads the newest version that all shards of a unit have; returns the version.

    Args:
        unit: The unit.
        read: Reads one shard.
        limit_s: How long to retry while versions are replaced during the read.
    """
    deadline = time.monotonic() + limit_s
    pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            version = None
            for shard in unit.shards:
                version = read(shard, version)
            return version or 0
        except VersionGoneError:
            if time.monotonic() > deadline:
                raise
            time.sleep(next(pauses))


class NewestInPlace(Future[int]):
    """The version of memory that is read in place without a result that counts. ``result`` waits for any version.

    Args:
        vector: The memory.
        check: Raises if this trainer cannot continue.
        limit_s: How long to wait.
    """

    def __init__(self, vector: SharedVector, check: Callable[[], None], limit_s: float) -> None:
        super().__init__()
        self._vector, self._check, self._limit_s = vector, check, limit_s

    def result(self, timeout: float | None = None) -> int:
        """Waits until all segments show one version; returns it."""
        deadline = time.monotonic() + self._limit_s
        pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while (version := self._vector.version) is None:
            self._check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"no version of the unit was complete in shared memory for {self._limit_s:.0f} s")
            time.sleep(next(pauses))
        return version


class InPlaceOrNewest(Future[int]):
    """A wait for a version in place that accepts any version if its work item does not count any more.

    Args:
        found: Waits for the version. Its ``result`` may poll.
        newest: Waits for any version.
        is_abandoned: Returns whether the work item does not count any more. Called once, if ``found`` has failed.
    """

    def __init__(self, found: Future[int], newest: Future[int], is_abandoned: Callable[[], bool]) -> None:
        super().__init__()
        self._found, self._newest, self._is_abandoned = found, newest, is_abandoned

    def result(self, timeout: float | None = None) -> int:
        """Returns the version."""
        try:
            return self._found.result(timeout)
        except (VersionGoneError, StaleEpochError):
            if not self._is_abandoned():
                raise
        return self._newest.result(timeout)
