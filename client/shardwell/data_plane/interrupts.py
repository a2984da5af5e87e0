"""Defers signal handlers that raise, such as the handler of Ctrl-C, while state shared by threads is inconsistent.

Python runs signal handlers between any two bytecodes of the main thread. A handler that raises at the wrong moment can
leave a transfer that was counted but never started, or a locked ``threading.Condition``, and other threads then hang.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], Any]

# The functions of ``signal`` take 5 microseconds per call, because they convert numbers to enums. A push calls six.
_this_thread = threading.get_ident
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Handler], Any] = _signal.signal

_POLL_S = 0.05
"""How long a wait may defer a signal."""


class _Uninterrupted:
    """A context that defers signal handlers of the main thread. May be nested. Does nothing in other threads."""

    def __init__(self) -> None:
        self._depth = 0
        self._thread = 0
        """The main thread while it is in the context; otherwise 0."""
        self._former: dict[int, Handler] = {}
        """The handlers to run. Not cleared: a handler that raises in ``__exit__`` can leave ``_defer`` in its place."""
        self._deferred: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if self._thread == _this_thread():
            self._depth += 1
        elif _is_main_thread():
            for number in _SIGNALS:
                former = _get_handler(number)
                if former == self._defer:
                    continue
                if callable(former):
                    self._former[number] = former
                    _set_handler(number, self._defer)
                else:
                    self._former.pop(number, None)
            self._depth, self._thread = 1, _this_thread()

    def __exit__(self, *_: object) -> None:
        if self._thread != _this_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        self._thread = 0
        try:
            for number, former in tuple(self._former.items()):
                _set_handler(number, former)  # a handler may run here, and raise
        finally:
            self._run(self._former)

    def _run(self, handlers: Mapping[int, Handler]) -> None:
        """Runs the handlers of the deferred signals. A handler may raise."""
        if self._deferred:
            number, frame = self._deferred.pop(0)
            try:
                if number in handlers:
                    handlers[number](number, frame)
            finally:
                self._run(handlers)

    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool]) -> None:
        """Calls ``changed.wait_for(is_true)`` and runs deferred handlers between polls. ``changed`` must be held."""
        if not _is_main_thread():
            changed.wait_for(is_true)
            return
        while not changed.wait_for(is_true, _POLL_S):
            self._run(self._former)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._thread:
            self._deferred.append((number, frame))
        else:
            self._former[number](number, frame)


uninterrupted = _Uninterrupted()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
