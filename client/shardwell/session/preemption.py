"""What a trainer does on SIGTERM, by which schedulers announce that they take the machine away.

Note: [SIGTERM]
    The trainer leaves the run and exits with code 143 within seconds. A work item that is nearly finished is finished
    and reported first, so that no other trainer has to compute it. Any other item is handed back. The handler is
    installed only if the script has none, because the process then would end without leaving.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

logger = logging.getLogger(__name__)

_NEARLY_DONE_S = 2.0
"""An item is finished first if at most this many seconds of its computation are left, by the time of the last item."""

_EXIT_CODE = 128 + signal.SIGTERM


class Computes(Protocol):
    """Computes work items."""

    def remaining_s(self) -> float | None:
        """Returns the estimated time until the current item ends. None: unknown, or no item is being computed."""
        ...

    def stop_after_item(self, stop: Callable[[], None]) -> None:
        """Has ``stop`` called when the current item is finished and reported."""
        ...


class Preemption:
    """Handles SIGTERM for the open sessions of this process. See Note: [SIGTERM]."""

    def __init__(self) -> None:
        self._trainers: list[Computes] = []
        self._stopping = False
        self._timer: threading.Timer | None = None

    def add(self, trainer: Computes) -> None:
        """Handles SIGTERM from now on, unless the script does or this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._trainers:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            signal.signal(signal.SIGTERM, self._terminate)
        self._trainers.append(trainer)

    def remove(self, trainer: Computes) -> None:
        """Stops to handle SIGTERM after the last session."""
        if trainer not in self._trainers:
            return
        self._trainers.remove(trainer)
        if not self._trainers and threading.current_thread() is threading.main_thread():
            self._restore()

    def forget(self) -> None:
        """Called in a forked process, which has no session: SIGTERM ends it as usual."""
        if self._trainers:
            self._trainers.clear()
            self._restore()

    def _restore(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stopping = False
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, _: FrameType | None) -> None:
        remaining = [left for trainer in self._trainers if (left := trainer.remaining_s()) is not None]
        if self._stopping or not remaining or max(remaining) > _NEARLY_DONE_S:
            logger.warning("SIGTERM: this trainer leaves the run; other trainers continue its work")
            raise SystemExit(_EXIT_CODE)
        logger.warning("SIGTERM: this trainer leaves the run when its work item is finished")
        self._stopping = True
        for trainer in self._trainers:
            trainer.stop_after_item(_exit)
        # The estimate may be wrong.
        self._timer = threading.Timer(2 * _NEARLY_DONE_S, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()


def _exit() -> None:
    raise SystemExit(_EXIT_CODE)


preemption = Preemption()
"""Signal handlers belong to the process, and so does this object."""
