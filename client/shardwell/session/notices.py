"""Logs what the coordinator tells the users of a run, such as that a checkpoint was not saved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_REPEAT_S = 60.0
"""Time after which a notice with the same cause as an earlier one is logged again."""


class RunNotices:
    """Logs each notice of a run once, as a warning. Thread-safe.

    Of notices with the same cause, the first is logged, and then one after every ``_REPEAT_S`` with the number of those
    before it.

    Args:
        run: Name of the run.
        clock: Returns the time in seconds.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock, self._lock = run, clock, threading.Lock()
        self._newest = 0
        self._logged: dict[str, tuple[float, int]] = {}
        """When a notice with this cause was logged last, and how many followed that were not."""

    def show(self, notices: Iterable[coordinator_pb2.Notice]) -> None:
        """Logs the notices that are new, oldest first."""
        with self._lock:
            for notice in notices:
                if notice.number > self._newest:
                    self._newest = notice.number
                    self._show(notice)

    def _show(self, notice: coordinator_pb2.Notice) -> None:
        logged_s, count = self._logged.get(notice.cause, (0.0, 0))
        if notice.cause and notice.cause in self._logged and self._clock() - logged_s < _REPEAT_S:
            self._logged[notice.cause] = logged_s, count + 1
            return
        self._logged[notice.cause] = self._clock(), 0
        repeated = f" ({count} like it were not logged)" if count else ""
        logger.warning("run %r: %s%s", self._run, notice.message, repeated)
