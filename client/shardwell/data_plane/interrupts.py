"""Signal handlers that raise, such as Ctrl-C's, wait until bookkeeping between threads is complete.

Python runs them between any two bytecodes of the main thread. One that raises there can leave a transfer that was
counted but never begun, or a ``threading.Condition`` that stays locked: everything that waits for it hangs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], Any]

_POLL_S = 0.05
"""How long a wait may put off a signal."""


class _Uninterrupted:
    """A context in which handlers of the main thread are put off; may be nested. Does nothing in other threads."""

    def __init__(self) -> None:
        self._depth = 0
        self._former: dict[int, Handler] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if not _is_main_thread():
            return
        if not self._depth:
            for number in _SIGNALS:
                former = signal.getsignal(number)
                if callable(former) and former != self._note:
                    self._former[number] = former
                    signal.signal(number, self._note)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if not _is_main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        for number, former in self._former.items():
            signal.signal(number, former)
        handlers, self._former = self._former, {}
        self._run(handlers)

    def _run(self, handlers: Mapping[int, Handler]) -> None:
        """Runs the handlers of what arrived meanwhile; they may raise."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            if number in handlers:
                handlers[number](number, frame)

    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool]) -> None:
        """``changed.wait_for(is_true)``, with ``changed`` held, that handlers may end between two looks."""
        if not _is_main_thread():
            changed.wait_for(is_true)
            return
        while not changed.wait_for(is_true, _POLL_S):
            self._run(self._former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))


uninterrupted = _Uninterrupted()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
